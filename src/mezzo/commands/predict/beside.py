"""Predictions beside measurements on the same device: how far off they are. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from mezzo.gpus import find_gpu
from mezzo.records import Note, RealGpus, Row
from mezzo.report import formatting as fmt


def is_here(gpu_name: str, device_name: str | None) -> bool:
    """Return whether the device of that name, as torch reports it, is a GPU of the kind ``gpu_name``."""
    found = find_gpu(device_name) if device_name else None
    return found is not None and found.name == gpu_name


def off_text(predicted: float, measured: float, *, high: str, low: str) -> str:
    """Return how far a prediction is off: ``24% off, too fast``; ``high`` and ``low`` name the two directions."""
    error = predicted / measured - 1
    share = f"{abs(error):.0%} off"
    return share if share.startswith("0%") else f"{share}, {high if error > 0 else low}"


def beside_text(predicted_ms: float, measured_ms: float) -> str:
    """Return a predicted and a measured step, and how far the prediction is off."""
    off = off_text(predicted_ms, measured_ms, high="too slow", low="too fast")
    return f"predicted {fmt.ms_text(predicted_ms)}, measured {fmt.ms_text(measured_ms)}: {off}"


def beside(predicted: RealGpus | None, device_name: str | None, rows: Sequence[Row]) -> list[Note]:
    """Return each prediction for the device of the runs beside what its row measured there.

    Args:
        predicted: the predictions; None if none were requested.
        device_name: the device of the runs, as torch reports it.
        rows: what was measured; emulated rows have no time and no memory of their own.
    """
    if predicted is None:
        return []
    found = []
    measured = {row.policy_shown: row for row in rows if not row.emulated}
    on_gpu = [one for one in predicted.predictions if one.possible and is_here(one.gpu, device_name)]
    for one in [predicted.here] if predicted.here is not None else on_gpu:
        row = measured.get(one.policy)
        if row is None or row.step_ms is None:
            continue
        peak, memory = row.memory.cuda_allocated_bytes, ""
        if peak and not row.memory.of_emulation:
            off = off_text(one.allocated_bytes, peak, high="too much", low="too little")
            memory = (
                f"allocated: predicted {fmt.bytes_text(one.allocated_bytes)}, measured {fmt.bytes_text(peak)}: {off}"
            )
        found.append(Note(what=f"{one.gpu}, {one.policy}", value=beside_text(one.step_ms, row.step_ms), reason=memory))
    return found
