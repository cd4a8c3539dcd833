"""Find the newest snapshot from before a training run went wrong: saved before the evidence began, and with finite weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from mezzo.engine.snapshots.choosing import contents_at
from mezzo.engine.snapshots.folder import SavedSnapshot, saved_in
from mezzo.errors import SnapshotError


def newest_good(
    folder: Path,
    *,
    before: int,
    weights: Callable[[Any], Any],
    read: Callable[[SavedSnapshot], Any] = lambda saved: contents_at(saved.path),
) -> tuple[SavedSnapshot, Any] | None:
    """Return the newest snapshot of fewer than ``before`` updates with finite weights, and its contents; None if there is none.

    Snapshots saved after it are deleted: they belong to the faulty part of the run, and would be loaded as the newest.

    Args:
        folder: the folder of the snapshots.
        before: the first update of the evidence, counting skipped ones.
        weights: returns the part of a snapshot's contents that must be finite.
        read: returns the contents, or raises ``SnapshotError``.
    """
    after: list[SavedSnapshot] = []
    for saved in saved_in(folder):
        if saved.updates < before and not saved.calls:
            try:
                contents = read(saved)
            except SnapshotError:
                continue
            if _finite(weights(contents)):
                for later in after:
                    later.path.unlink(missing_ok=True)
                return saved, contents
        after.append(saved)
    return None


def _finite(tree: Any) -> bool:
    tensors = [tensor for tensor in tree_leaves(tree) if isinstance(tensor, Tensor) and tensor.is_floating_point()]
    # Healthy models have masks of -infinity: only NaN and +infinity are signs of a fault.
    return not any(bool((tensor.isnan() | (tensor == math.inf)).any()) for tensor in tensors)
