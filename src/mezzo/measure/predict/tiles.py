"""Cycles of matrix products on the multiprocessors of a GPU, by the tile that a library would choose.

A product is cut into tiles of results. Each multiprocessor computes one tile at a time, in steps along the sum::

    cycles of a step = the longer of   2 x rows x columns / FLOPs per cycle   and   (rows + columns) x bytes / feed
    cycles           = waves x (steps x cycles of a step + fill)

Large tiles load less for each FLOP; small ones waste less at the edges of the result and in the last wave, which leaves multiprocessors
idle. Multiprocessors that share their loads need fewer bytes each. Where there are fewer tiles than multiprocessors, the sum is split and
its parts are added; or the steps of all tiles are dealt out evenly (stream-K: Osama et al. 2023, arXiv 2301.03598). A library has kernels
for all of these and chooses well, so the least of their times is taken.

Fused attention works on 128 queries at a time and meets all of their keys, which it loads. The exponential of each score runs in units of
their own, 16 a cycle (CUDA's programming guide), between two products: none of these overlap (Dao 2023, arXiv 2307.08691). Under a causal
mask the last queries meet the most keys. FlashAttention 2 begins with the first queries, so a long block may run alone at the end; its
backward pass and FlashAttention 3 begin with the longest blocks.

Limits: one tile at a time on a multiprocessor, loads without conflicts, and no rest of a tile that a smaller kernel computes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mezzo.measure.predict.tape import ATTENTION_ROWS

Array: TypeAlias = NDArray[np.float64]
_TILES = ((256, 128), (128, 128), (128, 64), (128, 32), (64, 64), (64, 32))
"""Rows and columns; the longer side of the tile lies along the longer side of the result."""
_SPLITS = (1, 2, 4, 8, 16, 64)
_EVENLY = 0
"""Stands for steps that are dealt out evenly, beside the numbers of parts of a sum."""
_STEPS = 64
"""The shortest part of a sum."""
_PARTIAL_BYTES = 2 * 4
"""A result of a part is written and read in FP32."""
_EXPONENTIALS = 16
"""Exponentials of one multiprocessor in a cycle."""
_ROWS_AT_ONCE = 20_000
"""Products whose choices are priced together: 42 numbers each."""


@dataclass(frozen=True)
class TiledProducts:
    """Matrix products as columns: (rows, depth) x (depth, columns), ``products`` times."""

    products: Array
    rows: Array
    columns: Array
    depth: Array
    element_bytes: Array
    flops_per_cycle: Array
    """Of one multiprocessor."""
    multiprocessors: Array
    sharing: Array
    """Multiprocessors that share what they load; of an attention, heads that do."""

    def where(self, chosen: NDArray[np.bool_] | slice) -> TiledProducts:
        """Return the chosen ones."""
        return TiledProducts(*(getattr(self, f.name)[chosen] for f in fields(self)))


def tile_cycles(products: TiledProducts, *, feed_bytes: float, fill_cycles: float) -> Array:
    """Return the cycles of each product, with the best tile for it.

    Args:
        products: with at least as many rows as columns.
        feed_bytes: what one multiprocessor loads in a cycle.
        fill_cycles: cycles of a tile in which its units wait.
    """
    found = np.empty_like(products.rows)
    for start in range(0, len(found), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        choices = [
            _cycles(products.where(part), tile, split, feed_bytes, fill_cycles)
            for tile in _TILES
            for split in (*_SPLITS, _EVENLY)
        ]
        found[part] = np.min(choices, axis=0)
    return found


def _cycles(p: TiledProducts, tile: tuple[int, int], split: int, feed_bytes: float, fill_cycles: float) -> Array:
    rows, columns = tile
    # a pair shares along the columns, two pairs along the rows as well
    loaded = rows / np.maximum(1, p.sharing / 2) + columns / np.minimum(p.sharing, 2)
    step = np.maximum(2 * rows * columns / p.flops_per_cycle, loaded * p.element_bytes / feed_bytes)
    tiles = p.products * np.ceil(p.rows / rows) * np.ceil(p.columns / columns)
    if split == _EVENLY:
        waves = np.maximum(tiles / p.multiprocessors, _STEPS / p.depth)
        fills, depth = np.ceil(waves) + 1, p.depth
        parts = np.minimum(p.multiprocessors / tiles, p.depth / _STEPS)
    else:
        waves = np.ceil(tiles * split / p.multiprocessors)
        fills, depth = waves, p.depth / split
        parts = np.full_like(tiles, split)
    partial_bytes = np.where(parts > 1, parts * p.products * p.rows * p.columns * _PARTIAL_BYTES, 0.0)
    steps: Array = waves * step * np.maximum(_STEPS, depth) + fills * fill_cycles
    return steps + partial_bytes / (p.multiprocessors * feed_bytes)


def attention_cycles(
    products: TiledProducts,
    backward: NDArray[np.bool_],
    *,
    feed_bytes: float,
    fill_cycles: float,
    longest_first: NDArray[np.bool_],
) -> Array:
    """Return the cycles of fused attentions.

    Args:
        products: of queries and keys; columns are the keys that a query meets on average.
        backward: which of them are backward passes, of five products rather than two.
        feed_bytes: what one multiprocessor loads in a cycle.
        fill_cycles: cycles of a block in which its units wait.
        longest_first: which of them start with the blocks that meet the most keys.
    """
    p = products
    score = ATTENTION_ROWS * (np.where(backward, 10, 4) * p.depth / p.flops_per_cycle + 1 / _EXPONENTIALS)
    # a block loads two rows for each of its keys; a backward pass also adds to the queries' gradients
    score = score + np.where(backward, 4, 2) * p.depth * p.element_bytes / (p.sharing * feed_bytes)
    # under a causal mask the last queries meet all keys
    causal = (p.rows > ATTENTION_ROWS) & (p.columns == (p.rows + ATTENTION_ROWS) // 2)
    longest = np.where(causal, p.rows, p.columns) * score + fill_cycles
    waves = p.products * np.ceil(p.rows / ATTENTION_ROWS) / p.multiprocessors
    even = waves * (p.columns * score + fill_cycles)
    uneven = np.where(longest_first, np.maximum(even, longest), even + longest)
    result: Array = np.where(causal, uneven, np.ceil(waves) * longest)
    return result
