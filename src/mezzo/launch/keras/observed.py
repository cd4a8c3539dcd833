"""Let PyTorch's observers observe a Keras script on PyTorch.

Layers are PyTorch modules there, but Keras calls them itself, and its optimizers are not PyTorch's. So calls of layers and
updates run the global hooks that PyTorch would run, and an update passes its variables to the hooks as an optimizer's parameters.
A step is open until the next backward pass begins, as in a PyTorch script.
"""

from __future__ import annotations

import functools
import importlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from mezzo.engine.matrix_units.emulation import Emulation
from mezzo.engine.matrix_units.emulation_nodes import matmul as emulated_matmul
from mezzo.engine.scaling import NoScale, Scale
from mezzo.formats import FP16
from mezzo.launch.keras.layers import JudgedLayers, LayerTree, OneLayer
from mezzo.launch.keras.state import KerasRun
from mezzo.launch.keras.updates import LayerScale
from mezzo.launch.patches import Patches
from mezzo.launch.torch import observer_for
from mezzo.launch.torch.own_amp import make_changes
from mezzo.measure.steps import StepRecorder
from mezzo.observe.observer import ModuleTree, Observer, Update
from mezzo.observe.one_module import OneModule
from mezzo.observe.settings import AnySettings, DiagnoseSettings, RangesSettings, TrialChanges
from mezzo.policy import Policy

Call = Callable[..., Any]
_MASK = "_keras_mask"
"""Attribute in which Keras passes a mask from layer to layer."""


class Depth(threading.local):
    """How many layers are being called, one inside another, in each thread."""

    layers = 0


