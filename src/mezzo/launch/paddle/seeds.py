"""Shift every seed that a Paddle script sets, for ``paddle.seed``, Python and NumPy; the counterpart for torch is ``launch.seeds``."""

from __future__ import annotations

import paddle

from mezzo.launch.patches import Patches
from mezzo.launch.seeds import Shift, shift_python


def shift_seeds(seed: int, patches: Patches) -> None:
    """Seed the global generators with ``seed``, and add it to every seed set from now until ``patches`` are undone."""
    shift_python(seed, patches)
    paddle.seed(seed)
    shift = Shift(seed)
    for owner in (paddle, paddle.framework, paddle.framework.random):
        patches.around(owner, "seed", shift.call)
