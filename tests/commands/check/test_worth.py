"""What a policy is worth: gains beyond the spread, predictions beyond their error, and memory savings large enough to use."""

from __future__ import annotations

import pytest

from mezzo.commands.check.worth import missing_text, saved_memory, worth_of
from mezzo.records import Gain, Memory, Row

MIB = 1 << 20


def row(*, ratio: float | None = 1.0, mib: int = 1000, num_runs: int = 3, emulated: bool = False) -> Row:
    size = Memory(parameters_bytes=0, gradients_bytes=0, optimizer_bytes=0, activations_bytes=mib * MIB)
    fields = {"policy": "bf16", "num_runs": num_runs, "num_failed": 0, "verdict": "equivalent", "emulated": emulated}
    return Row.model_validate(fields | {"memory": size, "memory_ratio": ratio, "reason": "alike"})


def measured(times: float, low: float, high: float) -> Gain:
    return Gain(kind="measured", times=times, low=low, high=high, device="a CPU", note="")


def there(times: float, over_tf32: float | None = None, kind: str = "predicted") -> Gain:
    fields = {"kind": kind, "times": times, "times_over_tf32": over_tf32, "device": "an A100", "note": ""}
    return Gain.model_validate(fields)


@pytest.mark.parametrize(
    ("gain", "num_runs", "gained", "slower"),
    [
        (measured(2.0, 1.8, 2.1), 3, ["is 2x as fast on a CPU"], ""),
        (measured(1.3, 0.9, 1.5), 3, [], ""),  # the spread has 1 in it
        (measured(1.04, 1.03, 1.05), 3, [], ""),  # beyond the spread, and too little
        (measured(1.3, 1.3, 1.3), 1, [], ""),  # one seed has no spread
        (measured(0.5, 0.4, 0.6), 3, [], "a step takes 2 times as long on a CPU"),
        (measured(0.5, 0.4, 1.1), 3, [], ""),
    ],
)
def test_a_measured_gain_lies_beyond_its_spread(gain: Gain, num_runs: int, gained: list[str], slower: str) -> None:
    worth = worth_of(row(num_runs=num_runs), [gain], for_gpu=False)
    assert (worth.gained, worth.slower) == (gained, slower)
    assert worth.no_gain == (not gained and num_runs > 1)


@pytest.mark.parametrize(
    ("gain", "gained"),
    [
        (there(2.4, 1.6), ["is predicted to be 1.6x as fast as TF32 on an A100"]),
        (there(2.4, 1.1), []),  # over FP32 it gains, but TF32 gains as much for one line
        (there(1.5), ["is predicted to be 1.5x as fast as FP32 on an A100"]),
        (there(1.14), []),  # inside the error
        (there(6.0, 1.6, "bound"), []),  # a ceiling is no prediction
    ],
)
def test_a_gpu_gain_counts_where_it_is_predicted(gain: Gain, gained: list[str]) -> None:
    worth = worth_of(row(), [measured(1.0, 0.9, 1.1), gain], for_gpu=False)
    assert worth.gained == gained
    assert worth.no_gain == (not gained)


def test_for_a_gpu_times_measured_here_say_nothing() -> None:
    slow = worth_of(row(), [there(0.5, 0.4), measured(2.0, 1.9, 2.1)], for_gpu=True)
    assert (slow.gained, slow.slower) == ([], "a step is predicted to take 2 times as long on an A100")
    open_question = worth_of(row(), [measured(0.5, 0.4, 0.6)], for_gpu=True)
    assert (open_question.slower, open_question.possible, open_question.no_gain) == (
        "",
        "speed, but how much is not known",
        False,
    )
    ceiling = worth_of(row(), [there(6.0, 1.6, "bound")], for_gpu=True)
    assert ceiling.possible == "at most 1.6x TF32's speed on an A100"
    assert worth_of(row(), [there(1.02, kind="bound")], for_gpu=True).no_gain


@pytest.mark.parametrize(
    ("ratio", "mib", "saved"),
    [(0.6, 600, 0.4), (0.96, 960, 0.0), (0.5, 19, 0.0), (0.5, 21, 0.5), (1.2, 600, 0.0), (None, 600, 0.0)],
)
def test_memory_counts_from_a_share_and_a_segment_of_the_allocator_on(
    ratio: float | None, mib: int, saved: float
) -> None:
    assert saved_memory(row(ratio=ratio, mib=mib)) == pytest.approx(saved)


def test_what_is_missing_has_its_figures() -> None:
    worth = worth_of(row(ratio=0.7, mib=7), [measured(1.0, 0.95, 1.08), there(1.05, 1.02)], for_gpu=False)
    assert missing_text(worth) == (
        "shows no gain: 0.95x to 1.08x the speed on a CPU, a predicted 1.02x TF32's speed on an A100 and "
        "30% less memory, 3 MiB a step"
    )
    emulated = worth_of(row(ratio=None, emulated=True), [], for_gpu=False)
    assert missing_text(emulated) == (
        "shows no gain: no measured speed (it is emulated here) and memory that was not counted"
    )
    assert missing_text(worth_of(row(), [], for_gpu=False)).endswith("no measured speed and the same memory")
    assert missing_text(worth_of(row(ratio=1.1), [], for_gpu=False)).endswith("and 10% more memory")
