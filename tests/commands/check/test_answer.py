"""The answer, from comparisons made of a few numbers: decision, words, gains and the next command."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest

from helpers_compare import falling, judge, run
from mezzo.commands.check.answer import MOST_SEEDS, Case, Repair, answered, skipped_share
from mezzo.commands.check.worth import predicted_gain
from mezzo.gpus import GPUS
from mezzo.records import CompareRecord, DiagnoseRecord, Effective, FileRead, Memory, RealGpus, RunRecord

ENDS = (1.0, 1.1, 0.9)
NAN = float("nan")
LOWERED = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "as-is": "fp16", "tf32": "tf32"}
BYTES = {"fp32": 1000, "tf32": 1000}


def command(kind: str, *options: str) -> str:
    words = ["python"] if kind == "python" else ["mezzo", kind, *options]
    return shlex.join([*words, "train.py", "--lr", "0.1"])


def trained(
    policy: str, *, times: float = 1.0, ms: float = 10.0, emulated: bool = False, num_seeds: int = 3, **fields: Any
) -> list[RunRecord]:
    """Return a run a seed: 900 of 1000 FLOPs in the policy's format; 600 bytes where FP32 takes 1000."""
    lowered = LOWERED[policy.split(":")[0]]
    flops = {lowered: 900, "fp32": 100} if lowered != "fp32" else {"fp32": 1000}
    size = BYTES.get(lowered, 600) << 20
    facts = {
        "effective": Effective(flops_by_format=flops, emulated=emulated),
        "memory": Memory(parameters_bytes=0, gradients_bytes=0, optimizer_bytes=0, activations_bytes=size),
        "duration_s": 60.0,
    }
    return [
        run(policy, falling(end * times), seed=seed, time_ms=[ms] * 20, **(facts | fields))
        for seed, end in enumerate(ENDS[:num_seeds])
    ]


def broken(policy: str, *, num_seeds: int = 1) -> list[RunRecord]:
    return [run(policy, [5.0, 4.0] + [NAN] * 18, seed=seed) for seed in range(num_seeds)]


def case(*groups: list[RunRecord], gpu: str | None = "a100-80gb", for_gpu: bool = False, **fields: Any) -> Case:
    comparison: CompareRecord = judge([record for group in groups for record in group])
    return Case(
        comparison=comparison,
        device="a CPU",
        command=command,
        gpu=None if gpu is None else GPUS[gpu],
        for_gpu=for_gpu,
        **fields,
    )


# --- use ---------------------------------------------------------------------------------------------------------------------


def test_the_fastest_of_those_that_train_alike() -> None:
    found = answered(case(trained("fp32"), trained("bf16", ms=5.0), trained("fp16", ms=8.0), gpu=None))
    assert (found.decision, found.policy) == ("use", "bf16")
    assert found.why == (
        "bf16 trains like fp32, is 2x as fast on a CPU and saves 40% of the memory; fp16 does too, but bf16 is the fastest"
    )
    assert found.memory_saved == pytest.approx(0.4)
    assert [(gain.kind, gain.times, gain.low, gain.high, gain.device) for gain in found.gains] == [
        ("measured", 2.0, 2.0, 2.0, "a CPU")
    ]
    assert found.next_command == "mezzo run --policy bf16 train.py --lr 0.1"
    assert [(other.what, other.value) for other in found.others] == [("fp16", "equivalent")]
    assert found.evidence.startswith("every step's loss is identical to fp32's")


def test_emulated_policies_are_bounded_for_the_gpu_and_ordered_as_an_expert_would() -> None:
    policies = trained("bf16", emulated=True), trained("fp16", emulated=True)
    found = answered(case(trained("fp32"), *policies, for_gpu=True))
    assert (found.decision, found.policy) == ("use", "bf16")
    assert found.why == (
        "bf16 trains like fp32 and would save 40% of the memory; fp16 does too, but bf16 has FP32's range and needs no loss scale"
    )
    (gain,) = found.gains
    assert (gain.kind, gain.device) == ("bound", "A100-SXM4-80GB")
    # Memory limits both sides: 1000 MiB against 600 MiB, each written and read.
    assert gain.times == pytest.approx(1000 / 600)
    assert gain.times_over_tf32 == pytest.approx(1000 / 600)
    assert gain.note.startswith(
        "90% of the FLOPs are in products that it runs in BF16 at 16 times FP32's peak rate; memory"
    )


