"""Count the values of a Paddle script's steps by exponent: activations, their gradients, weights, weight gradients and updates.

The script runs in FP32. A layer's outputs are counted when it returns; gradients in hooks on these outputs and on parameters, before
accumulation and clipping; weights before an optimizer's step. An output that a container returns unchanged is not counted again.

Limits: operations outside layers and between a layer's parts are not counted. Cost, in observed steps only: a copy of each counted tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import paddle

from mezzo.formats import BF16, FP16
from mezzo.launch.paddle.gradients.script_hooks import observe_gradient
from mezzo.launch.paddle.layer_names import bare_name
from mezzo.launch.paddle.nonfinite.replay import KEPT, rounded_within
from mezzo.launch.paddle.observing import StepObserver
from mezzo.launch.paddle.ranges.listed_formats import ListedFormats
from mezzo.launch.paddle.ranges.value_counts import Tally, counted
from mezzo.launch.paddle.state import PaddleRun, dense, parameters_of
from mezzo.launch.paddle.surveys import array_of
from mezzo.launch.paddle.tape import Tape, tensors
from mezzo.launch.patches import Patches
from mezzo.observe.module_names import free_title
from mezzo.observe.ranges.casts import Counts
from mezzo.observe.ranges.table import ObservedValues, ranges_record
from mezzo.observe.settings import RangesSettings
from mezzo.records import RangeKind, RangesRecord, RunRecord

Key: TypeAlias = tuple[RangeKind, str]


class Ranges(StepObserver):
    """An observer that counts values by exponent."""

    kind = "ranges"

    def __init__(self, settings: RangesSettings, run: PaddleRun) -> None:
        super().__init__(run, steps=settings.steps)
        self._policy = settings.policy
        self._formats = ListedFormats(settings.policy, run)
        self._tape = Tape(run, self._formats)
        self._tape.keeps = False
        self._on = self._updates = False
        self._values, self._swallowed = Tally(), Tally()
        self._lowered: set[Key] = set()
        self._names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._labels: dict[str, bool] = {}
        """The prefix of the names inside each outermost layer, and whether it has layers inside."""
        self._parameters: dict[int, tuple[Any, str]] = {}
        self._hooks: dict[int, Any] = {}
        self._counted: dict[int, tuple[Any, int]] = {}
        """Outputs that an inner layer has counted, with their version."""
        self._before: dict[int, Any] = {}

    # --- recording -----------------------------------------------------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Wrap layers until ``patches`` are undone."""
        self._tape.install(patches)
        patches.around(paddle.nn.Layer, "__call__", self._call)

    def begin(self) -> None:
        """Begin to count."""
        self._on = self._tape.on = True

    def judge(self, norm: Any | None) -> None:
        """Keep the counts of the step's passes; copy the weights before they change."""
        self._values.keep()
        self._name_parameters()
        self._before = {key: array_of(p) for key, (p, _) in self._parameters.items() if p.is_floating_point()}

    def end(self) -> None:
        """Stop counting, and discard what was not kept."""
        self._on = self._tape.on = False
        self._values.forget()
        self._formats.forget()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks, self._counted = {}, {}

    def update_ended(self, optimizer: Any) -> None:
        """Count weights, updates, and the updates that rounding would lose."""
        for parameter in parameters_of(optimizer) if self.observing else []:
            old = self._before.pop(id(parameter), None)
            if old is not None and not parameter.stop_gradient:  # the statistics of a normalisation are parameters, too
                self._update(old, array_of(parameter), self._parameters[id(parameter)][1])
        super().update_ended(optimizer)

    def backward_begins(self, losses: Any) -> None:
        """Hook every parameter that is known by now."""
        super().backward_begins(losses)
        if not self._on:
            return
        self._name_parameters()
        for key, (parameter, name) in self._parameters.items():
            if not self._formats.gradient_is_wide(parameter):
                self._lowered.add(("weight gradients", name))
            if not parameter.stop_gradient and key not in self._hooks:
                hook = functools.partial(self._gradient, ("weight gradients", name))
                self._hooks[key] = observe_gradient(parameter, hook)

    # --- layers --------------------------------------------------------------------------------------------------------------------------

    def _call(self, original: Callable[..., Any], layer: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not (self._on and paddle.is_grad_enabled()):
            return original(layer, *args, **kwargs)
        if self._name(layer):
            name = f"{self._names[layer]} (input)"
            if self._count("activations", name, (args, kwargs)):
                self._lowered.add(("activations", name))  # its first operation may be a product
        output = original(layer, *args, **kwargs)
        self._returned(layer, output)
        return output

    def _returned(self, layer: Any, output: Any) -> None:
        name = self._names.get(layer, type(layer).__name__)
        for tensor in self._count("activations", name, [output]):
            key: Key = ("activation gradients", name)
            lowered = not self._formats.is_wide(tensor)
            if lowered:
                self._lowered.add(("activations", name))
            if not tensor.stop_gradient and not tensor.is_leaf:
                observe_gradient(tensor, functools.partial(self._gradient, key))
                if lowered:
                    self._lowered.add(key)

    # --- counting ------------------------------------------------------------------------------------------------------------------------

    def _count(self, kind: RangeKind, name: str, values: Any) -> list[Any]:
        """Count the tensors in ``values`` that no inner layer has counted; return them."""
        new = []
        for tensor in tensors(values):
            version = int(tensor.inplace_version)
            if not tensor.is_floating_point() or self._counted.get(id(tensor), (None, -1))[1] == version:
                continue
            self._counted[id(tensor)] = tensor, version
            self._values.add((kind, name), counted(array_of(tensor)))
            new.append(tensor)
        return new

    def _gradient(self, key: Key, gradient: Any) -> None:
        if not self._on or gradient is None:
            return
        with self.run.own_work():
            self._values.add(key, counted(array_of(dense(gradient))))

    def _update(self, old: Any, new: Any, name: str) -> None:
        self._updates = True
        update = new - old
        self._values.add(("weights", name), counted(old))
        self._values.add(("updates", name), counted(update))
        nonzero, num_swallowed = update != 0, []
        for fmt in (FP16, BF16):
            weight = rounded_within(old, fmt, KEPT)
            num_swallowed.append(int((nonzero & (rounded_within(weight + update, fmt, KEPT) == weight)).sum()))
        self._swallowed.add(name, np.array([int(nonzero.sum()), *num_swallowed]))
        self._values.keep()
        self._swallowed.keep()

    # --- names ---------------------------------------------------------------------------------------------------------------------------

    def _name(self, layer: Any) -> bool:
        """Name a new layer and all layers inside it; return whether it is an outermost one."""
        if layer in self._names:
            return self._names[layer] in self._labels
        label = free_title(type(layer).__name__, self._labels)
        self._labels[label] = bool(layer.sublayers())
        for name, inner in layer.named_sublayers(include_self=True):
            self._names.setdefault(inner, ".".join(part for part in (label, bare_name(name)) if part))
        return True

    def _name_parameters(self) -> None:
        for layer, label in list(self._names.items()):
            for name, parameter in layer.named_parameters(include_sublayers=False):
                self._parameters.setdefault(id(parameter), (parameter, f"{label}.{name}"))
        for number, optimizer in enumerate(list(self.run.optimizers)):
            for index, parameter in enumerate(parameters_of(optimizer)):
                name = f"{type(optimizer).__name__}#{number + 1}.params[{index}]"
                self._parameters.setdefault(id(parameter), (parameter, name))

    def record(self, run: RunRecord) -> RangesRecord:
        """Return the record of the counts."""
        values = ObservedValues(
            counts={key: Counts(table.tolist()) for key, table in self._values.kept.items()},
            lowered=self._lowered,
            swallowed={name: row.tolist() for name, row in self._swallowed.kept.items()},
            steps=self.watched,
            forced_eager=False,
            updates_seen=self._updates,
            models=[label for label, has_layers in self._labels.items() if has_layers],
        )
        return ranges_record(run, values, policy=self._policy)
