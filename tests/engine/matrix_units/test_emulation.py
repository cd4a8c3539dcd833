"""Emulated arithmetic against native half kernels where they add in FP32, and against float64 rounded once everywhere.

torch 2.13's half kernels for CPUs round partial sums to 16 bits, which GPU kernels do not, in: the gradients of convolutions, transposed
convolutions, sums over a broadcast batch, ``addbmm``, ``addr``, products of three matrices, attention and recurrent layers. There only
float64 is a yardstick. Everywhere else the emulation is held to both.
"""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from helpers_engine import casting, randn, same_bits, saved_bytes, tensors, ulps
from mezzo.engine.matrix_units.emulation import float8_linear
from mezzo.formats import RECIPES

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
POLICIES = {FP16: "fp16:arithmetic=emulated", BF16: "bf16:arithmetic=emulated"}  # some CPUs have native BF16
_VF: Any = torch._C._VariableFunctions
Op = Callable[..., Any]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


# --- every emulated operation ----------------------------------------------------------------------------------------


def recurrent(kind: str, *, bidirectional: bool = False, batch_first: bool = False) -> Op:
    def run(x: Tensor, hidden: Tensor, *rest: Tensor) -> Any:
        state: Any = (hidden, rest[0]) if kind == "lstm" else hidden
        weights = list(rest[1:] if kind == "lstm" else rest)
        return getattr(_VF, kind)(x, state, weights, True, 1, 0.0, True, bidirectional, batch_first)

    return run


def gates(count: int, *, sides: int = 1) -> list[tuple[int, ...]]:
    return [(count * 3, 5), (count * 3, 3), (count * 3,), (count * 3,)] * sides


def lstm_cell(x: Tensor, hidden: Tensor, cell: Tensor, *weights: Tensor) -> Any:
    return torch.lstm_cell(x, (hidden, cell), *weights)


CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()
ROUNDED = randn(6, 6, seed=5).half().bfloat16()
HEADS = [(2, 2, 6, 8)] * 3
attend = F.scaled_dot_product_attention


def einsum(text: str) -> Op:
    return partial(torch.einsum, text)


def transposed_product(a: Tensor, b: Tensor) -> Tensor:
    return a.T.mm(b.T)


def of_channels_last(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x.contiguous(memory_format=torch.channels_last), w)


def learnt_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return attend(q, k, v, bias)


BOTH = "results gradients"
wider = partial(F.conv_transpose2d, stride=2, padding=1, output_padding=1)
IMAGES, FEW = [(2, 3, 6, 6), (4, 3, 3, 3), (4,)], [(2, 3, 5, 5), (4, 3, 2, 4), (4,)]
PAIRS = [(2, 2, 5, 8), (2, 2, 6, 8)]
GROUPED = [(2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)]
grouped_queries = partial(attend, enable_gqa=True)

