"""Keep fingerprints of every value of a run's first steps: operations, losses, gradients, updates, and the script's compare points.

Cost, in recorded steps only: one fingerprint for each result (``mezzo.observe.values.fingerprints``), and a copy of the weights while an
optimizer steps. Limits: updates that the script computes itself are recorded as operations; each process records its own values.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.engine.gradients import trained_by
from mezzo.engine.processes.shards import local
from mezzo.formats import FP32
from mezzo.measure.flops import OperandFormats
from mezzo.observe.compare_points import listen
from mezzo.observe.module_names import Names
from mezzo.observe.observer import ObservedRun, TracingObserver
from mezzo.observe.replay import at_least
from mezzo.observe.settings import ValuesSettings
from mezzo.observe.source_lines import running_line
from mezzo.observe.values.fingerprints import dense
from mezzo.observe.values.log import LEAVES, Event, Floats, ValuesLog
from mezzo.observe.values.tracer import ValuesTracer, optimizer_settings
from mezzo.records import RunRecord

_MOST_ELEMENTS = 2**24
"""Largest number of elements that are kept of a compare point."""


class RecordedValues(TracingObserver):
    """An observer of every value."""

    def __init__(self, settings: ValuesSettings, run: ObservedRun) -> None:
        super().__init__(run, steps=settings.steps, ends_script=settings.ends_script)
        self._settings = settings
        self._tracer: ValuesTracer | None = None
        self._ends: list[int] = []
        """The number of events at the end of each step that is over."""
        self._marked = 0
        self._scales: dict[int, float] = {}
        """The loss scale of each backward pass, by the number of events before it."""
        self._before = WeakTensorKeyDictionary()
        """Copies of the weights from before the steps of the running optimizers."""
        self._handles: list[Any] = []
        self._undo_deterministic: Callable[[], None] = lambda: None
        self._points: list[tuple[str, Tensor]] = []
        self.problems: dict[str, str] = {}
        """Operations and compare points that could not be inspected, and why."""

    # --- observation -------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Seed the generators and choose the kernels, before the script's first line."""
        if self._settings.seed is not None:
            random.seed(self._settings.seed)
            np.random.seed(self._settings.seed)
            torch.manual_seed(self._settings.seed)
        if self._settings.deterministic:
            before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
            self._undo_deterministic = lambda: torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.use_deterministic_algorithms(True, warn_only=True)
        self._handles = [register_optimizer_step_pre_hook(self._stepping)]
        self._unlisten = listen(self._point)
        if self._settings.outcomes_only and self._waiting[:1] == [1]:
            self._begin()  # it enters no modes, which compiled code would not begin or end in
        else:
            super().start()

    def can_switch_modes(self) -> bool:
        """Return whether observation can begin or end here."""
        return self._settings.outcomes_only or super().can_switch_modes()

    def begin(self, step: int) -> None:
        """Enter the tracer."""
        self._tracer = ValuesTracer(
            OperandFormats(inside=lambda: self.run.phase.inside),
            device_type=self.run.precision.device_type or "cpu",
            flags=self.run.phase,
            in_fp64=self._settings.in_fp64,
            mirrored=self._settings.mirrored,
            problems=self.problems,
        )
        self._ends, self._marked, self._scales = [], 0, {}
        if not self._settings.outcomes_only:
            self._tracer.start(stepping_is_called=True)

    def _run_eagerly(self) -> None:
        if not self._settings.outcomes_only:
            super()._run_eagerly()

    def restart(self) -> None:
        """Discard what was recorded."""
        assert self._tracer is not None
        self._tracer.forget()
        self._marked, self._scales = 0, {}

    def mark(self) -> None:
        """Mark everything recorded so far as belonging to the step."""
        assert self._tracer is not None
        self._marked = len(self._tracer.events)

    def turn(self, step: int) -> None:
        """Continue: the events after the mark belong to the next step."""
        self._ends.append(self._marked)

    def end(self) -> None:
        """Leave the tracer, and discard the events after the mark if any step is over."""
        assert self._tracer is not None
        if not self._settings.outcomes_only:
            self._tracer.stop()
        if self._observing is not None and self._num_closed >= self._observing:
            self._ends.append(self._marked)
        if self._ends:
            self._tracer.keep(self._ends[-1])

    def close(self) -> None:
        """Stop observing, wherever the script ended."""
        super().close()
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self._unlisten()
            self._undo_deterministic()
        self._handles = []

    def too_short(self) -> bool:
        """Return whether nothing was recorded: a script without updates may have compare points or a forward pass."""
        return self._tracer is None or not self._tracer.events

    # --- events ------------------------------------------------------------------------------------------------------------------

    def backward_begins(self, losses: Sequence[Tensor]) -> None:
        """Record the losses."""
        if self._tracer is None or self._observing is None:
            return
        tracer = self._tracer
        self._scales[len(tracer.events)] = self.loss_scale()
        for loss in losses:
            tracer.attempt(
                lambda loss=loss: tracer.note(  # type: ignore[misc]
                    "loss", op="loss", line=running_line(), reads=[loss], results=[(loss, None)]
                )
            )

    def backward_ended(self) -> None:
        """Record that the step has gradients."""
        if self._tracer is not None:
            self._tracer.gradients_ready(ready=True)
        super().backward_ended()

    def _point(self, name: str, values: Any) -> None:
        if not isinstance(values, Tensor):
            self.problems[f"compare point {name}"] = f"a {type(values).__name__} was passed; allowed: a tensor"
            return
        if values.numel() <= _MOST_ELEMENTS:
            self._points.append((name, dense(values).float().cpu().clone()))
        else:
            what = f"it has {values.numel():,} elements, and at most {_MOST_ELEMENTS:,} are kept: its norm alone is compared"
            self.problems[f"compare point {name}"] = what
        tracer = self._tracer
        if tracer is not None and self._observing is not None:
            line = running_line()
            tracer.attempt(lambda: tracer.note("point", op=name, line=line, reads=[values], results=[(values, None)]))

    def _stepping(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Record the gradients that an optimizer is about to use, and copy the weights."""
        tracer = self._tracer
        if tracer is None or self._observing is None:
            return
        for parameter in trained_by([optimizer]):
            gradient = parameter.grad
            if gradient is None or parameter in self._before:
                continue
            self._before[parameter] = local(parameter.detach()).clone()
            tracer.attempt(lambda p=parameter: tracer.see(p))  # type: ignore[misc]
            tracer.attempt(
                lambda p=parameter, g=gradient: self._note_gradient(p, g)  # type: ignore[misc]
            )

    def _note_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        assert self._tracer is not None
        self._tracer.note(
            "gradient",
            op="gradient",
            owner=parameter,
            phase="backward",
            reads=[gradient],
            results=[(gradient, None)],
            makes=[gradient],
        )

    def updated(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Record what an optimizer has changed, parameter by parameter, then the update."""
        self.update_ended()
        tracer = self._tracer
        before, self._before = self._before, WeakTensorKeyDictionary()
        if tracer is not None and self._observing is not None and isinstance(optimizer, torch.optim.Optimizer):
            for group in optimizer.param_groups:
                settings = optimizer_settings(group)
                for parameter in group["params"]:
                    if parameter in before:
                        old = before[parameter]
                        tracer.attempt(
                            lambda p=parameter, o=old, s=settings: self._note_update(optimizer, p, o, s)  # type: ignore[misc]
                        )
            tracer.gradients_ready(ready=False)
            self._note_buffers(tracer)
        super().updated(optimizer)

    def _note_buffers(self, tracer: ValuesTracer) -> None:
        """Record the running statistics, which no gradient shows."""
        for root in self._names().outermost:
            for path, module in self.run.objects.tree.modules(root):
                for name, buffer in module.named_buffers(recurse=False):
                    if tracer.knows(buffer):
                        of = f"{path}.{name}" if path else name
                        tracer.attempt(
                            lambda n=of, t=buffer: tracer.note(  # type: ignore[misc]
                                "state", op="state", name=n, phase="update", reads=[t], results=[(t, None)]
                            )
                        )

    def _note_update(
        self, optimizer: torch.optim.Optimizer, parameter: Tensor, old: Tensor, settings: tuple[str, ...]
    ) -> None:
        assert self._tracer is not None
        new = local(parameter.detach())
        change = at_least(new, FP32.dtype) - at_least(old, FP32.dtype)  # exact for numbers within a factor of two
        self._tracer.note(
            "update",
            op=type(optimizer).__name__,
            owner=parameter,
            phase="update",
            settings=settings,
            reads=[parameter, *([parameter.grad] if parameter.grad is not None else [])],
            results=[(change, new)],
            makes=[parameter],
        )

    def _names(self) -> Names:
        traced = () if self._tracer is None else self._tracer.trace.roots
        return Names([*self.run.objects.roots, *traced], self.run.objects.tree)

    # --- the log -----------------------------------------------------------------------------------------------------------------

    def log(self, run: RunRecord) -> ValuesLog:
        """Return what was recorded."""
        where = {"device": str(run.environment.device), "torch": torch.__version__}
        if self._tracer is None:
            return ValuesLog(points=self._named_points(), environment=where, problems=self.problems)
        hashes, numbers = self._tracer.fingerprints.read()
        names, leaves = self._names(), self._leaves()
        events = [
            self._named(self._placed(event, n), owner, names, leaves.get(n))
            for n, (event, owner) in enumerate(zip(self._tracer.finished_events(), self._tracer.owners, strict=True))
        ]
        skipped = tuple(step for step, was in enumerate(run.steps.skipped, start=1) if was)
        rest = self._named_points(), where, self.problems, self._settings.outcomes_only, skipped
        return ValuesLog(events, np.array(hashes, np.int64), numbers, *rest)

    def _placed(self, event: Event, number: int) -> Event:
        """Return an event with its step, and with its loss scale if it can be multiplied by one."""
        step = 1 + sum(end <= number for end in self._ends)
        in_backward = event.phase == "backward" and event.kind != "gradient"
        if not (in_backward or (event.kind == "loss" and self.run.update.script_scaler is not None)):
            return replace(event, step=step)
        begun = [before for before in self._scales if before <= number]
        return replace(event, step=step, loss_scale=self._scales[begun[-1]] if begun else 1.0)

    def _named_points(self) -> dict[str, Floats]:
        """Return the values of the compare points, numbered by name."""
        counts: Counter[str] = Counter()
        points: dict[str, Floats] = {}
        for name, values in self._points:
            counts[name] += 1
            points[f"{name}#{counts[name]}"] = values.double().numpy()
        return points

    def _leaves(self) -> dict[int, tuple[str, str]]:
        """Return kind and name of the weights and buffers among the values that no event made."""
        assert self._tracer is not None
        found: dict[int, tuple[str, str]] = {}
        for root in self._names().outermost:
            for path, module in self.run.objects.tree.modules(root):
                for kind, tensors in (("weight", module.named_parameters), ("buffer", module.named_buffers)):
                    for name, tensor in tensors(recurse=False):
                        first = self._tracer.leaf(tensor)
                        if first is not None:
                            found.setdefault(first, (kind, f"{path}.{name}" if path else name))
        return found

    def _named(
        self, event: Event, owner: nn.Module | Tensor | None, names: Names, leaf: tuple[str, str] | None
    ) -> Event:
        if leaf is not None and event.kind in LEAVES:
            kind, name = leaf
            return replace(event, kind=kind, op=kind, module=name)  # type: ignore[arg-type]
        if event.module:
            return event
        name = names.parameter(owner) if isinstance(owner, Tensor) else names.of(owner)
        return replace(event, module=name)

    def record(self, run: RunRecord) -> RunRecord:
        """Write the log; return the run's own record."""
        if self._settings.path:
            self.log(run).save(Path(self._settings.path))
        return run
