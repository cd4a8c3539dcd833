"""Every course of a search: the next run, what is dropped, and the answer, on runs with given speeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from scipy import stats

import record_builders as build
from mezzo.commands.tune.answer import BestTrial, answered
from mezzo.commands.tune.plan import (
    FINAL,
    Configuration,
    SearchKnowledge,
    Trial,
    expected_trials,
    fault,
    finalists,
    grid,
    next_trial,
    pruned,
    speed_of,
    speed_up,
)
from mezzo.records import (
    Effective,
    Memory,
    OutOfMemory,
    Placement,
    RunRecord,
    Steps,
)

GIB = 2**30
NUM_STEPS = 40


def ran(
    configuration: Configuration,
    *,
    ms: float,
    elements: float = 8.0,
    seed: int = 0,
    final_loss: float = 0.5,
    **fields: Any,
) -> RunRecord:
    """Return a run whose first steps are slow and whose loss falls to ``final_loss``, a little apart for every seed."""
    losses = [final_loss * (1 + 0.01 * seed) * (1 + 3 * math.exp(-step / 4)) for step in range(NUM_STEPS)]
    steps = Steps(
        loss=losses,
        loss_scale=[math.nan] * NUM_STEPS,
        skipped=[False] * NUM_STEPS,
        grad_norm=[1.0] * NUM_STEPS,
        time_ms=[1e4] * 3 + [ms] * (NUM_STEPS - 3),
        cpu_ms=[ms] * NUM_STEPS,
    )
    lowered = Effective(flops_by_format={"bf16" if "16" in configuration.policy else "fp32": 10})
    known: dict[str, Any] = {
        "command": [],
        "script": "train.py",
        "script_sha256": "",
        "policy": configuration.policy,
        "seed": seed,
        "environment": build.environment(),
        "steps": steps,
        "memory": Memory(),
        "effective": lowered,
        "input_elements": elements,
        "first_steps": NUM_STEPS,
    }
    return RunRecord.model_validate(known | fields)


def searched(known: SearchKnowledge, facts: Mapping[str, dict[str, Any]]) -> SearchKnowledge:
    """Run the plan to its end; ``facts`` has the fields of each configuration's runs by its name."""
    while (trial := next_trial(known)) is not None:
        configuration = trial.configuration
        given = {"ms": 100.0, **facts.get(configuration.name, {})}
        run = ran(configuration, seed=trial.repeat, **given)
        jitter = 1 + 0.002 * ((trial.repeat * 7 + len(known.runs)) % 5)
        times = [value * jitter for value in run.steps.time_ms]
        run = run.model_copy(update={"steps": run.steps.model_copy(update={"time_ms": times})})
        known = replace(known, runs={**known.runs, trial: run})
    return known


def search(
    facts: Mapping[str, dict[str, Any]], *, vary: Mapping[str, list[str]] | None = None, **fields: Any
) -> tuple[SearchKnowledge, BestTrial]:
    configurations = tuple(grid(["bf16"], vary or {}, [(True, False), (False, True)], []))
    begun: dict[str, Any] = {"configurations": configurations, "steps": 20, "repeats": 3, "margin": 0.02}
    known = searched(SearchKnowledge(**(begun | fields)), facts)
    return known, answered(known)


def states(found: BestTrial) -> dict[str, str]:
    return {row.name: row.state for row in found.rows}


FAST = {"bf16, compiled": {"ms": 50.0}}


def test_the_first_run_is_the_script_as_it_is() -> None:
    known = SearchKnowledge(configurations=tuple(grid(["bf16"], {}, [], [])), steps=20, repeats=3, margin=0.02)
    assert next_trial(known) == Trial(Configuration(), 0)
    assert next_trial(replace(known, left_share=0.0)) is None


def test_few_steps_first_then_the_finalists_with_the_script_and_fp32() -> None:
    known, found = search(FAST)
    played = [(trial.round, trial.repeat) for trial in known.runs]
    assert played == [(0, 0)] * 6 + [(1, 0)] * 0 + [(FINAL, 0)] * 5 + [(FINAL, 1)] * 5 + [(FINAL, 2)] * 5
    final = [trial.configuration.name for trial in known.runs if trial.round == FINAL]
    assert set(final[:5]) == {"as-is", "fp32", *(one.name for one in finalists(known))}
    assert [final[5 * n] for n in range(3)] == [final[0], final[1], final[2]]  # each seed begins with another one
    assert found.decision == "use"
    assert found.chosen.name == "bf16, compiled"
    row = next(row for row in found.rows if row.name == "bf16, compiled")
    assert row.speedup == pytest.approx(2.0, rel=0.01)
    assert row.verdict == "equivalent"


