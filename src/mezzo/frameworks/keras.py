"""Convert a policy to Keras' own objects and back.

Keras sets precision with a dtype policy: the format in which every layer computes, and the format of its variables.
``mixed_float16`` and ``mixed_bfloat16`` keep variables in FP32. Keras' ``LossScaleOptimizer`` doubles and halves the loss
scale without bounds. There are no op lists: each layer's code decides what it computes in FP32 even so
(normalisation sums in FP32, for example). Imports Keras only in the functions that need it.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from mezzo import oplists
from mezzo.children.script_text import Kind, own_trees
from mezzo.errors import PolicyError
from mezzo.explain import NOT_HONOURED, Choice, Choices, communication_not_honoured
from mezzo.formats import BF16, FP32
from mezzo.frameworks import Framework
from mezzo.policy import NAMES_ELSEWHERE, PRESETS, Policy

INITIAL_SCALE = 2.0**15
"""The loss scale from which Keras' ``LossScaleOptimizer`` begins unless it is told."""
_GROWTH, _BACKOFF = 2.0, 0.5  # fixed in LossScaleOptimizer
_MIXED = {preset: name for name, preset in NAMES_ELSEWHERE["keras"].items()}


@dataclass(frozen=True, kw_only=True)
class KerasPrecision:
    """The settings of Keras that correspond to a policy."""

    dtype_policy: Any
    """A ``keras.DTypePolicy``, for ``keras.config.set_dtype_policy`` or a layer's ``dtype``."""
    loss_scale: dict[str, float] | None
    """Arguments of ``keras.optimizers.LossScaleOptimizer`` besides the optimizer; None without a dynamic scale."""
    loss_scale_factor: float | None
    """A static scale: the argument of this name of every Keras optimizer."""
    tf32: bool | None
    """Argument of ``tf.config.experimental.enable_tensor_float_32_execution``; None leaves it alone."""

    def wrap(self, optimizer: Any) -> Any:
        """Return ``optimizer``, inside a ``LossScaleOptimizer`` if the policy has a dynamic scale."""
        if self.loss_scale_factor is not None:
            optimizer.loss_scale_factor = self.loss_scale_factor
        if self.loss_scale is None:
            return optimizer
        import keras

        return keras.optimizers.LossScaleOptimizer(optimizer, **self.loss_scale)


def dtype_policy_name(policy: Policy) -> str:
    """Return the name of the Keras dtype policy that corresponds to ``policy``.

    Raises:
        PolicyError: Keras has none; the message lists the policies that have one.
    """
    if policy.in_layers:
        allowed = ", ".join(name for name, preset in PRESETS.items() if not preset.in_layers)
        raise PolicyError(
            f"policy {policy!s} has no dtype policy in Keras, which trains in FP8 only layers that are quantized after they are built; "
            f"allowed: {allowed}",
            hint="choose one of them, or call model.quantize in the script and run it as-is",
        )
    if not policy.lowers:
        return FP32.dtype_name
    # A policy with master weights maps to a mixed policy as well: Keras' FP32 variables are the masters.
    return policy.storage.dtype_name if _is_pure(policy) else _MIXED[policy.compute]


def to_keras(policy: Policy) -> KerasPrecision:
    """Return ``policy`` as Keras' own objects; ``explain`` lists what they cannot express.

    Raises:
        PolicyError: Keras has no dtype policy for it.
        ImportError: Keras is not installed.
    """
    import keras

    scale: dict[str, float] = {"initial_scale": policy.init_scale, "dynamic_growth_steps": policy.growth_interval}
    return KerasPrecision(
        dtype_policy=keras.DTypePolicy(dtype_policy_name(policy)),
        loss_scale=scale if policy.loss_scale == "dynamic" else None,
        loss_scale_factor=policy.init_scale if policy.loss_scale == "static" else None,
        tf32=tf32_of(policy),
    )


def tf32_of(policy: Policy) -> bool | None:
    """Return whether FP32 products use TF32; None under a policy that casts, which leaves the switch alone."""
    return None if policy.lowers else policy.compute == "tf32"


