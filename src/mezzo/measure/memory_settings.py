"""Settings that save memory, from what filled it when a script ran out of it: each with the bytes that it saves, the largest first."""

from __future__ import annotations

from collections.abc import Mapping

from mezzo.measure.checkpointing.plan import bytes_text
from mezzo.records import Reason

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer state"
ACTIVATIONS, OTHER = "saved activations", "other"
_EIGHT_BIT = 0.75
"""Share of FP32 moments that 8-bit moments save: 1 byte instead of 4, and a scale for each block."""


def memory_settings(
    bytes_by_kind: Mapping[str, int], *, lowers: bool, step_activations: int | None, peak_bytes: int | None = None
) -> list[Reason]:
    """Return the settings to write, the one that saves most first.

    Args:
        bytes_by_kind: bytes in memory when it ran out, by kind.
        lowers: whether the policy computes below 32 bits already.
        step_activations: bytes that a whole step saved for its backward pass; None if no step was counted.
        peak_bytes: the most bytes that could be allocated; None if unknown.
    """
    activations = max(step_activations or 0, bytes_by_kind.get(ACTIVATIONS, 0))
    state = bytes_by_kind.get(OPTIMIZER, 0)
    savings: list[tuple[int, str, str]] = []
    if activations:
        why = (
            "half of the saved activations wait for the backward pass at a time; the update is that of the whole batch"
        )
        savings.append((activations // 2, 'half the batch: Session(micro_batch="auto"), or accumulate=2', why))
        why = "at most this much: a checkpointed block keeps its input and computes the rest again"
        savings.append((activations, "mezzo.checkpoint(model, sample, budget=...)", why))
        if not lowers:
            why = "activations in 16 bits; weights, gradients and optimizer state stay FP32"
            savings.append((activations // 2, "--policy bf16", why))
    if state:
        why = "moments take 1 byte a weight instead of 4"
        savings.append((int(_EIGHT_BIT * state), 'mezzo.AdamW(..., moments="8bit")', why))
    settings = [
        Reason(what="write", value=setting, reason=f"saves {bytes_text(saved_bytes)}: {why}")
        for saved_bytes, setting, why in sorted(savings, key=lambda one: -one[0])
    ]
    permanent_bytes = sum(size for kind, size in bytes_by_kind.items() if kind in (PARAMETERS, GRADIENTS, OPTIMIZER))
    if peak_bytes is not None and step_activations and permanent_bytes < peak_bytes:
        share = (peak_bytes - permanent_bytes) / step_activations
        if share < 1:
            why = "the memory that parameters, gradients and optimizer state leave free, divided by what a whole step saves"
            value = f"{share:.0%} of the batch fits"
            settings.insert(0, Reason(what="largest batch, estimated", value=value, reason=why))
    return settings