# family: name: operation, shapes of its operands, what torch's half kernels add up in FP32 (results, gradients, both or neither)
CASES: dict[str, dict[str, tuple[Op, list[tuple[int, ...]], str]]] = {
    "matmul": {
        "linear": (F.linear, [(9, 8), (7, 8)], BOTH),
        "linear with bias": (F.linear, [(2, 3, 8), (7, 8), (7,)], BOTH),
        "linear of a vector": (F.linear, [(8,), (7, 8), (7,)], BOTH),
        "linear to one feature": (F.linear, [(3, 8), (8,)], BOTH),
        "mm": (torch.mm, [(9, 8), (8, 7)], BOTH),
        "mm of transposed": (transposed_product, [(8, 9), (7, 8)], BOTH),
        "bmm": (torch.bmm, [(3, 5, 8), (3, 8, 6)], BOTH),
        "mv": (torch.mv, [(9, 8), (8,)], BOTH),
        "matmul 1-D 1-D": (torch.matmul, [(8,), (8,)], BOTH),
        "matmul 1-D 2-D": (torch.matmul, [(8,), (8, 5)], BOTH),
        "matmul 2-D 1-D": (torch.matmul, [(5, 8), (8,)], BOTH),
        "matmul 1-D 3-D": (torch.matmul, [(8,), (3, 8, 5)], BOTH),
        "matmul 3-D 1-D": (torch.matmul, [(3, 5, 8), (8,)], BOTH),
        "matmul 2-D 2-D": (lambda a, b: a @ b, [(5, 8), (8, 4)], BOTH),
        "matmul 3-D 2-D": (torch.matmul, [(3, 5, 8), (8, 4)], BOTH),
        "matmul 2-D 3-D": (torch.matmul, [(5, 8), (3, 8, 4)], BOTH),
        "matmul 3-D 3-D": (torch.matmul, [(3, 5, 8), (3, 8, 4)], BOTH),
        "matmul 4-D 4-D": (torch.matmul, [(2, 3, 5, 8), (2, 3, 8, 4)], BOTH),
        "matmul broadcast": (torch.matmul, [(2, 1, 5, 8), (3, 8, 4)], "results"),
        "addmm": (torch.addmm, [(5, 6), (5, 8), (8, 6)], BOTH),
        "addmm of a row, scaled": (partial(torch.addmm, beta=0.5, alpha=2), [(6,), (5, 8), (8, 6)], BOTH),
        "baddbmm": (torch.baddbmm, [(2, 5, 6), (2, 5, 8), (2, 8, 6)], BOTH),
        "addbmm": (torch.addbmm, [(5, 6), (2, 5, 8), (2, 8, 6)], "gradients"),
        "addmv": (torch.addmv, [(5,), (5, 8), (8,)], BOTH),
        "addr": (torch.addr, [(5, 6), (5,), (6,)], "gradients"),
        "einsum bik,bkj->bij": (einsum("bik,bkj->bij"), [(2, 5, 8), (2, 8, 6)], BOTH),
        "einsum bhqd,bhkd->bhqk": (einsum("bhqd,bhkd->bhqk"), PAIRS, BOTH),
        "einsum ij,jk->ki": (einsum("ij,jk->ki"), [(5, 8), (8, 6)], BOTH),
        "einsum i,j->ij": (einsum("i,j->ij"), [(5,), (6,)], "results"),
        "einsum ij,jk,kl->il": (einsum("ij,jk,kl->il"), [(5, 8), (8, 6), (6, 3)], ""),
        "multi_dot": (lambda *m: torch.linalg.multi_dot(m), [(5, 8), (8, 6), (6, 3)], ""),
    },
    "conv": {
        "1d": (F.conv1d, [(2, 4, 9), (6, 4, 3), (6,)], "results"),
        "2d": (F.conv2d, IMAGES, "results"),
        "2d without bias": (F.conv2d, IMAGES[:2], "results"),
        "3d": (F.conv3d, [(1, 2, 4, 4, 4), (3, 2, 2, 2, 2), (3,)], "results"),
        "stride and padding": (partial(F.conv2d, stride=2, padding=1), IMAGES, "results"),
        "stride and padding of two kinds": (partial(F.conv2d, stride=(1, 2), padding=(2, 0)), IMAGES[:2], "results"),
        "same": (partial(F.conv2d, padding="same"), IMAGES, "results"),
        "same, even and dilated": (partial(F.conv2d, padding="same", dilation=(1, 2)), FEW, "results"),
        "valid": (partial(F.conv1d, padding="valid"), [(2, 3, 5), (4, 3, 2), (4,)], "results"),
        "dilated": (partial(F.conv2d, dilation=2), [(2, 3, 6, 6), (4, 3, 2, 2)], "results"),
        "groups": (partial(F.conv2d, groups=2), [(2, 4, 5, 5), (6, 2, 3, 3)], "results"),
        "depthwise": (partial(F.conv2d, groups=4), [(2, 4, 5, 5), (4, 1, 3, 3), (4,)], "results"),
        "unbatched": (F.conv2d, [(3, 6, 6), (4, 3, 3, 3), (4,)], "results"),
        "channels_last": (of_channels_last, IMAGES[:2], "results"),
        "tbc": (partial(torch.conv_tbc, pad=1), [(5, 2, 3), (3, 3, 4), (4,)], ""),
        "transposed 1d": (F.conv_transpose1d, [(2, 3, 5), (3, 4, 3), (4,)], ""),
        "transposed 2d": (wider, [(2, 3, 4, 4), (3, 4, 3, 3), (4,)], ""),
        "transposed 2d of groups": (
            partial(F.conv_transpose2d, groups=2, dilation=2),
            [(2, 4, 4, 4), (4, 3, 2, 2)],
            "",
        ),
        "transposed 3d": (F.conv_transpose3d, [(1, 2, 3, 3, 3), (2, 3, 2, 2, 2)], ""),
        "transposed unbatched": (F.conv_transpose1d, [(3, 5), (3, 4, 3)], ""),
    },
    "attention": {
        "grouped queries": (grouped_queries, GROUPED, ""),
        "3-D": (attend, [(2, 6, 8)] * 3, ""),
        "values of another width": (attend, [(2, 2, 6, 8), (2, 2, 6, 8), (2, 2, 6, 4)], ""),
        "learnt bias": (learnt_bias, [*HEADS, (2, 2, 6, 6)], ""),
        "mask of three dimensions": (partial(attend, attn_mask=CAUSAL[None]), HEADS, ""),
    },
    "rnn": {
        "lstm": (recurrent("lstm"), [(4, 2, 5), (1, 2, 3), (1, 2, 3), *gates(4)], ""),
        "both ways": (recurrent("lstm", bidirectional=True), [(4, 2, 5), *[(2, 2, 3)] * 2, *gates(4, sides=2)], ""),
        "gru": (recurrent("gru"), [(4, 2, 5), (1, 2, 3), *gates(3)], ""),
        "gru batch first": (recurrent("gru", batch_first=True), [(2, 4, 5), (1, 2, 3), *gates(3)], ""),
        "rnn_tanh": (recurrent("rnn_tanh"), [(4, 2, 5), (1, 2, 3), *gates(1)], ""),
        "rnn_relu": (recurrent("rnn_relu"), [(4, 2, 5), (1, 2, 3), *gates(1)], ""),
        "lstm_cell": (lstm_cell, [(2, 5), (2, 3), (2, 3), *gates(4)], ""),
        "gru_cell": (torch.gru_cell, [(2, 5), (2, 3), *gates(3)], ""),
        "rnn_tanh_cell": (torch.rnn_tanh_cell, [(2, 5), (2, 3), *gates(1)], ""),
        "rnn_relu_cell": (torch.rnn_relu_cell, [(2, 5), (2, 3), *gates(1)], ""),
    },
    "prelu": {
        "one weight": (torch.prelu, [(3, 4), (1,)], "results"),
        "a weight a channel": (F.prelu, [(3, 4), (4,)], "results"),
    },
}


