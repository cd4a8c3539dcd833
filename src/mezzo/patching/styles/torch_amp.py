"""A loop that calls torch directly, patched by PyTorch's own recipe: ``torch.autocast``, and ``torch.amp.GradScaler`` with FP16."""

from __future__ import annotations

import ast

from mezzo.patching.device import DeviceType
from mezzo.patching.job import PatchJob
from mezzo.patching.outcome import unclear
from mezzo.patching.reading import Backward
from mezzo.patching.regions import Regions
from mezzo.patching.styles.banned import Banned
from mezzo.patching.styles.scaler import Scaler, refuse_in_any_library
from mezzo.patching.styles.validation import autocast_validation
from mezzo.patching.text import last_line
from mezzo.policy import PRESETS, Policy

_SCALER_ARGUMENTS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
_LEFT_TO_THE_DEVICE = ("name", "op_lists", *_SCALER_ARGUMENTS)


def why_not_expressed(policy: Policy) -> str:
    """Return the reason why torch.amp cannot express a policy; empty if it can."""
    if policy.casting == "model":
        return "torch.amp keeps weights in FP32; it has no 16-bit weights"
    if policy.compute == "fp8":
        return "torch.amp has no FP8"
    if policy.loss_scale == "static":
        return "torch.amp has no static loss scale"
    preset, given = vars(PRESETS[policy.name]), vars(policy)
    changed = [f for f in given if f not in _LEFT_TO_THE_DEVICE and given[f] != preset[f]]
    if changed == ["arithmetic"] and policy.arithmetic == "native":
        return ""
    return f"torch.amp has no {', '.join(changed)}" if changed else ""


def patch_loop(job: PatchJob, *, with_regions: bool = True) -> None:
    """Put the forward passes under autocast, and scale the loss if the policy does.

    Raises:
        Unclear: the loop cannot be patched without guessing.
    """
    script = job.script
    if job.policy.loss_scale != "none":
        refuse_what_scaling_breaks(job)
    device = DeviceType(script)
    job.imports("torch")
    names: dict[Backward, str] = {}
    scaler = _TorchScaler(job, device) if job.policy.loss_scale != "none" else None
    if scaler is not None:
        scaler.create()

    def opening(stmt: ast.stmt) -> str:
        return f"{job.library}.autocast({device.at(stmt)}, dtype={job.dtype})"

    if with_regions:
        regions, banned = Regions(script, script.backwards), Banned(script)
        for argument in banned.leave_out(regions):
            job.editor.append_to(argument, ".float()")
            job.note(
                argument,
                "the loss outside of autocast",
                "CUDA's autocast refuses binary cross entropy on probabilities",
            )
        names = job.autocast(regions, opening)
        autocast_validation(job, opening, why_not=banned.why_not)
    if scaler is None:
        for backward, name in names.items():
            job.editor.replace(backward.loss, name)
        job.note("loss scale", "none", "BF16 has the range of FP32, so gradients need no scaling")
        return
    scaler.replace_calls(names)


def refuse_what_scaling_breaks(job: PatchJob) -> None:
    """Refuse what does not work with scaled gradients.

    Raises:
        Unclear: names the line and what to do.
    """
    script = job.script
    second = script.calls_to(r"torch\.autograd\.grad")
    if second:
        unclear(
            f"line {second[0].lineno} calls torch.autograd.grad, whose gradients must be scaled and unscaled by hand",
            'use bf16, or follow "Gradient penalty" in the examples of torch.amp',
        )
    refuse_in_any_library(job)


class _TorchScaler(Scaler):
    def __init__(self, job: PatchJob, device: DeviceType) -> None:
        super().__init__(job)
        self._device = device

    def create(self) -> None:
        """Create the scaler after the last optimizer."""
        policy, preset = self._job.policy, PRESETS["fp16"]
        changed = [f for f in _SCALER_ARGUMENTS if getattr(policy, f) != getattr(preset, f)]
        settings = "".join(f", {f}={getattr(policy, f)!r}" for f in changed)
        device = self._device.at(self.home.after, line=last_line(self.home.after))
        lines = []
        if device.startswith("next(") and not self.home.owner:
            variable = self._script.tree.free_name("device_type", "amp_device_type")
            lines.append(f"{variable} = {device}")
            device = self._device.share(variable, self.home.scope)
        assigned = f"{self.home.owner}{self.name} = {self._job.library}.amp.GradScaler({device}{settings})"
        self.created(*lines, assigned)

    def value_of(self, scaler: str) -> str:
        """Return the expression for a scaler's scale."""
        return f"{scaler}.get_scale()"
