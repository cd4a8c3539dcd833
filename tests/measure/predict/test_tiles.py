"""Cycles of products and attention on tiles, counted by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mezzo.measure.predict.tiles import TiledProducts, attention_cycles, tile_cycles

MULTIPROCESSORS, FLOPS_PER_CYCLE = 100, 1024.0


def _products(
    rows: int, columns: int, depth: int, *, products: int = 1, element_bytes: int = 2, sharing: int = 1
) -> TiledProducts:
    sizes = (products, rows, columns, depth, element_bytes, FLOPS_PER_CYCLE, MULTIPROCESSORS, sharing)
    return TiledProducts(*(np.array([size], dtype=np.float64) for size in sizes))


def _cycles(one: TiledProducts, **constants: Any) -> float:
    return float(tile_cycles(one, **{"feed_bytes": 1e12, "fill_cycles": 0.0} | constants)[0])


@pytest.mark.parametrize(
    ("one", "constants", "cycles"),
    [
        # 100 tiles of 256 x 128: each step of depth 1 has 2 x 256 x 128 FLOPs
        (_products(25_600, 128, 4096), {}, 4096 * 64),
        # twice as many tiles: two waves, each of which fills its units once
        (_products(51_200, 128, 4096), {"fill_cycles": 1000.0}, 2 * (4096 * 64 + 1000)),
        # 50 tiles: the sum in two parts keeps all multiprocessors busy
        (_products(12_800, 128, 4096), {}, 4096 * 32),
        # a short sum is not split: 50 tiles of 256 x 128, or 100 of 128 x 128
        (_products(12_800, 128, 64), {}, 64 * 32),
        # 101 tiles: their steps are dealt out evenly
        (_products(25_856, 128, 4096), {}, 4096 * 64 * 1.01),
        # 16 columns take a tile of 32
        (_products(25_600, 16, 4096), {}, 4096 * 16),
        # a small product pays the fill of one wave
        (_products(64, 32, 64), {"fill_cycles": 1000.0}, 64 * 4 + 1000),
        # 768 bytes a step of 256 x 128, 2 bytes each, at 8 bytes a cycle: 96 cycles, more than the 64 of arithmetic
        (_products(25_600, 128, 4096), {"feed_bytes": 8.0}, 4096 * 96),
        # two multiprocessors share the columns' operand, four the rows' as well
        (_products(25_600, 128, 4096, sharing=2), {"feed_bytes": 8.0}, 4096 * (256 + 64) * 2 / 8),
        (_products(25_600, 128, 4096, sharing=4), {"feed_bytes": 4.0}, 4096 * (128 + 64) * 2 / 4),
        (_products(25_600, 128, 4096, element_bytes=1), {"feed_bytes": 4.0}, 4096 * 96),
        (_products(128, 128, 4096, products=200), {}, 4096 * 64),
    ],
)
def test_cycles_of_the_best_tile(one: TiledProducts, constants: dict[str, float], cycles: float) -> None:
    assert _cycles(one, **constants) == pytest.approx(cycles, rel=1e-6)


def test_many_products_are_priced_in_parts() -> None:
    one, many = _products(300, 200, 500), 45_000
    repeated = TiledProducts(*(np.repeat(value, many) for value in vars(one).values()))
    found = tile_cycles(repeated, feed_bytes=64.0, fill_cycles=3000.0)
    assert len(found) == many
    assert set(found) == {_cycles(one, feed_bytes=64.0, fill_cycles=3000.0)}


def test_a_product_takes_no_less_if_it_is_larger() -> None:
    sizes = [_products(rows, 512, 512) for rows in range(512, 60_000, 997)]
    found = [_cycles(one, feed_bytes=64.0, fill_cycles=3000.0) for one in sizes]
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("blocks", "backward", "cycles"),
    [
        (100, False, 128 * 512 * (4 * 64 / 1024 + 1 / 16)),
        (101, False, 2 * 128 * 512 * (4 * 64 / 1024 + 1 / 16)),
        (100, True, 128 * 512 * (10 * 64 / 1024 + 1 / 16)),
    ],
)
def test_cycles_of_attention(blocks: int, backward: bool, cycles: float) -> None:
    one = _products(100, 512, 64, products=blocks)
    found = _attention(one, backward=backward)
    assert found == pytest.approx(cycles)
    assert _attention(one, backward=backward, fill_cycles=1000.0) - found == pytest.approx(
        1000.0 * np.ceil(blocks / 100)
    )


def _attention(one: TiledProducts, *, backward: bool = False, longest_first: bool = False, **constants: float) -> float:
    flags: dict[str, Any] = {"backward": np.array([backward]), "longest_first": np.array([longest_first])}
    return float(attention_cycles(one, **flags, **{"feed_bytes": 1e12, "fill_cycles": 0.0} | constants)[0])


@pytest.mark.parametrize(("backward", "rows"), [(False, 2), (True, 4)])
def test_a_block_of_an_attention_loads_the_rows_of_its_keys(backward: bool, rows: int) -> None:
    alone, four = (_products(100, 512, 64, products=100, sharing=heads) for heads in (1, 4))
    loaded = 512 * rows * 64 * 2 / 10
    free = _attention(alone, backward=backward)
    assert _attention(alone, backward=backward, feed_bytes=10.0) == pytest.approx(free + loaded)
    assert _attention(four, backward=backward, feed_bytes=10.0) == pytest.approx(free + loaded / 4)


@pytest.mark.parametrize("products", [25, 1])
def test_under_a_causal_mask_the_last_block_is_the_longest(products: int) -> None:
    # 8 blocks of 128 queries for each product; 1,024 keys, of which a query meets 576 on average
    score = 128 * (4 * 64 / 1024 + 1 / 16)
    even, longest = products * 8 / 100 * 576 * score, 1024 * score
    one = _products(1024, 576, 64, products=products)
    assert _attention(one) == pytest.approx(even + longest)
    assert _attention(one, longest_first=True) == pytest.approx(max(even, longest))