def operands(shapes: list[tuple[int, ...]], low: torch.dtype, dtype: torch.dtype, *, draw: int = 0) -> list[Tensor]:
    return [randn(*s, seed=100 * draw + i).to(low).to(dtype).requires_grad_() for i, s in enumerate(shapes)]


def results_and_gradients(op: Op, given: list[Tensor], low: torch.dtype, region: Any = None) -> dict[str, list[Tensor]]:
    if region is None:
        results = tensors(op(*given))
    else:
        with region:
            results = tensors(op(*given))
    starts = [randn(*r.shape, seed=90 + i).to(low).to(r.dtype) for i, r in enumerate(results)]
    return {"results": [r.detach() for r in results], "gradients": list(torch.autograd.grad(results, given, starts))}


def emulated(op: Op, shapes: list[tuple[int, ...]], low: torch.dtype, *, draw: int = 0) -> dict[str, list[Tensor]]:
    return results_and_gradients(op, operands(shapes, low, low, draw=draw), low, casting(POLICIES[low]).region())


def agreement(ours: list[Tensor], others: list[Tensor]) -> tuple[int, int]:
    """Return how many elements are equal to the bit and how many there are; fail where one is further off than one unit."""
    same = total = 0
    for mine, other in zip(ours, others, strict=True):
        apart = ulps(mine, other)
        # Where large terms cancel, the order of FP32 sums shows in more than one unit of what is left.
        rounding = (mine.float() - other.float()).abs() <= 1e-6 * other.float().abs().max()
        assert ((apart <= 1) | rounding).all()
        same, total = same + int((apart == 0).sum()), total + mine.numel()
    return same, total


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("low", POLICIES, ids=str)
@pytest.mark.parametrize("family", CASES)
def test_float64_rounded_once(family: str, low: torch.dtype) -> None:
    same = total = 0
    draws = {"rnn": 4, "attention": 4}.get(family, 1)  # the FP32 exponentials in them are not the same on all machines
    for (op, shapes, _), draw in itertools.product(CASES[family].values(), range(draws)):
        ours = emulated(op, shapes, low, draw=draw)
        exact = results_and_gradients(op, operands(shapes, low, FP64, draw=draw), low)
        for part in ("results", "gradients"):
            assert {t.dtype for t in ours[part]} == {low}
            found = agreement(ours[part], [t.to(low) for t in exact[part]])
            same, total = same + found[0], total + found[1]
    assert same >= 0.997 * total
    assert total > 25


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("low", POLICIES, ids=str)
@pytest.mark.parametrize("family", ["matmul", "conv", "prelu"])
def test_native_half_kernels_that_add_in_fp32(family: str, low: torch.dtype) -> None:
    same = total = 0
    for op, shapes, parts in CASES[family].values():
        ours = emulated(op, shapes, low) if parts else {}
        native = results_and_gradients(op, operands(shapes, low, low), low) if parts else {}
        for part in parts.split():
            found = agreement(ours[part], native[part])
            same, total = same + found[0], total + found[1]
    assert same >= 0.997 * total
    assert total >= {"matmul": 3500, "conv": 1300, "prelu": 24}[family]


