"""Shift every seed that a script sets, so that several runs of one script are independent.

Seed k adds k to the values that the script passes to ``torch.manual_seed``, ``torch.cuda.manual_seed[_all]``,
``torch.Generator.manual_seed``, ``random.seed``, ``numpy.random.seed`` and ``numpy.random.default_rng``. Before the
script begins, the global generators get seed k, so that a script that sets no seed is repeatable as well. Seeds from which a library
creates generators in other ways are not shifted (``random.Random(3)``, ``numpy.random.RandomState(3)``, scikit-learn's
``random_state=3``): data sets and their splits stay the same for all seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from mezzo.launch.patches import Patches

_NAMES = ("seed", "a")  # names of the first parameter of the functions that are patched below


def shift_seeds(seed: int, patches: Patches) -> None:
    """Seed Python's, NumPy's and torch's global generators, and add ``seed`` to every seed set from now until ``patches`` are undone."""
    shift_python(seed, patches)
    shift_torch(seed, patches)


def shift_python(seed: int, patches: Patches) -> None:
    """Do the same for Python and NumPy only."""
    random.seed(seed)
    np.random.seed(seed)
    shift = Shift(seed)
    for owner, name in ((random, "seed"), (np.random, "seed"), (np.random, "default_rng")):
        patches.around(owner, name, shift.call)


def shift_torch(seed: int, patches: Patches) -> None:
    """Do the same for torch only; imports torch."""
    import torch

    # torch's class is immutable, so a subclass takes its name.
    class Generator(torch.Generator):
        def manual_seed(self, value: int) -> torch.Generator:
            return super().manual_seed(value + seed)

    torch.manual_seed(seed)
    shift = Shift(seed)
    for owner, name in (
        (torch, "manual_seed"),
        (torch.random, "manual_seed"),
        (torch.cuda, "manual_seed"),
        (torch.cuda, "manual_seed_all"),
    ):
        patches.around(owner, name, shift.call)
    patches.replace(torch, "Generator", Generator)


class Shift:
    """A shift of seeds in outermost calls only: ``torch.manual_seed`` itself calls ``torch.cuda.manual_seed_all``."""

    def __init__(self, by: int) -> None:
        self._by, self._inside = by, False

    def call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a seed function with the shift added to its first argument."""
        if self._inside:
            return original(*args, **kwargs)
        self._inside = True
        try:
            return original(
                *map(self._shifted, args[:1]),
                *args[1:],
                **{name: self._shifted(value) if name in _NAMES else value for name, value in kwargs.items()},
            )
        finally:
            self._inside = False

    def _shifted(self, value: Any) -> Any:
        return value + self._by if isinstance(value, (int, np.integer)) else value