def from_keras(value: Any) -> Policy:
    """Return the policy that corresponds to an object of Keras.

    Args:
        value: a ``KerasPrecision``, a ``keras.DTypePolicy`` or its name, or a ``LossScaleOptimizer`` (the global dtype
            policy with its loss scale).

    Raises:
        PolicyError: no policy stands for it.
    """
    if isinstance(value, KerasPrecision):
        policy = PRESETS["tf32"] if value.tf32 else _named(value.dtype_policy.name)
        if value.loss_scale_factor is not None:
            return policy.replace(loss_scale="static", init_scale=value.loss_scale_factor)
        return _scaled(policy, value.loss_scale)
    if hasattr(value, "dynamic_growth_steps"):
        import keras

        scale = {"initial_scale": value.initial_scale, "dynamic_growth_steps": value.dynamic_growth_steps}
        return _scaled(_named(keras.config.dtype_policy().name), scale)
    return _named(str(getattr(value, "name", value)))


def _named(name: str) -> Policy:
    known = {dtype_policy_name(p): p for p in reversed(PRESETS.values()) if not p.in_layers and not p.master_weights}
    if name not in known:
        raise PolicyError(
            f"the Keras dtype policy {name!r} stands for no policy; allowed: {', '.join(known)}",
            hint="pass one of them, a keras.DTypePolicy or a LossScaleOptimizer",
        )
    return known[name]


def _scaled(policy: Policy, scale: dict[str, float] | None) -> Policy:
    if scale is None:
        return policy.replace(loss_scale="none")
    fields = {"init_scale": float(scale["initial_scale"]), "growth_interval": int(scale["dynamic_growth_steps"])}
    return policy.replace(loss_scale="dynamic", **fields)


def explain(policy: Policy) -> Choices:
    """Return what ``policy`` does in Keras, as choices; if Keras cannot honour a choice, its value begins by saying so.

    Raises:
        PolicyError: Keras has no dtype policy for it.
    """
    name = dtype_policy_name(policy)
    choices = Choices(
        [_compute(policy, name), _weights(policy), _scale(policy), *_modules(policy), *not_honoured(policy)]
    )
    if policy.loss_scale == "dynamic":
        value = f"{NOT_HONOURED} by Keras itself: {policy.min_scale:g} to {policy.max_scale:g}"
        reason = "LossScaleOptimizer has no floor and no ceiling; mezzo run adds both"
        choices.append(Choice(what="bounds of the loss scale", value=value, reason=reason))
    return choices


def _compute(policy: Policy, name: str) -> Choice:
    if policy.lowers:
        reason = "every layer casts its inputs and weights to it; its kernels are the backend's own"
        return Choice(what="compute", value=f"{policy.compute}: dtype policy {name}", reason=reason)
    on = tf32_of(policy)
    reason = "TensorFlow and cuDNN compute FP32 products in TF32 unless told not to"
    return Choice(what="compute", value=f"{name}, TF32 {'on' if on else 'off'}", reason=reason)


def _weights(policy: Policy) -> Choice:
    if _is_pure(policy):
        reason = "a plain dtype policy keeps variables in the format it computes in"
        return Choice(what="weights", value=f"{policy.compute} only", reason=reason)
    reason = "Keras' mixed dtype policies keep variables in FP32; they are what the optimizer updates"
    return Choice(what="weights", value="fp32", reason=reason)


def _scale(policy: Policy) -> Choice:
    if policy.loss_scale == "dynamic":
        value = f"dynamic from {policy.init_scale:g}, grows every {policy.growth_interval} updates"
        return Choice(what="loss scale", value=value, reason="LossScaleOptimizer around the script's optimizer")
    if policy.loss_scale == "static":
        reason = "LossScaleOptimizer with a constant scale under mezzo run; loss_scale_factor of an optimizer in Keras"
        return Choice(what="loss scale", value=f"static {policy.init_scale:g}", reason=reason)
    return Choice(what="loss scale", value="none", reason="the policy sets none")


def _modules(policy: Policy) -> Iterator[Choice]:
    if policy.fp32_modules:
        patterns = ", ".join(policy.fp32_modules)
        reason = "layers of these names, and the layers in them, get Keras' policy float32"
        yield Choice(what="modules", value=f"{patterns} in fp32", reason=reason)
    if policy.casting == "model" and policy.norms == "fp32":
        reason = "normalisation layers get Keras' policy float32"
        yield Choice(what="normalisation layers", value="fp32", reason=reason)


