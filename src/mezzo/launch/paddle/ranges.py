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
import numpy.typing as npt
import paddle

from mezzo.engine.kernels.exponent_bins import BINS, CELLS, CUTS, FIRST_EXPONENT, ROWS
from mezzo.formats import BF16, FP16, FP32
from mezzo.frameworks import paddle as paddle_policy
from mezzo.launch.paddle.backward import observe_gradient
from mezzo.launch.paddle.replay import KEPT, rounded_within
from mezzo.launch.paddle.state import PaddleRun, bare_name, dense, parameters_of
from mezzo.launch.paddle.surveys import array_of
from mezzo.launch.paddle.tape import Listener, StepObserver, Tape, TapedOperation, tensors
from mezzo.launch.patches import Patches
from mezzo.observe.module_names import free_title
from mezzo.observe.ranges.table import Counts, ObservedValues, ranges_record
from mezzo.observe.settings import RangesSettings
from mezzo.policy import Policy
from mezzo.records import RangeKind, RangesRecord, RunRecord

Key: TypeAlias = tuple[RangeKind, str]


class Ranges(StepObserver):
    """An observer that counts values by exponent."""

    kind = "ranges"

    def __init__(self, settings: RangesSettings, run: PaddleRun) -> None:
        super().__init__(run, steps=settings.steps)
        self._policy = settings.policy
        self._formats = ListedFormats(settings.policy, run)
        self._tape = Tape(run, self._formats, keeps=False)
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
        self._on = True
        self._tape.start()

    def judge(self, norm: Any | None) -> None:
        """Keep the counts of the step's passes; copy the weights before they change."""
        self._values.keep()
        self._name_parameters()
        self._before = {key: array_of(p) for key, (p, _) in self._parameters.items() if p.is_floating_point()}

    def end(self) -> None:
        """Stop counting, and discard what was not kept."""
        self._on = False
        self._tape.stop()
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
            blocks={},  # Paddle has no policies in blocks
            steps=self.watched,
            forced_eager=False,
            updates_seen=self._updates,
            models=[label for label, has_layers in self._labels.items() if has_layers],
        )
        return ranges_record(run, values, policy=self._policy)


# The result of an operation in the lower-precision list has 16 bits, in the FP32 list 32; any other result has the
# widest format of its operands; code outside layers is FP32. A weight's gradient has 16 bits if an operation in the lower list reads the
# weight. The result of batch normalisation has the format of its first operand, whatever the format of its weights.

_FOLLOW_FIRST = ("batch_norm", "instance_norm", "prelu")
"""Operations whose result has the format of their first operand."""


class ListedFormats(Listener):
    """The formats that a step's tensors would have; nothing is rounded, and the script runs in FP32."""

    def __init__(self, policy: Policy, run: PaddleRun) -> None:
        self._run = run
        self._lowers = policy.lowers
        self._precisions = paddle_policy.precisions(paddle_policy.for_scripts(policy))
        self._wide: dict[int, tuple[Any, bool]] = {}
        """Whether a tensor is FP32, by its id; the tensors are kept alive."""
        self._lowered: dict[int, Any] = {}
        """Weights that an operation in the lower list reads."""

    def forget(self) -> None:
        """Drop the tensors of a step that is over."""
        self._wide.clear()

    def is_wide(self, tensor: Any) -> bool:
        """Return whether ``tensor`` stays in FP32 under the policy; a tensor that no operation returned does."""
        return self._wide.get(id(tensor), (tensor, True))[1] and self._lowers

    def gradient_is_wide(self, parameter: Any) -> bool:
        """Return whether a parameter's gradient is FP32, because no operation in the lower list reads the parameter."""
        return id(parameter) not in self._lowered and self._lowers

    def finished(self, operation: TapedOperation) -> None:
        """Record the format that an operation's results would have."""
        wide = self._is_wide(operation)
        for result in operation.results:
            self._wide[id(result)] = result, wide
        if not wide and self._precisions.get(operation.name) == "lower":
            self._lowered.update({id(t): t for t in operation.operands})

    def _is_wide(self, operation: TapedOperation) -> bool:
        precision = self._precisions.get(operation.name, "follow")
        if not self._run.local.depth or precision == "fp32":
            return True
        if precision == "lower":
            return False
        read = [t for t in operation.operands if t.is_floating_point()]
        decisive = read[:1] if operation.name in _FOLLOW_FIRST else read
        return not decisive or any(self._wide.get(id(t), (t, True))[1] for t in decisive)


CountTable: TypeAlias = npt.NDArray[np.int64]


def counted(values: npt.NDArray[Any]) -> CountTable:
    """Return the counts of ``values`` by exponent and cell; FP64 is rounded to FP32 first."""
    with np.errstate(over="ignore", under="ignore"):
        magnitudes = np.abs(values.astype(np.float32).ravel())
    finite = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]
    fractions, exponents = np.frexp(finite.astype(np.float64))
    mantissas = ((2.0 * fractions - 1.0) * 2**FP32.mantissa_bits).astype(np.int64)
    rows = exponents.astype(np.int64) - FIRST_EXPONENT  # row 0 is for zeros, and frexp's exponent is one too large
    bins = rows * CELLS + np.searchsorted(np.array(CUTS), mantissas, side="right")
    table = np.bincount(bins, minlength=BINS).astype(np.int64)
    table[0] += int((magnitudes == 0).sum())
    table[(ROWS - 1) * CELLS] += int(np.isinf(magnitudes).sum())
    table[(ROWS - 1) * CELLS + 1] += int(np.isnan(magnitudes).sum())
    return table


class Tally:
    """Tables by name; the open step's are separate until ``keep``."""

    def __init__(self) -> None:
        self.kept: dict[Any, CountTable] = {}
        self._open: dict[Any, CountTable] = {}

    def add(self, key: Any, table: CountTable) -> None:
        """Add counts of the open step under ``key``."""
        self._open[key] = self._open.get(key, 0) + table

    def keep(self) -> None:
        """Keep the counts of the open step."""
        for key, table in self._open.items():
            self.kept[key] = self.kept.get(key, 0) + table
        self._open = {}

    def forget(self) -> None:
        """Discard the counts of the open step."""
        self._open = {}
