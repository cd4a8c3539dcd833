"""Give Keras' layers the dtype policy of a policy when they are made, and FP32 to those that it names.

A layer whose dtype the script leaves open gets the policy's, and so does one that the script puts under a mixed dtype
policy of Keras: the policy takes the place of the script's own mixed precision. A plain dtype that the script gives
(``dtype="float32"`` for a last softmax) is kept and listed. Names are known and variables are not made yet when a layer
is first called: then it is matched with ``fp32_modules``, together with the layers in it.
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

_MIXED = "mixed_"  # how the names of Keras' own mixed dtype policies begin
_NORMS = ("BatchNormalization", "GroupNormalization", "LayerNormalization", "RMSNormalization", "UnitNormalization")


class Layers:
    """Patch ``keras.Layer``."""

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
        """Refuse patterns of the policy that matched no layer by the time of the first update."""
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
                reason = "the script, or the file that it was loaded from, gives this layer a dtype of its own"
                self._run.leave("layer", f"{layer.name} in {asked}", reason)

        return init

    def _call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if layer not in self._met:
                self._meet(layer)
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

    def _meet(self, layer: Any) -> None:
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
    """Return the name of the dtype or dtype policy that a layer is given, None for an open one."""
    if isinstance(dtype, dict):
        name = dtype.get("config", {}).get("name")
        return None if name is None else str(name)
    return None if dtype is None else str(getattr(dtype, "name", dtype))


def _names(layer: Any) -> list[str]:
    """Return the names that patterns are matched with: the layer's own, and those with the names of the layers around it."""
    path = importlib.import_module("keras.src.backend.common.name_scope").current_path()
    parts = [*(part for part in path.split("/") if part), layer.name]
    return [".".join(parts[k:]) for k in reversed(range(len(parts)))]
