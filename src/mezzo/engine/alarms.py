"""Alarms: six signs that a training run is going wrong, read from the loss, gradient norm, skip and loss scale of each update.

Each sign needs more evidence than chance, noise or a policy's usual warm-up produce; the limits are the constants below. Every
kind is raised once, until ``forget``. No sign reads a device: values unknown to the host are None.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from mezzo.records import Alarm, AlarmKind

SKIPS_IN_A_ROW = 30
"""After that many skips a scale of 2**16 is below 2**-13: FP16 gradients that still overflow are above 10**8."""
_STORM_SKIPS, _STORM_WINDOW = 10, 40
"""Skipped updates among the last 40. A healthy dynamic scale skips one per growth interval, 2,000 updates by default."""
_CALM_IN_A_ROW, _CALM_AT = 20, 100
"""The warm-up of a dynamic scale is over after 20 successful updates in a row, or at update 100."""
FLOOR_WITHOUT_ONE = 2.0**-14
"""The assumed floor of a scaler without one: FP16 gradients that overflow at it are above 10**9."""
_WINDOW, _FEWEST = 64, 30
"""Losses that a spike is compared with: at most the last 64 before it, at least 30."""
_SPIKE = 5
"""Losses in a row that must be above the limit: a single hard batch is no spike."""
_MADS = 10.0
"""Least height of a spike in standard deviations, estimated as 1.4826 MAD."""
_TO_DEVIATION = 1.4826
_RISE, _REGAINED = 0.5, 0.25
"""A spike is also above 1.5 times the median, and loses a quarter of the training's progress: a restarted learning rate raises the
loss by less."""
_ZEROS = 10
"""Measured gradient norms in a row that are exactly 0 while the loss is not."""
_SAME, _LIVELY = 50, 0.01
"""Losses in a row that are equal to the bit, while the gradients' norm is at least this share of the first ones: a converged model
has small gradients."""
_MEDIAN_EVERY = 8
"""Updates between two medians that decide whether a loss needs a closer check: a median of 64 takes about 5 us."""
_LOSSES_SKIPPED = 5
"""Losses in a row that are not finite although their updates were skipped."""


class UpdateNumbers(NamedTuple):
    """The numbers of one update."""

    step: int
    """Its number, from 1."""
    loss: float | None
    norm: float | None
    """The norm of the unscaled gradients; None if it was not measured."""
    skipped: bool
    scale: float | None
    """The loss scale after the update; None without one."""


class Alarms:
    """The signs, and their memory of earlier updates."""

    def __init__(self, floor: float | None = None) -> None:
        """Create the signs.

        Args:
            floor: the loss scale's floor; None for a scaler without one.
        """
        self._floor = FLOOR_WITHOUT_ONE if floor is None else floor
        self.forget()

    def forget(self) -> None:
        """Forget all updates, for example after a return to a snapshot."""
        self._raised: set[AlarmKind] = set()
        self._flags: deque[bool] = deque(maxlen=_STORM_WINDOW)
        self._skips = self._successes = self._seen = 0
        self._first_skip = self._bad_losses = self._zeros = self._same = self._first_zero = 0
        self._last_loss: float | None = None
        self._calm = False
        self._scale_before: float | None = None
        self._scale_at_skip: float | None = None
        self._first_losses: list[float] = []
        self._first_norms: list[float] = []
        self._norm = math.nan
        self._threshold = math.inf
        self._losses: deque[tuple[int, float]] = deque(maxlen=_WINDOW + _SPIKE)

    def inspect(self, updates: Sequence[UpdateNumbers]) -> Iterator[Alarm]:
        """Inspect updates in their order; yield new alarms."""
        place = 0
        while (place := self._record_usual(updates, place)) < len(updates):
            yield from self._check_signs(updates[place])
            place += 1

    def _record_usual(self, updates: Sequence[UpdateNumbers], first: int) -> int:
        """Record the usual updates from index ``first`` on; return the index of the first that needs a closer check.

        The effect is the same as with the six signs, without their calls, which take 4 us per step.
        """
        if self._bad_losses or len(self._first_losses) < _SPIKE:
            return first
        losses, last, threshold, place = self._losses, self._last_loss, self._threshold, first
        scale = self._scale_before
        for step, loss, norm, skipped, next_scale in updates[first:] if first else updates:
            if norm is not None or skipped or not loss or loss == last or not -math.inf < loss < math.inf:
                break
            if not step % _MEDIAN_EVERY:
                threshold = _limit([*losses, (step, loss)][-_WINDOW - _SPIKE :])
            if loss > threshold:
                break
            losses.append((step, loss))
            last, scale, place = loss, next_scale, place + 1
        num = place - first
        if num:
            self._seen, self._successes = self._seen + num, self._successes + num
            self._skips, self._same = 0, 1
            self._last_loss, self._scale_before, self._threshold = last, scale, threshold
            calm = num if self._calm else max(self._successes - _CALM_IN_A_ROW + 1, self._seen - _CALM_AT + 1)
            if calm > 0:
                self._calm = True
                self._flags.extend([False] * min(calm, num))
        return place

    def _check_signs(self, update: UpdateNumbers) -> list[Alarm]:
        self._seen += 1
        loss, norm, isfinite = update.loss, update.norm, math.isfinite
        finite = (loss is None or isfinite(loss)) and (norm is None or isfinite(norm))
        alarms = [
            None if finite and not self._bad_losses else self._not_finite(update),
            self._skipping(update),
            self._at_floor(update) if update.skipped else None,
            self._spike(update),
            None if norm is None else self._zero(update),
            self._stuck(update),
        ]
        self._scale_before = update.scale
        new = [alarm for alarm in alarms if alarm is not None and alarm.kind not in self._raised]
        self._raised.update([alarm.kind for alarm in new])
        return new

    def _not_finite(self, update: UpdateNumbers) -> Alarm | None:
        bad_loss = update.loss is not None and not math.isfinite(update.loss)
        bad_norm = update.norm is not None and not math.isfinite(update.norm)
        self._bad_losses = self._bad_losses + 1 if bad_loss else 0
        if bad_loss and not update.skipped:
            evidence = f"the loss of update {update.step} is {update.loss:g}, and the update was applied"
            return Alarm(kind="loss not finite", step=update.step, since=update.step, evidence=evidence)
        if bad_loss and self._bad_losses >= _LOSSES_SKIPPED:
            evidence = f"the losses of the last {self._bad_losses} updates are not finite; skipping updates does not repair a loss"
            return Alarm(
                kind="loss not finite", step=update.step, since=update.step - self._bad_losses + 1, evidence=evidence
            )
        if bad_norm and not update.skipped:
            evidence = (
                f"the gradients of update {update.step} have the norm {update.norm:g}, and the update was applied"
            )
            return Alarm(kind="loss not finite", step=update.step, since=update.step, evidence=evidence)
        return None

    def _skipping(self, update: UpdateNumbers) -> Alarm | None:
        if not update.skipped:
            self._skips, self._successes = 0, self._successes + 1
            self._calm |= self._successes >= _CALM_IN_A_ROW or self._seen >= _CALM_AT
            if self._calm:
                self._flags.append(False)
            return None
        if not self._skips:
            self._first_skip, self._scale_at_skip = update.step, self._scale_before
        self._skips, self._successes = self._skips + 1, 0
        self._calm |= self._seen >= _CALM_AT
        if self._calm:
            self._flags.append(True)
        if self._skips >= SKIPS_IN_A_ROW:
            evidence = f"{self._skips} updates in a row were skipped{self._fall(update)}"
            return Alarm(kind="skip storm", step=update.step, since=self._first_skip, evidence=evidence)
        if sum(self._flags) >= _STORM_SKIPS:
            since = update.step - len(self._flags) + 1
            evidence = f"{sum(self._flags)} of the last {len(self._flags)} updates were skipped{self._fall(update)}"
            return Alarm(kind="skip storm", step=update.step, since=since, evidence=evidence)
        return None

    def _fall(self, update: UpdateNumbers) -> str:
        if update.scale is None:
            return ""
        before = self._scale_at_skip
        from_before = f", from {before:g}" if before not in (None, update.scale) else ""
        return f"; the loss scale is {update.scale:g}{from_before}"

    def _at_floor(self, update: UpdateNumbers) -> Alarm | None:
        before = self._scale_before
        if not update.skipped or before is None or before > self._floor:
            return None
        evidence = f"update {update.step} was skipped with the loss scale at {before:g}; its floor is {self._floor:g}"
        return Alarm(
            kind="scale at its floor", step=update.step, since=self._first_skip or update.step, evidence=evidence
        )

    def _spike(self, update: UpdateNumbers) -> Alarm | None:
        if update.loss is None or update.skipped or not math.isfinite(update.loss):
            return None
        if len(self._first_losses) < _SPIKE:
            self._first_losses.append(update.loss)
        self._losses.append((update.step, update.loss))
        if update.step % _MEDIAN_EVERY == 0:
            self._threshold = _limit(self._losses)
        if update.loss <= self._threshold:
            return None
        before = [loss for _, loss in self._losses][:-_SPIKE]
        if len(before) < _FEWEST:
            return None
        last = [*self._losses][-_SPIKE:]
        lowest = min([loss for _, loss in last])
        middle = median(before)
        deviation = _TO_DEVIATION * median([abs(loss - middle) for loss in before])
        gained = median(self._first_losses) - middle
        if lowest <= middle + max(_MADS * deviation, _REGAINED * gained, _RISE * abs(middle)):
            return None
        evidence = (
            f"the last {_SPIKE} losses are {lowest:.4g} or more; the median of the {len(before)} before is {middle:.4g}, "
            f"and 1.4826 MAD {deviation:.3g}"
        )
        return Alarm(kind="loss spike", step=update.step, since=last[0][0], evidence=evidence)

    def _zero(self, update: UpdateNumbers) -> Alarm | None:
        if update.norm is None or update.skipped or not math.isfinite(update.norm):
            return None
        self._norm = update.norm
        if len(self._first_norms) < _SPIKE:
            self._first_norms.append(update.norm)
        if update.norm or update.loss is None or not update.loss:  # a loss of exactly 0 has nothing to learn from
            self._zeros = 0
            return None
        self._first_zero = self._first_zero if self._zeros else update.step
        self._zeros += 1
        if self._zeros < _ZEROS:
            return None
        evidence = (
            f"all gradients are exactly 0 in {self._zeros} measured updates in a row, and the loss is {update.loss:.4g}"
        )
        return Alarm(kind="gradients zero", step=update.step, since=self._first_zero, evidence=evidence)

    def _stuck(self, update: UpdateNumbers) -> Alarm | None:
        if update.loss is None or update.skipped or not update.loss or not math.isfinite(update.loss):
            return None
        self._same = self._same + 1 if update.loss == self._last_loss else 1
        self._last_loss = update.loss
        if self._same < _SAME or self._zeros or not self._norm >= _LIVELY * max(self._first_norms):
            return None
        evidence = (
            f"{self._same} updates in a row were applied, the gradients have the norm {self._norm:.3g}, and the loss is "
            f"{update.loss:.6g} to the bit after each"
        )
        return Alarm(kind="stuck updates", step=update.step, since=update.step - self._same + 1, evidence=evidence)


def _limit(losses: Iterable[tuple[int, float]]) -> float:
    """Return the loss above which an update needs a closer check."""
    middle = median([loss for _, loss in losses])  # a list: a generator costs a call per element
    return middle + _RISE / 2 * abs(middle)