class UpdatedVariables:
    """The variables of a Keras optimizer, in the form of a PyTorch optimizer for its hooks."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self.param_groups = [{"params": [v.value for v in variables if isinstance(v.value, nn.Parameter)]}]

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(p.grad is not None for p in self.param_groups[0]["params"])


class ObservedKeras:
    """A Keras run on PyTorch, with the interface that observers use (``mezzo.observe.observer.ObservedRun``)."""

    def __init__(self, run: KerasRun, settings: AnySettings) -> None:
        self._run = run
        self.phase = self.update = self.precision = self.objects = self.notes = self  # no part is used by itself here
        self.in_backward = self.in_compiled = self.compiles = self.recomputing = self.skips = False
        self.before_compiling: list[Callable[[], Any]] = []
        self.inside: Any = None
        self.recorder = StepRecorder()
        self.scale: Scale = NoScale()
        self.script_scaler: Any = None
        self.session_policy = ""
        self.gradient_scale = 1.0
        self.parts: list[Update] = []
        self.effective: Policy | None = None
        self.tree: ModuleTree = LayerTree()
        self.roots: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        self.device_type: str | None = None
        self.main_casting = None
        self.emulates = False
        self._optimizers: dict[int, UpdatedVariables] = {}
        self._pending: tuple[bool, float | None] | None = None
        self._depth = Depth()
        judged = settings.policy if isinstance(settings, RangesSettings) else None
        formats = None if judged is None else JudgedLayers(judged, run.own_dtypes, self.tree, self.roots)
        self.observer: Observer = observer_for(settings, self, formats)
        self._changes = settings.changes if isinstance(settings, DiagnoseSettings) else TrialChanges()

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that have made an update."""
        return list(self._optimizers.values())

    @contextmanager
    def as_in_backward(self) -> Iterator[None]:
        """Run code that is left alone, as if in a backward pass."""
        before, self.in_backward = self.in_backward, True
        try:
            yield
        finally:
            self.in_backward = before

    def checked_contract(self, *, failed: bool) -> None:
        """Return None: contracts on formats are of PyTorch scripts."""

    def skip(self) -> None:
        """Let the optimizer that is about to step leave its step out."""
        self.skips = True

    def inspection(self, step: int) -> None:
        """Return nothing: the formats of a Keras layer are its dtype policy's."""

    def one_module(self, policy: Policy) -> OneModule:
        """Return how a single layer runs under ``policy``."""
        return OneLayer(policy, self.tree, self.returned_formats)

    @property
    def returned_formats(self) -> dict[int, torch.dtype]:
        """The formats to which layers' outputs are cast, by the layers' ids."""
        return self._run.returned_formats

    def install(self, patches: Patches) -> None:
        """Begin to observe, until ``patches`` are undone."""
        make_changes(self._changes, self.tree, patches)
        backend = importlib.import_module("keras.src.backend")
        patches.around(backend, "compute_output_spec", _call_unobserved)
        patches.around(torch, "compile", self._never_compile)
        emulate_products(patches, on_use=self._emulated)
        self.observer.start()
        patches.on_undo(self.observer.close)

    def _emulated(self) -> None:
        self.emulates = True

    def _never_compile(self, original: Call, model: Any = None, **kwargs: Any) -> Any:
        if model is None:
            return lambda function: function
        self.observer.forced_eager = True
        return model

    # --- layers ----------------------------------------------------------------------------------------------------------------

    def calls(self, original: Call) -> Call:
        """Return ``keras.Layer.__call__`` with PyTorch's global hooks around it."""
        is_symbolic = importlib.import_module("keras.src.backend.common.keras_tensor").any_symbolic_tensors
        in_stateless_scope = importlib.import_module("keras.src.backend.common.stateless_scope").in_stateless_scope

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if in_stateless_scope() or is_symbolic(args, kwargs):
                with unobserved():
                    return original(layer, *args, **kwargs)
            if not self._depth.layers:
                self._record_root(layer)
            self._depth.layers += 1
            try:
                return _with_hooks(original, layer, args, kwargs, self.returned_formats.get(id(layer)))
            finally:
                self._depth.layers -= 1

        return call

    def _record_root(self, layer: Any) -> None:
        if self.in_backward:  # an observer runs the layer on its own
            return
        self.roots[layer] = None
        if self.device_type is None:
            value = next((v._value for v in layer.variables if isinstance(v._value, Tensor)), None)
            self.device_type = None if value is None else value.device.type

    # --- backward passes -------------------------------------------------------------------------------------------------------

    def scaler_met(self, scaler: LayerScale) -> None:
        """Record that a loss is about to be scaled."""
        if self.script_scaler is None or self.script_scaler.key != scaler.key:
            self.script_scaler = scaler
            self.observer.scaler_met(scaler)

    def backward_begins(self, losses: Sequence[Tensor], *, scaled: bool) -> None:
        """Record a backward pass.

        Args:
            losses: the losses without the loss scale.
            scaled: whether the parameters' gradients will include the loss scale.
        """
        self.close_update()
        self.observer.backward_begins(losses)
        for loss in losses:
            self.recorder.loss(loss)
        self.gradient_scale = self.script_scaler.get_scale() if scaled and self.script_scaler is not None else 1.0
        self.in_backward = True

    def backward_ended(self) -> None:
        """Record that the backward pass is over, or failed."""
        self.in_backward = False
        self.observer.backward_ended()

    # --- updates ---------------------------------------------------------------------------------------------------------------

    def make_update(self, apply: Call, inner: Any, grads: Sequence[Any], variables: Any, *, norm: Any) -> Any:
        """Apply gradients with PyTorch's optimizer hooks around it; skip the update if a hook has removed the gradients.

        Args:
            apply: the method of the optimizer, or of the LossScaleOptimizer around it.
            inner: the optimizer.
            grads: the gradients.
            variables: the variables to update; None for the optimizer's own.
            norm: of the unscaled gradients.
        """
        updated = UpdatedVariables(variables or inner._trainable_variables)
        self._optimizers[id(inner)] = updated
        self.recorder.norm(norm)
        self.skips = overflowed = self.script_scaler is not None and not math.isfinite(float(norm))
        before = int(inner.iterations)
        had_gradients = updated.has_gradients
        for hook in tuple(optimizer_hooks._global_optimizer_pre_hooks.values()):
            hook(updated, (updated,), {})  # type: ignore[arg-type]
        self.observer.stepping()
        try:
            result = None
            if updated.has_gradients or not had_gradients:
                result = apply(grads, variables)
            elif overflowed:
                self.script_scaler.back_off()
            else:  # the observer skips the update, but Keras' schedules must count it
                inner.iterations.assign_add(1)
        finally:
            for hook in tuple(optimizer_hooks._global_optimizer_post_hooks.values()):
                hook(updated, (updated,), {})  # type: ignore[arg-type]
        skipped = int(inner.iterations) == before
        scaler = 0 if self.script_scaler is None else self.script_scaler.key
        self.parts.append(Update(scaler=scaler, optimizer=id(inner), skipped=skipped))
        self.observer.updated(updated)  # type: ignore[arg-type]
        return result

    def step_made(self, *, skipped: bool, scale: float | None) -> None:
        """Record the update of the open step, which closes when the next backward pass begins."""
        self._pending = skipped, scale

    def step_closed(self, *, loss: float, norm: float, skipped: bool) -> None:
        """Do nothing: steps close when the next backward pass begins."""

    def close_update(self) -> None:
        """Close the open step if it has made its update."""
        if self._pending is None:
            return
        (skipped, scale), self._pending = self._pending, None
        self.recorder.close(skipped=skipped, scale=scale)
        self.observer.step_closed(self.recorder.num_closed)
        self.parts = []