def test_many_configurations_lose_half_in_each_round() -> None:
    vary = {"batch-size": ["16", "32", "64"]}
    known, _ = search(FAST, vary=vary)
    numbers = [sum(trial.round == number for trial in known.runs) for number in range(4)]
    assert numbers == [24, 12, 6, 0]


def test_noise_is_no_gain() -> None:
    _, found = search({"bf16, compiled": {"ms": 99.9}, "bf16": {"ms": 99.8}})
    assert found.decision == "keep"
    assert found.chosen.name == "as-is"
    assert "faster" not in states(found).values()
    assert found.why == "no configuration is faster than what the script does now, beyond the noise of its repeats"


def test_larger_batches_are_compared_by_what_the_model_is_given() -> None:
    facts = {"as-is, batch-size 16": {"ms": 150.0, "elements": 16.0}}
    _, found = search(facts, vary={"batch-size": ["16"]})
    row = next(row for row in found.rows if row.name == "as-is, batch-size 16")
    assert row.speedup == pytest.approx(100 / 150 * 2, rel=0.01)
    assert row.inputs == 2.0
    assert "another batch is another training" in found.why


OUT = [
    # what a run shows, the state, the reason
    ({"error": "RuntimeError: no"}, "failed", "RuntimeError: no"),
    (
        {"exit_code": 2, "first_steps": None},
        "failed",
        "it ended with exit code 2; what it printed is in output.log of its folder",
    ),
    ({"memory": Memory(cuda_reserved_bytes=13 * GIB)}, "barred", "it needs 13 GiB, above the limit of 12 GiB"),
    ({"effective": Effective(emulated=True)}, "barred", "its formats are emulated here: its speed says nothing"),
    (
        {"effective": Effective(flops_by_format={"bf16": 10}, unmade_changes={"compile": "its own"})},
        "barred",
        "torch.compile changed nothing: its own",
    ),
    ({"effective": Effective(flops_by_format={"fp32": 1})}, "barred", "bf16 changed nothing"),
    ({"ms": 200.0}, "dropped", "others were faster in round 1"),
    (
        {"effective": Effective(num_replays=9)},
        "barred",
        "times are not compared, because 9 replays of a CUDA graph are not timed",
    ),
]


@pytest.mark.parametrize(("fields", "state", "reason"), OUT)
def test_what_cannot_be_the_answer_does_not_end_the_search(fields: dict[str, Any], state: str, reason: str) -> None:
    facts = {"bf16, compiled": {"ms": 10.0, **fields}, "bf16": {"ms": 50.0}}
    _, found = search(facts, memory_bytes=12 * GIB)
    row = next(row for row in found.rows if row.name == "bf16, compiled")
    assert (row.state, row.reason) == (state, reason)
    assert found.chosen.name == "bf16"


IN_BF16 = Effective(flops_by_format={"bf16": 10, "fp32": 1})
IN_FP8 = Effective(flops_by_format={"e4m3": 9, "bf16": 1})
NOTHING = "fp8 computed nothing in FP8: neither would its other variants"


@pytest.mark.parametrize(
    ("effective", "error", "others"),
    [
        (IN_BF16, None, {"fp8, channels-last": NOTHING, "fp8, compiled": NOTHING}),
        (
            Effective(flops_by_format={"fp32": 10}),
            None,
            {
                "fp8, channels-last": "fp8 changed nothing: neither would its other variants",
                "fp8, compiled": "fp8 changed nothing: neither would its other variants",
            },
        ),
        (IN_FP8, None, {}),
        (IN_BF16, "RuntimeError: no", {}),
    ],
    ids=["all in bf16", "all in fp32", "in fp8", "failed"],
)
def test_a_policy_that_computed_nothing_in_its_format_is_not_run_in_other_variants(
    effective: Effective, error: str | None, others: dict[str, str]
) -> None:
    configurations = tuple(grid(["fp8"], {"batch-size": ["16"]}, [(True, False), (False, True)], []))
    known = SearchKnowledge(configurations=configurations, steps=20, repeats=3, margin=0.02)
    facts = {one.name: {"effective": IN_FP8} for one in configurations if one.policy == "fp8"}
    found = answered(searched(known, facts | {"fp8": {"effective": effective, "error": error}}))
    unrun = {row.name: row.reason for row in found.rows if row.state == "not run"}
    assert unrun == others  # another batch is another script: its variants are run
    ran_rows = [row.name for row in found.rows if row.policy == "fp8" and row.state != "not run"]
    assert ran_rows.count("fp8") == 1


