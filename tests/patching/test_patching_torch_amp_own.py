"""Scripts with mixed precision of their own: another format, a scaler turned off or on, or nothing to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers_patching import patch_of, refusal_of

LOOP = """import torch
from torch.cuda.amp import GradScaler, autocast
optimizer = torch.optim.SGD(model.parameters())
{scaler}
for x in data:
    with {autocast}:
        loss = model(x).mean()
    {backward}
    {step}
"""
SCALED = {"backward": "scaler.scale(loss).backward()", "step": "scaler.step(optimizer); scaler.update()"}
PLAIN = {"backward": "loss.backward()", "step": "optimizer.step()"}


CUDA = 'scaler = torch.amp.GradScaler("cuda", init_scale=8.0{})'
LINES = "scaler = GradScaler(\n    init_scale=8.0,\n{})"
MADE, OFF, TO_BF16 = "scaler = GradScaler()", "scaler = GradScaler(enabled=False)", "autocast(dtype=torch.bfloat16)"
HALF, TO_FP16 = 'torch.autocast("cuda", torch.{})', "torch.autocast({}, dtype=torch.float16)"
CHANGED = [
    # scaler and autocast before, policy, and after
    (MADE, "autocast()", "bf16", OFF, TO_BF16),
    (CUDA.format(""), HALF.format("half"), "bf16", CUDA.format(", enabled=False"), HALF.format("bfloat16")),
    (OFF, "torch.autocast(d, dtype=torch.bfloat16)", "fp16", OFF.replace("False", "True"), TO_FP16.format("d")),
    (MADE, "torch.autocast(device)", "fp16", MADE, TO_FP16.format("device")),
    (LINES.format(""), "autocast()", "bf16", LINES.format("    enabled=False,\n"), TO_BF16),
]


@pytest.mark.parametrize(("scaler", "autocast", "policy", "new_scaler", "new_autocast"), CHANGED)
def test_the_format_is_changed(
    scaler: str, autocast: str, policy: str, new_scaler: str, new_autocast: str, tmp_path: Path
) -> None:
    patch = patch_of(LOOP.format(scaler=scaler, autocast=autocast, **SCALED), policy, tmp_path)
    assert patch.patched == LOOP.format(scaler=new_scaler, autocast=new_autocast, **SCALED)
    assert patch.kind == "own_amp"


@pytest.mark.parametrize(
    ("above", "autocast", "device"),
    [
        ("", 'torch.autocast("cuda", dtype={})', '"cuda"'),
        ("", 'torch.autocast(device_type="cuda", dtype={})', '"cuda"'),
        ("", "torch.cpu.amp.autocast(True, {})", '"cpu"'),
        ('kind = "cuda"', "torch.autocast(kind, dtype={})", "kind"),
        ("from settings import kind", "torch.autocast(device_type=kind, dtype={})", "kind"),
        ("", "torch.autocast(unknown, dtype={})", "torch.get_default_device().type"),
    ],
)
def test_a_scale_is_added_where_there_was_none(above: str, autocast: str, device: str, tmp_path: Path) -> None:
    before, after = (autocast.format(dtype) for dtype in ("torch.bfloat16", "torch.float16"))
    patch = patch_of(f"{above}\n{LOOP.format(scaler='', autocast=before, **PLAIN)}", "fp16", tmp_path)
    assert patch.patched.splitlines()[4:] == [
        f"scaler = torch.amp.GradScaler({device})",
        "",
        "for x in data:",
        f"    with {after}:",
        "        loss = model(x).mean()",
        "    scaler.scale(loss).backward()",
        "    scaler.step(optimizer)",
        "    scaler.update()",
    ]


@pytest.mark.parametrize(
    ("scaler", "autocast", "parts", "policy", "reason", "already"),
    [
        (MADE, "autocast()", SCALED, "fp16", "already computes in fp16", True),
        ("", 'torch.autocast("cuda", dtype=torch.bfloat16)', PLAIN, "bf16", "already computes in bf16", True),
        (MADE, "torch.autocast(d, dtype=t)", SCALED, "fp16", "line 6 takes autocast's format from t", False),
        (MADE, "autocast()", SCALED, "fp16-master", "the script has mixed precision of its own, which cannot", False),
        (MADE, "nothing()", SCALED, "fp16", "line 4 creates a GradScaler, but no autocast was found", False),
    ],
)
def test_what_is_left(
    scaler: str, autocast: str, parts: dict[str, str], policy: str, reason: str, already: bool, tmp_path: Path
) -> None:
    outcome = refusal_of(LOOP.format(scaler=scaler, autocast=autocast, **parts), policy, tmp_path)
    assert outcome.reason.startswith(reason)
    assert outcome.already is already
