"""Which kinds of operation take more or less time than predicted, in the steps that ``measure_kernels`` profiled?

The prediction is what ``mezzo predict --model`` says, with the shipped constants. The time in which no kernel ran in the measured step is a
separate row: the device waited, for the host or between kernels. ``--calls KIND`` pairs the operations of a kind, in their order in each
phase, and prints those with the largest differences, with the rates reached. ``--out`` writes the table as CSV.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.gpu.measure_kernels import Kernel, Step, kind_of
from benchmarks.gpu.measure_zoo import Case
from benchmarks.prediction.predict_zoo import label, said, tapes
from benchmarks.shared import csv_rows, options
from mezzo.gpus import Gpu, find_gpu
from mezzo.measure.predict.plan import recorded_as
from mezzo.measure.predict.step import Conditions
from mezzo.measure.predict.tape import CostedOperation

_SHOWN = 15


@dataclass
class Call:
    """One call of an operation, measured or predicted."""

    phase: str
    kind: str
    operation: str
    us: float
    num_kernels: int = 1
    """For a prediction, the number of operations on the tape, each priced as one kernel."""
    shapes: str = ""
    kernels: str = ""
    flops: int = 0
    moved_bytes: int = 0


@dataclass
class Part:
    """A kind of operation in one phase of a step."""

    case: Case
    phase: str
    kind: str
    measured_ms: float = 0.0
    predicted_ms: float = 0.0
    kernels: int = 0
    priced_kernels: int = 0


def measured_calls(kernels: Iterable[Kernel]) -> list[Call]:
    """Return the operations that launched ``kernels``, in the order in which they began."""
    groups: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.place].append(kernel)
    found = []
    for _, one in sorted(groups.items()):
        first, us = one[0], sum(kernel.took_us for kernel in one)
        names = " + ".join(f"{kernel.kernel[:60]} {kernel.took_us:.0f} us" for kernel in one)
        found.append(Call(first.phase, first.kind, first.operation, us, len(one), first.shapes, names))
    return found


def predicted_calls(operations: Sequence[CostedOperation], seconds: Iterable[float]) -> list[Call]:
    """Return the calls of a tape's operations; a convolution's gradients, its bias's included, are one call."""
    found: list[Call] = []
    last: CostedOperation | None = None
    for operation, second in zip(operations, seconds, strict=True):
        kind, us = kind_of(operation.name, operation.phase), 1e6 * float(second)
        moved = operation.read_bytes + operation.written_bytes
        if last is not None and _continues(last, operation):
            call = found[-1]
            call.us, call.num_kernels = call.us + us, call.num_kernels + 1
            call.flops, call.moved_bytes = call.flops + operation.flops, call.moved_bytes + moved
        else:
            found.append(Call(operation.phase, kind, operation.name, us, flops=operation.flops, moved_bytes=moved))
        last = operation
    return found


def _continues(last: CostedOperation, operation: CostedOperation) -> bool:
    names = last.name, operation.name
    return last.module == operation.module and names in (
        ("convolution_input_gradient", "convolution_weight_gradient"),
        ("convolution_weight_gradient", "sum"),
    )


def parts_of(case: Case, measured: Iterable[Call], predicted: Iterable[Call]) -> list[Part]:
    """Return the measured and predicted time of each kind and phase."""
    found: dict[tuple[str, str], Part] = {}

    def part(call: Call) -> Part:
        return found.setdefault((call.phase, call.kind), Part(case, call.phase, call.kind))

    for call in measured:
        part(call).measured_ms += call.us / 1e3
        part(call).kernels += call.num_kernels
    for call in predicted:
        part(call).predicted_ms += call.us / 1e3
        part(call).priced_kernels += call.num_kernels
    return sorted(found.values(), key=lambda one: one.predicted_ms - one.measured_ms)


def joined(measured: Sequence[Call], predicted: Sequence[Call], kind: str) -> list[tuple[Call, Call]]:
    """Return the calls of ``kind`` in pairs, by their order; if their numbers differ in a phase, print that and pair none of it."""
    pairs: list[tuple[Call, Call]] = []
    for phase in ("forward", "backward", "optimizer"):
        sides = (measured, predicted)
        own, priced = ([call for call in calls if (call.phase, call.kind) == (phase, kind)] for calls in sides)
        if len(own) == len(priced):
            pairs += zip(own, priced, strict=True)
        else:
            print(f"  {kind}, {phase}: {len(own)} measured, {len(priced)} predicted: not joined")
    return pairs