NO_LAYOUT = Effective(flops_by_format={"fp32": 10}, unmade_changes={"channels_last": "no images"})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"effective": NO_LAYOUT}, "memory layout changed nothing of as-is, channels-last, and no policy decides that"),
        ({"effective": NO_LAYOUT, "error": "RuntimeError: no"}, ""),
        ({}, ""),
    ],
    ids=["no images", "failed", "images"],
)
def test_a_layout_that_changed_nothing_is_tried_once(fields: dict[str, Any], expected: str) -> None:
    known, found = search({"as-is, channels-last": fields})
    row = next(row for row in found.rows if row.name == "bf16, channels-last")
    assert (row.reason if row.state == "not run" else "") == expected
    assert pruned(known, Configuration(policy="bf16", channels_last=True, settings=(("batch-size", "16"),))) == ""


def test_a_configuration_that_trains_to_another_result_is_barred() -> None:
    _, found = search({"bf16, compiled": {"ms": 50.0, "final_loss": 0.9}})
    row = next(row for row in found.rows if row.name == "bf16, compiled")
    assert (row.state, row.verdict) == ("barred", "different")
    assert found.decision == "keep"
    assert found.why.startswith(
        "no configuration is faster beyond noise and trains like FP32 (bf16, compiled is faster, but"
    )


def test_a_larger_batch_than_one_that_did_not_fit_is_not_run() -> None:
    vary = {"batch-size": ["16", "32"]}
    oom = OutOfMemory(step=1, message="CUDA out of memory.")
    facts = {"bf16, batch-size 16": {"error": "OutOfMemoryError: CUDA out of memory.", "out_of_memory": oom}}
    known, found = search(facts, vary=vary)
    row = next(row for row in found.rows if row.name == "bf16, batch-size 32")
    assert (row.state, row.reason) == ("not run", "bf16, batch-size 16 did not fit, and its batch is smaller")
    assert states(found)["bf16, batch-size 32, compiled"] != "not run"
    assert pruned(known, Configuration(policy="bf16", settings=(("batch-size", "8"),))) == ""


def test_a_script_that_fails_itself_is_run_once() -> None:
    known, found = search({"as-is": {"error": "ValueError: no data"}})
    assert len(known.runs) == 1
    assert found.decision == "failed"
    assert found.why == "the script as it is cannot be timed: ValueError: no data"


def test_without_time_for_repeats_nothing_is_decided() -> None:
    known, _ = search(FAST)
    first = {trial: run for trial, run in known.runs.items() if trial.repeat == 0}
    found = answered(replace(known, runs=first, left_share=0.0))
    assert found.decision == "undecided"
    assert found.why == "the budget ran out before the fastest configurations were repeated"


def test_an_answer_says_what_there_was_no_time_for() -> None:
    known, found = search(FAST)
    assert "not run" not in found.why
    unmade = Configuration(policy="bf16", settings=(("batch-size", "128"),))
    found = answered(replace(known, configurations=(*known.configurations, unmade), left_share=0.0))
    why = f"; 1 of {len(found.rows)} configurations were not run: the budget ran out, and a longer --budget runs them"
    assert found.why.endswith(why)


def test_a_speed_leaves_the_first_steps_out() -> None:
    run = ran(Configuration(), ms=100.0)
    assert getattr(speed_of(run), "step_ms", None) == 100.0
    assert speed_of(ran(Configuration(), ms=1.0, steps=Steps(loss=[1.0] * 7, time_ms=[1.0] * 7))) is None


def test_the_interval_is_students_with_bonferronis_correction() -> None:
    ratios = [1.2, 1.3, 1.25]
    found = speed_up(ratios, num_compared=1)
    low, high = stats.t.interval(
        0.95, 2, loc=sum(map(math.log, ratios)) / 3, scale=stats.sem([math.log(ratio) for ratio in ratios])
    )
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert speed_up(ratios, num_compared=3).low < found.low
    assert math.isnan(speed_up([1.2], num_compared=1).low)
    assert not speed_up([1.2], num_compared=1).faster


