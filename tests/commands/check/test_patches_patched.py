"""Patches tried: the judgement as a table, and trials of each shape of script against the unpatched run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forked_processes import forked_runs
from helpers_launch import children_in_this_process
from mezzo.commands.check.patches import COMPARED_STEPS, PatchOutcome, judged, largest_difference, mirror, try_patch
from mezzo.launch.request import Request, policy_text
from mezzo.patching import Patch, make_patch
from mezzo.policy import Policy
from mezzo.records import Effective, Environment, FileRead, RunRecord, Steps
from paths import SCRIPTS

FP16 = Policy.parse("fp16")
NAN = float("nan")
CPU = Environment(date="", mezzo="", python="", torch="", os="", cpu="", threads=1, device="cpu")


def run(
    loss: list[float], *, skipped: int = 0, flops: dict[str, int] | None = None, policy: str = "fp16", **fields: Any
) -> RunRecord:
    steps = Steps(loss=loss, skipped=[n < skipped for n in range(len(loss))])
    effective = Effective(flops_by_format={"fp16": 100} if flops is None else flops)
    return RunRecord(
        command=[],
        script="",
        script_sha256="",
        policy=policy,
        environment=CPU,
        steps=steps,
        effective=effective,
        **fields,
    )


EPS = 2.0**-10
JUDGED: list[tuple[str, RunRecord, RunRecord, bool, str]] = [
    # what, unpatched, patched, offered, the last reason's value
    ("the same", run([1.0, 0.5]), run([1.0, 0.5]), True, "the same to the last bit"),
    ("the same with NaN", run([1.0, NAN]), run([1.0, NAN]), True, "the same to the last bit"),
    (
        "one rounding",
        run([1.0, 0.5]),
        run([1.0, 0.5 * (1 - EPS / 2)]),
        True,
        f"within 0.00049 in the first {COMPARED_STEPS} steps",
    ),
    ("two roundings", run([1.0, 0.5]), run([1.0, 0.5 * (1 - 2 * EPS)]), False, "different"),
    ("only one finite", run([1.0, 0.5]), run([1.0, NAN]), False, "different"),
    ("later steps", run([1.0] * 21), run([1.0] * 20 + [2.0]), True, f"within 0 in the first {COMPARED_STEPS} steps"),
    ("fewer steps", run([1.0, 0.5]), run([1.0]), False, "different"),
    ("a skipped update more", run([1.0, 0.5]), run([1.0, 0.5], skipped=1), False, "different"),
    ("fewer FLOPs lowered", run([1.0]), run([1.0], flops={"fp16": 99, "fp32": 1}), False, "different"),
    ("another format", run([1.0]), run([1.0], flops={"bf16": 100}), False, "different"),
    ("more FLOPs lowered", run([1.0], flops={"fp16": 50, "fp32": 50}), run([1.0]), True, "the same to the last bit"),
    (
        "the policy lowered nothing",
        run([1.0], flops={"fp32": 9}),
        run([1.0], flops={"fp32": 9}),
        False,
        "changed nothing",
    ),
    ("no step", run([]), run([]), False, "no step"),
    ("an error", run([1.0]), run([1.0], error="ValueError: no"), False, "failed"),
    ("an exit code", run([1.0]), run([1.0], exit_code=3), False, "failed"),
    (
        "resumed",
        run([1.0], files_read=[FileRead(path="last.pt", written_at_s=1.0)]),
        run([1.0]),
        False,
        "not independent",
    ),
]


@pytest.mark.parametrize(
    ("unpatched", "patched", "offered", "value"), [case[1:] for case in JUDGED], ids=[case[0] for case in JUDGED]
)
def test_judgements(unpatched: RunRecord, patched: RunRecord, offered: bool, value: str) -> None:
    outcome = judged(unpatched, patched, FP16)
    assert outcome.may_be_offered is offered
    assert outcome.reasons[-1].value == value
    assert outcome.reasons[0].what == "compared"


def test_the_largest_difference_is_relative() -> None:
    assert largest_difference([2.0, 100.0], [1.0, 100.0]) == 0.5
    assert largest_difference([0.0], [0.0]) == 0.0
    assert largest_difference([], []) == 0.0


def test_a_mirror_links_all_but_one_file(tmp_path: Path) -> None:
    folder, copy = tmp_path / "scripts", tmp_path / "scripts" / "runs" / "trial"
    (folder / "package" / "inner").mkdir(parents=True)
    for name in ("train.py", "data.txt", "package/engine.py", "package/other.py", "package/inner/x.py"):
        (folder / name).write_text(name)
    mirror(folder, copy, without=folder / "package" / "engine.py")
    assert not (copy / "package" / "engine.py").exists()
    assert not (copy / "package").is_symlink()
    assert (copy / "package" / "other.py").read_text() == "package/other.py"
    assert (copy / "package" / "inner" / "x.py").read_text() == "package/inner/x.py"
    assert (copy / "data.txt").is_symlink()
    assert not (copy / "runs").exists()


# --- trials --------------------------------------------------------------------------------------------------------------------------


def tried(
    script: Path, policy: str, folder: Path, *arguments: str, style: Any = "auto", **how: Any
) -> tuple[Patch, PatchOutcome]:
    patch = make_patch(script, policy=Policy.parse(policy), style=style)
    assert isinstance(patch, Patch), patch
    request = Request(
        target=str(script),
        kind="script",
        arguments=arguments,
        policy=Policy.parse(policy),
        record_path=str(folder / "record.json"),
        command=("mezzo", "check"),
    )
    return patch, try_patch(request, patch, folder, **how)


SAME = "the same to the last bit"
HERE: list[tuple[str, str, str]] = [
    # script, policy, FLOPs below 32 bits
    ("patch_plain", "fp16", "fp16"),
    ("patch_plain", "bf16", "bf16"),
    ("patch_accumulation", "fp16", "fp16"),
    ("patch_accumulation", "bf16", "bf16"),
    ("patch_clipping", "fp16", "fp16"),
    ("patch_gan", "fp16", "fp16"),
    ("patch_gan", "bf16", "bf16"),
    ("patch_lbfgs", "bf16", "bf16"),
    ("patch_own_amp", "bf16", "bf16"),
    ("patch_plain", "fp16:fp32_modules=2", "fp16"),
    ("patch_accumulation", "fp16:fp32_modules=2", "fp16"),
    ("patch_clipping", "fp16:fp32_modules=2", "fp16"),
    ("patch_gan", "fp16:fp32_modules=2", "fp16"),
]


@pytest.mark.parametrize(("name", "policy", "lowered"), HERE)
def test_a_patched_script_trains_as_under_the_policy(name: str, policy: str, lowered: str, tmp_path: Path) -> None:
    with children_in_this_process():
        patch, outcome = tried(SCRIPTS / f"{name}.py", policy, tmp_path)
    assert outcome.may_be_offered, outcome.reasons
    assert outcome.same_losses
    assert outcome.reasons[-1].value == SAME
    assert outcome.tried_as == policy
    assert outcome.reference is not None
    assert outcome.patched is not None
    assert outcome.patched.policy == "as-is"
    assert outcome.patched.effective.flops_by_format == outcome.reference.effective.flops_by_format
    assert lowered in outcome.patched.effective.flops_by_format
    assert (tmp_path / "script" / f"{name}.py").read_text() == patch.patched


def test_a_loss_in_fp16_is_tried_at_a_smaller_scale(tmp_path: Path) -> None:
    with children_in_this_process():
        _, outcome = tried(SCRIPTS / "gan.py", "fp16", tmp_path)
    assert outcome.may_be_offered, outcome.reasons
    assert outcome.tried_as == "fp16:init_scale=1024"
    assert "autocast on a CPU may leave the loss in FP16" in outcome.reasons[1].reason


def test_a_patch_that_misses_the_model_is_not_offered(tmp_path: Path) -> None:
    """An autocast around nothing trains in FP32, and its losses differ from those of the policy."""
    script = SCRIPTS / "patch_plain.py"
    patch = make_patch(script, policy=Policy.parse("bf16"))
    assert isinstance(patch, Patch)
    broken = patch.patched.replace("dtype=torch.bfloat16", "dtype=torch.bfloat16, enabled=False")
    wrong = Patch(path=script, source=patch.source, patched=broken, diff="", kind="plain", style="torch.amp")
    request = Request(
        target=str(script), kind="script", policy=Policy.parse("bf16"), record_path=str(tmp_path / "r.json"), command=()
    )
    with children_in_this_process():
        outcome = try_patch(request, wrong, tmp_path)
    assert not outcome.may_be_offered
    assert [reason.what for reason in outcome.reasons] == ["compared", "FLOPs by format"]


Ran = list[tuple[str, str]]
AS_IS, DEVICE = "as-is", ":op_lists=device"
INSTEAD: list[tuple[str, str, str, RunRecord, RunRecord, Ran]] = [
    # script, policy, what the trial is named after, unpatched, patched, the runs that follow the first two
    (
        "patch_plain",
        "fp16",
        "no kernel",
        run([], error="RuntimeError: no half"),
        run([1.0]),
        [("patched", AS_IS), ("unpatched", f"bf16{DEVICE}")],
    ),
    (
        "patch_plain",
        "fp16",
        "no module",
        run([], error="ModuleNotFoundError: x"),
        run([], error="ModuleNotFoundError: x"),
        [],
    ),
    (
        "patch_plain",
        "fp16",
        "skips differ",
        run([1.0]),
        run([1.0], skipped=1),
        [("patched", AS_IS), ("unpatched", f"fp16:init_scale=1024{DEVICE}")],
    ),
    ("patch_plain", "fp16:init_scale=64", "no room", run([1.0]), run([1.0], skipped=1), []),
    ("patch_plain", "bf16", "bf16", run([1.0]), run([2.0]), []),
    ("patch_plain", "fp16", "the patched script fails", run([1.0]), run([], error="NameError: x"), []),
    (
        "patch_lightning",
        "fp16",
        "BF16 for FP16",
        run([1.0]),
        run([1.0], flops={"bf16": 9}),
        [("unpatched", f"bf16{DEVICE}")],
    ),
    (
        "patch_accelerate",
        "fp16",
        "a refusal",
        run([1.0]),
        run([], error="ValueError: GPU"),
        [("patched", AS_IS), ("unpatched", f"bf16{DEVICE}")],
    ),
    ("patch_accelerate", "bf16", "a real fault", run([1.0]), run([], error="ValueError: no"), []),
    (
        "patch_transformers",
        "bf16",
        "use_cpu",
        run([1.0]),
        run([], error="ValueError: use_cpu"),
        [("patched", AS_IS), ("unpatched", f"bf16{DEVICE}")],
    ),
    (
        "patch_keras",
        "fp16",
        "FP32 products",
        run([1.0], flops={"fp32": 9}),
        run([1.0]),
        [("patched", AS_IS), ("unpatched", "bf16")],
    ),
    ("patch_paddle_plain", "fp16", "AMP that is off", run([1.0]), run([2.0], flops={"fp32": 9}), [("patched", "fp16")]),
    ("patch_paddle_plain", "bf16", "Paddle's own error", run([1.0]), run([], error="TypeError: x"), []),
]


@pytest.mark.parametrize(
    ("name", "policy", "unpatched", "patched", "more"),
    [(*case[:2], *case[3:]) for case in INSTEAD],
    ids=[c[2] for c in INSTEAD],
)
@pytest.mark.parametrize("gpu", [None, "H100"])
def test_what_is_tried_instead_without_a_gpu(
    name: str, policy: str, unpatched: RunRecord, patched: RunRecord, more: Ran, gpu: str | None, tmp_path: Path
) -> None:
    runs: Ran = []

    def child(request: Request, **_: Any) -> RunRecord:
        kind = Path(request.record_path).stem
        runs.append((kind, policy_text(request.policy)))
        record = patched if kind == "patched" else unpatched
        return record.model_copy(update={"environment": CPU.model_copy(update={"gpu": gpu})})

    tried(SCRIPTS / f"{name}.py", policy, tmp_path, child=child)
    assert runs[0] == ("patched", AS_IS)
    assert runs[1][0] == "unpatched"
    assert runs[2:] == ([] if gpu else more)


def paddle_trial(under_policy: RunRecord, folder: Path) -> PatchOutcome:
    """Return the outcome on a CPU, where the patched script trains in FP32 unless it is under the policy."""

    def child(request: Request, **_: Any) -> RunRecord:
        if Path(request.record_path).stem == "unpatched":
            return run([1.0, 0.5])
        return run([3.0, 3.0], flops={"fp32": 100}, policy=AS_IS) if request.policy is None else under_policy

    return tried(SCRIPTS / "patch_paddle_plain.py", "fp16", folder, child=child)[1]


def test_a_paddle_patch_is_compared_under_the_policy_where_its_amp_is_off(tmp_path: Path) -> None:
    outcome = paddle_trial(run([1.0, 0.5]), tmp_path)
    assert outcome.may_be_offered
    assert outcome.same_losses
    assert [reason.value for reason in outcome.reasons] == ["2 steps", "fp16 under mezzo run", SAME]
    assert "the patched script under fp16, with the unpatched one under fp16" in outcome.reasons[0].reason


@pytest.mark.parametrize("wrong", [run([1.0, 0.4]), run([1.0]), run([1.0, 0.5], flops={"fp32": 100})])
def test_a_paddle_patch_that_trains_otherwise_is_not_offered(wrong: RunRecord, tmp_path: Path) -> None:
    assert not paddle_trial(wrong, tmp_path).may_be_offered


@pytest.mark.parametrize(("policy", "compared"), [("fp16", "fp16:init_scale=32768"), ("bf16", "bf16")])
def test_a_keras_patch_is_compared_from_keras_own_first_scale(policy: str, compared: str, tmp_path: Path) -> None:
    policies = []

    def child(request: Request, **_: Any) -> RunRecord:
        policies.append(policy_text(request.policy))
        return run([1.0])

    tried(SCRIPTS / "patch_keras.py", policy, tmp_path, child=child)
    assert policies == [AS_IS, compared]


def test_a_script_of_a_package_is_not_tried(tmp_path: Path) -> None:
    patch = make_patch(SCRIPTS / "patch_plain.py", policy=FP16)
    assert isinstance(patch, Patch)
    request = Request(
        target="package.train", kind="module", policy=FP16, record_path=str(tmp_path / "r.json"), command=()
    )
    outcome = try_patch(request, patch, tmp_path)
    assert not outcome.may_be_offered
    assert outcome.reasons[0].value == "not run"


def test_a_closure_is_refused_with_fp16() -> None:
    assert not isinstance(make_patch(SCRIPTS / "patch_lbfgs.py", policy=FP16), Patch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy", "tried_as"),
    [
        ("patch_compiled", "fp16", "fp16"),
        ("patch_lightning", "fp16", "bf16"),  # on a CPU what is tried is BF16 for either policy
        ("patch_fabric", "bf16", "bf16"),
        ("patch_accelerate", "fp16", "bf16"),
        ("patch_transformers", "bf16", "bf16"),
        ("imported_loop", "fp16", "fp16"),
    ],
)
def test_trainers_in_processes_of_their_own(name: str, policy: str, tried_as: str, tmp_path: Path) -> None:
    with forked_runs():
        _, outcome = tried(SCRIPTS / f"{name}.py", policy, tmp_path)
    assert outcome.may_be_offered, outcome.reasons
    assert (outcome.tried_as, outcome.reasons[-1].value) == (tried_as, SAME)
