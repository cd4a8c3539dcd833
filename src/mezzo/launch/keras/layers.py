"""Set the dtype policy of Keras' layers when they are constructed, and keep those layers in FP32 that the policy names.

A layer whose dtype the script leaves open gets the policy's, and so does one with a mixed dtype policy of Keras: the policy
replaces the script's own mixed precision. A plain dtype that the script sets
(``dtype="float32"`` for a last softmax) is kept and listed. When a layer is first called, its name is known and its variables
do not exist yet: this is when it is matched with ``fp32_modules``, together with its inner layers, by their paths below it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakSet

from mezzo.formats import FP32, STORED_BYTES
from mezzo.frameworks.keras import dtype_policy_name
from mezzo.launch.keras.state import Backend, KerasRun
from mezzo.launch.patches import Patches
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
    """Yield the layers inside ``layer`` with their paths: names joined by dots, without that of ``layer`` itself."""
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
