"""The processes of a run, and what each of them measured."""

from __future__ import annotations

from mezzo.records.values import Value


class RankRun(Value):
    """One process of a run in several."""

    rank: int
    host: str = ""
    device: str = ""
    """The GPU's name, or torch's device type."""
    num_steps: int = 0
    skipped_steps: list[int] = []
    """Numbers of the steps whose updates were skipped, from 1."""
    final_loss: float | None = None
    """The loss of the last step in this process, on its own part of the data."""
    final_scale: float | None = None
    step_ms: float | None = None
    """Median wall time of a step after the first; None if there was none."""
    cpu_ms: float | None = None
    """Median CPU time of a step after the first."""
    total_bytes: int | None = None
    """Bytes of a step: parameters, gradients, optimizer state and activations of this process."""
    cuda_allocated_bytes: int | None = None
    weights: str = ""
    """A digest of the weights at the end, without sharded ones; empty if they were gone by then."""
    duration_s: float = 0.0
    exit_code: int = 0
    error: str | None = None
