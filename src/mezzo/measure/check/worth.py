"""Whether a policy that trains like the baseline is worth a switch: its certain gains, its possible gains, and its costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mezzo.measure.compare.costs import SLOWER
from mezzo.measure.compare.words import listed
from mezzo.records import Gain, Row

FASTER = 1.05
"""A measured speed-up, or a ceiling, below this is no gain."""
_PREDICTED_SLOWER, _PREDICTED_FASTER = 0.85, 1.15
"""A predicted speed-up between these may be none: predictions are off by 12% on average."""
_LITTLE, _LITTLE_BYTES = 0.05, 20 << 20
"""Savings of memory below these are no gain: too little to enlarge a batch, or less than one segment of torch's CUDA allocator."""


@dataclass(frozen=True, kw_only=True)
class Worth:
    """The arguments for and against a policy."""

    gained: list[str]
    """Each measured or predicted gain: ``is 2x as fast on a CPU``."""
    possible: str
    """A gain that is neither shown nor ruled out; empty if there is none."""
    missing: list[str]
    """Each figure that shows no gain: ``0.95x to 1.08x the speed on a CPU``."""
    slower: str
    """How much longer a step takes on the device that the answer is for; empty unless it is longer beyond the spread."""

    @property
    def no_gain(self) -> bool:
        """Whether there is no gain, and as far as is known none is possible."""
        return not self.gained and not self.possible


def worth_of(row: Row, gains: Sequence[Gain], *, for_gpu: bool) -> Worth:
    """Return what a policy is worth.

    Args:
        row: the policy's row of the comparison.
        gains: its gains in speed, as measured, predicted or bounded.
        for_gpu: whether the answer is for a GPU that is not here, so that times measured here do not apply.
    """
    kinds = {gain.kind: gain for gain in gains}
    measured = None if for_gpu else kinds.get("measured")
    on_gpu = kinds.get("predicted") or kinds.get("bound")
    gained, missing, possible, slower = list[str](), list[str](), "", ""
    if measured is not None and measured.times < SLOWER and (measured.high or measured.times) < 1.0:
        slower = f"a step takes {1 / measured.times:.3g} times as long on {measured.device}"
    elif measured is not None and measured.times >= FASTER and row.num_runs < 2:
        possible = f"{measured.times:.3g}x in speed on {measured.device}, by one seed"
    elif measured is not None and measured.times >= FASTER and (measured.low or 0.0) > 1.0:
        gained.append(f"is {measured.times:.3g}x as fast on {measured.device}")
    elif measured is not None:
        missing.append(f"{_spread(measured, row.num_runs)} the speed on {measured.device}")
    elif not for_gpu:
        missing.append("no measured speed" + " (it is emulated here)" * row.emulated)
    if on_gpu is not None:
        times, over = on_gpu.over_what_is_free
        if on_gpu.kind == "bound":
            most = f"at most {times:.3g}x {over}'s speed on {on_gpu.device}"
            possible = most if for_gpu and times >= FASTER else possible
            missing += [most] if for_gpu and times < FASTER else []
        elif times >= _PREDICTED_FASTER:
            gained.append(f"is predicted to be {times:.3g}x as fast as {over} on {on_gpu.device}")
        elif for_gpu and on_gpu.times < _PREDICTED_SLOWER:
            slower = f"a step is predicted to take {1 / on_gpu.times:.3g} times as long on {on_gpu.device}"
        else:
            missing.append(f"a predicted {times:.3g}x {over}'s speed on {on_gpu.device}")
    elif for_gpu:
        possible = "speed, but how much is not known"
    saved = saved_memory(row)
    if saved:
        gained.append(f"{'would save' if row.emulated else 'saves'} {saved:.0%} of the memory")
    else:
        missing.append(_memory(row))
    return Worth(gained=gained, possible=possible, missing=missing, slower=slower)


def saved_memory(row: Row) -> float:
    """Return the share of the memory that a policy saves; 0 if it is too little to use, or unknown."""
    if row.memory_ratio is None or 1.0 - row.memory_ratio < _LITTLE:
        return 0.0
    saved_bytes = _saved_bytes(row, row.memory_ratio)
    return 0.0 if saved_bytes is not None and saved_bytes < _LITTLE_BYTES else 1.0 - row.memory_ratio


def missing_text(worth: Worth) -> str:
    """Return the figures that show no gain, to follow ``bf16 trains like fp32, but``."""
    return f"shows no gain: {listed(worth.missing)}"


def _spread(gain: Gain, num_runs: int) -> str:
    if num_runs < 2 or gain.low is None or gain.high is None:
        return f"{gain.times:.3g}x"
    return f"{gain.low:.3g}x to {gain.high:.3g}x"


def _memory(row: Row) -> str:
    """Return the difference in memory in words, if it is no gain."""
    if row.memory.of_emulation:
        return "memory that only a GPU can show"
    if row.memory_ratio is None:
        return "memory that was not counted"
    saved, saved_bytes = 1.0 - row.memory_ratio, _saved_bytes(row, row.memory_ratio)
    share = f"{abs(saved):.0%} {'less' if saved >= 0 else 'more'}"
    if saved < _LITTLE or saved_bytes is None:
        return "the same memory" if share.startswith("0%") else f"{share} memory"
    return f"{share} memory, {saved_bytes / 2**20:.2g} MiB a step"


def _saved_bytes(row: Row, ratio: float) -> float | None:
    size = row.memory.cuda_allocated_bytes or row.memory.total_bytes
    return None if size is None else size / ratio - size
