"""The fixes of a diagnosis as a Keras script writes them. Imports neither torch nor Keras.

A run tries the same policies as for PyTorch: Mezzo translates them into Keras' own objects. Keras has no op lists, so no single operation
can be kept in FP32.
"""

from __future__ import annotations

from collections.abc import Sequence

from mezzo.policy import Policy

_WIDER = "bf16"
_LINES = {
    "x = x.float()  # before this line": 'x = keras.ops.cast(x, "float32")  # before this line',
    "assert torch.isfinite(batch).all()": "assert np.isfinite(batch).all()",
    'y = (x / t).masked_fill(mask, float("-inf"))': 'y = keras.ops.where(mask, float("-inf"), x / t)',
    "y = p * logs.masked_fill(p == 0, 0.0)": "y = p * keras.ops.where(p == 0, 0.0, logs)",
    "x = x.masked_fill(mask, torch.finfo(x.dtype).min)": "x = keras.ops.where(mask, -1e30, x)",
    "if x.numel():": "if keras.ops.size(x):",
    "y = x.std(correction=0)": "y = keras.ops.std(x)",
    "clip_grad_norm_(parameters, 1.0)": "clipnorm=1.0  # argument of the optimizer",
    "y = torch.sqrt(x + 1e-12)": "y = keras.ops.sqrt(x + 1e-12)",
    "y = torch.sqrt(x + 1e-4)": "y = keras.ops.sqrt(x + 1e-4)",
    "y = torch.rsqrt(x + 1e-6)": "y = keras.ops.rsqrt(x + 1e-6)",
    "y = torch.rsqrt(x + 1e-2)": "y = keras.ops.rsqrt(x + 1e-2)",
    "y = torch.log(x.clamp_min(1e-4))": "y = keras.ops.log(keras.ops.maximum(x, 1e-4))",
    "y = torch.log(x.clamp_min(1e-6))": "y = keras.ops.log(keras.ops.maximum(x, 1e-6))",
    "y = torch.log1p(x.float().clamp_min(-1 + 1e-6))": 'y = keras.ops.log1p(keras.ops.maximum(keras.ops.cast(x, "float32"), -1 + 1e-6))',
    "y = torch.log1p(x.clamp_min(-1 + 1e-6))": "y = keras.ops.log1p(keras.ops.maximum(x, -1 + 1e-6))",
    "y = torch.sqrt(x.clamp_min(1e-4))": "y = keras.ops.sqrt(keras.ops.maximum(x, 1e-4))",
    "y = torch.sqrt(x.clamp_min(1e-12))": "y = keras.ops.sqrt(keras.ops.maximum(x, 1e-12))",
    "y = a / torch.where(b.abs() < 1e-6, 1.0, b)": "y = a / keras.ops.where(keras.ops.abs(b) < 1e-6, 1.0, b)",
    "y = x.clamp_min(1e-4).pow(p)": "y = keras.ops.power(keras.ops.maximum(x, 1e-4), p)",
    "y = x.clamp_min(1e-12).pow(p)": "y = keras.ops.power(keras.ops.maximum(x, 1e-12), p)",
    "y = (x * x).sum(-1).add(1e-4).sqrt()": "y = keras.ops.sqrt(keras.ops.sum(x * x, -1) + 1e-4)",
    "y = (x * x).sum(-1).add(1e-12).sqrt()": "y = keras.ops.sqrt(keras.ops.sum(x * x, -1) + 1e-12)",
    "y = x.clamp_max(10).exp()": "y = keras.ops.exp(keras.ops.minimum(x, 10))",
    "y = x.clamp_max(80).exp()": "y = keras.ops.exp(keras.ops.minimum(x, 80))",
    "y = x.float().clamp(-1 + 1e-6, 1 - 1e-6).acos()": (
        'y = keras.ops.arccos(keras.ops.clip(keras.ops.cast(x, "float32"), -1 + 1e-6, 1 - 1e-6))'
    ),
    "y = x.clamp(-1 + 1e-6, 1 - 1e-6).acos()": "y = keras.ops.arccos(keras.ops.clip(x, -1 + 1e-6, 1 - 1e-6))",
    "mask = mask & ~mask.all(-1, keepdim=True)": "mask = keras.ops.logical_or(mask, ~keras.ops.any(mask, -1, keepdims=True))",
    "x = x.clamp(min=1e-6)": "x = keras.ops.maximum(x, 1e-6)",
}
"""The lines that fixes show for PyTorch, and their counterparts in Keras."""


def in_keras(
    advice: str, line: str, own: Policy | None, *, policy: Policy | None, scale: float | None, kept: Sequence[str]
) -> tuple[str, str] | None:
    """Return a fix's advice and line as a Keras script would write them; None if Keras cannot apply it.

    Args:
        advice: the advice for PyTorch.
        line: the line for PyTorch.
        own: the run's policy; None for the script's own precision.
        policy: the policy with the fix; None for the run's own.
        scale: the loss scale to begin with, under the script's own precision.
        kept: the layers that the fix keeps in FP32, and the run does not.
    """
    if own is not None and policy is not None and policy.fp32 != own.fp32:
        return None
    lines = []
    if policy is not None and policy.compute == _WIDER and (own is None or own.compute != _WIDER):
        lines.append('keras.config.set_dtype_policy("mixed_bfloat16")')
    elif (initial := _new_scale(scale, policy, own)) is not None:
        lines.append(f"optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale={initial})")
    if kept:
        lines.append(f'dtype="float32"  # argument of the layer{"s" * (len(kept) > 1)} {" and ".join(kept)}')
    instead = f"keep {' and '.join(kept)} in FP32" if kept and policy is None else advice
    return instead, "; ".join(lines) or _LINES.get(line, line)


def _new_scale(scale: float | None, policy: Policy | None, own: Policy | None) -> float | None:
    """Return the loss scale that a fix begins with; None if it leaves the scale alone."""
    if scale is not None or policy is None or policy.loss_scale != "dynamic":
        return scale
    scaled = own is not None and (own.loss_scale, own.init_scale) == ("dynamic", policy.init_scale)
    return None if scaled else policy.init_scale
