"""Convert a policy to Keras' own objects and back.

Keras sets precision with a dtype policy: the format in which every layer computes, and the format of its variables.
``mixed_float16`` and ``mixed_bfloat16`` keep variables in FP32. Keras' ``LossScaleOptimizer`` doubles and halves the loss
scale without bounds. There are no op lists: each layer's code decides what it computes in FP32 even so
(normalisation sums in FP32, for example). Imports Keras only in the functions that need it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mezzo import oplists
from mezzo.errors import PolicyError
from mezzo.explain import NOT_HONOURED, Choice, Choices, communication_left_out
from mezzo.formats import BF16, FP32
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
    if policy.compute == "fp8":
        allowed = ", ".join(name for name, preset in PRESETS.items() if preset.compute != policy.compute)
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
    known = {dtype_policy_name(p): p for p in reversed(PRESETS.values()) if p.compute != "fp8" and not p.master_weights}
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
    choices = Choices([_compute(policy, name), _weights(policy), _scale(policy), *_modules(policy), *left_out(policy)])
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


def left_out(policy: Policy) -> Iterator[Choice]:
    """Yield the parts of a policy that Keras does not honour, even under ``mezzo run``."""

    def cannot(field: str, reason: str) -> Choice:
        return Choice(what=field, value=f"{NOT_HONOURED}: {_shown(getattr(policy, field))}", reason=reason)

    if policy.arithmetic == "emulated":
        yield cannot("arithmetic", "Keras computes with its backend's kernels; nothing is emulated")
    yield from communication_left_out(policy)
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