def flash_by_hand(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, mask: Tensor | None, scale: float | None
) -> dict[str, list[Tensor]]:
    """Compute attention in float64 with the one thing that flash attention rounds on its way: the result kept for the backward pass."""
    low, factor = q.dtype, 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    q, k, v, start = (t.detach().double() for t in (q, k, v, start))
    scores = q @ k.mT * factor
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask.double()
    p = scores.softmax(-1)
    out = (p @ v).to(low)
    inner = start @ v.mT - (start * out.double()).sum(-1, keepdim=True)
    scored = p * inner * factor
    grads = [scored @ k, scored.mT @ q, p.mT @ start]
    return {"results": [out], "gradients": [g.to(low) for g in grads]}


FLASH: dict[str, tuple[dict[str, Any], Tensor | None, float | None]] = {
    "plain": ({}, None, None),
    "scale": ({"scale": 0.5}, None, 0.5),
    "causal": ({"is_causal": True}, CAUSAL, None),
    "bool mask": ({"attn_mask": CAUSAL}, CAUSAL, None),
    "bool mask of four dimensions": ({"attn_mask": CAUSAL[None, None]}, CAUSAL, None),
    "float mask": ({"attn_mask": ROUNDED}, ROUNDED, None),
    "float mask and scale": ({"attn_mask": ROUNDED[None, None], "scale": 0.3}, ROUNDED, 0.3),
}


@pytest.mark.parametrize("low", POLICIES, ids=str)
def test_flash_attention(low: torch.dtype) -> None:
    same = total = 0
    for settings, mask, scale in FLASH.values():
        settings = {k: v.to(low) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in settings.items()}
        given = operands(HEADS, low, low)
        ours = results_and_gradients(
            lambda q, k, v, s=settings: attend(q, k, v, **s), given, low, casting(POLICIES[low]).region()
        )
        hand = flash_by_hand(
            *given,
            randn(2, 2, 6, 8, seed=90).to(low),
            None if mask is None else mask.to(low) if mask.is_floating_point() else mask,
            scale,
        )
        for part in ("results", "gradients"):
            found = agreement(ours[part], hand[part])
            same, total = same + found[0], total + found[1]
    assert same >= 0.99 * total  # the kernel's FP32 exponentials are not the same on all CPUs
    assert total == len(FLASH) * 4 * 192


def test_attention_with_dropout_draws_once() -> None:
    q, k, v = (t.requires_grad_() for t in (randn(1, 2, 6, 8), randn(1, 2, 6, 8, seed=1), randn(1, 2, 6, 8, seed=2)))
    torch.manual_seed(7)
    with casting("fp16").region():
        out = attend(q, k, v, dropout_p=0.5)
    grads = torch.autograd.grad(out.float().sum(), [q, k, v])
    torch.manual_seed(7)
    wide = [t.detach().half().float().requires_grad_() for t in (q, k, v)]
    reference = attend(*wide, dropout_p=0.5)
    assert torch.equal(out, reference.half())
    wanted = torch.autograd.grad(reference.sum(), wide)
    torch.testing.assert_close(list(grads), list(wanted), rtol=2e-3, atol=2e-3)


