"""Settings that save memory, from what filled it when a script ran out; each with the bytes it saves, the most first."""

from __future__ import annotations

from collections.abc import Mapping

from mezzo.records import Reason

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer state"
ACTIVATIONS, OTHER = "saved activations", "other"
_EIGHT_BIT = 0.75
"""Share of FP32 moments that 8-bit moments save: 1 byte in place of 4, and a scale for each block."""


def memory_settings(
    held_bytes: Mapping[str, int], *, lowers: bool, step_activations: int | None, peak_bytes: int | None = None
) -> list[Reason]:
    """Return the settings to write, the one that saves most first.

    Args:
        held_bytes: bytes in memory when it ran out, by kind.
        lowers: whether the policy computes below 32 bits already.
        step_activations: bytes that a whole step saved for its backward pass; None if no step was counted.
        peak_bytes: the most bytes that could be allocated; None if unknown.
    """
    activations = max(step_activations or 0, held_bytes.get(ACTIVATIONS, 0))
    state = held_bytes.get(OPTIMIZER, 0)
    found: list[tuple[int, str, str]] = []
    if activations:
        why = (
            "half of the saved activations wait for the backward pass at a time; the update is that of the whole batch"
        )
        found.append((activations // 2, 'half the batch: Session(micro_batch="auto"), or accumulate=2', why))
        why = "at most this much: a checkpointed block keeps its input and computes the rest again"
        found.append((activations, "mezzo.checkpoint(model, sample, budget=...)", why))
        if not lowers:
            why = "activations in 16 bits; weights, gradients and optimizer state stay FP32"
            found.append((activations // 2, "--policy bf16", why))
    if state:
        why = "moments of 1 byte a weight in place of 4"
        found.append((int(_EIGHT_BIT * state), 'mezzo.AdamW(..., moments="8bit")', why))
    settings = [
        Reason(what="write", value=setting, reason=f"saves {_size(saved_bytes)}: {why}")
        for saved_bytes, setting, why in sorted(found, key=lambda one: -one[0])
    ]
    held = sum(size for kind, size in held_bytes.items() if kind in (PARAMETERS, GRADIENTS, OPTIMIZER))
    if peak_bytes is not None and step_activations and held < peak_bytes:
        share = (peak_bytes - held) / step_activations
        if share < 1:
            why = "what parameters, gradients and optimizer state leave of the memory, against what a whole step keeps"
            value = f"{share:.0%} of the batch fits"
            settings.insert(0, Reason(what="largest batch, estimated", value=value, reason=why))
    return settings


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} B"
