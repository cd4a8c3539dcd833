"""What is known while somebody's script runs under a policy: the state that the hooks of this folder share."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mezzo import oplists
from mezzo.engine import conversion
from mezzo.engine.casting import Casting
from mezzo.engine.gradients import not_finite
from mezzo.engine.scaling import NoScale, Scale, scale_for
from mezzo.errors import PolicyError, ScaleFloorError
from mezzo.measure.steps import StepRecorder
from mezzo.policy import Policy
from mezzo.records import Reason

_KEPT_UNDER_MASTERS = {"layer_norm", "rms_norm", "group_norm", "batch_norm", "loss", "binary_cross_entropy"}


class Run:
    """Hold a run's policy, loss scale, steps and what could not be switched."""

    def __init__(self, policy: Policy | None) -> None:
        """Begin a run; ``policy`` is None where the script's own precision is left alone."""
        self.policy = policy
        self.applied = None if policy is None else _for_scripts(policy)
        self.recorder = StepRecorder()
        self.scale: Scale = NoScale()
        self.device_type: str | None = None
        self.in_backward = False
        self.left_alone: dict[str, Reason] = {}
        self.roots: dict[nn.Module, None] = {}
        """Modules that were called from outside any module, in order."""
        self.optimizers: dict[torch.optim.Optimizer, None] = {}
        self.local = threading.local()
        self.watchers: list[Any] = []
        self._castings: dict[str, Casting] = {}
        self._unmatched = set(() if policy is None else policy.fp32_modules)
        self._stepped = False
        self._found: Tensor | None = None
        self._script_skipped = False
        self._script_scale: float | None = None

    # --- forward ---------------------------------------------------------------------------------------------------------------

    def casting(self, device_type: str) -> Casting | None:
        """Return how the policy is applied on a device, or None where it casts nothing."""
        if self.applied is None or not self.applied.lowers:
            return None
        if device_type not in self._castings:
            self._castings[device_type] = Casting.of(self.applied, device_type)
        return self._castings[device_type]

    @property
    def main_casting(self) -> Casting | None:
        """Return the casting on the device that the first module ran on."""
        return self._castings.get(self.device_type or "")

    def meet(self, module: nn.Module, args: Any) -> str:
        """Take note of a module called from outside any module; return the device type it runs on."""
        parameter = next(module.parameters(), None)
        sample = parameter if parameter is not None else next((a for a in args if isinstance(a, Tensor)), None)
        device = torch.device("cpu") if sample is None else sample.device
        if module not in self.roots:
            self.roots[module] = None
            if parameter is not None:
                self._prepare(module, device)
        return device.type

    def _prepare(self, module: nn.Module, device: torch.device) -> None:
        if self.device_type is None:
            self.device_type = device.type
            if self.applied is not None:
                self.scale = scale_for(self.applied, device)
        if self.applied is None or not self.applied.lowers:
            return
        self._note_dtypes(module)
        matched = conversion.matching_patterns(module, self.applied.fp32_modules)
        self._unmatched -= matched
        policy = self.applied.replace(fp32_modules=tuple(matched))
        if policy.casting == "model":
            conversion.cast_model(module, policy, device.type)
        else:
            conversion.keep_fp32(module, policy, device.type)

    def _note_dtypes(self, module: nn.Module) -> None:
        dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
        name = type(module).__name__
        if torch.double in dtypes:
            self.leave("float64", name, "its weights are float64, and float64 is never cast")
        if any(dtype.itemsize == 2 for dtype in dtypes):
            self.leave("16-bit weights", name, "the script itself keeps its weights in 16 bits")

    def check_patterns(self) -> None:
        """Refuse patterns of the policy that matched no module by the time of the first update."""
        if self._unmatched:
            pattern = sorted(self._unmatched)[0]
            names = [n for root in self.roots for n in conversion.module_names(root)]
            raise conversion.no_such_module(pattern, names)

    def leave(self, what: str, value: str, reason: str) -> None:
        """Take note of something that could not be switched."""
        self.left_alone.setdefault(f"{what} {value}", Reason(what=what, value=value, reason=reason))

    # --- updates ---------------------------------------------------------------------------------------------------------------

    def owns(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether an optimizer of the script holds one of ``parameters``."""
        held = {id(p) for o in self.optimizers for g in o.param_groups for p in g["params"]}
        return any(id(p) in held for p in parameters)

    def updated(self, norm: Tensor | None) -> bool:
        """Take note of an optimizer's update with gradients of this norm; return whether to skip it.

        Reads one flag from the device where the loss is scaled.
        """
        self._stepped = True
        if norm is None:
            return False
        self.recorder.norm(norm)
        if not self.scale.checks:
            return False
        found = not_finite(norm)
        self._found = found if self._found is None else torch.maximum(self._found, found)
        return bool(found)

    def update_made(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Take the time of an update that is over; None where no optimizer object made it."""
        self.recorder.updated()
        for watcher in self.watchers:
            watcher.updated(optimizer)

    def script_scaled(self, *, skipped: bool, scale: float) -> None:
        """Take note of what the script's own GradScaler did at its update."""
        self._stepped, self._script_skipped, self._script_scale = True, skipped, scale

    def close_update(self) -> None:
        """Close the update that is open, if one is: all optimizer steps between two backward passes are one update."""
        if not self._stepped:
            return
        skipped = self._script_skipped
        scale = self._script_scale
        if self.scale.checks:
            skipped = self._found is not None and bool(self._found)
            if skipped and self.scale.at_floor():
                raise self.floor_error()
            if self._found is not None:
                self.scale.update(self._found)
            scale = self.scale.value()
        self.recorder.close(skipped=skipped, scale=scale)
        self._stepped, self._found, self._script_skipped = False, None, False
        for watcher in self.watchers:
            watcher.step_closed(len(self.recorder))

    def floor_error(self) -> ScaleFloorError:
        """Return the error of gradients that overflow at the scale's floor."""
        return ScaleFloorError(
            f"gradients overflow at the loss scale's floor of {self.scale.value():g}, update {len(self.recorder)}",
            hint="try --policy bf16, which has FP32's range, or keep modules in FP32 (fp32_modules=...)",
        )


def _for_scripts(policy: Policy) -> Policy:
    """Return the policy as it is applied to a script whose parameters stay its own.

    Master weights: a script's clipping and logging read FP32 gradients off its parameters, which 16-bit parameters cannot hold.
    So the script's FP32 parameters are the masters, and everything but norms and losses is listed to run in 16 bits.
    """
    if not policy.master_weights:
        return policy
    named = {*policy.fp32, *policy.widest, *policy.lower, *_KEPT_UNDER_MASTERS}
    lower = (*policy.lower, *(f.name for f in oplists.FAMILIES if f.name not in named))
    try:
        return policy.replace(casting="ops", master_weights=False, lower=lower)
    except PolicyError as error:  # an operation of a family was named by itself
        raise PolicyError(error.message, hint="under a -master policy name whole families") from None
