"""Distinguish skipped updates that are part of dynamic loss scaling from faults. Imports no torch.

A dynamic scale starts too high on purpose and halves until the gradients fit; later it grows now and then, to test whether
they still do. So two kinds of skips are normal:

- all skips in a row before an optimizer's first successful update, however many there are;
- after that, one per growth interval (with a hysteresis of ``h``, up to ``h`` in a row count as one). A row that begins right after the
  first successful update counts as one, too: small gradients in a first batch do not show that a scale fits.

All others are faults: the gradients overflow at a scale that fitted before. So is every skip under a static scale, and a
row of skips that lasts to the end of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Update(NamedTuple):
    """The part of an update that one optimizer makes."""

    scaler: int
    """Identity of the GradScaler; 0 for the policy's loss scale."""
    optimizer: int
    skipped: bool


class SkipRule(NamedTuple):
    """The settings of a loss scale that decide which skips are normal."""

    dynamic: bool
    growth_interval: int = 2000
    hysteresis: int = 1


@dataclass
class _History:
    searching: list[int] = field(default_factory=list)
    """Steps skipped before the first successful update."""
    num_updates: int = 0
    num_made: int = 0
    in_row: int = 0
    skips: list[tuple[int, int]] = field(default_factory=list)
    """Skips after the first successful update, without the tolerated rest of a row: the numbers of the optimizer's update and the step."""
    good_in_row: int = 0
    """Successful updates since the last skip: after a growth interval of them the scale has grown."""
    open_row: list[int] = field(default_factory=list)
    """The steps of a row right after the first successful update, which is a fault only if it never ends."""

    @property
    def settled(self) -> bool:
        """Whether an update succeeded."""
        return self.num_made > 0


class Skips:
    """The updates of each optimizer with each scaler."""

    def __init__(self) -> None:
        self._histories: dict[tuple[int, int], _History] = {}
        self.faulty: dict[int, None] = {}
        """Steps whose skips are faults, in the order in which that became known."""
        self.unexplained: list[int] = []
        """The first step of each row of skips that neither the search for a scale nor its growth explains: the scale may not be the
        cause."""

    def closed(self, step: int, updates: list[Update], *, skipped: bool, rule: SkipRule) -> None:
        """Record a step's updates; ``updates`` is empty if the optimizers are unknown."""
        parts = {(u.scaler, u.optimizer): u.skipped for u in updates} or {(0, 0): skipped}
        if skipped and not any(parts.values()):  # the overflow was detected for all optimizers together
            parts = dict.fromkeys(parts, True)
        for key, part_skipped in parts.items():
            self._note(step, self._histories.setdefault(key, _History()), rule, skipped=part_skipped)

    def settled(self) -> bool:
        """Return whether any update succeeded."""
        return any(history.settled for history in self._histories.values())

    def steps(self) -> list[int]:
        """Return the steps whose skips are faults if the run ends now, including those of optimizers that never made an update."""
        histories = self._histories.values()
        endless = [h.searching for h in histories if not h.settled] + [
            h.open_row for h in histories if len(h.open_row) > 1
        ]
        return sorted({*self.faulty, *(step for row in endless for step in row)})

    def _note(self, step: int, history: _History, rule: SkipRule, *, skipped: bool) -> None:
        history.num_updates += 1
        if not skipped:
            history.num_made, history.in_row, history.open_row = history.num_made + 1, 0, []
            history.good_in_row += 1
            return
        history.in_row += 1
        grew, history.good_in_row = history.good_in_row >= rule.growth_interval, 0
        if not rule.dynamic:
            self.faulty[step] = None
            return
        if not history.settled:
            history.searching.append(step)
            return
        if history.num_made == 1:
            history.open_row.append(step)
        elif history.in_row == 1 and not grew:
            self.unexplained.append(step)
        if history.in_row > 1 and (history.num_made == 1 or history.in_row <= rule.hysteresis):
            return
        recent = [s for number, s in history.skips if history.num_updates - number < rule.growth_interval]
        history.skips.append((history.num_updates, step))
        if recent:  # each was normal until a second one followed
            self.faulty.update(dict.fromkeys([*recent, step]))