def test_recurrent_layers_with_dropout_draw_once() -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.LSTM(5, 3, 2, dropout=0.5), randn(4, 2, 5)
    torch.manual_seed(7)
    with casting("fp16").region():
        out, _ = layer(x)
    grads = torch.autograd.grad(out.float().sum(), list(layer.parameters()))
    torch.manual_seed(7)
    reference, _ = layer(x)
    torch.testing.assert_close(out.float(), reference, rtol=1e-2, atol=1e-2)
    wanted = torch.autograd.grad(reference.sum(), list(layer.parameters()))
    torch.testing.assert_close(list(grads), list(wanted), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        (torch.mm, [(2, 3, 4), (4, 5)]),
        (torch.mm, [(3, 4), (3, 5)]),
        (torch.bmm, [(1, 3, 4), (2, 4, 5)]),
        (torch.bmm, [(3, 4), (4, 5)]),
        (torch.mv, [(3, 4), (4, 1)]),
        (F.linear, [(3, 4), (5, 3)]),
        (F.conv2d, [(1, 3, 4, 4), (2, 2, 3, 3)]),
    ],
)
def test_what_torch_refuses_is_refused(op: Op, shapes: list[tuple[int, ...]]) -> None:
    given = [randn(*shape) for shape in shapes]
    with pytest.raises(RuntimeError):
        op(*given)
    with pytest.raises(RuntimeError), casting("fp16").region():
        op(*given)


# --- range ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", POLICIES, ids=str)
def test_results_and_gradients_overflow_and_underflow_as_casts_do(low: torch.dtype) -> None:
    """Sums around the format's largest and smallest value, each against a real cast of the float64 sum."""
    ends = torch.finfo(low)
    half_step = ends.max * ends.eps / 2  # max + half_step is where rounding to infinity begins
    tiny = ends.smallest_normal * ends.eps
    targets = [ends.max, ends.max + 0.99 * half_step, ends.max + 1.01 * half_step, 4 * ends.max]
    targets += [ends.smallest_normal, tiny, 0.51 * tiny, 0.49 * tiny, 0.5 * tiny, -1.5 * ends.max]
    seen = set()
    root = math.sqrt(2.0 ** math.floor(math.log2(ends.max)))
    for target in targets:
        big = abs(target) > 1
        a = torch.tensor([[root if big else 2.0**-10, root / 2**12 if big else 0.0]], dtype=FP64).to(low)
        wanted = target / a[0, 0].double()
        first = wanted.to(low)
        rest = (
            torch.zeros((), dtype=FP64) if not big else (target - a[0, 0].double() * first.double()) / a[0, 1].double()
        )
        b = torch.stack([first, rest.to(low)])[:, None]
        exact = (a.double() @ b.double()).to(low)
        seen.add(exact.item())
        x, w = a.clone().requires_grad_(), b.clone().requires_grad_()
        with casting(POLICIES[low]).region():
            y = x @ w
        assert torch.equal(y, exact)
        # The same numbers as a gradient: d(x w)/dx for the cotangent a against the weight b.
        z = torch.zeros(1, 1, dtype=low, requires_grad=True)
        with casting(POLICIES[low]).region():
            out = z @ b.T
        (grad,) = torch.autograd.grad(out, z, a)
        assert torch.equal(grad, exact)
    assert seen == {ends.max, math.inf, -math.inf, ends.smallest_normal, tiny, 0.0}


def test_the_numbers_of_fp16s_ends() -> None:
    with casting("fp16").region():
        sums = (
            torch.tensor([[32752.0, 32752.0], [32752.0, 32768.0], [-32768.0, -32768.0]]).half()
            @ torch.ones(2, 1).half()
        )
        small = torch.tensor([[2.0**-12, 2.0**-13, 2.0**-14]]).half().mT @ torch.tensor([[2.0**-12]]).half()
    assert sums.flatten().tolist() == [65504.0, math.inf, -math.inf]
    assert small.flatten().tolist() == [2.0**-24, 0.0, 0.0]  # half of the smallest subnormal is a tie, rounded to even


def test_nan_and_infinity_pass_through() -> None:
    x = torch.tensor([[1.0, math.nan], [math.inf, 1.0], [1.0, 1.0]])
    with casting("fp16").region():
        y = x @ torch.ones(2, 1)
    assert y[0].isnan().all()
    assert y[1:].flatten().tolist() == [math.inf, 2.0]


# --- what is kept for the backward pass ---------------------------------------------------------------------------------