def test_what_predictions_rule_out_is_not_run_and_says_why() -> None:
    out = {Configuration(policy="bf16", compiles=True): "predicted to be slow"}
    known, found = search(FAST, ruled_out=out)
    assert not any(trial.configuration in out for trial in known.runs)
    row = next(row for row in found.rows if row.name == "bf16, compiled")
    assert (row.state, row.reason) == ("not run", "predicted to be slow")
    assert found.decision == "keep"


def test_checkpointing_is_a_dimension_and_must_have_been_applied() -> None:
    configurations = tuple(grid([], {}, [], [], checkpoints=["full", "1GiB"]))
    assert [one.name for one in configurations] == ["as-is", "as-is, checkpointed full", "as-is, checkpointed 1GiB"]
    begun = SearchKnowledge(configurations=configurations, steps=20, repeats=3, margin=0.02)
    missed = Effective(flops_by_format={"fp32": 10}, unmade_changes={"checkpoint": "no model was called"})
    found = answered(searched(begun, {"as-is, checkpointed 1GiB": {"effective": missed, "ms": 50.0}}))
    row = next(row for row in found.rows if row.checkpoint == "1GiB")
    assert row.state == "barred"
    assert row.reason == "activation checkpointing changed nothing: no model was called"
    assert found.decision == "keep"


# --- several runs at once ------------------------------------------------------------------------------------------------------


def of_five() -> SearchKnowledge:
    chosen = grid(["fp32", "bf16"], {"batch": ["8", "16"]}, [], [])
    return SearchKnowledge(configurations=tuple(chosen[:5]), steps=20, repeats=2, margin=0.02)


def test_the_rest_of_the_round_is_expected_once_the_first_run_has_ended() -> None:
    known = of_five()
    assert [*expected_trials(known)] == []
    first = Trial(known.now, 0)
    known = replace(known, runs={first: ran(known.now, ms=10.0)})
    assert [*expected_trials(known)] == [Trial(one, 0) for one in known.configurations[2:]]
    runs = {Trial(one, 0): ran(one, ms=10.0 - n) for n, one in enumerate(known.configurations)}
    finals = replace(known, runs=runs)
    playing = [trial for trial in [next_trial(finals), *expected_trials(finals)] if trial is not None]
    assert {trial.round for trial in playing} in ({1}, {FINAL})
    assert len(playing) == len(set(playing))


@pytest.mark.parametrize(
    ("placement", "gpu", "why"),
    [
        (Placement(jobs=2, gpus="1"), "NVIDIA H100", ""),
        (Placement(jobs=2, gpus="1"), "NVIDIA L4", "device NVIDIA L4, the baseline's NVIDIA H100"),
        (Placement(jobs=2, gpus="1", threads=4), "NVIDIA H100", ""),
        (Placement(jobs=4, gpus="1"), "NVIDIA H100", "runs at once 4, the baseline's 2"),
        (Placement(jobs=2, through="slurm"), "NVIDIA H100", "the cluster may have run other work on the same CPU"),
    ],
)
def test_times_are_compared_between_like_devices_only(placement: Placement, gpu: str, why: str) -> None:
    known = of_five()
    here = build.environment().model_copy(update={"gpu": "NVIDIA H100", "device": "cuda"})
    now, other = Trial(known.now, 0), Trial(known.configurations[2], 0)
    runs = {
        now: ran(known.now, ms=10.0, environment=here, placement=Placement(jobs=2, gpus="0")),
        other: ran(other.configuration, ms=5.0, environment=here.model_copy(update={"gpu": gpu}), placement=placement),
    }
    known = replace(known, runs=runs)
    assert why in fault(known, other)
    assert (known.over_now(other) is None) == bool(why)
    assert bool(fault(known, other)) == bool(why)


def test_without_a_gpu_of_its_own_on_a_cluster_nothing_is_timed() -> None:
    known = of_five()
    now = ran(known.now, ms=10.0, placement=Placement(jobs=0, through="ray"))
    found = answered(replace(known, runs={Trial(known.now, 0): now}))
    assert found.decision == "failed"
    assert "the cluster may have run other work" in found.why
