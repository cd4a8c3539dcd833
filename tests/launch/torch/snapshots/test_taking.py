"""Unmodified scripts that are killed and resumed end with the bits of the run that was never stopped; what cannot be resumed is refused."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers_values import existing, record_at
from mezzo.engine.snapshots import container
from mezzo.errors import SnapshotError
from mezzo.launch import child
from mezzo.launch.request import Request, SnapshotRequest
from mezzo.launch.torch.snapshots import taking
from mezzo.policy import Policy
from mezzo.records import RunRecord
from paths import SCRIPTS
from resumable_scripts import HEAD
from resumable_scripts import SCRIPTS as CASES


def lives(
    script: Path,
    folder: Path,
    *,
    die_at: int = 0,
    resume: bool = False,
    every_s: float = 0.0,
    how: int = signal.SIGKILL,
    at: Path | None = None,
    **more: Any,
) -> tuple[int, str]:
    """Run a script in a forked process, which may kill itself; return its exit status and its output."""
    snapshots = SnapshotRequest(
        folder=str(folder / "snapshots"), every_s=every_s, resume=resume, identity={"script": script.name}
    )
    request = Request(
        target=more.pop("target", str(script)),
        kind=more.pop("kind", "script"),
        policy=more.pop("policy", None),
        record_path=str(folder / "record.json"),
        command=("mezzo", "run"),
        snapshots=more.pop("snapshots", snapshots),
        **more,
    )
    folder.mkdir(exist_ok=True)
    process = os.fork()
    if process == 0:
        gc.freeze()  # what pytest has imported is not searched for references
        out = os.open(folder / "out.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        os.environ |= {"DIE_AT": str(die_at), "SIGNAL": str(int(how))}
        if at is not None:
            at.mkdir(exist_ok=True)
            os.chdir(at)
        code = 99
        try:
            code = child.main([request.packed()])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), (folder / "out.txt").read_text()


def result_of(text: str) -> str:
    found = re.findall(r"^result .*", text, re.M)
    assert len(found) == 1, text
    return found[0]


def killed_and_resumed(script: Path, folder: Path, *, die_at: int = 13, **words: Any) -> RunRecord:
    """Compare a run that is killed and resumed with one that is not; return the record of the resumed one."""
    apart = {"at": words.pop("at_whole", None) or words.get("at")}
    code, text = lives(script, folder / "whole", **{**words, "snapshots": None, **apart})
    assert code == 0, text
    died, first = lives(script, folder / "run", die_at=die_at, **words)
    assert died == -signal.SIGKILL, first
    code, again = lives(script, folder / "run", resume=True, **words)
    assert code == 0, again
    assert result_of(again) == result_of(text)
    return record_at(folder / "run" / "record.json", RunRecord)


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(body: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(HEAD + body)
        return path

    return write


QUICK = "class fit"


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", [QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n != QUICK)])
def test_a_killed_script_ends_with_the_bits_and_the_files_of_the_undisturbed_run(
    name: str, written: Any, tmp_path: Path
) -> None:
    script = written(CASES[name])
    policy = None if name == "scaler" else Policy.parse("fp16")
    words: dict[str, Any] = {"policy": policy, "arguments": ("word",), "at": tmp_path / "b"}
    record = killed_and_resumed(script, tmp_path, at_whole=tmp_path / "a", **words)
    assert files_in(tmp_path / "b") == files_in(tmp_path / "a")
    snapshots = existing(record.snapshots)
    assert snapshots.problems == []
    made = 2 * 13  # up to two updates a tick (GAN); the last snapshots may have been killed while they were written
    assert snapshots.resumed_updates in range(1, made)


IN_BLOCKS = """
model = nn.Sequential(nn.Linear(4, 64), *(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 2))
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(3):
    for a, b in loader: step(a, b)