KEPT: dict[str, tuple[Op, list[tuple[int, ...]], int]] = {
    # operation, operands, bytes: two for every element of an operand
    "linear": (F.linear, [(3, 8), (7, 8)], 2 * (24 + 56)),
    "linear with bias": (F.linear, [(3, 8), (7, 8), (7,)], 2 * (24 + 56)),
    "matmul": (torch.matmul, [(2, 3, 8), (2, 8, 5)], 2 * (48 + 80)),
    "matmul with a vector": (torch.matmul, [(3, 8), (8,)], 2 * (24 + 8)),
    "conv2d": (F.conv2d, [(2, 3, 6, 6), (4, 3, 3, 3), (4,)], 2 * (216 + 108)),
    "conv_transpose2d": (F.conv_transpose2d, [(2, 3, 4, 4), (3, 4, 3, 3)], 2 * (96 + 108)),
    # flash attention: queries, keys, values, result, and FP32 logarithms of the sums, one a row
    "flash attention": (attend, [(2, 2, 6, 8)] * 3, 2 * 4 * 192 + 4 * 24),
    "einsum": (einsum("ij,jk->ik"), [(5, 8), (8, 6)], 2 * (40 + 48)),
    "addmm": (torch.addmm, [(5, 6), (5, 8), (8, 6)], 2 * (30 + 40 + 48)),
    "grouped attention": (grouped_queries, GROUPED, 2 * (384 + 192 + 192)),
    "gru": (recurrent("gru"), [(4, 2, 5), (1, 2, 3), *gates(3)], 2 * (40 + 6 + 45 + 27 + 9 + 9)),
}


@pytest.mark.parametrize("low", POLICIES, ids=str)
@pytest.mark.parametrize("name", KEPT)
def test_bytes_kept_for_the_backward_pass(name: str, low: torch.dtype) -> None:
    op, shapes, wanted = KEPT[name]
    given = operands(shapes, low, FP32)
    with saved_bytes() as wide:
        op(*given)
    with saved_bytes() as kept, casting(POLICIES[low]).region():
        op(*given)
    assert kept["bytes"] == wanted
    assert wide["bytes"] > (1.4 if name == "addmm" else 1.7) * wanted  # FP32 needs no addend for its backward pass


def test_a_shared_weight_is_kept_once() -> None:
    weight, x = randn(8, 8).requires_grad_(), randn(3, 8).requires_grad_()
    with saved_bytes() as kept, casting("fp16").region():
        F.linear(F.linear(x, weight), weight)
    assert kept["bytes"] == 2 * (24 + 24 + 64)


@pytest.mark.parametrize("name", ["linear", "matmul", "conv2d", "flash attention", "einsum", "addmm", "gru"])
def test_operands_that_a_hook_takes_away_are_let_go(name: str) -> None:
    op, shapes, _ = KEPT[name]
    given = operands(shapes, FP16, FP16)
    watched = weakref.ref(given[0])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t), casting("fp16").region():
        out = tensors(op(*(t * 1 for t in given)))
        copies = [t * 1 for t in given]
        inner = weakref.ref(copies[0])
        out += tensors(op(*copies))
    del copies
    gc.collect()
    assert inner() is None
    assert watched() is not None
    assert all(g is not None for g in torch.autograd.grad(out, given, out))


# --- gradients of gradients -----------------------------------------------------------------------------------------------

TWICE: dict[str, tuple[Op, list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(3, 4), (5, 4), (5,)]),
    "matmul": (torch.matmul, [(2, 3, 4), (2, 4, 5)]),
    "matmul broadcast": (torch.matmul, [(2, 3, 4), (4, 5)]),
    "conv2d": (F.conv2d, [(1, 2, 5, 5), (3, 2, 3, 3), (3,)]),
    "conv_transpose1d": (F.conv_transpose1d, [(2, 3, 5), (3, 4, 3)]),
    "einsum": (einsum("bik,bkj->bij"), [(2, 3, 4), (2, 4, 3)]),
    "addmm": (torch.addmm, [(3, 5), (3, 4), (4, 5)]),
}


