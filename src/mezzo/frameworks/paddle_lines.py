"""The fixes of a diagnosis as lines of a Paddle script. Imports no Paddle."""

from __future__ import annotations

import re

from mezzo.formats import BF16, FP32
from mezzo.frameworks import paddle_ops
from mezzo.policy import PRESETS, Policy

POLICY_LINE = re.compile(r'policy = "(?P<policy>[^"]+)"')

_LINES: tuple[tuple[str, str], ...] = (
    (r"torch\.amp\.GradScaler\(init_scale=([^)]*)\)", r"paddle.amp.GradScaler(init_loss_scaling=\1)"),
    (r"torch\.amp\.GradScaler\(", "paddle.amp.GradScaler("),
    (r"torch\.autocast\(x\.device\.type, enabled=False\)", "paddle.amp.auto_cast(enable=False)"),
    (r"torch\.autocast\(device_type, dtype=torch\.\w+\)", f'paddle.amp.auto_cast(dtype="{BF16.dtype_name}")'),
    (r"x\.float\(\)", f'x.astype("{FP32.dtype_name}")'),
    (r"(?<![\w.])clip_grad_norm_\(", "paddle.nn.utils.clip_grad_norm_("),
    (r"\.clamp_min\(([^)]*)\)", r".clip(min=\1)"),
    (r"\.clamp_max\(([^)]*)\)", r".clip(max=\1)"),
    (r"\.clamp\(", ".clip("),
    (r"\.numel\(\)", ".size"),
    (r"\.std\(correction=0\)", ".std(unbiased=False)"),
    (r"\.add\(1e-12\)", " + 1e-12"),
    (r"\btorch\.", "paddle."),
)
"""Patterns in lines for PyTorch, with their replacements for Paddle."""


def in_paddle(line: str, *, before: str) -> str:
    """Return a line for a PyTorch script, or a line that names a policy, as a line for a Paddle script.

    Args:
        line: the line that ``mezzo diagnose`` suggests for PyTorch.
        before: the policy of the run that failed, or ``as-is``.
    """
    policy_line = POLICY_LINE.fullmatch(line)
    if policy_line is None:
        for pattern, replacement in _LINES:
            line = re.sub(pattern, replacement, line)
        return line
    old = Policy.parse(before) if before.partition(":")[0] in PRESETS else PRESETS["fp16"]
    changes = "; ".join(_changes(old, Policy.parse(policy_line["policy"])))
    return f"{changes}  # {line}" if changes else line


def _changes(old: Policy, new: Policy) -> list[str]:
    """Return the lines for Paddle's own mixed precision that change one policy into another."""
    lines = []
    if set(new.fp32_modules) - set(old.fp32_modules):
        lines.append("with paddle.amp.auto_cast(enable=False):")
    ops = sorted(
        {paddle_ops.amp_name(op) for name in set(new.fp32) - set(old.fp32) for op in paddle_ops.listed_by(name)}
    )
    if ops:
        names = ", ".join(f'"{op}"' for op in ops)
        lines.append(f"paddle.amp.auto_cast(custom_black_list=[{names}])")
    if new.compute != old.compute and new.lowers:
        lines.append(f'paddle.amp.auto_cast(dtype="{new.storage.dtype_name}")')
    elif new.loss_scale != "none" and (new.loss_scale, new.init_scale) != (old.loss_scale, old.init_scale):
        lines.append(f"scaler = paddle.amp.GradScaler(init_loss_scaling={new.init_scale})")
    return lines