def test_an_old_gpu_gets_fp16() -> None:
    found = answered(case(trained("fp32"), trained("fp16", emulated=True), gpu="v100-16gb", for_gpu=True))
    assert (found.decision, found.policy, found.why) == (
        "use",
        "fp16",
        "fp16 trains like fp32 and would save 40% of the memory",
    )
    assert [gain.times_over_tf32 for gain in found.gains] == [None], "a V100 has no TF32"


def test_the_scripts_own_mixed_precision_stays_if_nothing_beats_it() -> None:
    found = answered(case(trained("fp32"), trained("as-is", ms=5.0), trained("bf16", ms=5.0), gpu=None))
    assert (found.decision, found.policy) == ("use", "as-is")
    assert found.why == "the script's own mixed precision trains like fp32, so there is nothing to change"
    assert found.next_command == "python train.py --lr 0.1"


def test_the_scripts_own_mixed_precision_that_is_slower_is_not_praised() -> None:
    found = answered(case(trained("fp32"), trained("as-is", ms=20.0), gpu=None))
    assert (found.decision, found.policy) == ("use", "as-is")
    assert found.why == (
        "the script's own mixed precision trains like fp32, so there is nothing to change; but a step takes 2 times as long on "
        "a CPU as in fp32"
    )


def test_a_repaired_policy_says_what_was_changed() -> None:
    text = "fp16:fp32_modules=head"
    repair = Repair(of="fp16", policy=text, how="mezzo diagnose found the fix: keep head in FP32")
    found = answered(
        case(trained("fp32"), broken("fp16"), trained(text, emulated=True), gpu="t4", for_gpu=True, repairs=[repair])
    )
    assert (found.decision, found.policy) == ("use", text)
    assert [(one.what, one.value, one.reason) for one in found.changed] == [("fp16", text, repair.how)]
    assert found.next_command == "mezzo run --policy fp16:fp32_modules=head train.py --lr 0.1"


# --- stay --------------------------------------------------------------------------------------------------------------------


def test_a_policy_that_is_slower_only_here_may_still_be_used_on_the_gpu() -> None:
    runs = trained("fp32"), trained("bf16", ms=20.0)
    here = answered(case(*runs))
    assert (here.decision, here.policy) == ("stay", "fp32")
    assert here.why == (
        "bf16 trains like fp32, but a step takes 2 times as long on a CPU; it saves 40% of the memory, if that is what you need"
    )
    assert here.next_command == "mezzo check --gpu a100-80gb train.py --lr 0.1"
    assert answered(case(*runs, for_gpu=True)).decision == "use"


def test_a_little_slower_is_worth_the_memory() -> None:
    assert answered(case(trained("fp32"), trained("bf16", ms=10.3))).decision == "use"


SAME = Memory(parameters_bytes=0, gradients_bytes=0, optimizer_bytes=0, activations_bytes=990 << 20)


BAND = "8 of 10 measured trainings had 87% to 118% of their predicted speed"


def predicted(times: float, over_tf32: float, *, validated: bool = True, fits: bool = True) -> RealGpus:
    facts = {"gpu": "a100-80gb", "policy": "bf16", "possible": True, "fits": fits, "validated": validated}
    facts |= {"throughput": 200.0, "throughput_low": 174.0, "throughput_high": 236.0}
    return RealGpus.model_validate(
        {"predictions": [facts | {"over_fp32": times, "over_tf32": over_tf32, "bounds": {"arithmetic": 1.0}}]}
    )


