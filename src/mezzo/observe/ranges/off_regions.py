"""Regions in which a script itself turns autocast off, as with ``torch.autocast(enabled=False)``: a policy leaves that code in FP32.

In the FP32 run that ranges observes, such a region has no effect, so it is recognised by time: autograd numbers its nodes in the order of
their creation, so the numbers at both ends of a region show which nodes were created inside it.

A region that is opened outside any module ends where a module is called: a policy opens its own region there.

Limits: everything computed in a region counts as FP32, even if it is computed from 16-bit values without a cast; nodes of other threads can
have the same numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from torch import nn


class OffRegions:
    """The script's open autocast regions, and which graph nodes were created where autocast is off."""

    def __init__(self) -> None:
        self._open: list[tuple[bool, nn.Module | None]] = []
        """For each open region, whether autocast is off in it, and the module if a policy would open the region for its call."""
        self._ends_at_module: list[bool] = []
        self._numbers: list[int] = []
        """The number of the next node at each change, in ascending order."""
        self._off: list[bool] = []
        """Whether autocast was off from that node on."""

    @property
    def now(self) -> bool:
        """Whether autocast is off now."""
        return bool(self._open) and self._open[-1][0]

    def enter(self, *, off: bool, in_module: bool) -> int:
        """Open a region; return its depth, for ``leave``."""
        depth = len(self._open)
        self._open.append((off, None))
        self._ends_at_module.append(not in_module)
        self._note_change()
        return depth

    def leave(self, depth: int) -> None:
        """Close a region, and those that an error left open inside it."""
        del self._open[depth:], self._ends_at_module[depth:]
        self._note_change()

    def module_called(self, module: nn.Module) -> None:
        """Open the policy's region if a module is called in one that the script opened outside any module."""
        if self._open and self._open[-1][0] and self._ends_at_module[-1]:
            self._open.append((False, module))
            self._ends_at_module.append(False)
            self._note_change()

    def module_returned(self, module: nn.Module) -> None:
        """Close the region that was opened for ``module``."""
        if self._open and self._open[-1][1] is module:
            self.leave(len(self._open) - 1)

    def cover(self, node: Any) -> bool:
        """Return whether a graph node was created where autocast is off."""
        place = bisect_right(self._numbers, node._sequence_nr()) - 1
        return place >= 0 and self._off[place]

    def forget(self) -> None:
        """Discard the regions that are over, so that a long run does not accumulate them."""
        self._numbers, self._off = [], []
        if self._open:
            self._note_change()

    def _note_change(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._off.append(self.now)
