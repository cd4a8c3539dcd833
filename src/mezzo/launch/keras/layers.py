"""Set the dtype policy of Keras' layers when they are constructed, and keep those layers in FP32 that the policy names.

A layer whose dtype the script leaves open gets the policy's, and so does one with a mixed dtype policy of Keras: the policy
replaces the script's own mixed precision. A plain dtype that the script sets
(``dtype="float32"`` for a last softmax) is kept and listed. When a layer is first called, its name is known and its variables
do not exist yet: this is when it is matched with ``fp32_modules``, together with its inner layers, by their paths below it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from mezzo.formats import FP32, STORED_BYTES
from mezzo.frameworks.keras import dtype_policy_name
from mezzo.launch.keras.state import Backend, KerasRun
from mezzo.launch.patches import Patches
from mezzo.observe.observer import ModuleTree
from mezzo.observe.one_module import for_single_modules, same_random_numbers
from mezzo.observe.ranges.listed_formats import OffRegions
from mezzo.policy import Policy

_MIXED = "mixed_"  # prefix of the names of Keras' own mixed dtype policies
_NORMS = ("BatchNormalization", "GroupNormalization", "LayerNormalization", "RMSNormalization", "UnitNormalization")


class Layers:
    """The patches of ``keras.Layer``."""

    def __init__(self, run: KerasRun, backend: Backend) -> None:
        self._run, self._backend = run, backend
        self._called: WeakSet[Any] = WeakSet()
        self._names: dict[str, None] = {}
        self._unmatched = set(() if run.policy is None else run.policy.fp32_modules)

    def install(self, patches: Patches) -> None:
        """Patch until ``patches`` are undone."""
        import keras

        policy = self._run.policy
        if policy is not None:
            name = dtype_policy_name(policy)
            before = keras.config.dtype_policy()
            patches.on_undo(lambda: keras.config.set_dtype_policy(before))
            keras.config.set_dtype_policy(name)
            patches.wrap(keras.Layer, "__init__", lambda original: self._init(original, name))
        self._norms = tuple(getattr(keras.layers, name) for name in _NORMS if hasattr(keras.layers, name))
        patches.wrap(keras.Layer, "__call__", self._call)

    def check_patterns(self) -> None:
        """Raise if a pattern of the policy has matched no layer before the first update."""
        if self._unmatched:
            from mezzo.engine.casts.conversion import no_such_module

            raise no_such_module(sorted(self._unmatched)[0], self._names)

    def _init(self, original: Callable[..., None], ours: str) -> Callable[..., None]:
        layers = self

        @functools.wraps(original)
        def init(self: Any, *, dtype: Any = None, **kwargs: Any) -> None:
            layer, run = self, layers._run  # Keras inspects the signature, so its names must be these
            own = _name_of(dtype)
            is_open = own is None or own.startswith(_MIXED)
            original(layer, dtype=ours if is_open else dtype, **kwargs)
            if own in STORED_BYTES and not is_open:
                run.own_dtypes.add(layer)
            if own in STORED_BYTES and own != ours and not is_open:
                reason = "the script, or the file that it was loaded from, sets this layer's own dtype"
                run.note_left_alone("layer", f"{layer.name} in {own}", reason)

        return init

    def _call(self, keras_call: Callable[..., Any]) -> Callable[..., Any]:
        original = keras_call if self._run.observed is None else self._run.observed.calls(keras_call)

        @functools.wraps(keras_call)
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if layer not in self._called:
                self._record_layer(layer)
            local = self._run.local
            if local.in_layer:
                return original(layer, *args, **kwargs)
            local.in_layer = True
            try:
                self._backend.layer_called((args, kwargs))
                return original(layer, *args, **kwargs)
            finally:
                local.in_layer = False

        return call

    def _record_layer(self, layer: Any) -> None:
        self._called.add(layer)
        policy = self._run.policy
        if policy is None or not policy.lowers:
            self._unmatched.clear()
            return
        if self._matches(policy, _names(layer)) or self._is_kept_norm(layer, policy):
            keep_fp32(layer)
        for path, inner in inner_layers(layer):  # these may have been called before they became part of it
            if policy.fp32_modules and self._matches(policy, [path]):
                keep_fp32(inner)

    def _matches(self, policy: Policy, names: list[str]) -> bool:
        self._names |= dict.fromkeys(names)
        matched = {p for p in policy.fp32_modules if any(fnmatchcase(name, p) for name in names)}
        self._unmatched -= matched
        return bool(matched)

    def _is_kept_norm(self, layer: Any, policy: Policy) -> bool:
        return policy.casting == "model" and policy.norms == "fp32" and isinstance(layer, self._norms)


def _name_of(dtype: Any) -> str | None:
    """Return the name of a layer's dtype or dtype policy; None if it is left open."""
    if isinstance(dtype, dict):
        name = dtype.get("config", {}).get("name")
        return None if name is None else str(name)
    return None if dtype is None else str(getattr(dtype, "name", dtype))


