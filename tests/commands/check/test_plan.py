"""What a check does next: each course of a check as a row, with records made from a few numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from helpers_compare import falling, run
from mezzo.commands.check.plan import (
    CheckState,
    NextStage,
    expected_runs,
    first_run_limit_s,
    gone_wrong,
    next_stage,
    repairs,
    undone,
)
from mezzo.records import (
    DiagnoseRecord,
    Effective,
    FallbackRecord,
    FallbackVerdict,
    Pass,
    RangesRecord,
    RunRecord,
    ScaleWindow,
)

POLICIES = ("fp32", "bf16", "fp16")
NAN = float("nan")
# Seeds that end well apart, so that a difference of a thousandth is inside the margin.
ENDS = (1.0, 1.1, 0.9)


def trained(policy: str, seed: int, *, times: float = 1.0, **fields: Any) -> RunRecord:
    return run(policy, falling(ENDS[seed] * times), seed=seed, duration_s=10.0, **fields)


def broken(policy: str, seed: int) -> RunRecord:
    return run(policy, [5.0, 4.0] + [NAN] * 18, seed=seed, duration_s=10.0)


def failed(policy: str, seed: int) -> RunRecord:
    return run(policy, [], seed=seed, duration_s=10.0, error="RuntimeError: no kernel", exit_code=1)


def known(*runs: RunRecord, left_s: float = 600.0, policies: tuple[str, ...] = POLICIES, **fields: Any) -> CheckState:
    return CheckState(policies=policies, seeds=3, left_s=left_s, runs=runs, **fields)


def played(asked: CheckState, answers: Any, *, limit: int = 40) -> list[str]:
    """Return what is asked for until the end, as short texts; ``answers`` gives the run of each policy and seed."""
    course = []
    while (ask := next_stage(asked)) is not None and len(course) < limit:
        assert ask.kind == "run"
        course.append(f"{ask.policy} {ask.seed}")
        asked = CheckState(
            policies=asked.policies,
            seeds=asked.seeds,
            left_s=asked.left_s - 10.0,
            runs=(*asked.runs, answers(ask.policy, ask.seed)),
        )
    return course


def asked_text(asked: NextStage | None) -> str:
    return "" if asked is None else f"{asked.kind} {asked.policy}" + (f" {asked.seed}" if asked.kind == "run" else "")


HEALTHY = [
    "fp32 0", "bf16 0", "fp16 0",
    "bf16 1", "fp16 1", "fp32 1",
    "fp16 2", "fp32 2", "bf16 2",
]  # fmt: skip


def test_a_healthy_script_runs_every_policy_with_every_seed_and_nothing_else() -> None:
    assert played(known(), trained) == HEALTHY


def test_a_policy_without_effect_gets_no_more_seeds() -> None:
    def answers(policy: str, seed: int) -> RunRecord:
        effective = Effective(flops_by_format={"bf16": 4}) if policy == "fp8" else Effective()
        return trained(policy, seed, effective=effective)

    course = played(known(policies=("fp32", "bf16", "fp8")), answers)
    assert course == ["fp32 0", "bf16 0", "fp8 0", "bf16 1", "fp32 1", "fp32 2", "bf16 2"]


def test_fewer_seeds_where_the_time_is_short() -> None:
    assert played(known(left_s=69.0), trained) == HEALTHY[:6]  # after two seeds, 9 s are left of 69
    assert played(known(left_s=59.0), trained) == HEALTHY[:3]
    assert played(known(left_s=15.0), trained) == HEALTHY[:2]  # the first seed is tried for as long as there is time


def test_a_run_that_was_stopped_is_not_asked_for_again() -> None:
    assert asked_text(next_stage(known(trained("fp32", 0), lost=frozenset({("bf16", 0)})))) == "run fp16 0"


def test_a_policy_that_diverges_gets_no_more_seeds_and_a_diagnosis() -> None:
    def answers(policy: str, seed: int) -> RunRecord:
        return broken(policy, seed) if policy == "fp16" else trained(policy, seed)

    runs = tuple(answers(policy, seed) for policy, seed in [("fp32", 0), ("bf16", 0), ("fp16", 0)])
    assert gone_wrong(known(*runs)) == ["fp16"]
    everything = [*runs, *(trained(p, s) for s in (1, 2) for p in ("fp32", "bf16"))]
    assert asked_text(next_stage(known(*runs))) == "run bf16 1"
    assert asked_text(next_stage(known(*everything))) == "diagnose fp16"
    # bf16 trains alike: nothing has to be repaired
    assert next_stage(known(*everything, diagnosed={"fp16": None})) is None


def test_a_policy_that_fails_is_diagnosed_with_the_seed_that_failed() -> None:
    runs = [*(trained(p, s) for s in (0, 1, 2) for p in ("fp32", "bf16")), trained("fp16", 0), failed("fp16", 1)]
    asked = next_stage(known(*runs))
    assert asked is not None
    assert (asked.kind, asked.policy, asked.seed) == ("diagnose", "fp16", 1)


@pytest.mark.parametrize("first", [failed("fp32", 0), run("fp32", [], seed=0)])
def test_a_script_that_fails_by_itself_is_run_once(first: RunRecord) -> None:
    assert next_stage(known(first)) is None


def test_a_baseline_that_goes_wrong_with_every_seed_is_diagnosed_and_nothing_else() -> None:
    assert asked_text(next_stage(known(broken("fp32", 0)))) == "run fp32 1"
    every = [broken("fp32", seed) for seed in range(3)]
    assert asked_text(next_stage(known(*every))) == "diagnose fp32"
    assert next_stage(known(*every, diagnosed={"fp32": None})) is None
    assert next_stage(known(*every, inspecting=())) is None


def test_an_unstable_baseline_keeps_every_policy_in_play() -> None:
    runs = (broken("fp32", 0), trained("fp32", 1), trained("bf16", 0), broken("fp16", 0))
    assert asked_text(next_stage(known(*runs))) == "run bf16 1"
    assert asked_text(next_stage(known(*runs, trained("bf16", 1)))) == "run fp16 1"


def test_no_observers_for_other_frameworks() -> None:
    runs = [*(trained("fp32", s) for s in range(3)), broken("fp16", 0)]
    assert asked_text(next_stage(known(*runs, policies=("fp32", "fp16")))) == "diagnose fp16"
    assert next_stage(known(*runs, policies=("fp32", "fp16"), inspecting=())) is None


# --- repairs -----------------------------------------------------------------------------------------------------------------

FP16_ONLY = ("fp32", "fp16")
BROKEN = (trained("fp32", 0), broken("fp16", 0))


def diagnosis(*, fix_tried: bool, policy: str = "fp16:fp32_modules=head", **fields: Any) -> DiagnoseRecord:
    passes = [Pass(policy="fp16", reason="to find"), Pass(policy=policy, reason="to try: keep head in FP32")]
    facts = {"verdict": "range_overflow", "located": True, "module": "head", "step": 3, "fix": "keep head in FP32"}
    return DiagnoseRecord.model_validate(
        {"run": broken("fp16", 0), "passes": passes, "fix_tried": fix_tried, **facts, **fields}
    )


def ranges(*, suggested: int | None) -> RangesRecord:
    window = ScaleWindow(
        format="fp16", lowest=4, highest=12, suggested=suggested, reason="gradients fit from 2^4 to 2^12"
    )
    return RangesRecord(
        run=trained("fp32", 0), policy="fp16", format="fp16", first_scale=-10, little=0.01, windows=[window]
    )


def search(suggested: str, verdict: FallbackVerdict = "found") -> FallbackRecord:
    kept = ["head"] if suggested else []
    return FallbackRecord(
        run=trained("fp32", 0),
        policy="fp16",
        tolerance=0.02,
        verdict=verdict,
        reason="",
        kept=kept,
        suggested=suggested,
    )


OPEN = tuple(
    run("fp16:fp32_modules=head", falling(end), seed=s, duration_s=10.0) for s, end in enumerate((1.02, 1.15, 0.9))
)
"""Runs that do not decide."""

COURSES: list[tuple[str, dict[str, Any], tuple[RunRecord, ...], str]] = [
    # what is known beside the runs, more runs, what is asked for next
    ("first the cause", {}, (), "diagnose fp16"),
    (
        "the tried fix, with the first seed",
        {"diagnosed": {"fp16": diagnosis(fix_tried=True)}},
        (),
        "run fp16:fp32_modules=head 0",
    ),
    (
        "and with the others, beside the baseline",
        {"diagnosed": {"fp16": diagnosis(fix_tried=True)}},
        (trained("fp16:fp32_modules=head", 0),),
        "run fp16:fp32_modules=head 1",
    ),
    (
        "until it is judged",
        {"diagnosed": {"fp16": diagnosis(fix_tried=True)}},
        tuple(trained(p, s) for p in ("fp32", "fp16:fp32_modules=head") for s in range(3) if (p, s) != ("fp32", 0)),
        "",
    ),
    (
        "an open verdict on a repair asks for nothing more",
        {"diagnosed": {"fp16": diagnosis(fix_tried=True)}},
        (*(trained("fp32", s) for s in (1, 2)), *OPEN),
        "",
    ),
    (
        "a fix that does not help leaves the search",
        {"diagnosed": {"fp16": diagnosis(fix_tried=True)}},
        (broken("fp16:fp32_modules=head", 0),),
        "fallback fp16",
    ),
    ("a fix that was not tried is none", {"diagnosed": {"fp16": diagnosis(fix_tried=False)}}, (), "fallback fp16"),
    (
        "a fault of the scale asks for ranges",
        {"diagnosed": {"fp16": diagnosis(fix_tried=False, verdict="scale_overflow")}},
        (),
        "ranges fp16",
    ),
    (
        "then for the scale that they suggest",
        {
            "diagnosed": {"fp16": diagnosis(fix_tried=False, verdict="scale_overflow")},
            "ranged": {"fp16": ranges(suggested=10)},
        },
        (),
        "run fp16:init_scale=1024 0",
    ),
    (
        "no scale fits",
        {
            "diagnosed": {"fp16": diagnosis(fix_tried=False, verdict="scale_overflow")},
            "ranged": {"fp16": ranges(suggested=None)},
        },
        (),
        "fallback fp16",
    ),
    (
        "modules that the search found",
        {"diagnosed": {"fp16": None}, "searched": {"fp16": search("fp16:fp32_modules=tail")}},
        (),
        "run fp16:fp32_modules=tail 0",
    ),
    (
        "modules with most of the FLOPs are no repair",
        {"diagnosed": {"fp16": None}, "searched": {"fp16": search("fp16:fp32_modules=tail", "does not pay")}},
        (),
        "",
    ),
    ("nothing is left", {"diagnosed": {"fp16": None}, "searched": {"fp16": None}}, (), ""),
]


@pytest.mark.parametrize(("facts", "more", "asked"), [row[1:] for row in COURSES], ids=[row[0] for row in COURSES])
def test_what_repairs_the_only_policy(facts: dict[str, Any], more: tuple[RunRecord, ...], asked: str) -> None:
    assert asked_text(next_stage(known(*BROKEN, *more, policies=FP16_ONLY, **facts))) == asked


def test_a_fix_that_is_another_policy_of_the_comparison_is_no_repair() -> None:
    facts = {"fp16": diagnosis(fix_tried=True, policy="bf16")}
    assert repairs(known(*BROKEN, diagnosed=facts)) == []
    assert [one.policy for one in repairs(known(*BROKEN, policies=FP16_ONLY, diagnosed=facts))] == ["bf16"]


def test_a_different_result_asks_for_modules() -> None:
    runs = [*(trained("fp32", s) for s in range(3)), *(trained("fp16", s, times=1.8) for s in range(3))]
    assert asked_text(next_stage(known(*runs, policies=FP16_ONLY))) == "fallback fp16"


def test_many_skips_of_the_answer_ask_for_a_scale() -> None:
    skipped = [True] * 4 + [False] * 16
    runs = [*(trained("fp32", s) for s in range(3)), *(trained("fp16", s, skipped=skipped) for s in range(3))]
    assert asked_text(next_stage(known(*runs, policies=FP16_ONLY))) == "ranges fp16"
    scale = {"ranged": {"fp16": ranges(suggested=10)}}
    assert asked_text(next_stage(known(*runs, policies=FP16_ONLY, **scale))) == "run fp16:init_scale=1024 0"
    few = [*(long("fp32", s, num_skipped=0) for s in range(3)), *(long("fp16", s, num_skipped=1) for s in range(3))]
    assert next_stage(known(*few, policies=FP16_ONLY)) is None


def long(policy: str, seed: int, *, num_skipped: int) -> RunRecord:
    skipped = [True] * num_skipped + [False] * (40 - num_skipped)
    return run(policy, falling(ENDS[seed], num_steps=40), seed=seed, skipped=skipped, duration_s=10.0)


# --- time --------------------------------------------------------------------------------------------------------------------


def test_without_time_nothing_more_is_done_and_it_says_what_was_left_out() -> None:
    late = known(*BROKEN, policies=FP16_ONLY, left_s=5.0)
    assert next_stage(late) is None
    assert undone(late) == "mezzo diagnose --policy fp16"
    assert undone(known(trained("fp32", 0), trained("fp16", 0), policies=FP16_ONLY, left_s=5.0)) == "fp16 with seed 1"
    everything = [trained(p, s) for p in POLICIES for s in range(3)]
    assert undone(known(*everything, left_s=0.0)) == ""


def test_the_first_run_takes_its_share_of_the_budget() -> None:
    # 0.7 of 10 minutes for 3 policies with 3 seeds each
    assert math.isclose(first_run_limit_s(600.0, num_policies=3, seeds=3), 46.6666666667)


# --- several runs at once ----------------------------------------------------------------------------------------------------


def expected(asked: CheckState) -> list[str]:
    return [f"{ask.policy} {ask.seed}" for ask in expected_runs(asked)]


def test_all_other_runs_are_expected_once_the_first_has_ended() -> None:
    assert expected(known()) == []
    after_first = known(trained("fp32", 0), policies=("fp32", "bf16", "fp16"))
    course = played(after_first, trained)
    assert course[0] == "bf16 0"
    assert expected(after_first) == course[1:]
    assert len(course) == 8


def test_a_policy_that_went_wrong_and_repairs_are_not_expected() -> None:
    runs = [trained("fp32", 0), trained("bf16", 0), broken("fp16", 0)]
    assert asked_text(next_stage(known(*runs))) == "run bf16 1"
    assert expected(known(*runs)) == ["fp32 1", "fp32 2", "bf16 2"]
    assert expected(known(*BROKEN, policies=FP16_ONLY)) == []  # a diagnosis is next


def test_runs_at_once_take_less_time_together() -> None:
    assert known(trained("fp32", 0), at_once=2).seconds_together(["fp32"] * 4) == 20.0
    assert known(trained("fp32", 0), at_once=8).seconds_together(["fp32"] * 4) == 10.0
    # the first alone, then 8 runs, 4 at a time
    assert math.isclose(first_run_limit_s(600.0, num_policies=3, seeds=3, at_once=4), 0.7 * 600 / 3)