def penalty(op: Op, given: list[Tensor], region: Any = None) -> list[Tensor]:
    """Return the gradients of a gradient penalty, as of a Wasserstein GAN."""
    if region is None:
        loss = op(*given).tanh().sum()
    else:
        with region:
            loss = op(*given).float().tanh().sum()
    inner = torch.autograd.grad(loss, given, create_graph=True)
    outer = sum(g.to(loss.dtype).square().sum() for g in inner)
    found = torch.autograd.grad(outer, given, allow_unused=True)  # type: ignore[arg-type]
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, given, strict=True)]


@pytest.mark.parametrize("low", POLICIES, ids=str)
@pytest.mark.parametrize("name", TWICE)
def test_double_backward(name: str, low: torch.dtype) -> None:
    op, shapes = TWICE[name]
    wide = [(0.5 * t.detach()).requires_grad_() for t in operands(shapes, low, FP64)]
    exact = penalty(op, wide)
    ours = penalty(op, [t.detach().float().requires_grad_() for t in wide], casting(POLICIES[low]).region())
    rounding = 0.03 if low is BF16 else 0.004  # a few roundings of 2**-9 or 2**-11
    for mine, wanted in zip(ours, exact, strict=True):
        assert mine.dtype is FP32
        assert (mine.double() - wanted).abs().max() <= rounding * wanted.abs().max()
        assert wanted.abs().max() > 0.01


@pytest.mark.parametrize("wanted", [0, 1])
@pytest.mark.parametrize("name", TWICE)
def test_double_backward_of_one_operand(name: str, wanted: int) -> None:
    op, shapes = TWICE[name]
    given = [t.detach() for t in operands(shapes, FP16, FP32)]
    given[wanted].requires_grad_()
    with casting(POLICIES[FP16]).region():
        loss = op(*given).float().tanh().sum()
    (plain,) = torch.autograd.grad(loss, given[wanted], retain_graph=True)
    (again,) = torch.autograd.grad(loss, given[wanted], create_graph=True)
    assert torch.equal(again, plain)
    (second,) = torch.autograd.grad(again.square().sum(), given[wanted])
    assert second.isfinite().all()
    assert second.abs().max() > 0


def test_what_has_no_double_backward_says_so() -> None:
    q, k, v = (randn(1, 2, 6, 8, seed=i).requires_grad_() for i in range(3))
    with casting("fp16").region():
        loss = attend(q, k, v).float().square().sum()
    (grad,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grad.sum(), k)
    x, w = randn(3, 4).requires_grad_(), randn(5, 4).requires_grad_()
    with casting("fp8").region():
        loss = F.linear(x, w).float().square().sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grad.sum(), w)


# --- FP8 ----------------------------------------------------------------------------------------------------------------------


RECIPE = RECIPES["tensorwise", "ocp"]


def test_under_the_fp8_policy_linear_layers_are_fp8_and_the_rest_bf16() -> None:
    x, w = randn(6, 16), randn(5, 16)
    with casting("fp8").region():
        y, z, s = F.linear(x, w), x @ w.T, (x @ w.T).softmax(-1)
    assert (y.dtype, z.dtype, s.dtype) == (BF16, BF16, FP32)
    assert torch.equal(y, float8_linear(x.bfloat16(), w, recipe=RECIPE))
    with casting("bf16").region():
        assert same_bits([z], [x @ w.T])
    assert not torch.equal(y, z)


@pytest.mark.parametrize("low", POLICIES, ids=str)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("product", [torch.mm, torch.matmul, torch.spmm])
def test_sparse_matrices_times_dense_ones(
    product: Callable[[Tensor, Tensor], Tensor], layout: torch.layout, low: torch.dtype
) -> None:
    """As a graph convolution multiplies; torch's own gradients in FP32 of the same 16-bit values are the oracle."""
    places, values = torch.tensor([[0, 1, 2, 2], [1, 0, 2, 0]]), torch.tensor([0.5, 0.25, 1.0, 2.0])
    graph = torch.sparse_coo_tensor(places, values, (3, 3), check_invariants=True).to_sparse(layout=layout)
    dense = randn(3, 4).to(low).float().requires_grad_()
    with casting(POLICIES[low]).region():
        result = product(graph, dense)
    assert result.dtype == low
    assert torch.equal(result.float(), (graph.to_dense() @ dense).to(low).float())
    weights = randn(3, 4).to(low)
    (found,) = torch.autograd.grad(result, dense, weights)
    assert torch.equal(found, (graph.to_dense().mT @ weights.float()).to(low).float())
