"""What does a step cost that ``mezzo audit`` records?

The step is forward, backward and update; torch's FlopCounterMode is for comparison. The trace is interpreted once, after the traced steps;
this is timed separately.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.shared.harness import interleave, median_ms, ratio, report, spread
from benchmarks.shared.loops import plain_step
from benchmarks.shared.models import small_models
from mezzo.measure.flops import OperandFormats
from mezzo.observe.audit.operations import interpret, weights_of
from mezzo.observe.module_names import Names
from mezzo.observe.observer import ModuleTree
from mezzo.observe.tracer import Tracer

ROUNDS = 15


def main() -> None:
    rows, data = [], {}
    for name, model, loss_of in small_models():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        step, tracers = plain_step(model, loss_of, optimizer), [_new_tracer()]
        pieces = {
            "plain": step,
            "audited": partial(_audited, step, tracers),
            "FlopCounterMode": partial(_counted, step),
            "meaning": partial(_meaning, tracers, optimizer),
        }
        times = interleave(pieces, rounds=ROUNDS)
        rows += [
            (f"{name}: audited step against plain step", spread(ratio(times, "audited", "plain")), "1.6 or less"),
            (f"{name}: FlopCounterMode", spread(ratio(times, "FlopCounterMode", "plain")), ""),
            (f"{name}: working out the meaning, once", f"{median_ms(times)['meaning']:.1f} ms", ""),
        ]
        data[name] = {"median_ms": median_ms(times)}
    report("audit", rows, data)


def _new_tracer() -> Tracer:
    return Tracer(OperandFormats(), device_type="cpu")


def _audited(step: Callable[[], None], tracers: list[Tracer]) -> None:
    tracers[:] = [_new_tracer()]
    tracers[0].start()
    step()
    tracers[0].stop()


def _counted(step: Callable[[], None]) -> None:
    with FlopCounterMode(display=False):
        step()


def _meaning(tracers: list[Tracer], optimizer: torch.optim.Optimizer) -> None:
    names = Names(tracers[0].trace.roots, ModuleTree())
    interpret(tracers[0].trace, names, weights_of(names.roots, [optimizer]))