result()
"""


def test_layers_in_blocks_are_resumed_in_blocks(written: Any, tmp_path: Path) -> None:
    """Their forwards are Mezzo's own; random bits follow from the step's values, so the resumed run draws the same."""
    script, policy = written(IN_BLOCKS), Policy.parse("nvfp4:bf16_products=2.wgrad")
    record = killed_and_resumed(script, tmp_path, policy=policy, at=tmp_path)
    assert existing(record.snapshots).resumed_updates > 0
    assert record.effective.share_by_format["nvfp4"] > 0.5


@pytest.mark.filterwarnings("ignore:loaded .* not loaded, though newer")
def test_a_snapshot_that_cannot_be_loaded_is_in_the_record(written: Any, tmp_path: Path) -> None:
    script, folder = written(CASES[QUICK]), tmp_path / "run"
    assert lives(script, folder, die_at=7)[0] == -signal.SIGKILL
    newest = max((folder / "snapshots").glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1])

    code, text = lives(script, folder, resume=True)

    assert code == 0, text
    (problem,) = existing(record_at(folder / "record.json", RunRecord).snapshots).problems
    assert (problem.what, problem.value) == (newest.name, "not loaded")
    assert f"mezzo: not {newest.name}: {problem.reason}" in text


def outside_its_function(script: Path) -> str:
    """Return a script whose ``main`` is written out at the top level, so that all its variables are the module's."""
    head, main = script.read_text(encoding="utf-8").split("def main():\n")
    return head + textwrap.dedent(main.removesuffix("main()\n"))


@pytest.mark.slow
@pytest.mark.parametrize("in_function", [True, False])
def test_a_whole_script(in_function: bool, tmp_path: Path) -> None:
    script = SCRIPTS / "resumable.py"
    if not in_function:
        script = tmp_path / "train.py"
        script.write_text(outside_its_function(SCRIPTS / "resumable.py"), encoding="utf-8")
    policy = Policy.parse("fp16")
    _, text = lives(script, tmp_path / "whole", policy=policy, snapshots=None)
    arguments = ("--checkpoint", str(tmp_path / "best.pt"))
    assert lives(script, tmp_path / "run", policy=policy, arguments=arguments, die_at=19)[0] == -signal.SIGKILL
    best = (tmp_path / "best.pt").read_bytes()

    code, again = lives(script, tmp_path / "run", policy=policy, resume=True, arguments=arguments)

    assert code == 0, again
    assert result_of(again) == result_of(text)
    assert (tmp_path / "best.pt").read_bytes() == best


def test_sigterm_saves_and_ends(written: Any, tmp_path: Path) -> None:
    script = written(CASES[QUICK])
    _, text = lives(script, tmp_path / "whole", snapshots=None)
    rare = SnapshotRequest(
        folder=str(tmp_path / "run" / "snapshots"), every_s=1e6, resume=False, identity={"script": script.name}
    )

    code, _ = lives(script, tmp_path / "run", die_at=12, how=signal.SIGTERM, snapshots=rare)
    resumed, again = lives(script, tmp_path / "run", resume=True)

    assert (code, resumed) == (143, 0), again
    assert result_of(again) == result_of(text)