@pytest.mark.parametrize("for_gpu", [False, True])
def test_without_a_gain_the_answer_is_to_stay_with_the_measured_figures(for_gpu: bool) -> None:
    asked = case(trained("fp32"), trained("bf16", ms=9.9, memory=SAME), for_gpu=for_gpu)
    asked = replace(asked, comparison=asked.comparison.model_copy(update={"real_gpus": predicted(1.3, 1.04)}))
    found = answered(asked)
    here = "" if for_gpu else "1.01x to 1.01x the speed on a CPU, "
    assert (found.decision, found.policy) == ("stay", "fp32")
    assert found.why == (
        f"bf16 trains like fp32, but shows no gain: {here}a predicted 1.04x TF32's speed on A100-SXM4-80GB and "
        "1% less memory"
    )


def test_a_gain_that_is_predicted_is_the_reason() -> None:
    asked = case(trained("fp32"), trained("bf16", ms=9.9, memory=SAME))
    asked = replace(asked, comparison=asked.comparison.model_copy(update={"real_gpus": predicted(2.6, 1.5)}))
    found = answered(asked)
    assert (found.decision, found.policy) == ("use", "bf16")
    assert found.why == "bf16 trains like fp32 and is predicted to be 1.5x as fast as TF32 on A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("validated", "fits", "note"),
    [
        (True, True, BAND),
        (False, True, "no measurement has checked it"),
        (True, False, f"{BAND}; the batch does not fit"),
    ],
)
def test_a_prediction_has_one_statement_of_trust(validated: bool, fits: bool, note: str) -> None:
    gain = predicted_gain(predicted(2.6, 1.5, validated=validated, fits=fits), "bf16", GPUS["a100-80gb"])
    assert gain is not None
    assert (gain.times, gain.times_over_tf32, gain.note) == (2.6, 1.5, note)


@pytest.mark.parametrize(
    ("bounds", "fits", "note"),
    [
        ({"arithmetic": 0.4, "launch": 0.6}, True, "; kernel launches bound the step: a larger batch gains more"),
        ({"arithmetic": 0.4, "launch": 0.6}, False, "; the batch does not fit"),
        ({"arithmetic": 0.6, "launch": 0.4}, True, ""),
        ({}, True, ""),
    ],
)
def test_a_prediction_says_what_a_larger_batch_does(bounds: dict[str, float], fits: bool, note: str) -> None:
    found = predicted(2.6, 1.5, fits=fits)
    own = found.predictions[0].model_copy(update={"bounds": bounds})
    gain = predicted_gain(found.model_copy(update={"predictions": [own]}), "bf16", GPUS["a100-80gb"])
    assert gain is not None
    assert gain.note == f"{BAND}{note}"


def test_tf32_is_no_gain_over_itself() -> None:
    found = predicted(1.4, 1.0)
    own = found.predictions[0].model_copy(update={"policy": "tf32"})
    gain = predicted_gain(found.model_copy(update={"predictions": [own]}), "tf32", GPUS["a100-80gb"])
    assert gain is not None
    assert (gain.times, gain.times_over_tf32) == (1.4, None)


def test_no_policy_trains_alike() -> None:
    found = answered(case(trained("fp32"), broken("bf16"), trained("fp16", times=1.8), gpu=None))
    assert (found.decision, found.policy) == ("stay", "fp32")
    assert found.why == "no other policy trains like fp32: bf16 diverged and fp16 trains to a different result"
    assert found.next_command == "mezzo diagnose --policy bf16 train.py --lr 0.1"
    assert found.memory_saved is None


def test_the_cause_is_named_with_the_policy_that_failed() -> None:
    cause = DiagnoseRecord.model_validate(
        {
            "run": broken("fp16")[0],
            "verdict": "range_overflow",
            "located": True,
            "module": "head",
            "phase": "forward",
            "step": 3,
            "line": "train.py:12",
            "detail": "mul makes 1e6, beyond FP16's 65504.",
            "fix": "keep head in FP32",
            "fix_tried": True,
        }
    )
    found = answered(case(trained("fp32"), trained("bf16"), broken("fp16"), gpu=None, diagnosed={"fp16": cause}))
    assert found.decision == "use"
    assert found.others[0].reason.endswith(
        "; cause: range overflow in step 3, forward pass of head, train.py:12: mul makes 1e6, beyond FP16's 65504; "
        "fix: keep head in FP32 (tried)"
    )


