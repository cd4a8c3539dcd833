"""Three real processes against the same sums computed directly: formats, divisors, scales, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import exchange_runs
from exchange_runs import WORLD, gradient
from mezzo.engine.processes.exchange import divisors
from mezzo.formats import BF16, FORMATS, FP16, FP32, Format
from processes import left_by_ranks

DIVISORS: list[tuple[Format, int, float, float]] = [
    # before and after the sum; their product is the number of processes
    (FP32, 3, 3, 1),
    (BF16, 384, 384, 1),
    (FP16, 2, 2, 1),
    (FP16, 3, 2, 1.5),
    (FP16, 8, 4, 2),
    (FP16, 384, 32, 12),
    (FP16, 1024, 32, 32),
]


@pytest.mark.parametrize(("fmt", "size", "before", "after"), DIVISORS)
def test_what_gradients_are_divided_by(fmt: Format, size: int, before: float, after: float) -> None:
    assert divisors(fmt, size) == (before, after)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> list[dict[str, Any]]:
    """Return what three processes found, by scene."""
    return left_by_ranks(exchange_runs.__file__, WORLD, tmp_path_factory, worker_id)


def sums(reduce: str, size: float, scale: float) -> list[Tensor]:
    """Return the averages of the processes' gradients, one for each order in which three numbers can be added in the format."""
    dtype = FORMATS[reduce].dtype
    before = 2.0 if reduce == "fp16" else 3.0
    sent = [(gradient(rank, size) * (scale / before)).to(dtype) for rank in range(WORLD)]
    found = []
    for one, two, three in itertools.permutations(sent):
        partial = (one.double() + two.double()).to(dtype)
        found.append((partial.double() + three.double()).to(dtype).double() * (before / 3.0 / scale))
    return found


AVERAGED = {
    # format, size of the gradients, loss scale
    "session fp32": ("fp32", 1.0, 1.0),
    "session bf16": ("bf16", 1.0, 1.0),
    "session fp16": ("fp16", 1.0, 1.0),
    "session fp16, small": ("fp16", 2.0**-28, 65536.0),
    "session short window": ("bf16", 1.0, 1.0),
    "script fp32": ("fp32", 1.0, 1.0),
    "script bf16": ("bf16", 1.0, 1.0),
    "script fp16": ("fp16", 1.0, 1.0),
    "script fp16, small": ("fp16", 2.0**-28, 65536.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AVERAGED)
def test_gradients_are_rounded_and_summed_in_the_format(name: str, results: list[dict[str, Any]]) -> None:
    found = [result[name][0] for result in results]
    assert all(torch.equal(one, found[0]) for one in found)
    reduce, size, scale = AVERAGED[name]
    orders = sums(reduce, size, scale)
    # A division by 3 is not the product with a third: a few elements in a hundred differ by a unit of the format.
    near = torch.stack([((found[0] - order).abs() <= 1e-6 * order.abs()) for order in orders]).any(dim=0)
    assert near.double().mean() > 0.97
    exact = sum(gradient(rank, size).double() for rank in range(WORLD)) / WORLD
    if reduce != "fp32":
        assert not torch.allclose(found[0].double(), exact, rtol=1e-6, atol=0.0)
    assert float((found[0] - exact).norm() / exact.norm()) < 2 * FORMATS[reduce].eps


@pytest.mark.slow
@pytest.mark.parametrize("name", ["session shards", "script shards"])
def test_shards_are_summed_in_the_format(name: str, results: list[dict[str, Any]]) -> None:
    found, *others = (result[name][0] for result in results)
    assert all(torch.equal(one, found) for one in others)
    exact = sum(gradient(rank, 1.0).double() for rank in range(WORLD)) / WORLD
    assert 1e-4 < float((found - exact).norm() / exact.norm()) < 2 * BF16.eps


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["session", "script"])
def test_an_overflow_of_one_process_is_skipped_by_all(kind: str, results: list[dict[str, Any]]) -> None:
    assert [int(result[f"{kind} fp16, overflow"][1]) for result in results] == [1] * WORLD
    if kind == "script":  # what overflowed is NaN, which a clamp would not hide
        gradients = results[0]["script fp16, overflow"][0]
        assert not gradients.isinf().any()
        assert gradients.isnan().any()


@pytest.mark.slow
def test_a_hook_of_the_script_is_kept(results: list[dict[str, Any]]) -> None:
    found, _, left = results[0]["script's own hook"]
    exact = sum(gradient(rank, 1.0) for rank in range(WORLD)) / WORLD
    assert torch.allclose(found, exact, rtol=1e-5, atol=1e-6)
    assert left == ["reduce bf16: the script's own communication hook decides the format"]


SUMS = (
    "policy fp32:gradients=bf16 emulates sums of gradients in one process, and 3 train; allowed: one process\n"
    "  hint: try this policy in one process, and leave gradients out with several"
)
REFUSED = {
    "a session's sums": SUMS,
    "a script's sums": SUMS,
    "a session's world": "policy fp32:reduce=bf16:world=8 emulates 8 processes, and 3 real ones train; allowed: one process\n"
    "  hint: leave world out: real processes reduce in the format themselves",
    "a script's world": "policy fp32:reduce=bf16:world=8 emulates 8 processes, and 3 real ones train; allowed: one process\n"
    "  hint: leave world out: real processes reduce in the format themselves",
    "a hook of its own": "policy fp32:reduce=bf16 reduces in bf16, and DistributedDataParallel has a communication hook of its own, "
    "which decides the format\n  hint: leave reduce out of the policy, or the hook out of the script",
    "other shards": "policy bf16:reduce=bf16 says reduce=bf16, and fully_shard was called with reduce_dtype=torch.float32\n"
    "  hint: pass mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) to fully_shard, or leave reduce out",
    "other gathering": "policy bf16:gather=bf16 says gather=bf16, and fully_shard was called with param_dtype=torch.float32\n"
    "  hint: pass mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16) to fully_shard, or leave gather out",
    "shards in FP16": "policy fp16:reduce=fp16 reduces in fp16, and fully_shard reduces gradients whose loss scale was taken out: "
    "small ones would be lost; allowed with fully_shard: fp32, bf16\n"
    "  hint: use reduce=bf16, or a mezzo.Session in the script, which reduces scaled gradients",
    "old shards": "policy fp32:reduce=bf16 sets formats of gradients or weights, and the script uses FullyShardedDataParallel; allowed: "
    "DistributedDataParallel and fully_shard\n"
    "  hint: use fully_shard, or leave reduce, gather and gradients out and pass mixed_precision=MixedPrecision(...) in the script",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exchanged_so_is_refused(name: str, results: list[dict[str, Any]]) -> None:
    assert [result[f"refused: {name}"] for result in results] == [REFUSED[name]] * WORLD