REFUSED: dict[str, tuple[str, str]] = {
    "an object of C code that the loop changes": (
        """
import array
seen = array.array("d")
for epoch in range(3):
    for a, b in loader: seen.append(step(a, b))
result()
""",
        "'seen' is a array.array, which a snapshot cannot save",
    ),
    "a file in memory that the loop writes": (
        """
kept = np.memmap("kept.dat", dtype=np.float64, mode="w+", shape=(2000,))
for epoch in range(3):
    for a, b in loader: kept[epoch] = step(a, b)
result()
""",
        "'kept' is a numpy.memmap",
    ),
    "an array of another class": (
        """
table = np.zeros(3).view(np.recarray)
for epoch in range(3):
    for a, b in loader: table[epoch] = step(a, b)
result()
""",
        "'table' is a numpy.",
    ),
    "workers that live on": (
        """
l = DataLoader(data, 4, shuffle=True, num_workers=1, persistent_workers=True)
for epoch in range(3):
    for a, b in l: step(a, b)
result()
""",
        "persistent_workers=True",
    ),
    "a thread of the script": (
        """
import threading
stop = threading.Event()
def feed():
    while not stop.wait(0.01): pass
threading.Thread(target=feed, daemon=True).start()
for epoch in range(3):
    for a, b in loader: step(a, b)
result()
""",
        "a thread runs feed",
    ),
    "a loop in a library": (
        """
import functools
functools.reduce(lambda total, batch: total + step(*batch), loader, 0.0)
result()
""",
        "the update is in no loop of the script",
    ),
    "a function that calls itself": (
        """
def train(depth):
    if depth:
        for a, b in loader: step(a, b); train(depth - 1); break
train(3)
result()
""",
        "a function of the training calls itself",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_script_that_cannot_be_resumed_is_refused_after_its_first_update(
    name: str, written: Any, tmp_path: Path
) -> None:
    body, why = REFUSED[name]

    code, text = lives(written(body), tmp_path / "run", at=tmp_path / "here")

    assert code == SnapshotError.exit_code, text
    assert why in text
    assert "result" not in text
    record = record_at(tmp_path / "run" / "record.json", RunRecord)
    assert len(record.steps) <= (10 if name == "workers that live on" else 2)  # there the loop around it is tried


@pytest.mark.slow
def test_a_script_that_ends_too_early_is_refused(written: Any, tmp_path: Path) -> None:
    body = """
if open("epochs.txt").read() == "1":
    sys.exit()
for epoch in range(3):
    for x, y in loader:
        loss = step(x, y)
        with open("log.txt", "a") as log: log.write(f"{loss}\\n")
result()
"""
    (tmp_path / "epochs.txt").write_text("3")
    script, here = written(body.replace('"epochs.txt"', repr(str(tmp_path / "epochs.txt")))), tmp_path / "here"
    assert lives(script, tmp_path / "run", die_at=25, at=here)[0] == -signal.SIGKILL
    (tmp_path / "epochs.txt").write_text("1")

    code, text = lives(script, tmp_path / "run", resume=True, at=here)

    assert code == SnapshotError.exit_code
    assert "the script ended before it reached the place where that run was stopped" in text
    (tmp_path / "epochs.txt").write_text("3")  # the refused resume has left the files as they were at the snapshot
    code, text = lives(script, tmp_path / "run", resume=True, at=here)
    assert code == 0, text
    assert len((here / "log.txt").read_text().splitlines()) == 30


def test_another_run_is_refused(written: Any, tmp_path: Path) -> None:
    script = written(CASES[QUICK])
    assert lives(script, tmp_path / "run", die_at=5)[0] == -signal.SIGKILL
    other = SnapshotRequest(
        folder=str(tmp_path / "run" / "snapshots"), every_s=60, resume=True, identity={"script": "other.py"}
    )

    code, text = lives(script, tmp_path / "run", snapshots=other)

    assert code == SnapshotError.exit_code
    assert "it is of a run with script 'train.py', and this one has 'other.py'" in text


def test_a_run_killed_before_its_first_snapshot_starts_over_with_its_files_as_they_were(
    written: Any, tmp_path: Path
) -> None:
    script = written(
        'for a, b in loader:\n    with open("log.txt", "a") as f: f.write("line\\n")\n    step(a, b)\nresult()\n'
    )
    folder, work = tmp_path / "run", tmp_path / "work"
    request = SnapshotRequest(
        folder=str(folder / "snapshots"), every_s=0.0, resume=True, may_be_first=True, identity={"script": script.name}
    )
    code, text = lives(script, folder, die_at=1, at=work, snapshots=request)
    assert code == -signal.SIGKILL, text
    assert (work / "log.txt").read_text() == "line\n"

    code, text = lives(script, folder, at=work, snapshots=request)

    assert code == 0, text
    assert (work / "log.txt").read_text() == "line\n" * 10


def test_a_run_that_had_ended_resumes_and_ends_well(written: Any, tmp_path: Path) -> None:
    """A scheduler that starts the same command again must see it succeed."""
    script = written(CASES[QUICK])
    code, text = lives(script, tmp_path / "run")
    assert code == 0, text

    code, again = lives(script, tmp_path / "run", resume=True)

    assert code == 0, again
    assert result_of(again) == result_of(text)


@pytest.mark.slow
def test_a_module_of_a_package_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("steps = []\n")
    (package / "train.py").write_text(
        HEAD
        + "from . import steps\nfor epoch in range(3):\n    for a, b in loader: steps.append(step(a, b))\nresult(steps)\n"
    )
    monkeypatch.chdir(tmp_path)
    killed_and_resumed(package / "train.py", tmp_path, target="pack.train", kind="module")


@pytest.mark.slow
def test_a_loop_in_a_package_of_the_working_folder_is_resumed(tmp_path: Path) -> None:
    """As in repositories whose scripts and packages lie beside each other."""
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "train.py"
    script.write_text(
        HEAD + "sys.path.insert(0, os.getcwd())\nfrom lib_beside import fit\nresult(fit(step, loader))\n",
        encoding="utf-8",
    )
    loops = "    for epoch in range(3):\n        for a, b in loader: seen.append(step(a, b))\n"
    body = f"def fit(step, loader):\n    seen = []\n{loops}    return seen\n"
    (tmp_path / "lib_beside.py").write_text(body, encoding="utf-8")
    killed_and_resumed(script, tmp_path, at=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_large_data_is_not_saved_and_must_be_the_same_again(same: bool, written: Any, tmp_path: Path) -> None:
    """Set-up reads it from a file, which somebody may have changed since."""
    body = """
big = np.load("big.npy")
for epoch in range(3):
    for a, b in loader: step(a + float(big[0]), b)
result(big.sum())
"""
    np.save(tmp_path / "big.npy", np.ones(200_000))
    script = written(body.replace('"big.npy"', repr(str(tmp_path / "big.npy"))))
    assert lives(script, tmp_path / "run", die_at=13)[0] == -signal.SIGKILL
    newest = max((tmp_path / "run" / "snapshots").glob("*.safetensors"))
    assert newest.stat().st_size < 200_000 * 8
    if not same:
        np.save(tmp_path / "big.npy", np.full(200_000, 2.0))

    code, text = lives(script, tmp_path / "run", resume=True)

    assert code == (0 if same else SnapshotError.exit_code), text
    assert same or "set-up did not make '__main__.big" in text


def test_a_save_that_is_due_does_not_wait_for_a_slow_disk(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file is written only once the script has made all its updates: waiting for it would never end."""
    write, trained = container.write, tmp_path / "trained"

    def slowly(*arguments: Any) -> None:
        while not trained.exists():
            time.sleep(0.01)
        write(*arguments)

    monkeypatch.setattr(container, "write", slowly)
    body = "for a, b in loader: step(a, b)\nopen(TRAINED, 'w').close()\nresult()".replace("TRAINED", repr(str(trained)))

    code, text = lives(written(body), tmp_path / "run", every_s=1e-6)

    assert code == 0, text
    assert existing(record_at(tmp_path / "run" / "record.json", RunRecord).snapshots).saved == 1


SECRETS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--api-key")
args = parser.parse_args()
client = {"password": open(FILE).read(), "name": "me"}
for epoch in range(3):
    for a, b in loader:
        step(a, b)
        headers = {"Authorization": f"Bearer {args.api_key}", "raw": client["password"].encode(), "hub": [os.environ["HF_TOKEN"]]}
result(headers, args, client, bytes(headers["raw"]))
"""


def test_no_secret_is_in_a_snapshot(written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ["hunter2-Xy7Qp", "hf_QwErTyUiOp123456", "swordfish"]
    monkeypatch.setenv("HF_TOKEN", secrets[1])
    (tmp_path / "password").write_text(secrets[2])
    script = written(SECRETS.replace("FILE", repr(str(tmp_path / "password"))))
    words: dict[str, Any] = {"arguments": ("--api-key", secrets[0])}
    killed_and_resumed(script, tmp_path, **words)
    files = [path for path in (tmp_path / "run" / "snapshots").rglob("*") if path.is_file()]
    assert [path for path in files for secret in secrets if secret.encode() in path.read_bytes()] == []
    assert {path.stat().st_mode & 0o077 for path in files if path.suffix == ".safetensors"} == {0}
    monkeypatch.delenv("HF_TOKEN")
    code, refused = lives(script, tmp_path / "run", resume=True, **words)
    assert code == SnapshotError.exit_code
    assert "the secret '$HF_TOKEN' is not there" in refused


def test_a_python_that_was_not_tried_is_refused(written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking, "_TRIED", (3, 9))

    code, text = lives(written(CASES[QUICK]), tmp_path / "run")

    assert code == SnapshotError.exit_code
    assert "--snapshot was not tried with Python 3." in text
