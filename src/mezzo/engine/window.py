"""An accumulation window: the backward passes between two updates, the share of each, and whether their gradients overflowed."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mezzo.engine import checks
from mezzo.engine.gradients import any_not_finite, multiply, not_finite
from mezzo.engine.scaling import Scale

ScaleFlags: TypeAlias = list[tuple[Scale, Tensor]]
"""Scales, each with the overflow flag that updates it: FP32 1 or 0."""


class Reduction(NamedTuple):
    """The result of reading every gradient of an update once."""

    norm: Tensor
    """The norm of the gradients as they are; multiplied by ``factor``, the norm of the unscaled and averaged ones."""
    factor: Tensor | None = None
    """The factor that unscales and averages the gradients; None for 1."""
    found_inf: Tensor | None = None
    """FP32 1 if a gradient is not finite, else 0; None without a loss scale."""
    overflowed: bool | None = False
    """Whether the host has read ``found_inf`` and skips; None if the device decides."""


class Window:
    """The backward passes between two updates: their number, their weights, and the overflow flag of each of several losses.

    A micro-batch of weight ``w`` counts as ``w / (first * accumulate)`` of the window, as if all weights equalled the first, and the
    update divides by the actual sum: full windows of equal weights need no division, and short or uneven ones are averaged correctly.
    """

    def open(self, accumulate: int, num_losses: int) -> None:
        """Begin a window of ``accumulate`` micro-batches; ``num_losses`` losses have scales."""
        self.accumulate = accumulate
        self.calls = 0
        self.batches = 0
        """Batches that were trained on in parts; their parts are among ``calls``."""
        self.unscaled: Reduction | None = None
        """The reduction of the gradients when ``unscale`` was called; None while they are scaled."""
        self.found_inf: dict[int, Tensor] = {}
        """With several scales: for each loss that had a backward pass, 1 if its gradients overflowed, else 0."""
        self.weighted = False
        """Whether weights were given."""
        self.mean_total: Tensor | None = None
        """With weights in several processes: the mean of their sums of shares."""
        self._first_weight = 0.0
        self._shares = [0.0] * num_losses

    def share(self, weight: float | None, loss_id: int, *, unit: float = 0.0) -> float:
        """Count the backward pass of a micro-batch and return its share; 1 if nothing is averaged.

        Args:
            weight: the micro-batch's weight.
            loss_id: the number of its loss.
            unit: the unit of weights, instead of the window's first weight: several processes need a common unit.
        """
        self.calls += 1
        if weight is None and self.accumulate == 1:
            return 1.0
        own_weight = 1.0 if weight is None else float(weight)
        self.weighted |= weight is not None
        self._first_weight = self._first_weight or unit or own_weight
        share = own_weight / (self._first_weight * self.accumulate)
        self._shares[loss_id] += share
        return share

    def batch_ended(self) -> bool:
        """Count a batch that was trained on in parts; return whether the window is full."""
        self.batches += 1
        return self.batches >= self.accumulate

    def unscale(self, gradients: list[Tensor], reduced: Reduction) -> None:
        """Unscale and average the gradients now, before the update."""
        multiply(gradients, reduced.factor)
        self.unscaled = reduced

    def exchanged(self, total: Tensor | None, found_inf: dict[int, Tensor]) -> None:
        """Note the mean of all processes' sums of shares, and the flags of the losses in all of them."""
        self.mean_total, self.found_inf = total, found_inf

    def set_unit(self, unit: float) -> None:
        """Set the unit of weights, unless the window already has one."""
        self._first_weight = self._first_weight or unit

    def state(self) -> dict[str, Any]:
        """Return everything that backward passes change."""
        return {name: copy(value) if isinstance(value, (list, dict)) else value for name, value in vars(self).items()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what ``state()`` returned."""
        vars(self).update(
            {name: copy(value) if isinstance(value, (list, dict)) else value for name, value in state.items()}
        )

    def sum_of_shares(self) -> float:
        """Return the sum of this process's shares, of the loss that has most."""
        return max(self._shares) or 1.0

    def total(self) -> float | Tensor | None:
        """Return the divisor that averages the gradients; None for 1.

        Raises:
            SessionError: the losses' sums of shares differ, so that no single number averages them.
        """
        if not self._first_weight:  # nothing is averaged
            return None
        checks.check_shares(self._shares)
        if self.mean_total is not None:
            return self.mean_total
        total = self.sum_of_shares()
        return None if total == 1.0 else total

    def note(self, loss_id: int, found: Tensor) -> None:
        """Record the flag of a backward pass of one of several losses: 1 if a gradient is not finite, else 0."""
        before = self.found_inf.get(loss_id)
        self.found_inf[loss_id] = found if before is None else torch.maximum(before, found)

    def rescale_to_first(self, loss_id: int, fresh: list[Tensor], scales: Sequence[Scale]) -> None:
        """Record whether one loss's ``fresh`` gradients are finite, and rescale them from its scale to the first loss's."""
        scale = scales[loss_id]
        if not fresh or not scale.checks:
            return
        self.note(loss_id, any_not_finite(fresh))
        inverse = scale.inverse()
        if loss_id and inverse is not None:
            multiply(fresh, scales[0].scale(inverse))

    def any_found_inf(self) -> Tensor:
        """Return 1 if any loss's gradients overflowed, else 0."""
        return torch.stack(list(self.found_inf.values())).amax()

    def overflowed(self, norm: Tensor) -> Tensor:
        """Return 1 if ``norm``, of all gradients, is not finite or a loss's gradients overflowed, else 0."""
        found_inf = not_finite(norm)
        return torch.maximum(found_inf, self.any_found_inf()) if self.found_inf else found_inf

    def scale_flags(self, scales: Sequence[Scale], found: Tensor | None) -> ScaleFlags:
        """Return the flag for each scale of this window's losses; all are set if only the sum of the losses overflows."""
        if found is None:
            return []
        if not self.found_inf:
            return [(scales[0], found)]
        only_sum = found * (self.any_found_inf() == 0)
        return [(scales[loss_id], torch.maximum(flag, only_sum)) for loss_id, flag in self.found_inf.items()]

    def update_scales(self, flags: ScaleFlags, skipped: Tensor | bool) -> None:
        """Update the scales of this window's losses; without a flag if the host knows the only one."""
        knows = not self.found_inf and not isinstance(skipped, Tensor)
        for scale, found_inf in flags:
            if knows:
                scale.updated(skipped=bool(skipped))
            else:
                scale.update(found_inf)

    def state_dict(self) -> dict[str, Any]:
        """Return the window's state, without gradients."""
        return {
            "calls": self.calls,
            "unscaled": None if self.unscaled is None else tuple(self.unscaled),
            "found": dict(self.found_inf),
            "weighted": self.weighted,
            "first_weight": self._first_weight,
            "shares": list(self._shares),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continue a window of as many micro-batches and losses, its tensors on ``device``."""
        unscaled = state["unscaled"]
        self.calls, self.weighted = state["calls"], state["weighted"]
        self.unscaled = None if unscaled is None else Reduction(*(_on(device, value) for value in unscaled))
        self.found_inf = {loss_id: found.to(device) for loss_id, found in state["found"].items()}
        self._first_weight, self._shares = state["first_weight"], list(state["shares"])


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