def inner_layers(layer: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the layers inside ``layer`` with their paths: names joined by dots, without ``layer``'s own."""
    for inner in layer._layers:
        if type(inner).__name__ == "InputLayer":  # it computes nothing
            continue
        name = f"{path}.{inner.name}" if path else inner.name
        yield name, inner
        yield from inner_layers(inner, name)


def keep_fp32(layer: Any) -> None:
    """Give ``layer`` and the layers in it Keras' dtype policy for FP32."""
    for inner in layer._flatten_layers():
        inner.dtype_policy = FP32.dtype_name


def _names(layer: Any) -> list[str]:
    """Return the names that patterns may match: the layer's own, and those prefixed with its containers."""
    path = importlib.import_module("keras.src.backend.common.name_scope").current_path()
    parts = [*(part for part in path.split("/") if part), layer.name]
    return [".".join(parts[k:]) for k in reversed(range(len(parts)))]


class LayerTree(ModuleTree):
    """The layers inside a model; a PyTorch module that a layer wraps is inside that layer."""

    def title(self, root: nn.Module) -> str:
        """Return the model's name in Keras."""
        return str(root.name) if _is_layer(root) else super().title(root)

    def modules(self, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield every layer once, with its path."""
        if not _is_layer(root):
            yield from super().modules(root)
            return
        seen: set[int] = set()
        for path, layer in [("", root), *inner_layers(root)]:
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            yield path, layer
            wrapped = layer.__dict__.get("_modules", {}).get("module")
            if isinstance(wrapped, nn.Module) and not _is_layer(wrapped):
                prefix = f"{path}." if path else ""
                yield from (
                    (f"{prefix}module.{below}".rstrip("."), module) for below, module in wrapped.named_modules()
                )

    def named(self, root: nn.Module) -> dict[str, nn.Module]:
        """Return the layers inside ``root`` by path."""
        return {path: layer for path, layer in self.modules(root) if path}

    def parameters(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the values of a layer's own variables."""
        if not _is_layer(module):
            yield from super().parameters(module)
            return
        layer: Any = module
        for variable in [*layer._trainable_variables, *layer._non_trainable_variables]:
            if isinstance(variable._value, nn.Parameter):
                yield variable.name, variable._value

    def keep_fp32(self, module: nn.Module, device_type: str) -> None:
        """Give a layer, and the layers in it, Keras' dtype policy for FP32."""
        if not _is_layer(module):
            super().keep_fp32(module, device_type)
            return
        keep_fp32(module)


def _is_layer(module: Any) -> bool:
    return hasattr(module, "_flatten_layers")


class JudgedLayers:
    """The formats that values would have, if each layer computes in its dtype policy's (``listed_formats.JudgedFormats``)."""

    def __init__(
        self, policy: Policy, own_dtypes: Container[nn.Module], tree: ModuleTree, roots: Iterable[nn.Module]
    ) -> None:
        """Judge ``policy``.

        Args:
            policy: the policy.
            own_dtypes: the layers whose dtype the script sets.
            tree: finds the layers of a model.
            roots: the models.
        """
        self._lowers, self._own_dtypes, self._tree, self._roots = policy.lowers, own_dtypes, tree, roots
        self.off = OffRegions()
        self._wide: set[int] | None = None

    def forget(self) -> None:
        """Read the layers' parameters again."""
        self._wide = None

    def is_wide(self, tensor: Tensor, module: nn.Module) -> bool:
        """Return whether ``module``'s output stays in FP32: the script sets the layer's dtype."""
        return module in self._own_dtypes

    def gradient_is_wide(self, parameter: Tensor) -> bool:
        """Return whether the parameter's layer stays in FP32."""
        if self._wide is None:
            wide = [m for root in self._roots for _, m in self._tree.modules(root) if m in self._own_dtypes]
            self._wide = {id(p) for module in wide for _, p in self._tree.parameters(module)}
        return id(parameter) in self._wide


class OneLayer:
    """How a single layer runs (``mezzo.observe.one_module.OneModule``)."""

    def __init__(self, policy: Policy, tree: ModuleTree, returned: dict[int, torch.dtype]) -> None:
        self._name = dtype_policy_name(for_single_modules(policy))
        self._tree, self._returned = tree, returned

    def weights(self, module: nn.Module) -> list[Tensor]:
        """Return the trained parameters in ``module``."""
        parameters = (p for _, m in self._tree.modules(module) for _, p in self._tree.parameters(m))
        return [p for p in {id(p): p for p in parameters}.values() if p.requires_grad]

    @contextmanager
    def unchanged(self, module: nn.Module) -> Iterator[None]:
        """Run with copies of the variables that a call changes: running statistics, and the state of seed generators."""
        variables = [v for v in getattr(module, "variables", []) if not v.trainable and v._value is not None]
        original = [(variable, variable._value) for variable in variables]
        try:
            for variable, value in original:
                variable._value = nn.Parameter(value.detach().clone(), requires_grad=False)
            with same_random_numbers():
                yield
        finally:
            for variable, value in original:
                variable._value = value

    @contextmanager
    def lowered(self, module: nn.Module, *, inner: torch.dtype | None) -> Iterator[None]:
        """Give the layer the policy's dtype policy; the layers inside keep FP32 and return ``inner``."""
        import keras

        if not isinstance(module, keras.Layer):
            raise TypeError(f"{type(module).__name__} is a module of PyTorch, which Keras does not cast")
        before = module._dtype_policy
        inside = [id(layer) for _, layer in self._tree.modules(module) if layer is not module]
        try:
            module._dtype_policy = keras.DTypePolicy(self._name)
            if inner is not None:
                self._returned.update(dict.fromkeys(inside, inner))
            yield
        finally:
            module._dtype_policy = before
            for identity in inside:
                self._returned.pop(identity, None)

    def forward(self) -> AbstractContextManager[Any]:
        """Return an empty context: layers cast by themselves."""
        return nullcontext()

    def backward(self) -> AbstractContextManager[Any]:
        """Return an empty context."""
        return nullcontext()
