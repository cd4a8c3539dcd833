"""Give Keras' layers a policy's dtype policy when they are constructed, and FP32 to those that the policy names.

A layer whose dtype the script leaves open gets the policy's, and so does one with a mixed dtype policy of Keras: the policy
replaces the script's own mixed precision. A plain dtype that the script sets
(``dtype="float32"`` for a last softmax) is kept and listed. When a layer is first called, its name is known and its variables
do not exist yet: at that time it is matched with ``fp32_modules``, together with its inner layers.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
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
        self._met: WeakSet[Any] = WeakSet()
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
        """Raise if a pattern of the policy has matched no layer by the time of the first update."""
        if self._unmatched:
            from mezzo.engine.conversion import no_such_module

            raise no_such_module(sorted(self._unmatched)[0], self._names)

    def _init(self, original: Callable[..., None], ours: str) -> Callable[..., None]:
        @functools.wraps(original)
        def init(layer: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> None:
            asked = _name_of(dtype)
            takes = asked is None or asked.startswith(_MIXED)
            original(layer, *args, dtype=ours if takes else dtype, **kwargs)
            if asked in STORED_BYTES and asked != ours and not takes:
                reason = "the script, or the file that it was loaded from, sets this layer's own dtype"
                self._run.note_left_alone("layer", f"{layer.name} in {asked}", reason)

        return init

    def _call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if layer not in self._met:
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
        self._met.add(layer)
        policy = self._run.policy
        if policy is None or not policy.lowers:
            self._unmatched.clear()
            return
        names = _names(layer)
        self._names |= dict.fromkeys(names)
        matched = {p for p in policy.fp32_modules if any(fnmatchcase(name, p) for name in names)}
        self._unmatched -= matched
        if matched or self._is_kept_norm(layer, policy):
            for inner in layer._flatten_layers():
                inner.dtype_policy = FP32.dtype_name

    def _is_kept_norm(self, layer: Any, policy: Policy) -> bool:
        return policy.casting == "model" and policy.norms == "fp32" and isinstance(layer, self._norms)


def _name_of(dtype: Any) -> str | None:
    """Return the name of a layer's dtype or dtype policy, None if it is left open."""
    if isinstance(dtype, dict):
        name = dtype.get("config", {}).get("name")
        return None if name is None else str(name)
    return None if dtype is None else str(getattr(dtype, "name", dtype))


def _names(layer: Any) -> list[str]:
    """Return the names that patterns may match: the layer's own, and those prefixed with its containers."""
    path = importlib.import_module("keras.src.backend.common.name_scope").current_path()
    parts = [*(part for part in path.split("/") if part), layer.name]
    return [".".join(parts[k:]) for k in reversed(range(len(parts)))]
