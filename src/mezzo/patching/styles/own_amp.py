"""A script with mixed precision of its own: another format for its autocast, and a loss scale where the format needs one."""

from __future__ import annotations

import ast
import re

from mezzo.formats import ALIASES, FORMATS
from mezzo.patching.job import PatchJob
from mezzo.patching.outcome import unclear
from mezzo.patching.reading import ScriptFacts
from mezzo.patching.styles import torch_amp
from mezzo.patching.tree import keyword_of
from mezzo.policy import PRESETS


def is_there(script: ScriptFacts) -> bool:
    """Return whether a script has an autocast or a loss scaler."""
    return bool(script.autocasts or script.scalers or script.calls_to(r"apex\.amp\..*"))


def patch(job: PatchJob) -> None:
    """Change the formats of the script's own autocast, and turn its loss scaler on or off.

    Raises:
        Unclear: the script already has the policy, or takes its format from elsewhere.
    """
    script, policy = job.script, job.policy
    apex = script.calls_to(r"apex\.amp\..*")
    if apex:
        unclear(f"line {apex[0].lineno} uses apex.amp", "see docs/apex.md, or replace it with torch.amp first")
    why_not = torch_amp.why_not_expressed(policy)
    if why_not or policy.compute == "tf32":
        why = why_not or "TF32 is not a 16-bit format"
        unclear(
            f"the script has mixed precision of its own, which cannot express policy {policy}: {why}",
            "remove its autocast and its GradScaler first",
        )
    if not script.autocasts:
        unclear(
            f"line {script.scalers[0].lineno} creates a GradScaler, but no autocast was found",
            "put the forward pass under torch.autocast first",
        )
    changed = [_retype(job, call) for call in script.autocasts if not _is_off(call)]
    if policy.loss_scale == "none":
        changed += [_turn_off(job, call) for call in script.scalers]
    elif script.scalers:
        changed += [_turn_on(job, call) for call in script.scalers]
    else:
        torch_amp.patch_loop(job, with_regions=False)
        changed.append(True)
    if not any(changed):
        unclear(
            f"already computes in {policy.compute} under its own autocast", "nothing needs to be done", already=True
        )


def _is_off(call: ast.Call) -> bool:
    enabled = keyword_of(call, "enabled")
    return isinstance(enabled, ast.Constant) and enabled.value is False


def _retype(job: PatchJob, call: ast.Call) -> bool:
    """Give an autocast the policy's dtype; return whether that changed anything."""
    name = job.script.tree.dotted(call.func)
    argument = keyword_of(call, "dtype") or (call.args[1] if len(call.args) > 1 else None)
    if argument is None:
        return _add_dtype(job, call, name)
    dtype = re.fullmatch(r"torch\.(\w+)", job.script.tree.dotted(argument))
    if dtype is None:
        unclear(
            f"line {argument.lineno} takes autocast's format from {ast.unparse(argument)}", f"make that {job.dtype}"
        )
    if ALIASES.get(dtype.group(1), dtype.group(1)) == FORMATS[job.policy.compute].dtype_name:
        return False
    job.editor.replace(argument, job.dtype)
    job.note(call, f"dtype={job.dtype}", f"the policy's format; it was {ast.unparse(argument)}")
    return True


def _add_dtype(job: PatchJob, call: ast.Call, name: str) -> bool:
    """Write the format, unless autocast chooses it by itself; return whether that changed anything."""
    device = call.args[0] if call.args else keyword_of(call, "device_type")
    on_cuda = ".cuda." in name or (isinstance(device, ast.Constant) and device.value == "cuda")
    on_cpu = ".cpu." in name or (isinstance(device, ast.Constant) and device.value == "cpu")
    if (on_cuda and job.policy.compute == "fp16") or (on_cpu and job.policy.compute == "bf16"):
        return False
    words = f"dtype={job.dtype}"
    job.editor.add_argument(call, words)
    job.note(call, words, "without it, autocast chooses by the device: FP16 on CUDA, BF16 on a CPU")
    return True


def _turn_off(job: PatchJob, call: ast.Call) -> bool:
    enabled = keyword_of(call, "enabled")
    if _is_off(call):
        return False
    if enabled is not None and not isinstance(enabled, ast.Constant):
        job.note(call, "left as it is", f"its enabled={ast.unparse(enabled)} decides; BF16 needs no loss scale")
        return False
    if enabled is not None:
        job.editor.replace(enabled, "False")
    else:
        job.editor.add_argument(call, "enabled=False")
    job.note(
        call,
        "enabled=False",
        "BF16 has the range of FP32, so gradients need no scaling; a disabled scaler passes everything through",
    )
    return True


def _turn_on(job: PatchJob, call: ast.Call) -> bool:
    enabled = keyword_of(call, "enabled")
    if enabled is not None and _is_off(call):
        job.editor.replace(enabled, "True")
        job.note(call, "enabled=True", "FP16 gradients need a loss scale")
        return True
    if job.policy != PRESETS["fp16"]:
        job.note(call, "left as it is", "its own loss-scale settings are kept")
    return False
