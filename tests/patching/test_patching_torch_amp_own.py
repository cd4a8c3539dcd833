"""Scripts with mixed precision of their own: another format, a scaler turned off or on, or nothing to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from mezzo.patching import Patch, Refused, make_patch
from mezzo.policy import Policy

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


def outcome_of(policy: str, tmp_path: Path, **parts: str) -> Patch | Refused:
    path = tmp_path / "script.py"
    path.write_text(LOOP.format(**parts), encoding="utf-8")
    return make_patch(path, policy=Policy.parse(policy))


CHANGED = [
    # scaler and autocast before, policy, and after
    (
        "scaler = GradScaler()",
        "autocast()",
        "bf16",
        "scaler = GradScaler(enabled=False)",
        "autocast(dtype=torch.bfloat16)",
    ),
    (
        'scaler = torch.amp.GradScaler("cuda", init_scale=8.0)',
        'torch.autocast("cuda", torch.half)',
        "bf16",
        'scaler = torch.amp.GradScaler("cuda", init_scale=8.0, enabled=False)',
        'torch.autocast("cuda", torch.bfloat16)',
    ),
    (
        "scaler = GradScaler(enabled=False)",
        "torch.autocast(d, dtype=torch.bfloat16)",
        "fp16",
        "scaler = GradScaler(enabled=True)",
        "torch.autocast(d, dtype=torch.float16)",
    ),
    (
        "scaler = GradScaler()",
        "torch.autocast(device)",
        "fp16",
        "scaler = GradScaler()",
        "torch.autocast(device, dtype=torch.float16)",
    ),
    (
        "scaler = GradScaler(\n    init_scale=8.0,\n)",
        "autocast()",
        "bf16",
        "scaler = GradScaler(\n    init_scale=8.0,\n    enabled=False,\n)",
        "autocast(dtype=torch.bfloat16)",
    ),
]


@pytest.mark.parametrize(("scaler", "autocast", "policy", "new_scaler", "new_autocast"), CHANGED)
def test_the_format_is_changed(
    scaler: str, autocast: str, policy: str, new_scaler: str, new_autocast: str, tmp_path: Path
) -> None:
    patch = outcome_of(policy, tmp_path, scaler=scaler, autocast=autocast, **SCALED)
    assert isinstance(patch, Patch), patch
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
    path = tmp_path / "script.py"
    path.write_text(f"{above}\n{LOOP.format(scaler='', autocast=before, **PLAIN)}", encoding="utf-8")
    patch = make_patch(path, policy=Policy.parse("fp16"))
    assert isinstance(patch, Patch), patch
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
    ("parts", "policy", "reason", "already"),
    [
        (
            {"scaler": "scaler = GradScaler()", "autocast": "autocast()", **SCALED},
            "fp16",
            "already computes in fp16",
            True,
        ),
        (
            {"scaler": "", "autocast": 'torch.autocast("cuda", dtype=torch.bfloat16)', **PLAIN},
            "bf16",
            "already computes in bf16",
            True,
        ),
        (
            {"scaler": "scaler = GradScaler()", "autocast": "torch.autocast(d, dtype=ptdtype)", **SCALED},
            "fp16",
            "line 6 takes autocast's format from ptdtype",
            False,
        ),
        (
            {"scaler": "scaler = GradScaler()", "autocast": "autocast()", **SCALED},
            "fp16-master",
            "the script has mixed precision of its own, which cannot express policy fp16-master",
            False,
        ),
        (
            {"scaler": "scaler = GradScaler()", "autocast": "nothing()", **SCALED},
            "fp16",
            "line 4 creates a GradScaler, but no autocast was found",
            False,
        ),
    ],
)
def test_what_is_left(parts: dict[str, str], policy: str, reason: str, already: bool, tmp_path: Path) -> None:
    outcome = outcome_of(policy, tmp_path, **parts)
    assert isinstance(outcome, Refused), outcome.diff
    assert outcome.reason.startswith(reason)
    assert outcome.already is already
