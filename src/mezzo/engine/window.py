"""An accumulation window: the backward passes between two updates, and what share of it each micro-batch is."""

from __future__ import annotations

from mezzo.engine import checks


class Window:
    """Count a window's backward passes and weigh them.

    A micro-batch of weight ``w`` counts as ``w / (first * accumulate)`` of the window, as if all were like its first, and the
    update divides by the sum of what really came: equal full windows need no division at all, and short or uneven ones are
    averaged right.
    """

    def __init__(self, accumulate: int, num_losses: int) -> None:
        self.accumulate = accumulate
        self.calls = 0
        self.unscaled = False
        self._first_weight = 0.0
        self._shares = [0.0] * num_losses

    def share(self, weight: float | None, loss_id: int) -> float:
        """Take a micro-batch in and return its share; 1 where nothing is averaged."""
        if weight is None and self.accumulate == 1:
            return 1.0
        given = 1.0 if weight is None else float(weight)
        self._first_weight = self._first_weight or given
        share = given / (self._first_weight * self.accumulate)
        self._shares[loss_id] += share
        return share

    def total(self) -> float:
        """Return the sum of the shares.

        Raises:
            SessionError: the losses' sums differ, so that no one number averages them.
        """
        checks.check_shares(self._shares)
        return max(self._shares) or 1.0
