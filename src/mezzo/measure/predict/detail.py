"""One prediction in detail: throughput over batch sizes, memory over the step, and the time of each module."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from mezzo.measure.predict.plan import Tapes, matrix_formats, recorded_as
from mezzo.measure.predict.step import Conditions, PredictedStep, seconds_by_module
from mezzo.measure.predict.tape import TrainingTape
from mezzo.measure.predict.tape_memory import DRIVER_BYTES
from mezzo.records import BatchCurve, MemoryTimeline, ModuleTime, Prediction, PredictionDetail

_POINTS = 200
_MOST_MODULES = 400
_SHOWN_KINDS = ("parameters", "gradients", "optimizer", "activations", "temporaries")


def detail_of(
    tapes: Mapping[str, Tapes], best: Prediction, others: Sequence[Prediction], *, batch: int, conditions: Conditions
) -> PredictionDetail:
    """Return the details of ``best``, with the curves of ``others`` on the same GPU."""
    tape = tapes[recorded_as(best.policy)].at(batch)
    return PredictionDetail(
        gpu=best.gpu,
        policy=best.policy,
        checkpoint=best.checkpoint,
        limit_bytes=conditions.gpu.memory_bytes - DRIVER_BYTES,
        curves=[_curve(tapes[recorded_as(one.policy)], one, conditions) for one in others],
        timeline=timeline(conditions.job.tape_of_rank(tape), matrix_formats(conditions.gpu, best.policy)),
        modules=module_times(conditions.covering(best.policy).step(tape, best.policy)),
    )


def _curve(tapes: Tapes, one: Prediction, conditions: Conditions) -> BatchCurve:
    """Return the throughput at powers of two up to the largest batch that fits, and at that batch."""
    largest = one.largest_batch or 0
    sizes = [2**power for power in range(20) if 2**power < largest]
    sizes += [largest] if largest else []
    known = conditions.covering(one.policy)
    rates = [known.throughput(tapes.at(size), one.policy, num_batches=tapes.num_batches) for size in sizes]
    return BatchCurve(policy=one.policy, batches=sizes, throughput=rates)


def timeline(tape: TrainingTape, formats: Collection[str] = ()) -> MemoryTimeline:
    """Return the allocated bytes by kind over the last step, at the largest moment of each stretch of allocations.

    Args:
        tape: the training.
        formats: the formats that the device's matrix units compute.
    """
    alive: dict[str, int] = {}
    begin = tape.step_starts[-1] if tape.step_starts else 0
    points: list[tuple[int, dict[str, int]]] = []
    # After the last allocation blocks are only freed.
    end = max((index + 1 for index, event in enumerate(tape.events) if event >= 0), default=0)
    stretch = max(1, -(-(end - begin) // _POINTS))
    highest = -1
    for index, event in enumerate(tape.events[:end]):
        block = tape.blocks[event if event >= 0 else ~event]
        kind = block.kind if block.kind in _SHOWN_KINDS else "other"
        size = block.size_bytes if block.is_taken(formats) else 0
        alive[kind] = alive.get(kind, 0) + (size if event >= 0 else -size)
        if index < begin:
            continue
        total = sum(alive.values())
        if (index - begin) % stretch == 0:
            points.append((index - begin, dict(alive)))
            highest = total
        elif total > highest:
            points[-1], highest = (points[-1][0], dict(alive)), total
    kinds = [kind for kind in (*_SHOWN_KINDS, "other") if any(found.get(kind) for _, found in points)]
    return MemoryTimeline(
        places=[index for index, _ in points],
        kinds={kind: [found.get(kind, 0) for _, found in points] for kind in kinds},
        backward=_after(tape.backward_starts, begin),
        optimizer=_after(tape.optimizer_starts, begin),
    )


def _after(starts: Sequence[int], begin: int) -> int | None:
    return next((start - begin for start in starts if start >= begin), None)


def module_times(step: PredictedStep) -> list[ModuleTime]:
    """Return the milliseconds of each module's own operations by what limits them, the longest first."""
    modules = [*seconds_by_module(step.tape, step.operation_s, step.kinds()).items()][:_MOST_MODULES]
    return [ModuleTime(module=name, ms={kind: 1e3 * s for kind, s in seconds.items()}) for name, seconds in modules]
