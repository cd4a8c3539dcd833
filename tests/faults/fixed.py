"""The printed fixes that change a script's own lines, each written into its planted fault."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Fixed(NamedTuple):
    """A printed line, and the text of the planted fault before and after it was written there."""

    printed: str
    edits: tuple[tuple[str, str], ...]


def fixed(printed: str, *texts: str) -> Fixed:
    """Return a fix of texts before and after, in turn."""
    return Fixed(printed, tuple(zip(texts[::2], texts[1::2], strict=True)))


ROOT, ROOT_IN_FP16 = "y = torch.sqrt(x + 1e-12)", "y = torch.sqrt(x + 1e-4)"
LOG = "y = torch.log(x.clamp_min(1e-6))"
DIVISOR = "y = a / torch.where(b.abs() < 1e-6, 1.0, b)"
BF16 = "dtype=torch.bfloat16  # for each torch.float16 of the script, .bfloat16() for .half(), and no GradScaler"
NO_AUTOCAST = "with torch.autocast(x.device.type, enabled=False):  # in their forward, on x.float()"
LINE = "with torch.autocast(x.device.type, enabled=False):  # and x.float() for the line's 16-bit operands"
SCALE = "scale = 1024.0  # in place of the script's 65536, wherever it multiplies or divides by it"
LONGER = ("STEPS = 6", "STEPS = 12")
"""A loss scale of 1024 is found in the seventh step."""
RELU = ("torch.log(F.relu(h))", "torch.log(F.relu(h).clamp_min(1e-6))")
TO_BF16 = ("dtype=torch.float16", "dtype=torch.bfloat16")

FIXED = {
    "invalid_sqrt": fixed(
        ROOT_IN_FP16, "torch.sqrt((h - h).abs() + 0 * h)", "torch.sqrt((h - h).abs() + 0 * h + 1e-4)"
    ),
    "invalid_sqrt-bf16": fixed(ROOT, "torch.sqrt((h - h).abs() + 0 * h)", "torch.sqrt((h - h).abs() + 0 * h + 1e-12)"),
    "invalid_log": fixed(LOG, *RELU, *LONGER),
    "compiled_log": fixed(LOG, *RELU, *LONGER),
    "two_optimizers": fixed(LOG, *RELU, *LONGER),
    "raises": fixed(LOG, *RELU, *LONGER),
    "late_log": fixed(LOG, "torch.log(F.relu(h) + offset[0])", "torch.log((F.relu(h) + offset[0]).clamp_min(1e-6))"),
    "invalid_accumulated": fixed(
        LOG, "torch.log(h.abs() + offset[0])", "torch.log((h.abs() + offset[0]).clamp_min(1e-6))"
    ),
    **dict.fromkeys(
        ("raw_log", "raw_log_by_hand", "raw_log_once"),
        fixed(LOG, "torch.log((x @ w).relu())", "torch.log((x @ w).relu().clamp_min(1e-6))"),
    ),
    "raw_gan": fixed(LOG, "torch.tanh(x @ made) @ judged))", "torch.tanh(x @ made) @ judged).clamp_min(1e-6))"),
    "raw_jacobian": fixed("y = torch.sqrt(x.clamp_min(1e-12))", "(w).sqrt()", "(w).clamp_min(1e-12).sqrt()"),
    "session_bf16": fixed(LOG, "torch.log(-h * h)", "torch.log((-h * h).clamp_min(1e-6))"),
    "invalid_zero_times_inf": fixed(
        DIVISOR, "torch.zeros_like(h))", "torch.where(torch.zeros_like(h).abs() < 1e-6, 1.0, torch.zeros_like(h)))"
    ),
    "invalid_norm": fixed("y = x.clamp_min(1e-12).pow(p)", ".pow(0.5)", ".clamp_min(1e-12).pow(0.5)"),
    "invalid_masked_rows": fixed(
        "mask = mask & ~mask.all(-1, keepdim=True)",
        "return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool), -math.inf)",
        (
            "mask = torch.ones_like(scores, dtype=torch.bool)\n        mask = mask & ~mask.all(-1, keepdim=True)\n"
            "        return scores.masked_fill(mask, -math.inf)"
        ),
    ),
    "checkpointed_sqrt": fixed(ROOT_IN_FP16, "torch.sqrt((h - h).abs())", "torch.sqrt((h - h).abs() + 1e-4)"),
    "invalid_behind_a_skip": fixed(
        ROOT,
        "((model(x) - model(other)) ** 2).sum(1).sqrt()",
        "(((model(x) - model(other)) ** 2).sum(1) + 1e-12).sqrt()",
    ),
    "gan_log_of_zero": fixed(
        LOG,
        "torch.log(1 - torch.sigmoid(fake * 0 + 90))",
        "torch.log((1 - torch.sigmoid(fake * 0 + 90)).clamp_min(1e-6))",
    ),
    "rl_advantage_of_one": fixed(
        DIVISOR,
        "(r - r[0]) / r[:1].std(correction=0)",
        "(r - r[0]) / torch.where(r[:1].std(correction=0).abs() < 1e-6, 1.0, r[:1].std(correction=0))",
    ),
    "rl_log_of_zero_probability": fixed(LOG, "p.log()", "p.clamp_min(1e-6).log()"),
    "rl_ratio": fixed("y = x.clamp_max(80).exp()", "(z * 0 + 100).exp()", "(z * 0 + 100).clamp_max(80).exp()"),
    "update_normalized_by_hand": fixed(
        DIVISOR,
        "p.grad.div_(p.grad.norm())",
        "p.grad.div_(torch.where(p.grad.norm().abs() < 1e-6, 1.0, p.grad.norm()))",
    ),
    "penalty_at_zero": fixed(ROOT, "slope.square().sum(-1).sqrt()", "(slope.square().sum(-1) + 1e-12).sqrt()"),
    "penalty_beside_an_overflow": fixed(
        ROOT, "slope.square().sum(-1).sqrt()", "(slope.square().sum(-1) + 1e-12).sqrt()"
    ),
    "own_noise": fixed(LINE, "torch.log(uniform)", "torch.log(uniform.float())"),
    "own_half_log": fixed(
        "y = torch.log(x.clamp_min(1e-4))", "torch.log(h.abs() * 0)", "torch.log((h.abs() * 0).clamp_min(1e-4))"
    ),
    "masked_entropy": fixed(
        "y = p * logs.masked_fill(p == 0, 0.0)",
        "logs.exp() * logs",
        "logs.exp() * logs.masked_fill(logs.exp() == 0, 0.0)",
    ),
    "scale_own_scaler": fixed(
        "scaler = torch.amp.GradScaler(init_scale=65536.0)", "init_scale=2.0**40", "init_scale=65536.0"
    ),
    "own_small_scale": fixed(
        "scaler = torch.amp.GradScaler(init_scale=65536.0)", "init_scale=1.0", "init_scale=65536.0"
    ),
    "own_without_scaler-as-is": fixed(
        "scaler = torch.amp.GradScaler()  # scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()",
        "own_amp(weight=1e-7)\n",
        'own_amp(weight=1e-7, scaler=torch.amp.GradScaler("cpu"))\n',
    ),
    "own_saturates": fixed(
        NO_AUTOCAST,
        "function=lambda h: h * 2000 / (h * 2000 * (h * 2000))",
        "function=wide(lambda h: h * 2000 / (h * 2000 * (h * 2000))",
        "keepdim=True).sqrt(),\n        scaler",
        "keepdim=True).sqrt()),\n        scaler",
    ),
    "own_refused": fixed(
        NO_AUTOCAST,
        "own_amp(function=lambda h: h.masked_fill(h > 100, -1e9), ",
        "own_amp(function=wide(lambda h: h.masked_fill(h > 100, -1e9)), ",
    ),
    "own_recurring_skips": fixed(
        BF16, "dtype=torch.float16", "dtype=torch.bfloat16", "init_scale=1024.0", "enabled=False"
    ),
    **{
        f"update_eps_{kind.lower()}": fixed(
            f"optimizer = {kind}(..., eps=0.0001)",
            f"{kind}(parameters, lr=1e-3{rest}",
            f"{kind}(parameters, lr=1e-3, eps=0.0001{rest}",
        )
        for kind, rest in (("AdamW", ")"), ("RMSprop", ", foreach"), ("Adagrad", ")"))
    },
    "update_eps_embedding": fixed(
        "optimizer = Adam(..., eps=0.0001)", "*head.parameters()], lr=1e-3", "*head.parameters()], eps=0.0001, lr=1e-3"
    ),
    "update_clipped_by_hand": fixed(LINE, "else p.grad).square()", "else p.grad.float()).square()"),
    "cast_loss": fixed(LINE, "(model(x).half() - y.half())", "(model(x).half().float() - y.half().float())"),
    "cast_softmax_by_hand": fixed(LINE, "(h.exp() / h.exp()", "(h.float().exp() / h.float().exp()"),
    "scale_static_by_hand": fixed(SCALE, "SCALE = 2.0**16", "SCALE = 1024.0"),
    "scale_static_replaced": fixed(SCALE, "SCALE = 2.0**16", "SCALE = 1024.0"),
    "scale_static_zeroed": fixed(SCALE, "SCALE = 2.0**16", "SCALE = 1024.0"),
    "scale_clipped_away": fixed(SCALE, "SCALE = 2.0**16", "SCALE = 1024.0"),
    "range_beside_a_percentage": fixed(BF16, *TO_BF16),
    "scale_settles_low": fixed(BF16, *TO_BF16, 'GradScaler("cpu")', 'GradScaler("cpu", enabled=False)'),
    "update_leaves_range": fixed(BF16, ".half()", ".bfloat16()"),
    "own_half_weights": fixed(BF16, ".half()", ".bfloat16()"),
    "own_probabilities": fixed(
        LINE,
        "loss = -torch.log1p(-p.clamp(max=1 - 1e-6)).mean()",
        (
            "with torch.autocast(x.device.type, enabled=False):\n"
            "                loss = -torch.log1p(-p.float().clamp(max=1 - 1e-6)).mean()"
        ),
    ),
}
"""By the fault's name, or its name and policy."""

WIDE = """
def wide(function):
    def in_fp32(x):
        with torch.autocast(x.device.type, enabled=False):
            return function(x.float())

    return in_fp32
"""
"""The forward of a module in which autocast is off, appended to the script."""


def with_fix(name: str, fixed: Fixed, file: Path, folder: Path) -> Callable[[], Any]:
    """Return the fault ``name`` of ``file`` after its fix was written into a copy in ``folder``."""
    text = file.read_text(encoding="utf-8")
    for old, new in fixed.edits:
        assert old in text
        text = text.replace(old, new)
    copy = folder / f"fixed_{name}.py"
    copy.write_text(text + WIDE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(copy.stem, copy)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[copy.stem] = importlib.util.module_from_spec(spec)  # torch.compile looks it up
    spec.loader.exec_module(module)
    function: Callable[[], Any] = getattr(module, name)
    return function
