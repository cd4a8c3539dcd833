"""The update that a script is making: what its passes and optimizers have done since the last one was closed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from mezzo.measure.steps import StepRecorder
from mezzo.observe.observer import Update


class OpenUpdate:
    """The open update: all optimizer steps between two backward passes are one."""

    def __init__(self) -> None:
        self.recorder = StepRecorder()
        self.stepped = False
        """Whether the optimizer of the open update has stepped, so that the next backward pass closes it."""
        self.in_closure = False
        """Whether an optimizer is calling its closure: the backward passes in it belong to one update."""
        self.overflowed: bool | None = None
        """Whether a gradient was not finite; None if none was checked."""
        self.skipped: bool | Tensor = False
        """Whether the update was skipped; if only the device knows, a tensor that is above 0 if so."""
        self.skips = False
        """Whether the last update of an optimizer was skipped."""
        self.parts: list[Update] = []
        """The optimizers' steps in it; kept only for an observer."""
        self.made_by: set[int] = set()
        """The numbers of the optimizers that have stepped."""
        self.transformed: list[Tensor] = []
        """Losses whose gradients ``torch.func`` has returned since the optimizer stepped: no backward pass records them."""
        self.script_scaler: Any = None
        """The script's own GradScaler, unless the policy has turned it off."""
        self.scaled_by_script = False
        """Whether losses are currently multiplied by the scale of ``script_scaler``."""

    @property
    def num_updates(self) -> int:
        """The number of updates, including the open one."""
        return self.recorder.num_closed + self.stepped

    @property
    def gradient_scale(self) -> float:
        """The loss scale that is still in the gradients: the script's own scaler's, since the policy's is divided out immediately."""
        return 1.0 if self.script_scaler is None else float(self.script_scaler.get_scale())

    def scale_on_device(self) -> Tensor | float | None:
        """Return the scale of the script's GradScaler without waiting for the device, if the scale is on it; None without one."""
        if self.script_scaler is None:
            return None
        on_device = getattr(self.script_scaler, "_scale", None)
        scale: Tensor | float = on_device if isinstance(on_device, Tensor) else self.script_scaler.get_scale()
        return scale

    def made(self, norm: Tensor | None) -> None:
        """Record an optimizer's update, with gradients of this norm; None if it was not computed."""
        self.stepped = True
        if norm is not None:
            self.recorder.norm(norm)

    def checked(self, *, finite: bool) -> bool:
        """Record whether the gradients of an optimizer were finite; return whether to skip its step."""
        self.skips = not finite
        self.overflowed = self.skips or bool(self.overflowed)
        self.skipped = self.skipped or self.skips
        return self.skips

    def not_checked(self) -> bool:
        """Record that the gradients of an optimizer are not checked; return False: its step is not skipped."""
        self.skips = False
        return False

    def skip(self) -> None:
        """Let the optimizer that is about to step leave its step out."""
        self.skips = True

    def scaler_stepped(self, skipped: bool | Tensor) -> None:
        """Record that the script's own GradScaler made or skipped an optimizer's step; a tensor is above 0 if so."""
        if isinstance(skipped, Tensor):
            self.stepped = True
            if isinstance(self.skipped, Tensor):
                self.skipped = self.skipped + skipped.to(self.skipped.device)
            else:
                self.skipped = self.skipped or skipped
        elif skipped:
            self.stepped = self.skipped = True

    def scaler_met(self, scaler: Any) -> bool:
        """Record that the script's own GradScaler is about to scale a loss; return whether it is a new one."""
        is_new, self.script_scaler, self.scaled_by_script = self.script_scaler is not scaler, scaler, True
        return is_new

    def scaling_ended(self) -> None:
        """Record that losses are no longer scaled by the script."""
        self.scaled_by_script = False

    def drop(self, made_by: Iterable[int], parts: Iterable[Update]) -> None:
        """Record that the script left the update out: it counts as skipped."""
        self.stepped = self.overflowed = self.skipped = True
        self.made_by.update(made_by)
        self.parts += parts

    def also_made_by(self, numbers: Iterable[int]) -> None:
        """Record the optimizers of a step whose updates were not recorded one by one."""
        if self.stepped:
            self.made_by.update(numbers)

    def closed(self) -> None:
        """Record that the update is over; its parts remain until the next one begins."""
        self.forget()
        self.made_by.clear()

    def begin(self) -> None:
        """Begin the next update."""
        self.parts = []

    def closed_in_fast_mode(self) -> None:
        """Begin the next update after one of which only the loss was recorded."""
        self.stepped = False
        self.made_by.clear()

    def forget(self) -> None:
        """Forget what the optimizers have done: it was no training step."""
        self.stepped, self.overflowed, self.skipped = False, None, False

    def start_over(self) -> None:
        """Record again from the first step: the steps so far did not belong to the training."""
        self.forget()
        self.recorder = self.recorder.replacement()

    def begin_closure(self) -> None:
        """Begin an optimizer's step that calls its closure itself: the backward passes in it belong to this update."""
        self.in_closure = True

    def end_closure(self) -> None:
        """End such a step."""
        self.in_closure = False
        self.recorder.measure_again()

    def take_transformed(self) -> list[Tensor]:
        """Return and forget the losses of ``torch.func``."""
        losses, self.transformed = self.transformed, []
        return losses
