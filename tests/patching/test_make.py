"""The whole patch of each shape of script, as a reviewed diff; and what is true of every patch of every available script."""

from __future__ import annotations

import ast
import difflib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mezzo.patching import LoopKind, Patch, PatchStyle, Refused, make_patch
from mezzo.policy import Policy
from paths import ROOT, SCRIPTS, TESTS

DIFFS = TESTS / "patching" / "diffs"
LOOPS = ("plain", "accumulation", "clipping", "gan")
CASES: list[tuple[str, str, LoopKind, str]] = [
    # script, policy, kind, style
    *((name, policy, name, "torch.amp") for name in (*LOOPS, "compiled") for policy in ("fp16", "bf16")),
    *((name, "fp16-master", name, "mezzo") for name in LOOPS),
    ("plain", "tf32", "plain", "torch.amp"),
    ("own_amp", "bf16", "own_amp", "torch.amp"),
    ("lbfgs", "bf16", "plain", "torch.amp"),
    *(
        (name, policy, name, "framework")
        for name in ("lightning", "fabric", "accelerate", "transformers", "keras")
        for policy in ("fp16", "bf16")
    ),
    *(("paddle_plain", policy, "clipping", "paddle.amp") for policy in ("fp16", "bf16", "fp16-master")),
    *(("paddle_minimize", policy, "accumulation", "paddle.amp") for policy in ("fp16", "bf16-pure")),
    ("paddle_fit", "fp16", "paddle_fit", "paddle.amp"),
    ("paddle_own", "bf16", "own_amp", "paddle.amp"),
    ("paddle_o2", "bf16-master", "own_amp", "paddle.amp"),
    *((name, "fp16", "keras", "framework") for name in ("keras_objects", "keras_loop", "keras_step")),
    ("keras_loop", "bf16", "keras", "framework"),
]  # type: ignore[list-item]


def made(path: Path, policy: str, style: PatchStyle = "auto") -> Patch:
    patch = make_patch(path, policy=Policy.parse(policy), style=style)
    assert isinstance(patch, Patch), patch
    return patch


def patched(name: str, policy: str) -> Patch:
    return made(SCRIPTS / f"patch_{name}.py", policy)


def refused(path: Path, policy: str, style: PatchStyle = "auto") -> Refused:
    outcome = make_patch(path, policy=Policy.parse(policy), style=style)
    assert isinstance(outcome, Refused), outcome
    return outcome


def body(diff: str) -> list[str]:
    """Return a diff without the names of its files."""
    return diff.splitlines()[2:]


@pytest.mark.parametrize(("name", "policy", "kind", "style"), CASES)
def test_the_patch_of_each_shape(name: str, policy: str, kind: LoopKind, style: str) -> None:
    patch = patched(name, policy)
    assert body(patch.diff) == body((DIFFS / f"{name}.{policy}.diff").read_text(encoding="utf-8"))
    assert (patch.kind, patch.style) == (kind, style)
    assert patch.source == (SCRIPTS / f"patch_{name}.py").read_text(encoding="utf-8")


def test_every_reviewed_diff_is_tested() -> None:
    assert {path.name for path in DIFFS.iterdir()} == {f"{name}.{policy}.diff" for name, policy, _, _ in CASES}


