"""Whether a policy that trains like the baseline is worth switching to: what it gains for certain, what it may gain, what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mezzo.measure.compare.costs import SLOWER
from mezzo.measure.compare.words import listed
from mezzo.records import Gain, Row

FASTER = 1.05
"""The measured speed-up, and the ceiling, below which nothing is gained."""
_PREDICTED_SLOWER, _PREDICTED_FASTER = 0.85, 1.15
"""Predicted speed-ups between these may be none: they are 12% off in the mean."""
_LITTLE, _LITTLE_BYTES = 0.05, 20 << 20
"""Less memory is no gain: a share that no batch grows by, or less than one segment of torch's CUDA allocator."""


@dataclass(frozen=True, kw_only=True)
class Worth:
    """What speaks for a policy, and what against it."""

    gained: list[str]
    """Each gain that was shown or is predicted, as ``is 2x as fast on a CPU``."""
    possible: str
    """A gain that nothing shows and nothing rules out; empty if there is none."""
    missing: list[str]
    """The figures where nothing was gained, as ``0.95x to 1.08x the speed on a CPU``."""
    slower: str
    """How much longer a step takes where the answer is for; empty if it does not, beyond the spread."""

    @property
    def none(self) -> bool:
        """Whether nothing is gained, and nothing can be as far as is known."""
        return not self.gained and not self.possible


def worth_of(row: Row, gains: Sequence[Gain], *, for_gpu: bool) -> Worth:
    """Return what a policy is worth.

    Args:
        row: the policy's row of the comparison.
        gains: its gains in speed, as measured, predicted or bounded.
        for_gpu: whether the answer is for a GPU that is not here, so that times measured here say nothing.
    """
    kinds = {gain.kind: gain for gain in gains}
    measured = None if for_gpu else kinds.get("measured")
    there = kinds.get("predicted") or kinds.get("bound")
    gained, missing, possible, slower = list[str](), list[str](), "", ""
    if measured is not None and _is_slower(measured):
        slower = f"a step takes {1 / measured.times:.3g} times as long on {measured.device}"
    elif measured is not None and measured.times >= FASTER and row.num_runs < 2:
        possible = f"{measured.times:.3g}x in speed on {measured.device}, by one seed"
    elif measured is not None and measured.times >= FASTER and (measured.low or 0.0) > 1.0:
        gained.append(f"is {measured.times:.3g}x as fast on {measured.device}")
    elif measured is not None:
        missing.append(f"{_spread(measured, row.num_runs)} the speed on {measured.device}")
    elif not for_gpu:
        missing.append("no measured speed" + " (it is emulated here)" * row.emulated)
    if there is not None and there.kind == "predicted":
        times, over = there.over_what_is_free
        if times >= _PREDICTED_FASTER:
            gained.append(f"is predicted to be {times:.3g}x as fast as {over} on {there.device}")
        elif for_gpu and there.times < _PREDICTED_SLOWER:
            slower = f"a step is predicted to take {1 / there.times:.3g} times as long on {there.device}"
        else:
            missing.append(f"a predicted {times:.3g}x {over}'s speed on {there.device}")
    elif there is not None:
        times, over = there.over_what_is_free
        most = f"at most {times:.3g}x {over}'s speed on {there.device}"
        possible = most if for_gpu and times >= FASTER else possible
        missing += [most] if for_gpu and times < FASTER else []
    elif for_gpu:
        possible = "a speed that is not known"
    saved = saved_memory(row)
    if saved:
        gained.append(f"{'would save' if row.emulated else 'saves'} {saved:.0%} of the memory")
    else:
        missing.append(_memory(row))
    return Worth(gained=gained, possible=possible, missing=missing, slower=slower)


def saved_memory(row: Row) -> float:
    """Return the share of the memory that a policy saves; 0 where it is too little to use, or not known."""
    if row.memory_ratio is None or 1.0 - row.memory_ratio < _LITTLE:
        return 0.0
    size = row.memory.cuda_allocated_bytes or row.memory.total_bytes
    if size is not None and size / row.memory_ratio - size < _LITTLE_BYTES:
        return 0.0
    return 1.0 - row.memory_ratio


def missing_text(worth: Worth) -> str:
    """Return that nothing is gained, with each figure, to go on after ``bf16 trains like fp32, but``."""
    return f"gains nothing that shows: {listed(worth.missing)}"


def _is_slower(measured: Gain) -> bool:
    return measured.times < SLOWER and (measured.high or measured.times) < 1.0


def _spread(gain: Gain, num_runs: int) -> str:
    if num_runs < 2 or gain.low is None or gain.high is None:
        return f"{gain.times:.3g}x"
    return f"{gain.low:.3g}x to {gain.high:.3g}x"


def _memory(row: Row) -> str:
    """Return what a policy does to the memory where that is no gain."""
    if row.memory_ratio is None:
        return "memory that was not counted"
    saved, size = 1.0 - row.memory_ratio, row.memory.cuda_allocated_bytes or row.memory.total_bytes
    share = f"{abs(saved):.0%} {'less' if saved >= 0 else 'more'}"
    if saved < _LITTLE or size is None:
        return "the same memory" if share.startswith("0%") else f"{share} memory"
    return f"{share} memory, {(size / row.memory_ratio - size) / 2**20:.2g} MiB a step"