def not_honoured(policy: Policy) -> Iterator[Choice]:
    """Yield the parts of a policy that Keras does not honour, even under ``mezzo run``."""

    def cannot(field: str, reason: str) -> Choice:
        return Choice(what=field, value=f"{NOT_HONOURED}: {_shown(getattr(policy, field))}", reason=reason)

    if policy.arithmetic == "emulated":
        yield cannot("arithmetic", "Keras computes with its backend's kernels; nothing is emulated")
    yield from communication_not_honoured(policy)
    for field in oplists.USER_LISTS:
        if getattr(policy, field):
            yield cannot(field, "Keras has no op lists: a layer computes in the format of its dtype policy")
    if policy.loss_scale != "dynamic":
        return
    if policy.growth_factor != _GROWTH:
        yield cannot("growth_factor", f"LossScaleOptimizer grows by {_GROWTH:g}")
    if policy.backoff_factor != _BACKOFF:
        yield cannot("backoff_factor", f"LossScaleOptimizer backs off by {_BACKOFF:g}")
    if policy.hysteresis != 1:
        yield cannot("hysteresis", "LossScaleOptimizer backs off at the first overflow")


def _is_pure(policy: Policy) -> bool:
    return policy.casting == "model" and not policy.master_weights


def _shown(value: Any) -> str:
    return "+".join(value) if isinstance(value, tuple) else str(value)


# --- the lines of a script ---------------------------------------------------------------------------------------------------------

AT_OPTIMIZER = "where the optimizer is created, before model.compile()"


class ScriptPart(NamedTuple):
    """A line of a Keras script, and where it belongs."""

    line: str
    where: str


def script_lines(
    own: Policy | None, policy: Policy | None, *, scale: float | None, kept: Sequence[str]
) -> list[ScriptPart]:
    """Return the lines of a Keras script that change its precision as a fix does; empty if the fix leaves its precision alone.

    Args:
        own: the run's policy; None for the script's own precision.
        policy: the policy with the fix; None for the run's own.
        scale: the loss scale to begin with, under the script's own precision.
        kept: the layers that the fix keeps in FP32, and the run does not.
    """
    lines = []
    if policy is not None and policy.compute == BF16.name and (own is None or own.compute != BF16.name):
        line = f'keras.config.set_dtype_policy("{_MIXED[BF16.name]}")'
        lines.append(ScriptPart(line, "before the first layer is created"))
    elif (initial := _new_scale(scale, policy, own)) is not None:
        line = f"optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale={initial})"
        lines.append(ScriptPart(line, AT_OPTIMIZER))
    if kept:
        line = f'dtype="float32"  # argument of the layer{"s" * (len(kept) > 1)} {" and ".join(kept)}'
        lines.append(ScriptPart(line, "where the layer is created"))
    return lines


def _new_scale(scale: float | None, policy: Policy | None, own: Policy | None) -> float | None:
    """Return the loss scale that a fix begins with; None if it leaves the scale alone."""
    if scale is not None or policy is None or policy.loss_scale != "dynamic":
        return scale
    scaled = own is not None and (own.loss_scale, own.init_scale) == ("dynamic", policy.init_scale)
    return None if scaled else policy.init_scale


_VARIABLE = "KERAS_BACKEND"
_DEFAULT = "tensorflow"


