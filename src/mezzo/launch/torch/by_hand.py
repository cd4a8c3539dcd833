"""Updates of a script without an optimizer object: it updates its weights itself, and every backward pass counts as an update.

A script may also make passes before it makes its optimizer, such as a trial of its model. Where these have changed no weight, they
were no updates: the record begins anew when the optimizer is made, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor

from mezzo.engine.gradients import total_norm
from mezzo.engine.scaling import scale_for

if TYPE_CHECKING:
    from mezzo.launch.torch.state import Run

_BY_HAND = "update by hand"
Leaf = tuple[Callable[[], Tensor | None], int, int]
"""A leaf of a pass, its version and the address of its values."""


class UpdatesByHand:
    """The backward passes of a script that has made no optimizer."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._num = 0
        self._leaves: dict[int, Leaf] = {}
        """The leaves that passes have reached, by identity, as they were at the first."""
        self._sample: tuple[Callable[[], Tensor | None], Tensor] | None = None
        """The smallest leaf of the first pass, and its values then: a change through ``.data`` leaves its version."""

    def reached(self, leaves: Sequence[Tensor]) -> None:
        """Note the leaves of a pass before the script may change them."""
        for leaf in leaves:
            known = self._leaves.get(id(leaf))
            if known is None or known[0]() is not leaf:
                self._leaves[id(leaf)] = ref(leaf), leaf._version, leaf.data_ptr()
        if self._sample is None and leaves:
            smallest = min(leaves, key=Tensor.numel)
            self._sample = ref(smallest), smallest.detach().clone()

    def made(self, gradients: list[Tensor]) -> None:
        """Record a pass as an update."""
        run = self._run
        self._num += 1
        run.note_left_alone("update", "by hand", "no optimizer object: every backward pass counts as an update")
        if gradients and run.updated(total_norm(gradients)):
            torch._foreach_zero_(gradients)  # the script's own update then changes nothing
        run.update_made(None)

    def optimizer_made(self) -> None:
        """Forget all passes so far if they changed no weight: the script's first optimizer begins its training."""
        run, num, self._num = self._run, self._num, 0
        if not num or run.optimizers or run.observer is not None or self._changed():
            return
        run.left_alone.pop(_BY_HAND, None)
        why = "they changed no weight and the script had no optimizer yet, so they are no steps of its training"
        run.note_left_alone("backward passes", f"{num} before the optimizer", why)
        run.stepped, run.found, run.open_skipped = False, None, False
        run.left_out.forget()
        run.recorder = run.recorder.anew()
        if run.applied is not None and run.recorder.clock.device is not None:
            run.scale = scale_for(run.applied, run.recorder.clock.device, known=True)
        for watcher in run.watchers:
            watcher.began_anew()
        if run.guard is not None:
            run.guard.restart()

    def _changed(self) -> bool:
        """Return whether a leaf that still exists has other values than at its first pass; reads a small one."""
        for find, version, address in self._leaves.values():
            leaf = find()
            if leaf is not None and (leaf._version != version or leaf.data_ptr() != address):
                return True
        if self._sample is None:
            return False
        leaf, before = self._sample[0](), self._sample[1]
        return leaf is not None and not torch.equal(leaf.detach(), before)
