"""Shift every seed that a Paddle script sets: ``paddle.seed``, python's and NumPy's, as ``mezzo.launch.seeds`` does for torch."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from mezzo.launch.patches import Patches


def shift_seeds(seed: int, patches: Patches) -> None:
    """Seed the global generators with ``seed``, and add it to every seed set from now until ``patches`` are undone."""
    random.seed(seed)
    np.random.seed(seed)
    paddle.seed(seed)
    places: list[tuple[Any, str]] = [
        (random, "seed"),
        (np.random, "seed"),
        (np.random, "default_rng"),
        (paddle, "seed"),
        (paddle.framework, "seed"),
        (paddle.framework.random, "seed"),
    ]
    for owner, name in places:
        patches.wrap(owner, name, lambda original: _shifted(original, by=seed))


def _shifted(original: Callable[..., Any], *, by: int) -> Callable[..., Any]:
    def shift(value: Any) -> Any:
        return value + by if isinstance(value, (int, np.integer)) else value

    @functools.wraps(original)
    def seed(*args: Any, **kwargs: Any) -> Any:
        shifted = {name: shift(value) if name in ("seed", "a") else value for name, value in kwargs.items()}
        return original(*map(shift, args[:1]), *args[1:], **shifted)

    return seed