def backend_of(target: str, *, kind: Kind, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the name of the backend; None if the script chooses it while it runs.

    Args:
        target: the script, or the module's dotted name.
        kind: which of the two ``target`` is.
        environment: the environment variables of the script.
    """
    found: set[str | None] = set()
    for tree in own_trees(target, kind=kind):
        found |= set(_chosen_in(tree, environment.get(_VARIABLE)))
    if found:
        return found.pop() if len(found) == 1 else None
    return environment.get(_VARIABLE) or _configured(environment)


def _chosen_in(tree: ast.AST, inherited: str | None) -> Iterator[str | None]:
    """Yield the backends that a file may choose; None if its text does not tell."""
    named = {id(n) for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value == _VARIABLE}
    for stmt in getattr(tree, "body", []):  # what runs whatever the script is told
        if isinstance(stmt, ast.Assign) and isinstance(stmt.targets[0], ast.Subscript):
            name = id(stmt.targets[0].slice)
            if name in named:
                named.discard(name)
                yield _text(stmt.value)
        elif isinstance(stmt, ast.Expr) and _is_setdefault(stmt.value) and id(stmt.value.args[0]) in named:
            named.discard(id(stmt.value.args[0]))
            yield inherited or _text(stmt.value.args[1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            named.discard(id(node.slice))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in ("get", "getenv"):  # which read it
                named.discard(id(node.args[0]))
            elif node.func.attr == "set_backend":
                yield None
    if named:  # it is set in another way, or only under a condition
        yield None


def _is_setdefault(value: ast.expr) -> TypeGuard[ast.Call]:
    is_call = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and len(value.args) == 2
    return is_call and value.func.attr == "setdefault"  # type: ignore[attr-defined]


def _text(value: ast.expr) -> str | None:
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _configured(environment: Mapping[str, str]) -> str:
    """Return the backend that Keras' own file names, or Keras' default."""
    home = environment.get("KERAS_HOME") or str(Path(environment.get("HOME", "~")).expanduser() / ".keras")
    try:
        named = json.loads((Path(home) / "keras.json").read_text(encoding="utf-8")).get("backend")
    except (OSError, ValueError, AttributeError):
        return _DEFAULT
    return named if isinstance(named, str) else _DEFAULT


def stage_on(backend: str | None) -> str:
    """Return the form of a script on a backend, as refusals name it; ``Keras`` for a backend that is not known."""
    named = f"Keras on {backend}"
    return named if named in FRAMEWORK.stages else FRAMEWORK.title


_LINES = {
    "new scaler": "",  # the optimizer scales, by the dtype policy of the layers
    "scaler": "",
    "autocast off": "",  # the dtype of layers
    "own bf16": "",
    "cast": 'x = keras.ops.cast(x, "float32")  # before this line',
    "check data": "assert np.isfinite(batch).all()",
    "clip": "clipnorm=1.0  # argument of the optimizer",
    "not empty": "if keras.ops.size(x):",
    "of all": "y = keras.ops.std(x)",
    "at least": "x = keras.ops.maximum(x, 1e-6)",
    "mask after": 'y = keras.ops.where(mask, float("-inf"), x / t)',
    "mask finite": "x = keras.ops.where(mask, -1e30, x)",
    "mask before": "y = p * keras.ops.where(p == 0, 0.0, logs)",
    "root at 0": "y = keras.ops.sqrt(keras.ops.maximum(x, {end}))",
    "root": "y = keras.ops.sqrt(x + {end})",
    "rsqrt": "y = keras.ops.rsqrt(x + {end})",
    "log": "y = keras.ops.log(keras.ops.maximum(x, {end}))",
    "log1p": "y = keras.ops.log1p(keras.ops.maximum({x}, -1 + 1e-6))",
    "div": "y = a / keras.ops.where(keras.ops.abs(b) < 1e-6, 1.0, b)",
    "pow": "y = keras.ops.power(keras.ops.maximum(x, {end}), p)",
    "norm": "y = keras.ops.sqrt(keras.ops.sum(x * x, -1) + {end})",
    "exp": "y = keras.ops.exp(keras.ops.minimum(x, {end}))",
    "acos": "y = keras.ops.arccos(keras.ops.clip({x}, -1 + 1e-6, 1 - 1e-6))",
    "softmax": "mask = keras.ops.logical_or(mask, ~keras.ops.any(mask, -1, keepdims=True))",
}
_OBSERVED = frozenset(("mezzo audit", "mezzo diagnose", "mezzo ranges", "mezzo fallback"))
FRAMEWORK = Framework(
    title="Keras",
    stages={
        "Keras on torch": _OBSERVED | {"mezzo tune"},
        "Keras on tensorflow": frozenset(("mezzo audit", "mezzo diagnose")),
        "Keras on jax": frozenset(),
        "Keras": _OBSERVED,
    },
    check=dtype_policy_name,
    stage_of=lambda target, kind: stage_on(backend_of(target, kind=kind)),
    elsewhere=f"{_VARIABLE}=torch mezzo {{command}} {{target}} runs the same script on PyTorch, if it only uses Keras",
    training_call="applied gradients by a Keras optimizer",
    not_seen="TensorFlow's own optimizers are not seen",
    in_fp32='keras.ops.cast(x, "float32")',
    lines=_LINES,
)