def read(folder: Path) -> tuple[list[Step], dict[Case, list[Kernel]]]:
    """Return the steps and kernels that ``measure_kernels`` wrote, case by case."""
    steps: list[Step] = []
    kernels: dict[Case, list[Kernel]] = defaultdict(list)
    for path in sorted(folder.glob("*/steps.csv")):
        steps += [Step(**_typed(Step, cells)) for cells in csv_rows.read(path)]
        if (rows := path.with_name("kernels.csv.gz")).exists():  # a trace without its step has none
            for cells in csv_rows.read(rows):
                kernels[Case(**_typed(Case, cells))].append(Kernel(**_typed(Kernel, cells)))
    return steps, kernels


_PARSERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "bool": "True".__eq__}


def _typed(kind: type, cells: dict[str, str]) -> dict[str, Any]:
    return {field.name: _PARSERS[str(field.type)](cells[field.name]) for field in fields(kind)}


def compare(step: Step, kernels: Sequence[Kernel], gpu: Gpu, calls: str | None) -> list[Part]:
    case = step.case
    tape = tapes(case.model, case.size, case.batch, recorded_as(case.policy), case.channels_last).first
    priced = Conditions(gpu=gpu).step(tape, case.policy)
    measured, predicted = measured_calls(kernels), predicted_calls(tape.operations, priced.operation_s)
    parts = parts_of(case, measured, predicted)
    print(
        f"{label({key: str(value) for key, value in asdict(case).items()})}: measured {step.step_ms:.2f} ms, "
        f"predicted {1e3 * priced.seconds:.2f} ms; host {step.host_ms:.2f} ms, predicted {1e3 * priced.host_s:.2f} ms"
    )
    parts.append(Part(case, "", "no kernel runs", step.step_ms - step.kernels_ms))
    for part in parts:
        name = f"{part.phase:10}{part.kind:14}" if part.phase else f"{part.kind:24}"
        counts = f"  kernels {part.kernels}, priced {part.priced_kernels}" if part.phase else ""
        times = f"measured {part.measured_ms:8.2f} ms  predicted {part.predicted_ms:8.2f} ms"
        print(f"  {name} {times}  difference {part.predicted_ms - part.measured_ms:+8.2f} ms{counts}")
    if calls is not None:
        show(joined(measured, predicted, calls))
    return parts


def show(pairs: Sequence[tuple[Call, Call]]) -> None:
    """Print the pairs with the largest differences, and the errors of all."""
    for own, priced in sorted(pairs, key=lambda pair: -abs(pair[1].us - pair[0].us))[:_SHOWN]:
        rate, moved = priced.flops / own.us / 1e6, priced.moved_bytes / own.us / 1e3
        print(
            f"    {own.phase:9}{own.operation:24} measured {own.us:8.0f} us predicted {priced.us:8.0f} us  "
            f"{rate:6.1f} TFLOP/s {moved:6.0f} GB/s  {own.shapes[:70]}  {own.kernels[:200]}"
        )
    errors = [100 * (own.us / priced.us - 1) for own, priced in pairs]
    print(f"    speed of {len(pairs)} calls: {said(errors)}")


def total(parts: Sequence[Part]) -> None:
    """Print predicted minus measured time by kind, in percent of the measured step: the mean over all cases."""
    steps: dict[Case, float] = defaultdict(float)
    differences: dict[tuple[str, str], float] = defaultdict(float)
    for part in parts:
        steps[part.case] += part.measured_ms
    for part in parts:
        share = 100 * (part.predicted_ms - part.measured_ms) / steps[part.case]
        differences[part.phase, part.kind] += share / len(steps)
    print(f"mean of {len(steps)} cases, predicted minus measured in percent of the measured step:")
    for (phase, kind), share in sorted(differences.items(), key=lambda item: item[1]):
        print(f"  {phase:10}{kind:14} {share:+6.1f}%")


def main(argv: Sequence[str] = ()) -> None:
    parser = options(__name__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", help="instead of the GPU that was measured")
    parser.add_argument("--calls", metavar="KIND", help="compare the operations of this kind in pairs")
    parser.add_argument("--out", type=Path, help="write the table as CSV")
    chosen = parser.parse_args(argv)
    steps, kernels = read(chosen.folder)
    if not steps:
        parser.error(f"no folder of {chosen.folder} has a steps.csv: measure_kernels.py --out writes them")
    parts: list[Part] = []
    for step in steps:
        gpu = find_gpu(chosen.gpu or step.gpu)
        if gpu is None:
            parser.error(f"no facts about {chosen.gpu or step.gpu!r}: name a GPU of mezzo/gpus.csv with --gpu")
        parts += compare(step, kernels[step.case], gpu, chosen.calls)
    total(parts)
    if chosen.out is not None:
        rows = [{**asdict(part.case), **vars(part)} for part in parts]
        names = [field.name for field in (*fields(Case), *fields(Part)) if field.name != "case"]
        csv_rows.write(chosen.out, ({name: row[name] for name in names} for row in rows), names)