@pytest.mark.parametrize(("name", "policy"), [(name, policy) for name, policy, _, _ in CASES])
def test_a_patched_script_is_patched_already(name: str, policy: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    patched(name, policy).write(path)
    assert refused(path, policy).already


@pytest.mark.parametrize("command", [["git", "apply"], ["patch", "-p1", "-i"]])
@pytest.mark.parametrize(
    ("name", "policy"), [("plain", "fp16"), ("gan", "fp16-master"), ("crlf", "fp16"), ("unended", "bf16")]
)
def test_the_diff_applies(
    name: str, policy: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    monkeypatch.chdir(tmp_path)
    source = (SCRIPTS / f"patch_{'plain' if name in ('crlf', 'unended') else name}.py").read_bytes()
    if name == "crlf":
        source = source.replace(b"\n", b"\r\n")
    script = tmp_path / "src" / "train.py"
    script.parent.mkdir()
    script.write_bytes(source.rstrip() if name == "unended" else source)
    patch = made(Path("src/train.py"), policy)
    assert patch.diff.startswith("--- a/src/train.py\n+++ b/src/train.py\n")
    patch.write_diff(tmp_path / "change.diff")
    binary = ["--binary"] if command[0] == "patch" else []
    done = subprocess.run([*command, "change.diff", *binary], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert script.read_bytes() == patch.patched.encode()


# --- every script at hand --------------------------------------------------------------------------------------------------

TRAINS = re.compile(r"backward\(|Trainer|Fabric|Accelerator|keras")
EVERY = sorted(
    path
    for folder in (
        "tests/scripts",
        "tests/faults",
        "examples",
        "benchmarks/gpu/contest",
        "benchmarks/scripts/public_scripts",
    )
    for path in (ROOT / folder).rglob("*.py")
    if TRAINS.search(path.read_text(encoding="utf-8"))
)
AUTO: list[tuple[str, PatchStyle]] = [(policy, "auto") for policy in ("bf16", "fp16-master", "tf32")]
ASKED: list[tuple[str, PatchStyle]] = [("fp16", "torch.amp"), ("fp16", "mezzo"), *AUTO]


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_every_script_is_patched_as_stated_or_refused_with_a_reason(path: Path) -> None:
    for policy, style in ASKED:
        outcome = make_patch(path, policy=Policy.parse(policy), style=style)
        if isinstance(outcome, Refused):
            assert outcome.reason
            assert outcome.by_hand
        else:
            compile(outcome.patched, str(path), "exec")
            assert outcome.diff
            assert unstated(outcome) == [], (policy, style)


def unstated(patch: Patch) -> list[int]:
    """Return the source lines that a patch changes, or inserts at, and that none of its reasons names."""
    stated: set[int] = set()
    for reason in patch.reasons:
        first, last = (
            (int(n) for n in (re.findall(r"\d+", reason.what) * 2)[:2]) if reason.what.startswith("line") else (0, 0)
        )
        stated.update(range(first, last + 1))
    tree = ast.parse(patch.source)
    for stmt in [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and not hasattr(n, "body")]:
        lines = range(stmt.lineno, (stmt.end_lineno or 0) + 1)
        if stated & set(lines) or (
            isinstance(stmt, (ast.Import, ast.ImportFrom)) and "imports" in {r.what for r in patch.reasons}
        ):
            stated.update(lines)
    before, after = (text.splitlines() for text in (patch.source, patch.patched))
    found = []
    for kind, first, last, _, _ in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        above = first
        while above and not before[above - 1].strip():
            above -= 1
        if kind == "insert" and not stated & {above, first, first + 1}:
            found.append(first)
        elif kind in ("replace", "delete"):
            found += [n for n in range(first + 1, last + 1) if n not in stated and before[n - 1].strip()]
    return found


def test_a_line_without_a_reason_is_found() -> None:
    patch = patched("plain", "fp16")
    silent = Patch(
        path=patch.path, source=patch.source, patched=patch.patched, diff=patch.diff, kind="plain", style="torch.amp"
    )
    assert unstated(silent)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"def f(:\n", "is not Python"),
        (b"# -*- coding: nowhere -*-\n", "cannot decode"),
        ("x = 'é'\n".encode("latin-1"), "cannot decode"),
        (b"x = 1\ry = 2\r", "carriage return"),
        (b"", "no training loop"),
        (b"print(1)\n", "no training loop"),
    ],
)
def test_files_that_cannot_be_read(source: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_bytes(source)
    assert reason in refused(path, "fp16").reason


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "cannot read" in refused(tmp_path / "none.py", "fp16").reason


def test_the_loop_of_a_neighbour_is_patched() -> None:
    assert made(SCRIPTS / "imported_loop.py", "fp16").path.name == "loop.py"


def test_several_neighbours_with_loops_are_refused(tmp_path: Path) -> None:
    for name in ("first", "second"):
        shutil.copy(SCRIPTS / "loop.py", tmp_path / f"{name}.py")
    (tmp_path / "main.py").write_text("import first\nfrom second import train\n")
    reason = refused(tmp_path / "main.py", "fp16").reason
    assert reason == "several files next to main.py have training loops: first.py, second.py"


def test_fp32_needs_no_patch() -> None:
    nothing = Refused(reason="fp32 adds nothing to a script", by_hand="keep the script as it is", already=True)
    assert refused(SCRIPTS / "patch_plain.py", "fp32") == nothing


def test_the_style_that_was_asked_for() -> None:
    path = SCRIPTS / "patch_plain.py"
    why = "torch.amp keeps weights in FP32; it has no 16-bit weights"
    session = 'mezzo.Session(model, optimizer, policy="fp16", scheduler=scheduler)'
    assert session in made(path, "fp16", "mezzo").patched
    assert refused(path, "fp16-master", "torch.amp").reason == f"policy fp16-master: {why}"
    chosen = made(path, "fp16-master").reasons[0]
    assert (chosen.value, chosen.reason) == ("mezzo.Session", why)