def unobserved() -> AbstractContextManager[Any]:
    """Return a context in which no dispatch mode sees the operations."""
    return _disable_current_modes() if torch.utils._python_dispatch._get_current_dispatch_mode() else nullcontext()


def _call_unobserved(original: Call, *args: Any, **kwargs: Any) -> Any:
    """Infer shapes without any observer: Keras runs layers on made-up values for it."""
    with unobserved():
        return original(*args, **kwargs)


def _with_hooks(original: Call, layer: Any, args: Any, kwargs: Any, returned: torch.dtype | None) -> Any:
    """Call a layer with PyTorch's global hooks, as PyTorch calls a module; cast its output to ``returned``, if given."""
    for hook in tuple(torch_hooks._global_forward_pre_hooks.values()):
        hook(layer, args)
    try:
        output = original(layer, *args, **kwargs)
    except BaseException:
        for number in tuple(torch_hooks._global_forward_hooks_always_called):
            torch_hooks._global_forward_hooks[number](layer, args, None)
        raise
    if returned is not None:
        cast = tree_map_only(Tensor, lambda t: t.to(returned) if t.is_floating_point() else t, output)
        output = _with_masks(output, cast)
    for number, hook in tuple(torch_hooks._global_forward_hooks.items()):
        with_kwargs = number in torch_hooks._global_forward_hooks_with_kwargs
        changed = hook(layer, args, kwargs, output) if with_kwargs else hook(layer, args, output)
        output = output if changed is None else _with_masks(output, changed)
    return output


def _with_masks(output: Any, changed: Any) -> Any:
    """Return ``changed`` with Keras' masks of ``output``."""
    for old, new in zip(tree_leaves(output), tree_leaves(changed), strict=True):
        mask = getattr(old, _MASK, None)
        if mask is not None and new is not old:
            setattr(new, _MASK, mask)
    return changed


# There Keras casts FP16 operands to FP32, multiplies, and casts back; the result equals a 16-bit unit's.
# ``mezzo.engine.matrix_units.emulation`` computes the same numbers, forward and backward, and names the format and the operation
# that it emulates.


def emulate_products(patches: Patches, *, on_use: Callable[[], None]) -> None:
    """Replace Keras' product of FP16 matrices on a CPU by the emulation, until ``patches`` are undone.

    Args:
        patches: restores Keras' own product.
        on_use: called whenever a product is emulated.
    """
    numpy = importlib.import_module("keras.src.backend.torch.numpy")
    product = Emulation(name="matmul", format=FP16.name, run=emulated_matmul)

    def emulated(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def matmul(x1: Any, x2: Any) -> Any:
            if not (_is_emulated(x1) or _is_emulated(x2)):
                return original(x1, x2)
            a, b = (x if isinstance(x, Tensor) else getattr(x, "value", x) for x in (x1, x2))  # of Keras' variables
            if not (_is_emulated(a) and _is_emulated(b)):
                return original(a, b)
            on_use()
            return product(a, b)

        return matmul

    for name in ("matmul", "dot"):
        patches.wrap(numpy, name, emulated)


def _is_emulated(value: Any) -> bool:
    """Return whether a value is a matrix, or a batch of them, in FP16 on a CPU."""
    if not isinstance(value, Tensor):
        return False
    return value.dtype is FP16.dtype and value.device.type == "cpu" and value.dim() > 1
