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
    "invalid_sqrt": Fixed(
        ROOT_IN_FP16, (("torch.sqrt((h - h).abs() + 0 * h)", "torch.sqrt((h - h).abs() + 0 * h + 1e-4)"),)
    ),
    "invalid_sqrt-bf16": Fixed(
        ROOT, (("torch.sqrt((h - h).abs() + 0 * h)", "torch.sqrt((h - h).abs() + 0 * h + 1e-12)"),)
    ),
    "invalid_log": Fixed(LOG, (RELU, LONGER)),
    "compiled_log": Fixed(LOG, (RELU, LONGER)),
    "two_optimizers": Fixed(LOG, (RELU, LONGER)),
    "raises": Fixed(LOG, (RELU, LONGER)),
    "late_log": Fixed(
        LOG, (("torch.log(F.relu(h) + offset[0])", "torch.log((F.relu(h) + offset[0]).clamp_min(1e-6))"),)
    ),
    "invalid_accumulated": Fixed(
        LOG, (("torch.log(h.abs() + offset[0])", "torch.log((h.abs() + offset[0]).clamp_min(1e-6))"),)
    ),
    **dict.fromkeys(
        ("raw_log", "raw_log_by_hand", "raw_log_once"),
        Fixed(LOG, (("torch.log((x @ w).relu())", "torch.log((x @ w).relu().clamp_min(1e-6))"),)),
    ),
    "raw_gan": Fixed(LOG, (("torch.tanh(x @ made) @ judged))", "torch.tanh(x @ made) @ judged).clamp_min(1e-6))"),)),
    "raw_jacobian": Fixed("y = torch.sqrt(x.clamp_min(1e-12))", (("(w).sqrt()", "(w).clamp_min(1e-12).sqrt()"),)),
    "session_bf16": Fixed(LOG, (("torch.log(-h * h)", "torch.log((-h * h).clamp_min(1e-6))"),)),
    "invalid_zero_times_inf": Fixed(
        DIVISOR, (("torch.zeros_like(h))", "torch.where(torch.zeros_like(h).abs() < 1e-6, 1.0, torch.zeros_like(h)))"),)
    ),
    "invalid_norm": Fixed("y = x.clamp_min(1e-12).pow(p)", ((".pow(0.5)", ".clamp_min(1e-12).pow(0.5)"),)),
    "invalid_masked_rows": Fixed(
        "mask = mask & ~mask.all(-1, keepdim=True)",
        (
            (
                "return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool), -math.inf)",
                "mask = torch.ones_like(scores, dtype=torch.bool)\n        mask = mask & ~mask.all(-1, keepdim=True)\n"
                "        return scores.masked_fill(mask, -math.inf)",
            ),
        ),
    ),
    "checkpointed_sqrt": Fixed(ROOT_IN_FP16, (("torch.sqrt((h - h).abs())", "torch.sqrt((h - h).abs() + 1e-4)"),)),
    "invalid_behind_a_skip": Fixed(
        ROOT,
        (
            (
                "((model(x) - model(other)) ** 2).sum(1).sqrt()",
                "(((model(x) - model(other)) ** 2).sum(1) + 1e-12).sqrt()",
            ),
        ),
    ),
    "gan_log_of_zero": Fixed(
        LOG,
        (
            (
                "torch.log(1 - torch.sigmoid(fake * 0 + 90))",
                "torch.log((1 - torch.sigmoid(fake * 0 + 90)).clamp_min(1e-6))",
            ),
        ),
    ),
    "rl_advantage_of_one": Fixed(
        DIVISOR,
        (
            (
                "(r - r[0]) / r[:1].std(correction=0)",
                "(r - r[0]) / torch.where(r[:1].std(correction=0).abs() < 1e-6, 1.0, r[:1].std(correction=0))",
            ),
        ),
    ),
    "rl_log_of_zero_probability": Fixed(LOG, (("p.log()", "p.clamp_min(1e-6).log()"),)),
    "rl_ratio": Fixed("y = x.clamp_max(80).exp()", (("(z * 0 + 100).exp()", "(z * 0 + 100).clamp_max(80).exp()"),)),
    "update_normalized_by_hand": Fixed(
        DIVISOR,
        (("p.grad.div_(p.grad.norm())", "p.grad.div_(torch.where(p.grad.norm().abs() < 1e-6, 1.0, p.grad.norm()))"),),
    ),
    "penalty_at_zero": Fixed(ROOT, (("slope.square().sum(-1).sqrt()", "(slope.square().sum(-1) + 1e-12).sqrt()"),)),
    "penalty_beside_an_overflow": Fixed(
        ROOT, (("slope.square().sum(-1).sqrt()", "(slope.square().sum(-1) + 1e-12).sqrt()"),)
    ),
    "own_noise": Fixed(LINE, (("torch.log(uniform)", "torch.log(uniform.float())"),)),
    "own_half_log": Fixed(
        "y = torch.log(x.clamp_min(1e-4))", (("torch.log(h.abs() * 0)", "torch.log((h.abs() * 0).clamp_min(1e-4))"),)
    ),
    "masked_entropy": Fixed(
        "y = p * logs.masked_fill(p == 0, 0.0)",
        (("logs.exp() * logs", "logs.exp() * logs.masked_fill(logs.exp() == 0, 0.0)"),),
    ),
    "scale_own_scaler": Fixed(
        "scaler = torch.amp.GradScaler(init_scale=65536.0)", (("init_scale=2.0**40", "init_scale=65536.0"),)
    ),
    "own_small_scale": Fixed(
        "scaler = torch.amp.GradScaler(init_scale=65536.0)", (("init_scale=1.0", "init_scale=65536.0"),)
    ),
    "own_without_scaler-as-is": Fixed(
        "scaler = torch.amp.GradScaler()  # scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()",
        (("own_amp(weight=1e-7)\n", 'own_amp(weight=1e-7, scaler=torch.amp.GradScaler("cpu"))\n'),),
    ),
    "own_saturates": Fixed(
        NO_AUTOCAST,
        (
            (
                "function=lambda h: h * 2000 / (h * 2000 * (h * 2000))",
                "function=wide(lambda h: h * 2000 / (h * 2000 * (h * 2000))",
            ),
            ("keepdim=True).sqrt(),\n        scaler", "keepdim=True).sqrt()),\n        scaler"),
        ),
    ),
    "own_refused": Fixed(
        NO_AUTOCAST,
        (
            (
                "own_amp(function=lambda h: h.masked_fill(h > 100, -1e9), ",
                "own_amp(function=wide(lambda h: h.masked_fill(h > 100, -1e9)), ",
            ),
        ),
    ),
    "own_recurring_skips": Fixed(
        BF16, (("dtype=torch.float16", "dtype=torch.bfloat16"), ("init_scale=1024.0", "enabled=False"))
    ),
    **{
        f"update_eps_{kind.lower()}": Fixed(
            f"optimizer = {kind}(..., eps=0.0001)",
            ((f"{kind}(parameters, lr=1e-3{rest}", f"{kind}(parameters, lr=1e-3, eps=0.0001{rest}"),),
        )
        for kind, rest in (("AdamW", ")"), ("RMSprop", ", foreach"), ("Adagrad", ")"))
    },
    "update_eps_embedding": Fixed(
        "optimizer = Adam(..., eps=0.0001)",
        (("*head.parameters()], lr=1e-3", "*head.parameters()], eps=0.0001, lr=1e-3"),),
    ),
    "update_clipped_by_hand": Fixed(LINE, (("else p.grad).square()", "else p.grad.float()).square()"),)),
    "cast_loss": Fixed(LINE, (("(model(x).half() - y.half())", "(model(x).half().float() - y.half().float())"),)),
    "cast_softmax_by_hand": Fixed(LINE, (("(h.exp() / h.exp()", "(h.float().exp() / h.float().exp()"),)),
    "scale_static_by_hand": Fixed(SCALE, (("SCALE = 2.0**16", "SCALE = 1024.0"),)),
    "scale_static_replaced": Fixed(SCALE, (("SCALE = 2.0**16", "SCALE = 1024.0"),)),
    "scale_static_zeroed": Fixed(SCALE, (("SCALE = 2.0**16", "SCALE = 1024.0"),)),
    "scale_clipped_away": Fixed(SCALE, (("SCALE = 2.0**16", "SCALE = 1024.0"),)),
    "range_beside_a_percentage": Fixed(BF16, (TO_BF16,)),
    "scale_settles_low": Fixed(BF16, (TO_BF16, ('GradScaler("cpu")', 'GradScaler("cpu", enabled=False)'))),
    "update_leaves_range": Fixed(BF16, ((".half()", ".bfloat16()"),)),
    "own_half_weights": Fixed(BF16, ((".half()", ".bfloat16()"),)),
    "own_probabilities": Fixed(
        LINE,
        (
            (
                "loss = -torch.log1p(-p.clamp(max=1 - 1e-6)).mean()",
                "with torch.autocast(x.device.type, enabled=False):\n"
                "                loss = -torch.log1p(-p.float().clamp(max=1 - 1e-6)).mean()",
            ),
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
