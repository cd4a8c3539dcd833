"""Regions in which a script itself turns autocast off, as with ``torch.autocast(enabled=False)``: a policy leaves that code in FP32.

In the FP32 run that ranges observes, such a region changes nothing, so it is found by time: autograd numbers its nodes in the order in
which they are made, so the numbers at both ends of a region tell which nodes were made inside it.

A region that is opened outside any module ends where a module is called: a policy opens its own region there.

Limits: everything computed in a region counts as FP32, even from 16-bit values that it does not cast first; nodes of other threads can
have the same numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from torch import nn


class OffRegions:
    """The script's open autocast regions, and which graph nodes were made where autocast is off."""

    def __init__(self) -> None:
        self._open: list[tuple[bool, nn.Module | None]] = []
        """For each open region whether autocast is off in it; a module stands for the region that a policy opens for it."""
        self._ends_at_module: list[bool] = []
        self._numbers: list[int] = []
        """Numbers of the next node where something changed, ascending."""
        self._off: list[bool] = []
        """Whether autocast was off from there on."""

    @property
    def now(self) -> bool:
        """Whether autocast is off now."""
        return bool(self._open) and self._open[-1][0]

    def enter(self, *, off: bool, in_module: bool) -> int:
        """Open a region; return its depth, for ``leave``."""
        depth = len(self._open)
        self._open.append((off, None))
        self._ends_at_module.append(not in_module)
        self._changed()
        return depth

    def leave(self, depth: int) -> None:
        """Close a region, and those that an error left open inside it."""
        del self._open[depth:], self._ends_at_module[depth:]
        self._changed()

    def module_called(self, module: nn.Module) -> None:
        """Open the policy's region if a module is called in one that the script opened outside any module."""
        if self._open and self._open[-1][0] and self._ends_at_module[-1]:
            self._open.append((False, module))
            self._ends_at_module.append(False)
            self._changed()

    def module_returned(self, module: nn.Module) -> None:
        """Close the region that was opened for ``module``."""
        if self._open and self._open[-1][1] is module:
            self.leave(len(self._open) - 1)

    def cover(self, node: Any) -> bool:
        """Return whether a graph node was made where autocast is off."""
        place = bisect_right(self._numbers, node._sequence_nr()) - 1
        return place >= 0 and self._off[place]

    def forget(self) -> None:
        """Discard the regions that are over, so that a long run does not accumulate them."""
        self._numbers, self._off = [], []
        if self._open:
            self._changed()

    def _changed(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._off.append(self.now)