def test_a_policy_that_changes_nothing_is_no_open_question() -> None:
    nothing = Effective(flops_by_format={"fp32": 1000}, num_lowered=0)
    found = answered(case(trained("fp32"), trained("bf16", effective=nothing), gpu=None))
    assert found.decision == "stay"
    assert found.why.startswith("mixed precision changes nothing here: bf16 changed nothing")


def test_a_script_in_float64_stays_there() -> None:
    double = Effective(flops_by_format={"fp64": 1000}, num_lowered=0)
    runs = [trained(policy, effective=double) for policy in ("fp32", "bf16", "fp16")]
    found = answered(case(*runs, gpu=None))
    assert (found.decision, found.policy, found.others) == ("stay", "fp64", [])
    assert found.why.startswith("the script computes in float64, which no policy lowers")
    assert found.next_command.startswith("mezzo audit")
    assert answered(case(trained("fp32"), *runs[1:], gpu=None)).policy == "fp32"


@pytest.mark.parametrize(
    ("flops", "updates", "formats", "shares"),
    [
        ({"bf16": 10}, {}, ["bf16"], "100% of its FLOPs in BF16"),
        ({"bf16": 5, "fp32": 5}, {}, ["bf16", "fp32"], "50% of its FLOPs in BF16 and 50% of its FLOPs in FP32"),
        ({"bf16": 4, "fp32": 6}, {}, ["fp32", "bf16"], ""),  # a policy may still lower the rest
        ({"bf16": 99, "fp32": 1}, {}, ["bf16"], "99% of its FLOPs in BF16"),
        ({"bf16": 10, "fp32": 5}, {"fp32": 5}, ["bf16"], "100% of its FLOPs in BF16"),
        ({"bf16": 10, "fp32": 5}, {"bf16": 10}, [], ""),  # Muon's own products
        ({"bf16": 4, "fp32": 96}, {}, [], ""),
    ],
)
def test_a_script_that_casts_by_itself_keeps_its_own_precision(
    flops: dict[str, int], updates: dict[str, int], formats: list[str], shares: str
) -> None:
    effective = Effective(flops_by_format=flops, update_flops_by_format=updates)
    found = answered(case(trained("fp32", effective=effective), trained("bf16", ms=5.0), gpu=None))
    assert found.own_formats == formats
    if not shares:
        assert (found.decision, found.policy) == ("use", "bf16")
        return
    assert (found.decision, found.policy, found.next_command) == ("stay", "as-is", "python train.py --lr 0.1")
    assert found.why == (
        f"the script converts its model or data itself: fp32, with which the other verdicts compare, computes {shares} too. "
        "To compare with FP32, remove the conversions from the script"
    )


def test_an_open_question_that_is_not_worth_an_answer() -> None:
    ends = (1.02, 1.15, 0.9)
    size = Memory(parameters_bytes=0, gradients_bytes=0, optimizer_bytes=0, activations_bytes=980 << 20)
    facts = {"memory": size, "effective": Effective(flops_by_format={"fp16": 10, "fp32": 990}, emulated=True)}
    open_runs = [run("fp16", falling(end), seed=seed, **facts) for seed, end in enumerate(ends)]
    too = [run("fp16:fp32_modules=dec", falling(end), seed=seed, **facts) for seed, end in enumerate(ends)]
    for open_groups in ([open_runs], [open_runs, too]):  # however many there are
        found = answered(case(trained("fp32"), *open_groups, gpu="t4", for_gpu=True))
        assert found.decision == "stay"
        assert (
            found.why
            == "fp16 may or may not train like fp32, but shows no gain: at most 1.02x FP32's speed on T4 and 2% less memory"
        )


