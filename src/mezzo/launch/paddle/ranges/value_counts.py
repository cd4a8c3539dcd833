"""Count the values of Paddle tensors by exponent with NumPy, in tables laid out as in ``mezzo.engine.kernels.exponent_bins``."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mezzo.engine.kernels.exponent_bins import BINS, CELLS, CUTS, FIRST_EXPONENT, ROWS
from mezzo.formats import FP32

Table: TypeAlias = npt.NDArray[np.int64]


def counted(values: npt.NDArray[Any]) -> Table:
    """Return the counts of ``values`` by exponent and cell; FP64 is rounded to FP32 first."""
    with np.errstate(over="ignore", under="ignore"):
        magnitudes = np.abs(values.astype(np.float32).ravel())
    finite = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]
    fractions, exponents = np.frexp(finite.astype(np.float64))
    mantissas = ((2.0 * fractions - 1.0) * 2**FP32.mantissa_bits).astype(np.int64)
    rows = exponents.astype(np.int64) - FIRST_EXPONENT  # row 0 is for zeros, and frexp's exponent is one too large
    bins = rows * CELLS + np.searchsorted(np.array(CUTS), mantissas, side="right")
    table = np.bincount(bins, minlength=BINS).astype(np.int64)
    table[0] += int((magnitudes == 0).sum())
    table[(ROWS - 1) * CELLS] += int(np.isinf(magnitudes).sum())
    table[(ROWS - 1) * CELLS + 1] += int(np.isnan(magnitudes).sum())
    return table


class Tally:
    """Tables by name; those of the open step are separate until ``keep``."""

    def __init__(self) -> None:
        self.kept: dict[Any, Table] = {}
        self._open: dict[Any, Table] = {}

    def add(self, key: Any, table: Table) -> None:
        """Add counts of the open step under ``key``."""
        self._open[key] = self._open.get(key, 0) + table

    def keep(self) -> None:
        """Keep the counts of the open step."""
        for key, table in self._open.items():
            self.kept[key] = self.kept.get(key, 0) + table
        self._open = {}

    def forget(self) -> None:
        """Discard the counts of the open step."""
        self._open = {}
