"""Which runs a diagnosis makes: asked for by the evidence so far, each at most once, and never without end."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mezzo.commands.diagnose.plan import diagnose_script, inspected
from mezzo.launch.request import Request, policy_text
from mezzo.observe.nonfinite.evidence import Evidence, Located, LostValues, WrongGradients, write_evidence
from mezzo.observe.settings import DiagnoseSettings
from mezzo.policy import Policy
from mezzo.records import AS_IS, DiagnoseRecord, RunRecord, Steps
from record_builders import environment

Answer = Callable[[Request, DiagnoseSettings], Evidence | None]


def place(step: int = 3, **changed: Any) -> Located:
    usual: dict[str, Any] = {
        "kind": "made",
        "op": "mul",
        "module": "1",
        "pattern": "1",
        "format": "fp16",
        "largest": 1e5,
    }
    gradients = changed.pop("gradients", None)
    return Located(step=step, source=LostValues(**usual | changed), gradients=gradients)


def showing(located: Located | None, step: int = 3) -> Evidence:
    return Evidence(located=located, watched=[step], bad_steps=[step], faulty_steps=[step], scaled=True)


OVERFLOW, INVALID = showing(place()), showing(place(largest=None))
SCALE = showing(place(backward=True, loss_scale=1024.0))
SILENT = Evidence(located=place(gradients=WrongGradients(parameter="w", error=1, count=1, total=1)), watched=[3])
UNSEEN = Evidence(bad_steps=[3], faulty_steps=[3], watched=[1, 2, 4], scaled=True)
FINE = Evidence(watched=[2, 3])
ALL_FP32 = INVALID.model_copy(update={"narrow": False})
BY_UPDATE = showing(place(kind="entered", largest=None, parameter=True))
UPDATE = Evidence(located=place(2, in_update=True, op="Adam.step", largest=None), watched=[2], faulty_steps=[2])
WIDE = "in FP32, the script's own 16 bits too, to step 3"


def diagnosed(
    folder: Path,
    answer: Answer,
    *,
    policy: str = "fp16",
    seed: int | None = None,
    arguments: tuple[str, ...] = (),
    **ending: Any,
) -> tuple[DiagnoseRecord | RunRecord, list[Request]]:
    """Return the record of a made-up script, and what was asked for; ``answer`` gives the evidence of each run."""
    asked: list[Request] = []
    request = Request(
        target="x",
        kind="script",
        policy=None if policy == AS_IS else Policy.parse(policy),
        record_path=str(folder / "record.json"),
        command=("mezzo",),
        output_to_stderr=True,
        seed=seed,
        arguments=arguments,
    )

    def child(one: Request, **_: Any) -> RunRecord:
        asked.append(one)
        assert isinstance(one.observe, DiagnoseSettings)
        evidence = answer(one, one.observe)
        if evidence is not None:
            write_evidence(evidence, one.observe.evidence_path)
        count = one.observe.steps[-1]
        steps = Steps(loss=[1.0] * count, skipped=[False] * count, grad_norm=[1.0] * count, loss_scale=[1.0] * count)
        where = environment()
        return RunRecord(
            command=[],
            script="x",
            script_sha256="",
            policy=policy_text(one.policy),
            environment=where,
            steps=steps,
            **ending,
        )

    return diagnose_script(request, steps=5, child=child), asked


def told(first: Evidence, by: dict[str, Evidence | None], *, otherwise: Evidence | None = FINE) -> Answer:
    """Return the answers of a script: to the first run, to others by what is asked, and to fixes."""

    def answer(request: Request, asked: DiagnoseSettings) -> Evidence | None:
        if not Path(request.record_path).name.startswith("pass"):
            return first
        kinds = {
            "suspects": bool(asked.suspects),
            "scale": asked.changes.loss_scale == 1.0,
            "wide": asked.changes.own_format == "fp32",
            "fp32": str(request.policy) == "fp32",
        }
        return next((by[kind] for kind, wanted in kinds.items() if wanted and kind in by), otherwise)

    return answer


ORDERS: list[tuple[Answer, str, list[str]]] = [
    # what the script shows, the policy, the reasons of the runs after the first
    (told(FINE, {}), "fp16", []),
    (told(OVERFLOW, {}), "fp16", ["in FP32, to step 3", "to try: keep 1 in FP32"]),
    (told(OVERFLOW, {}), "fp32", [WIDE, "to try: keep 1 in FP32"]),
    (told(ALL_FP32, {}), "fp32", []),
    (told(INVALID, {"fp32": ALL_FP32}), "fp16", ["in FP32, to step 3"]),
    (told(INVALID, {"fp32": INVALID}), "fp16", ["in FP32, to step 3", WIDE]),
    (told(INVALID, {"wide": FINE, "fp32": INVALID}), "fp16", ["in FP32, to step 3", WIDE, "to try: keep 1 in FP32"]),
    (  # the weights that step 3 reads were not finite before
        told(BY_UPDATE, {"suspects": UPDATE, "fp32": FINE}),
        "fp16",
        ["to inspect the operations of step 3", "in FP32, to step 2", "to try: train in BF16, which has FP32's range"],
    ),
    (told(INVALID, {"fp32": FINE}), "fp16", ["in FP32, to step 3", "to try: keep 1 in FP32"]),
    (told(INVALID, {"fp32": None}), "fp16", ["in FP32, to step 3"]),
    (told(SILENT, {}), "fp16", ["to try: keep 1 in FP32"]),
    (
        told(SCALE, {}),
        "fp16",
        ["with a loss scale of 1 in step 3", "to try: begin with a loss scale of 1 and let it be dynamic"],
    ),
    (
        told(SCALE, {"scale": OVERFLOW}),
        "fp16",
        ["with a loss scale of 1 in step 3", "in FP32, to step 3", "to try: keep 1 in FP32"],
    ),
    (told(SCALE, {"scale": SILENT}), "fp16", ["with a loss scale of 1 in step 3", "to try: keep 1 in FP32"]),
    (
        told(UNSEEN, {"suspects": OVERFLOW}),
        "fp16",
        ["to inspect the operations of step 3", "in FP32, to step 3", "to try: keep 1 in FP32"],
    ),
    (told(UNSEEN, {"suspects": FINE}), "fp16", ["to inspect the operations of step 3"]),
    (told(UNSEEN, {"suspects": None}), "fp16", ["to inspect the operations of step 3"]),
    (  # found in another step than the first time: a fix that helps would prove nothing
        told(UNSEEN, {"suspects": showing(place(5), 5)}),
        "fp16",
        ["to inspect the operations of step 3", "in FP32, to step 5"],
    ),
    (  # nothing helps
        told(OVERFLOW, {"fp32": FINE}, otherwise=OVERFLOW),
        "fp16",
        ["in FP32, to step 3"]
        + [
            f"to try: {fix}"
            for fix in ("keep 1 in FP32", "compute mul in FP32", "train in BF16, which has FP32's range")
        ],
    ),
    (
        told(showing(place(kind="refused", largest=1e9)), {}),
        "fp16",
        ["in FP32, to step 3", "to try: keep 1 in FP32"],
    ),
]


@pytest.mark.parametrize(("answer", "policy", "reasons"), ORDERS)
def test_each_run_follows_from_the_evidence_so_far(
    answer: Answer, policy: str, reasons: list[str], tmp_path: Path
) -> None:
    record, asked = diagnosed(tmp_path, answer, policy=policy)
    assert isinstance(record, DiagnoseRecord)
    assert [one.reason for one in record.passes] == ["to find the first step that is not finite", *reasons]
    assert [one.output_to_stderr for one in asked] == [True] + [False] * len(reasons)  # later ones print to files
    names = [Path(one.record_path).name for one in asked]
    assert names == ["record.json", *(f"pass{k}.json" for k in range(2, len(asked) + 1))]


def test_a_script_that_raised_runs_again_with_its_last_step_inspected(tmp_path: Path) -> None:
    _, asked = diagnosed(tmp_path, told(Evidence(watched=[1, 2, 4]), {}), exit_code=1, error="ValueError: nan")
    settings = asked[1].observe
    assert isinstance(settings, DiagnoseSettings)
    assert (settings.suspects, settings.steps) == ((6,), (5, 6))
    _, asked = diagnosed(tmp_path, told(Evidence(watched=[1, 2, 4]), {}), exit_code=130, error="KeyboardInterrupt")
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("missed", "suspects", "from_start"),
    [
        (Evidence(missed_start=True, watched=[2, 4], bad_steps=[1], faulty_steps=[1]), (1,), True),
        (Evidence(missed_start=True), (1,), True),  # one step, and it was not inspected
        (Evidence(missed_start=True, watched=[2, 4], bad_steps=[3], faulty_steps=[3]), (3,), False),
    ],
)
def test_a_script_that_calls_no_module_is_inspected_from_its_first_line(
    missed: Evidence, suspects: tuple[int, ...], from_start: bool, tmp_path: Path
) -> None:
    _, asked = diagnosed(tmp_path, told(missed, {"suspects": showing(place(suspects[0]))}))
    found = [one.observe for one in asked]
    assert all(isinstance(one, DiagnoseSettings) for one in found)
    assert isinstance(found[1], DiagnoseSettings)
    assert (found[1].suspects, found[1].steps[0], found[1].from_start) == (
        suspects,
        max(suspects[0] - 1, 1),
        from_start,
    )
    starts = [one for one in found[1:] if isinstance(one, DiagnoseSettings) and one.steps[0] == 1]
    assert all(one.from_start for one in starts)
    assert isinstance(found[0], DiagnoseSettings)
    assert not found[0].from_start
    _, asked = diagnosed(tmp_path, told(Evidence(missed_start=True, watched=[2, 4]), {}))
    assert len(asked) == 1


def test_the_first_three_suspects_are_inspected(tmp_path: Path) -> None:
    steps = [3, 5, 6, 7]
    _, asked = diagnosed(tmp_path, told(Evidence(watched=[1, 2, 4], bad_steps=steps, faulty_steps=steps), {}))
    assert isinstance(asked[1].observe, DiagnoseSettings)
    assert asked[1].observe.suspects == (3, 5, 6)


def test_a_fix_is_tried_beyond_the_fault(tmp_path: Path) -> None:
    _, asked = diagnosed(tmp_path, told(OVERFLOW, {}))
    assert isinstance(asked[-1].observe, DiagnoseSettings)
    assert asked[-1].observe.steps == (1, 2, 4, 8, 16, 19)


def test_an_earlier_skip_is_inspected_before_the_one_that_was_seen(tmp_path: Path) -> None:
    first = SCALE.model_copy(update={"bad_steps": [2, 3], "faulty_steps": [2, 3]})
    _, asked = diagnosed(tmp_path, told(first, {}))
    assert isinstance(asked[1].observe, DiagnoseSettings)
    assert asked[1].observe.suspects == (2,)


@pytest.mark.parametrize(("seed", "used"), [(None, 0), (3, 3)])
def test_every_run_begins_with_the_same_seed(seed: int | None, used: int, tmp_path: Path) -> None:
    _, asked = diagnosed(tmp_path, told(OVERFLOW, {}), seed=seed)
    assert [one.seed for one in asked] == [used] * 3


def test_no_run_finds_the_checkpoints_of_another(tmp_path: Path) -> None:
    _, asked = diagnosed(tmp_path, told(OVERFLOW, {}), arguments=("--out", "a/{run}"))
    assert [one.arguments for one in asked] == [("--out", f"a/pass{number}") for number in (1, 2, 3)]


def test_a_child_that_dies_gives_the_record_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "record.evidence.json").write_text("{}")  # of an earlier run in the same folder
    record, asked = diagnosed(tmp_path, lambda *_: None, exit_code=137, error="killed")
    assert isinstance(record, RunRecord)
    assert (record.exit_code, len(asked)) == (137, 1)


def test_nothing_is_run_again_after_an_interruption(tmp_path: Path) -> None:
    def answer(request: Request, asked: DiagnoseSettings) -> Evidence:
        if Path(request.record_path).name == "pass2.json":
            signal.raise_signal(signal.SIGINT)
        return OVERFLOW

    record, asked = diagnosed(tmp_path, answer)
    assert isinstance(record, DiagnoseRecord)
    assert [p.outcome for p in record.passes][1:] == ["stopped by SIGINT"]
    assert len(asked) == 2
    assert (record.located, record.fix_tried, record.fix_note) == (True, False, "not tried: the search was interrupted")


@pytest.mark.parametrize(
    ("last", "steps"), [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 20))]
)
def test_powers_of_two_are_inspected_and_the_last_step(last: int, steps: tuple[int, ...]) -> None:
    assert inspected(last) == steps


KNOWN = st.sampled_from([OVERFLOW, INVALID, SCALE, SILENT, UNSEEN, FINE, showing(place(2, pattern="2"), 2), None])


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(answers=[OVERFLOW, OVERFLOW, *[showing(place(2, pattern="2"), 2)] * 10], policy="fp16")
@given(answers=st.lists(KNOWN, min_size=12, max_size=12), policy=st.sampled_from(["fp16", "bf16", "fp32", "as-is"]))
def test_any_answers_come_to_an_end(answers: list[Evidence | None], policy: str, tmp_path: Path) -> None:
    left = iter(answers)
    record, asked = diagnosed(tmp_path, lambda *_: next(left), policy=policy)
    assert (
        len(asked) <= 12
    )  # the first, suspects twice, a scale of 1, FP32 twice, five fixes and FP32 to the step that the best one reaches
    assert isinstance(record, DiagnoseRecord) == (answers[0] is not None)
    if isinstance(record, DiagnoseRecord):
        reasons = [one.reason for one in record.passes]
        assert len(reasons) == len(set(reasons)) == len(asked)