# --- undecided and failed ------------------------------------------------------------------------------------------------------


def test_seeds_that_would_decide_are_named_with_the_time_they_take() -> None:
    ends = (1.02, 1.15, 0.9)  # against 1.0, 1.1 and 0.9
    open_runs = [run("bf16", falling(end), seed=seed, duration_s=60.0) for seed, end in enumerate(ends)]
    record = case(trained("fp32"), open_runs, gpu=None)
    needed = next(row.seeds_needed for row in record.comparison.rows if row.policy == "bf16")
    assert needed is not None
    assert needed > MOST_SEEDS
    found = answered(record)
    assert found.decision == "undecided"
    assert found.policy == "fp32"
    minutes = -(-2 * needed * 4 // 3)  # two policies, a minute each, and a third to spare
    assert found.next_command == f"mezzo check --policies bf16 --seeds {needed} --budget {minutes}m train.py --lr 0.1"
    assert found.next_why == (
        f"{needed} seeds decide it in four cases out of five; runs with more steps spread less, and need fewer"
    )


def test_a_policy_that_few_seeds_decide_comes_before_one_that_needs_hundreds() -> None:
    groups = [
        [run(policy, falling(end), seed=seed, duration_s=60.0) for seed, end in enumerate(ends)]
        for policy, ends in (("bf16", (1.15, 1.05, 0.8)), ("fp16", (0.98, 1.1, 0.92)))
    ]
    record = case(trained("fp32"), *groups, gpu=None)
    needed = {row.policy: row.seeds_needed or 0 for row in record.comparison.rows}
    assert needed["bf16"] > MOST_SEEDS > needed["fp16"] > 0
    found = answered(record)
    assert found.why.startswith("fp16 is not decided")
    assert f"--policies fp16 --seeds {needed['fp16']} " in found.next_command
    assert found.next_why == f"{needed['fp16']} seeds decide it in four cases out of five"


@pytest.mark.parametrize(("steps", "decision"), [(29, "undecided"), (30, "use")])
def test_a_few_first_steps_show_nothing(steps: int, decision: str) -> None:
    found = answered(case(trained("fp32", first_steps=steps), trained("bf16", first_steps=steps), more_time="60m"))
    assert found.decision == decision
    if decision == "undecided":
        assert found.why == "only 29 steps a run fit the budget, and fewer than 30 show nothing"
        assert found.next_command == "mezzo check --budget 60m train.py --lr 0.1"


def test_one_seed_asks_for_three() -> None:
    one = run("bf16", falling(1.001), seed=0, duration_s=60.0)
    found = answered(case(trained("fp32", num_seeds=1), [one], gpu=None))
    assert found.decision == "undecided"
    assert found.next_command == "mezzo check --policies bf16 --seeds 3 --budget 8m train.py --lr 0.1"


def test_a_baseline_that_goes_wrong_is_no_baseline() -> None:
    found = answered(case(broken("fp32"), trained("bf16")))
    assert (found.decision, found.policy) == ("failed", "fp32")
    assert found.why.startswith(
        "it goes wrong in fp32 itself, so nothing can be compared with it: 2 of the last 2 values"
    )
    assert found.next_command == "mezzo diagnose --policy fp32 train.py --lr 0.1"


def test_the_cause_of_a_baseline_that_goes_wrong() -> None:
    cause = DiagnoseRecord.model_validate(
        {
            "run": broken("fp32")[0],
            "verdict": "invalid_operation",
            "located": True,
            "module": "head",
            "phase": "forward",
            "step": 7,
            "detail": "log() has no finite result in FP32 either",
            "fix": "the logarithm needs an argument above 0",
        }
    )
    found = answered(case(broken("fp32"), diagnosed={"fp32": cause}))
    assert found.why == (
        "it goes wrong in fp32 itself, so nothing can be compared with it: invalid operation in step 7, forward pass of head: "
        "log() has no finite result in FP32 either; fix: the logarithm needs an argument above 0"
    )
    assert (found.next_command, found.next_why) == ("mezzo check train.py --lr 0.1", "answers once that is fixed")


def test_own_mixed_precision_that_was_off_is_no_answer() -> None:
    off = Effective(flops_by_format={"fp32": 1000}, num_lowered=0)
    found = answered(case(trained("fp32"), trained("as-is", effective=off), trained("bf16", ms=5.0), gpu=None))
    assert (found.decision, found.policy) == ("use", "bf16")
    assert (
        found.others[0].reason == "nothing ran below 32 bits, so the script's own mixed precision was off in these runs"
    )


@pytest.mark.parametrize(
    ("too_slow", "next_command"),
    [(False, "python train.py --lr 0.1"), (True, "mezzo check --budget 60m train.py --lr 0.1")],
)
def test_a_script_that_fails_by_itself(too_slow: bool, next_command: str) -> None:
    first = [run("fp32", [], error="RuntimeError: no data", exit_code=1)]
    found = answered(case(first, too_slow=too_slow, more_time="60m"))
    assert (found.decision, found.next_command) == ("failed", next_command)
    assert found.why.endswith("RuntimeError: no data")


def test_runs_that_read_each_other_decide_nothing() -> None:
    timed = {"started_at_s": 100.0, "duration_s": 50.0}
    first = trained("fp32", num_seeds=1, **timed)
    read = [FileRead(path="last.pt", written_at_s=120.0)]
    second = trained("bf16", num_seeds=1, files_read=read, started_at_s=200.0, duration_s=50.0)
    found = answered(case(first, second))
    assert found.decision == "undecided"
    assert (
        found.why
        == "the runs are not independent: the run of bf16 with seed 0 read last.pt, which the run of fp32 with seed 0 had written"
    )


def test_steps_that_a_graph_replays_leave_the_answer_open() -> None:
    runs = trained("bf16", ms=5.0, effective=Effective(flops_by_format={"bf16": 900}, num_replays=100))
    found = answered(case(trained("fp32"), runs, gpu=None))
    assert (found.decision, found.policy) == ("undecided", "fp32")
    assert found.why == "only 20 steps were recorded; 100 replays of a CUDA graph train as well and are not recorded"
    assert found.next_command == "mezzo check train.py --lr 0.1"
    assert found.next_why == "once the script trains without its graph, which computes the same"


def test_the_share_of_skipped_updates() -> None:
    runs = [run("fp16", falling(1.0), seed=seed, skipped=[True] * seed + [False] * (20 - seed)) for seed in range(3)]
    assert skipped_share(judge([*trained("fp32"), *runs]), "fp16") == pytest.approx(3 / 60)
    assert skipped_share(judge(trained("fp32")), "bf16") == 0.0


@pytest.mark.parametrize(
    ("seeds_cannot_decide", "command"),
    [
        (True, "mezzo compare --policies fp32,bf16 --margin 0.05 train.py --lr 0.1"),
        (False, "mezzo diagnose --policy bf16 train.py --lr 0.1"),
    ],
)
def test_what_decides_an_open_row_follows_from_its_fields(seeds_cannot_decide: bool, command: str) -> None:
    open_case = case(trained("fp32"), trained("bf16"), gpu=None)
    said = {
        "verdict": "undecided",
        "reason": "in words",
        "seeds_needed": None,
        "seeds_cannot_decide": seeds_cannot_decide,
    }
    rows = [row.model_copy(update=said if row.policy == "bf16" else {}) for row in open_case.comparison.rows]
    comparison = open_case.comparison.model_copy(update={"rows": rows})
    assert answered(replace(open_case, comparison=comparison)).next_command == command


def test_evidence_has_no_costs() -> None:
    (row,) = (row for row in judge([*trained("fp32"), *trained("bf16", ms=20.0)]).rows if row.policy == "bf16")
    assert row.evidence is not None
    assert row.reason == f"{row.evidence}; slower: a step takes 2 times as long as fp32's"
