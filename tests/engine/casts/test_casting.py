"""Casting against CUDA's op lists, operation by operation, and against torch's own autocast behaviour around it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helpers_engine import CountCasts, casting, gradients, mlp, randn, same_bits, tensors, to, ulps
from helpers_torch import AutocastTestLists
from mezzo import oplists
from mezzo.engine.casts.autocast_kernels import _LOCAL, open_table
from mezzo.engine.casts.casting import Casting
from mezzo.engine.casts.conversion import keep_fp32
from mezzo.engine.casts.registration import find_op
from mezzo.engine.session import Session
from mezzo.policy import Policy

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
ARITHMETICS = ("emulated", "native")
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is BF16  # torch's default
    assert open_table() is None


def fp16(arithmetic: str) -> Casting:
    return casting(f"fp16:arithmetic={arithmetic}")


# --- against torch's own table of CUDA's lists -----------------------------------------------------------------------

CUDA_LISTS: dict[str, torch.dtype] = {
    **dict.fromkeys(("torch_fp16", "nn_fp16", "linalg_fp16", "methods_fp16"), FP16),
    **dict.fromkeys(("torch_fp32", "nn_fp32", "methods_fp32", "torch_need_autocast_promote"), FP32),
    **dict.fromkeys(("torch_expect_builtin_promote", "methods_expect_builtin_promote"), FP32),
}
HOMES = (torch, torch._C._nn, Tensor)
ABSENT = {"__div__": "Python 2's division; torch has it no more"}


def cuda_entries() -> list[tuple[str, int]]:
    lists = AutocastTestLists("cpu")
    return [(name, i) for name in CUDA_LISTS for i in range(len(getattr(lists, name)))]


def cuda_entry(name: str, number: int) -> tuple[str, tuple[Any, ...], dict[str, Any], torch.dtype]:
    torch.manual_seed(number)
    entry = getattr(AutocastTestLists("cpu"), name)[number]
    op, args, *rest = entry
    if op == "einsum":  # written so that torch's own test skips it
        return op, ("ij,jk->ik", randn(8, 8), randn(8, 8, seed=1)), {}, FP16
    if op == "cross":
        return op, args, {"dim": 0}, FP32  # without dim it warns
    kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
    dtype = rest[0] if rest and isinstance(rest[0], torch.dtype) else CUDA_LISTS[name]
    return op, args, kwargs, dtype


def homes(op: str) -> list[Callable[..., Any]]:
    if op.startswith("linalg_"):
        return [getattr(torch.linalg, op.removeprefix("linalg_"))]
    places = (Tensor,) if op.startswith("__") else HOMES
    return [getattr(home, op) for home in places if hasattr(home, op)]


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize(("name", "number"), cuda_entries(), ids=lambda value: str(value))
def test_dtype_is_the_one_of_cuda_autocast(name: str, number: int, arithmetic: str) -> None:
    op, args, kwargs, dtype = cuda_entry(name, number)
    if "cudnn" in op or op in ABSENT:
        pytest.skip("needs CUDA" if "cudnn" in op else ABSENT[op])
    functions = homes(op)
    assert functions
    for function in functions:
        with fp16(arithmetic).region():
            out = function(*args, **kwargs)
        if op == "equal":
            assert out is False
            continue
        assert [t.dtype for t in ([out] if isinstance(out, Tensor) else out)] == [dtype] * (
            2 if op == "lstm_cell" else 1
        )


def test_the_table_of_cuda_lists_is_whole() -> None:
    entries = cuda_entries()
    assert len(entries) >= 115
    run = [entry for entry in entries if "cudnn" not in cuda_entry(*entry)[0] and cuda_entry(*entry)[0] not in ABSENT]
    assert len(entries) - len(run) == 3


# --- every operation of the lists, by number as well as by dtype ------------------------------------------------------

Call = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def cell(gates: int) -> Call:
    n = 4
    hidden = randn(2, n, seed=1)
    weights = (randn(gates * n, n, seed=2), randn(gates * n, n, seed=3), randn(gates * n), randn(gates * n, seed=1))
    return call(randn(2, n), (hidden, randn(2, n, seed=2)) if gates == 4 else hidden, *weights)


def layer(gates: int) -> Call:
    n = 4
    hidden = randn(1, 2, n, seed=1)
    weights = [randn(gates * n, n, seed=2), randn(gates * n, n, seed=3), randn(gates * n), randn(gates * n, seed=1)]
    state = (hidden, randn(1, 2, n, seed=2)) if gates == 4 else hidden
    return call(randn(3, 2, n), state, weights, True, 1, 0.0, False, False, False)


def packed(gates: int) -> Call:
    (x, state, weights, *_), _ = layer(gates)
    return call(x.flatten(0, 1), torch.tensor([2, 2, 2]), state, weights, True, 1, 0.0, False, False)


MATRICES = (randn(3, 4), randn(4, 5))
STACKS = (randn(2, 3, 4), randn(2, 4, 5))
PAIR, VECTOR, POSITIVE = (randn(4, 4), randn(4, 4, seed=1)), randn(6), randn(6).abs() + 0.5
INSIDE = randn(6).tanh() * 0.9
CLASSES, SIGNS = torch.tensor([1, 0, 3, 2]), torch.tensor([1, -1, 1, -1])
IMAGE = {1: randn(1, 2, 4), 2: randn(1, 2, 4, 4), 3: randn(1, 2, 3, 3, 3)}
KERNEL = {d: randn(2, 2, *[2] * d, seed=7) for d in (1, 2, 3)}
CONVOLUTION = (IMAGE[2], KERNEL[2], randn(2), (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
TRIPLE = (randn(6), randn(6, seed=1), POSITIVE)

TRANSFORMS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
REDUCED = ("mean", "var", "std", "var_mean", "std_mean")
CALLS: dict[str, Call] = {
    "linear": call(randn(3, 4), randn(5, 4), randn(5)),
    **dict.fromkeys(("matmul", "mm"), call(*MATRICES)),
    "bmm": call(*STACKS),
    "addmm": call(randn(3, 5), *MATRICES),
    "baddbmm": call(randn(2, 3, 5), *STACKS),
    "addbmm": call(randn(3, 5), *STACKS),
    "einsum": call("ij,jk->ik", MATRICES),
    "mv": call(randn(3, 4), randn(4)),
    "addmv": call(randn(3), randn(3, 4), randn(4)),
    "addr": call(randn(3, 4), randn(3), randn(4)),
    "chain_matmul": call([*MATRICES, randn(5, 2)]),
    "linalg_multi_dot": call([*MATRICES, randn(5, 2)]),
    "linalg_vecdot": call(*PAIR),
    **{f"conv{d}d": call(IMAGE[d], KERNEL[d], randn(2)) for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": call(IMAGE[d], KERNEL[d], randn(2)) for d in (1, 2, 3)},
    "conv_tbc": call(randn(4, 2, 3), randn(2, 3, 5), randn(5), 0),
    "convolution": call(*CONVOLUTION),
    "_convolution": call(*CONVOLUTION, False, True, True, True),
    "_convolution.deprecated": call(*CONVOLUTION, False, True, True),
    "scaled_dot_product_attention": call(randn(1, 2, 3, 4), randn(1, 2, 3, 4, seed=1), randn(1, 2, 3, 4, seed=2)),
    **{f"{name}_cell": cell(gates) for name, gates in zip(RECURRENT, (4, 3, 1, 1), strict=True)},
    **{f"{name}.input": layer(gates) for name, gates in zip(RECURRENT, (4, 3, 1, 1), strict=True)},
    **{f"{name}.data": packed(gates) for name, gates in zip(RECURRENT, (4, 3, 1, 1), strict=True)},
    "prelu": call(randn(6), torch.tensor([0.25])),
    **dict.fromkeys(("exp", "expm1", "cosh", "sinh", "tan"), call(VECTOR)),
    **dict.fromkeys(("log", "log10", "log2", "log1p", "reciprocal", "rsqrt"), call(POSITIVE)),
    **dict.fromkeys(("acos", "asin", "erfinv"), call(INSIDE)),
    "pow.Tensor_Scalar": call(POSITIVE, 1.7),
    "pow.Tensor_Tensor": call(POSITIVE, POSITIVE),
    "pow.Scalar": call(1.7, POSITIVE),
    **dict.fromkeys(("softmax", "log_softmax"), call(VECTOR, 0)),
    "logsumexp": call(VECTOR, [0]),
    "softplus": call(VECTOR),
    "layer_norm": call(randn(3, 6), (6,), randn(6), randn(6, seed=1)),
    "native_layer_norm": call(randn(3, 6), (6,), randn(6), randn(6, seed=1), 1e-5),
    "rms_norm": call(randn(3, 6), (6,), randn(6)),
    "group_norm": call(randn(2, 4), 2, randn(4), randn(4, seed=1)),
    **dict.fromkeys(("nuclear_norm", "linalg_vector_norm", "linalg_matrix_norm.str_ord"), call(PAIR[0])),
    "linalg_matrix_norm": call(PAIR[0], 2),
    "nuclear_norm.dim": call(PAIR[0], [0, 1]),
    "frobenius_norm.dim": call(PAIR[0], [0, 1]),
    "norm.Scalar": call(PAIR[0], 2),
    "norm.ScalarOpt_dim": call(PAIR[0], 2, [0]),
    "renorm": call(PAIR[0], 2, 0, 1.0),
    **dict.fromkeys(("dist", "cdist", "cosine_similarity"), call(*PAIR)),
    "cdist": call(*PAIR, 2.0, None),
    "pdist": call(PAIR[0]),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "multi_margin_loss"), call(PAIR[0], CLASSES)),
    "nll_loss2d": call(randn(1, 4, 2, 2), torch.zeros(1, 2, 2, dtype=torch.int64)),
    **dict.fromkeys(("l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss"), call(*PAIR)),
    "multilabel_margin_loss": call(PAIR[0], torch.ones(4, 4, dtype=torch.int64)),
    "soft_margin_loss": call(PAIR[0], torch.ones(4, 4)),
    "poisson_nll_loss": call(*PAIR, True, False, 1e-8, 1),
    "cosine_embedding_loss": call(*PAIR, SIGNS),
    "hinge_embedding_loss": call(PAIR[0], SIGNS),
    "kl_div": call(PAIR[0], PAIR[1].abs()),
    "margin_ranking_loss": call(*PAIR, torch.ones(4)),
    "triplet_margin_loss": call(*PAIR, randn(4, 4, seed=2)),
    "binary_cross_entropy_with_logits": call(PAIR[0], PAIR[1].sigmoid()),
    "binary_cross_entropy": call(PAIR[0].sigmoid(), PAIR[1].sigmoid()),
    **dict.fromkeys(("sum", "prod"), call(VECTOR)),
    **dict.fromkeys(("prod.dim_int", "cumsum", "cumprod"), call(VECTOR, 0)),
    "sum.dim_IntList": call(VECTOR, [0]),
    **{f"{kind}1d": call(IMAGE[1], [6]) for kind in ("upsample_nearest", "_upsample_nearest_exact")},
    **{f"{kind}2d": call(IMAGE[2], [6, 6]) for kind in ("upsample_nearest", "_upsample_nearest_exact")},
    **{f"{kind}3d": call(IMAGE[3], [6, 6, 6]) for kind in ("upsample_nearest", "_upsample_nearest_exact")},
    "upsample_linear1d": call(IMAGE[1], [6], False),
    "upsample_trilinear3d": call(IMAGE[3], [6, 6, 6], False),
    **{
        name: call(IMAGE[2], [6, 6], False)
        for kind in ("bilinear2d", "bicubic2d")
        for name in (f"upsample_{kind}", f"_upsample_{kind}_aa")
    },
    "addcdiv": call(*TRIPLE),
    "addcmul": call(*TRIPLE),
    "atan2": call(VECTOR, POSITIVE),
    "bilinear": call(randn(2, 3), randn(2, 4), randn(5, 3, 4), randn(5)),
    "cross": call(randn(2, 3), randn(2, 3, seed=1), 1),
    **dict.fromkeys(("dot", "vdot"), call(VECTOR, POSITIVE)),
    "grid_sampler": call(randn(1, 2, 4, 4), randn(1, 3, 3, 2).tanh(), 0, 0, False),
    "index_put": call(randn(6), (torch.tensor([1]),), randn(1)),
    "tensordot": call(randn(2, 3, 4), randn(3, 4, 2), [1, 2], [0, 1]),
    "scatter_add": call(torch.zeros(4), 0, torch.tensor([0, 1, 1, 3]), randn(4)),
    **dict.fromkeys(("relu", "hardtanh", "gelu", "silu", "sigmoid", "tanh", "square"), call(VECTOR)),
    **{f"{name}{dim}": call(VECTOR, *at) for name in REDUCED for dim, at in (("", ()), (".dim", ([0],)))},
    **{f"{name}.correction": call(VECTOR) for name in REDUCED[1:]},
    "sqrt": call(POSITIVE),
    "batch_norm": call(IMAGE[2], None, None, None, None, True, 0.1, 1e-5, False),
    "instance_norm": call(IMAGE[2], None, None, None, None, True, 0.1, 1e-5, False),
    **dict.fromkeys(("add", "sub", "mul", "div", "rsub.Tensor"), call(VECTOR, POSITIVE)),
    "rsub.Scalar": call(VECTOR, 1.5),
    "div.Tensor_mode": ((VECTOR, POSITIVE), {"rounding_mode": None}),
    "embedding": call(randn(5, 3), torch.tensor([0, 4, 2])),
    **{  # irfft and hfft of 5 numbers return 8: cuFFT takes powers of two
        f"fft_{kind}{dims}": call(randn(4, 5 if kind in ("irfft", "hfft") else 4))
        for kind in TRANSFORMS
        for dims in ("", "2", "n")
    },
}
NEEDS_CUDA = {
    *("cudnn_convolution", "cudnn_convolution_transpose", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"),
    "_scaled_dot_product_flash_attention",
}
OPS = [(family, op) for family in oplists.FAMILIES for op in family.ops if find_op(op) is not None]


def arguments(op: str) -> Call:
    return CALLS.get(op) or CALLS[op.split(".")[0]]


def half_but_first(values: Any) -> Any:
    first, *rest = tensors(values)
    keep = id(first)
    halved = {id(t): t.half() for t in rest if id(t) != keep}

    def visit(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(visit(v) for v in value)
        return halved.get(id(value), value)

    return visit(values)


@pytest.mark.filterwarnings("ignore:.*chain_matmul is deprecated")
@pytest.mark.filterwarnings("ignore:at.*_norm is deprecated")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize(
    ("family", "op"),
    [(family, op) for family, op in OPS if op not in NEEDS_CUDA],
    ids=[op for _, op in OPS if op not in NEEDS_CUDA],
)
def test_every_listed_operation(family: oplists.Family, op: str, arithmetic: str) -> None:
    function = find_op(op)
    args, kwargs = arguments(op)
    wide = to(to(args, FP16), FP32)  # the values that FP16 can represent, in FP32
    given = {"lower": wide, "fp32": to(args, FP16), "widest": half_but_first(wide), "follow": to(args, FP16)}
    with fp16(arithmetic).region():
        result = function(*given[family.precision], **kwargs)
    out = tensors(result)
    assert out or result.is_complex()
    if op == "cross_entropy_loss":  # torch asks log_softmax for its operand's format, which CUDA's autocast respects
        log_p = args[0].to(FP16).log_softmax(1, dtype=FP16)
        assert same_bits(out, [F.nll_loss(log_p.float(), args[1])])
    elif family.name == "fft":  # CPUs have no kernel of it for 16 bits
        exact = function(*wide, **kwargs)
        kept = exact.to(torch.complex32 if exact.is_complex() else FP16)
        assert result.dtype is kept.dtype
        assert torch.equal(*(torch.view_as_real(t) if t.is_complex() else t for t in (result, kept)))
    elif family.precision in ("fp32", "widest") or op == "square":  # square is made of pow
        assert same_bits(out, tensors(function(*wide, **kwargs)))
    elif family.precision == "follow" or arithmetic == "native":
        assert same_bits(out, tensors(function(*to(args, FP16), **kwargs)))
    else:
        exact = tensors(function(*to(wide, FP64), **kwargs))
        assert [t.dtype for t in out] == [FP16] * len(out)
        assert max(int(ulps(a, b.to(FP16)).max()) for a, b in zip(out, exact, strict=True)) <= 1


def test_the_table_of_calls_names_every_operation_and_nothing_else() -> None:
    named = {op for _, op in OPS if op in CALLS or op.split(".")[0] in CALLS}
    assert {op for _, op in OPS} - named == NEEDS_CUDA
    assert {name for name in CALLS if name not in {n for _, op in OPS for n in (op, op.split(".")[0])}} == set()


LINEAR = (randn(3, 4), randn(5, 4))


def attend(x: Tensor) -> Any:
    packed, bias, out = randn(12, 4, seed=3).to(x.dtype), torch.zeros(12).to(x.dtype), randn(4, 4, seed=4).to(x.dtype)
    return F.multi_head_attention_forward(
        x, x, x, 4, 2, packed, bias, None, None, False, 0.0, out, torch.zeros(4).to(x.dtype)
    )


# Functions written in Python around a listed operation, and others that torch's own table does not have.
PYTHON_LEVEL: dict[str, tuple[Callable[[Tensor], Any], torch.dtype]] = {
    "F.softmax": (lambda x: F.softmax(x, -1), FP32),
    "F.softmin": (lambda x: F.softmin(x, -1), FP32),
    "F.log_softmax": (lambda x: F.log_softmax(x, -1), FP32),
    "F.cross_entropy": (lambda x: F.cross_entropy(x, CLASSES), FP32),
    "F.cross_entropy of probabilities": (lambda x: F.cross_entropy(x, x.softmax(-1)), FP32),
    "F.huber_loss": (lambda x: F.huber_loss(x, x + 1), FP32),
    "F.gaussian_nll_loss": (lambda x: F.gaussian_nll_loss(x, x + 1, x.abs() + 1), FP32),
    "F.binary_cross_entropy": (lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x)), FP32),
    "F.rms_norm": (lambda x: F.rms_norm(x, (4,)), FP32),
    "F.normalize": (lambda x: F.normalize(x, dim=-1), FP32),
    "F.pairwise_distance": (lambda x: F.pairwise_distance(x, x + 1), FP32),
    "F.interpolate nearest": (lambda x: F.interpolate(x[None, None], scale_factor=2), FP32),
    "F.interpolate bilinear": (lambda x: F.interpolate(x[None, None], size=(6, 6), mode="bilinear"), FP32),
    "F.interpolate bicubic": (lambda x: F.interpolate(x[None, None], size=(6, 6), mode="bicubic"), FP32),
    "torch.norm": (torch.norm, FP32),
    "Tensor.norm": (lambda x: x.norm(), FP32),
    "Tensor.__rpow__": (lambda x: 2.0**x, FP32),
    "Tensor.__rtruediv__": (lambda x: 1.0 / x, FP32),
    "torch.nn.functional.tanhshrink": (F.tanhshrink, FP16),
    "F.gelu": (F.gelu, FP16),
    "F.relu": (F.relu, FP16),
    "F.max_pool2d": (lambda x: F.max_pool2d(x[None], 2), FP16),
    "F.batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), FP16),
    "torch.tensordot": (lambda x: torch.tensordot(x, x.float(), 1), FP32),
    "F.multi_head_attention_forward": (lambda x: attend(x[:, None])[0], FP16),
}


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("name", PYTHON_LEVEL)
def test_functions_written_in_python(name: str, arithmetic: str) -> None:
    function, dtype = PYTHON_LEVEL[name]
    x = randn(4, 4).half()
    with fp16(arithmetic).region():
        out = function(x)
    assert out.dtype is dtype
    if dtype is FP32 and name != "F.cross_entropy of probabilities":
        # Whatever is not listed inside (x + 1, sigmoid) rounds to FP16 as it does without a policy.
        reference = function(x.float())
        torch.testing.assert_close(out, reference, rtol=2e-3, atol=2e-3)


def test_attention_weights_are_fp32_as_their_softmax_is() -> None:
    with fp16("emulated").region():
        out, weights = attend(randn(3, 4)[:, None])
    assert (out.dtype, weights.dtype) == (FP16, FP32)


# --- numbers that show what was done ---------------------------------------------------------------------------------

OVERFLOWS = randn(4).half() * 0 + 300.0


@pytest.mark.parametrize(
    ("name", "run", "expected"),
    [
        ("pow", lambda x: x**2, 90000.0),
        ("exp", lambda x: (x / 20).exp(), 3269017.25),
        ("sum", lambda x: (x * 200).sum(), 240000.0),
        ("mse_loss", lambda x: F.mse_loss(x, torch.zeros_like(x)), 90000.0),
        ("norm", lambda x: x.norm(), 600.0),
        ("square, which is made of pow", lambda x: x.square(), 90000.0),
        ("mul stays FP16 and overflows", lambda x: x * x, float("inf")),
    ],
)
def test_what_leaves_the_range_of_fp16(name: str, run: Callable[[Tensor], Tensor], expected: float) -> None:
    with fp16("emulated").region():
        out = run(OVERFLOWS)
    assert out.flatten()[0].item() == pytest.approx(expected, rel=1e-6)


def test_binary_cross_entropy_of_probabilities_near_one_is_finite_and_exact() -> None:
    p = torch.tensor([0.0, 1.0, 0.9995], dtype=FP16)
    target = torch.tensor([0.0, 1.0, 1.0])
    with fp16("emulated").region():
        loss = F.binary_cross_entropy(p, target, reduction="none")
    assert loss.dtype is FP32
    assert torch.equal(loss, F.binary_cross_entropy(p.float(), target, reduction="none"))


def test_an_explicit_dtype_is_the_authors() -> None:
    x = randn(4).half()
    with fp16("emulated").region():
        assert x.softmax(0, dtype=FP16).dtype is FP16
        assert torch.sum(x, dtype=FP64).dtype is FP64
        assert F.softmax(x, 0, dtype=FP64).dtype is FP64


def test_out_is_left_alone() -> None:
    a, b = randn(3, 3), randn(3, 3, seed=1)
    out = torch.empty(3, 3)
    with fp16("emulated").region():
        result = torch.mm(a, b, out=out)
        summed = torch.sum(a.half(), 0, out=torch.empty(3, dtype=FP16))
    assert result is out
    assert torch.equal(out, a @ b)
    assert summed.dtype is FP16


def test_float64_is_untouched() -> None:
    model = mlp(4, 5, 3).double()
    x = randn(2, 4).double()
    with fp16("emulated").region():
        out = model(x)
        loss = F.mse_loss(out, torch.zeros_like(out))
    assert (out.dtype, loss.dtype) == (FP64, FP64)
    assert torch.equal(out, model(x))


def test_integers_and_other_devices_are_untouched() -> None:
    with fp16("emulated").region():
        assert (torch.ones(2, 2, dtype=torch.int64) @ torch.ones(2, 2, dtype=torch.int64)).dtype is torch.int64
        assert torch.sum(torch.ones(3, dtype=torch.int32)).dtype is torch.int64
        assert torch.mm(randn(2, 2).to("meta"), randn(2, 2).to("meta")).dtype is FP32


# --- weights ---------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(self.layer(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("policy", ["fp16", "fp16:arithmetic=native", "bf16", "fp16:op_lists=device"])
def test_a_weight_is_cast_once_a_forward(policy: str) -> None:
    model, used = Shared(), casting(policy)
    low = Policy.parse(policy).storage.dtype
    for _ in range(2):
        with used.region():
            with CountCasts((7, 7), low) as counted:
                loss = model(randn(2, 7)).sum()
            loss.backward()
        assert counted.count == 1


def test_a_weight_is_cast_once_a_forward_across_nested_regions() -> None:
    model, used = Shared(), fp16("emulated")
    with CountCasts((7, 7), FP16) as counted, used.region():
        with used.region():
            model(randn(2, 7))
        model(randn(2, 7))
    assert counted.count == 1
    assert _LOCAL.casts.items() == {}


def test_a_weight_that_changes_inside_a_region_is_cast_again() -> None:
    weight, x = torch.eye(3).requires_grad_(), torch.eye(3)
    with fp16("emulated").region():
        assert (x @ weight)[0, 0] == 1.0
        with torch.no_grad():
            weight.mul_(3.0)
        assert (x @ weight)[0, 0] == 3.0


def test_weights_changed_between_regions_are_cast_again() -> None:
    model, used = nn.Linear(3, 3, bias=False), fp16("emulated")
    x = torch.eye(3)
    with used.region():
        model(x)
    with torch.no_grad():
        model.weight.fill_(2.0)
    with used.region():
        assert torch.equal(model(x), torch.full((3, 3), 2.0, dtype=FP16))


@pytest.mark.parametrize("policy", ["fp16", "fp16:arithmetic=native"])
def test_no_grad_inside_a_region_does_not_cut_the_graph(policy: str) -> None:
    model, used, x = Shared(), casting(policy), randn(2, 7)
    with used.region():
        loss = model(x).sum()
    reference = gradients(loss, model)
    with CountCasts((7, 7), FP16) as counted, used.region():
        with torch.no_grad():
            model(x)
        loss = model(x).sum()
        with torch.inference_mode():
            model(x)
    assert counted.count == 2
    assert same_bits(gradients(loss, model), reference)
    assert len(reference) == 2


# --- nesting, errors, threads ----------------------------------------------------------------------------------------


def test_nested_autocast_off_is_fp32() -> None:
    a, b = randn(3, 3), randn(3, 3, seed=1)
    with fp16("emulated").region():
        with torch.autocast("cpu", enabled=False):
            inside = a @ b
            assert torch.equal(inside, a @ b)
            assert (a.half().exp()).dtype is FP16  # nothing is widened either
        assert (a @ b).dtype is FP16
    assert inside.dtype is FP32
    assert torch.equal(inside, a @ b)


def test_nested_regions() -> None:
    a = randn(3, 3)
    outer, inner = fp16("emulated"), casting("bf16")
    with outer.region():
        with outer.region():
            assert (a @ a).dtype is FP16
        with inner.region():
            assert (a @ a).dtype is BF16
        assert (a @ a).dtype is FP16
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is FP16
    assert (a @ a).dtype is FP32


class Cube(torch.autograd.Function):
    seen: list[torch.dtype] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = x @ weight
        Cube.seen.append(y.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad.to(x.dtype) @ weight.mT, x.mT @ grad.to(x.dtype)


def test_a_custom_function_in_a_region() -> None:
    x, weight = randn(3, 4).requires_grad_(), randn(4, 5).requires_grad_()
    Cube.seen.clear()
    with fp16("emulated").region():
        y = Cube.apply(x, weight)
        loss = y.sum()
    loss.backward()
    assert Cube.seen == [FP16]  # its forward runs under the policy, as under torch.autocast
    assert (loss.dtype, x.grad.dtype, weight.grad.dtype) == (FP32, FP32, FP32)  # type: ignore[union-attr]


@pytest.mark.parametrize("call", ["Tensor.backward", "autograd.backward", "autograd.grad", "casting.backward"])
def test_nothing_of_a_backward_pass_is_cast(call: str) -> None:
    seen: list[torch.dtype] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.extend([(grad @ grad).dtype, grad.half().exp().dtype])
            return grad

    x, used = randn(3, 3).requires_grad_(), fp16("emulated")
    with used.region():
        loss = Watch.apply(x).sum()
        if call == "Tensor.backward":
            loss.backward()
        elif call == "autograd.backward":
            torch.autograd.backward([loss])
        elif call == "autograd.grad":
            torch.autograd.grad(loss, x)
        else:
            with used.backward():
                loss.backward()
        assert torch.is_autocast_enabled("cpu")
    assert seen == [FP32, FP16]


def test_custom_fwd_with_a_dtype_turns_the_policy_off_inside() -> None:
    class Wide(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x @ x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    x = randn(3, 3)
    with fp16("emulated").region():
        y = Wide.apply(x.half())
    assert torch.equal(y, x.half().float() @ x.half().float())


@pytest.mark.parametrize("policy", ["fp16", "fp16:arithmetic=native", "fp16:op_lists=device", "fp16-master", "fp32"])
def test_an_exception_leaves_nothing_behind(policy: str) -> None:
    used = casting(policy)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), used.region():
            (randn(2, 2) @ randn(2, 2)).exp().apply_(lambda x: 1 / 0)
        with pytest.raises(RuntimeError), used.region(), used.region():
            torch.mm(randn(2, 3), randn(2, 3))
        with pytest.raises(RuntimeError), used.backward():
            randn(2).sum().backward()
        assert not torch.is_autocast_enabled("cpu")
        assert open_table() is None
        assert _LOCAL.open.depth == 0
        assert _LOCAL.casts.items() == {}


def test_an_exception_inside_a_region_leaves_the_region_intact() -> None:
    with fp16("emulated").region():
        with pytest.raises(RuntimeError):
            torch.mm(randn(2, 3), randn(2, 3))
        with pytest.raises(AssertionError, match="embedding dimension"):
            F.multi_head_attention_forward(  # entered rather than looked up
                *[randn(3, 1, 5)] * 3, 4, 2, None, None, None, None, False, 0.0, randn(4, 4), None
            )
        assert torch.is_autocast_enabled("cpu")
        assert (randn(2, 2) @ randn(2, 2)).dtype is FP16


def test_another_thread_is_not_affected() -> None:
    seen: dict[str, torch.dtype] = {}
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        inside.wait(10)
        seen["other"] = (randn(2, 2) @ randn(2, 2)).dtype
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with fp16("emulated").region():
        inside.set()
        assert done.wait(10)
        seen["this"] = (randn(2, 2) @ randn(2, 2)).dtype
    thread.join(10)
    assert seen == {"other": FP32, "this": FP16}


# --- layers ----------------------------------------------------------------------------------------------------------


def of_packed(module: nn.Module, x: Tensor) -> Any:
    return module(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3])))[0].data


def plain(module: nn.Module, x: Tensor) -> Any:
    return module(x)


def without_weights(module: nn.Module, x: Tensor) -> Any:
    return module(x, x, x, need_weights=False)[0]


def with_loss(module: nn.Module, x: Tensor) -> Any:
    return nn.CrossEntropyLoss()(module(x[0]), torch.tensor([0, 1]))


def encoder(**how: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, **how)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Any], list[torch.dtype]]] = {
    "LSTM": (lambda: nn.LSTM(4, 3), plain, [FP16] * 3),
    "LSTM of two layers with dropout": (lambda: nn.LSTM(4, 3, 2, dropout=0.5), plain, [FP16] * 3),
    "LSTM bidirectional": (lambda: nn.LSTM(4, 3, bidirectional=True, batch_first=True), plain, [FP16] * 3),
    "LSTM with projection": (lambda: nn.LSTM(4, 3, proj_size=2), plain, [FP16] * 3),
    "LSTM of packed": (lambda: nn.LSTM(4, 3), of_packed, [FP16]),
    "GRU": (lambda: nn.GRU(4, 3), plain, [FP16] * 2),
    "GRU of packed": (lambda: nn.GRU(4, 3), of_packed, [FP16]),
    "RNN": (lambda: nn.RNN(4, 3), plain, [FP16] * 2),
    "RNN of relu": (lambda: nn.RNN(4, 3, nonlinearity="relu"), plain, [FP16] * 2),
    "LSTMCell": (lambda: nn.LSTMCell(4, 3), lambda m, x: m(x[0]), [FP16] * 2),
    "GRUCell": (lambda: nn.GRUCell(4, 3), lambda m, x: m(x[0]), [FP16]),
    "RNNCell": (lambda: nn.RNNCell(4, 3), lambda m, x: m(x[0]), [FP16]),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2), lambda m, x: m(x, x, x), [FP16, FP32]),
    "its results alone": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), without_weights, [FP16]),
    "TransformerEncoderLayer": (lambda: encoder(batch_first=True), plain, [FP32]),
    "TransformerEncoderLayer norm first": (lambda: encoder(norm_first=True), plain, [FP32]),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0), lambda m, x: m(x, x), [FP32]),
    "Embedding": (lambda: nn.Embedding(9, 3), lambda m, x: m(torch.tensor([1, 2])), [FP32]),
    "Bilinear": (lambda: nn.Bilinear(4, 4, 2), lambda m, x: m(x, x), [FP32]),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 3, 2), lambda m, x: m(x[None, :2, :, :]), [FP16]),
    "BatchNorm1d after Linear": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
        lambda m, x: m(x[0]),
        [FP16],
    ),
    "CrossEntropyLoss after Linear": (lambda: nn.Linear(4, 3), with_loss, [FP32]),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("mode", ["train", "eval", "eval no_grad"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, mode: str) -> None:
    build, run, dtypes = LAYERS[name]
    torch.manual_seed(0)
    module, x = build(), randn(5, 2, 4)
    module.train(mode == "train")
    with torch.no_grad() if "no_grad" in mode else nullcontext():
        torch.manual_seed(1)
        reference = tensors(run(module, x))
        torch.manual_seed(1)
        with fp16("emulated").region():
            out = tensors(run(module, x))
    assert [t.dtype for t in out] == dtypes
    torch.testing.assert_close([t.float() for t in out], reference, rtol=1e-2, atol=1e-2)
    if any(t.dtype is FP16 for t in out):
        assert not all(torch.equal(a.float(), b) for a, b in zip(out, reference, strict=True))
    if "no_grad" in mode:
        return
    wide = gradients(sum(t.float().square().sum() for t in reference), module)  # type: ignore[arg-type]
    got = gradients(sum(t.float().square().sum() for t in out), module)  # type: ignore[arg-type]
    assert len(got) == len(wide) > 0
    torch.testing.assert_close(got, wide, rtol=5e-2, atol=5e-2)


def test_a_layer_norm_of_huge_values_is_finite() -> None:
    x = torch.tensor([[60000.0, -60000.0, 30000.0, 0.0]]).half()
    with fp16("emulated").region():
        y = nn.LayerNorm(4)(x)
        z = nn.RMSNorm(4)(x)
    assert torch.equal(y, nn.LayerNorm(4)(x.float()))
    assert torch.equal(z, nn.RMSNorm(4)(x.float()))


# --- user lists and modules ------------------------------------------------------------------------------------------

X16, X32 = randn(4, 4).half(), randn(4, 4)
USER_LISTS: list[tuple[str, Callable[[], Tensor], torch.dtype]] = [
    # a family
    ("fp16:fp32=matmul", lambda: X32 @ X32, FP32),
    ("fp16:fp32=matmul", lambda: F.linear(X16, X16), FP32),
    ("fp16:fp32=matmul", lambda: torch.einsum("ij,jk->ik", X16, X16), FP32),
    ("fp16:fp32=matmul", lambda: F.conv1d(X32, X32[:, :, None]), FP16),
    ("fp16:lower=softmax", lambda: X32.softmax(0), FP16),
    ("fp16:lower=softmax", lambda: F.log_softmax(X32, 0), FP16),
    ("fp16:lower=layer_norm", lambda: F.layer_norm(X32, (4,)), FP16),
    ("fp16:fp32=gelu", lambda: F.gelu(X16), FP32),
    ("fp16:fp32=relu", lambda: F.relu(X16), FP32),
    ("fp16:fp32=mean", lambda: X16.mean(), FP32),
    ("fp16:widest=matmul", lambda: X16 @ X32, FP32),
    ("fp16:widest=matmul", lambda: X16 @ X16, FP16),
    ("fp16:lower=add", lambda: X32 + X32, FP16),
    # an operation: the rest of its family stays
    ("fp16:fp32=bmm", lambda: torch.bmm(X16[None], X16[None]), FP32),
    ("fp16:fp32=bmm", lambda: torch.mm(X32, X32), FP16),
    ("fp16:lower=exp", lambda: X32.exp(), FP16),
    ("fp16:lower=log_softmax", lambda: X16.softmax(0), FP32),
    ("fp16:lower=log_softmax", lambda: X32.log_softmax(0), FP16),
    ("fp16:widest=softmax", lambda: X16.softmax(0), FP16),
    # several at once, and over the device's lists
    ("fp16:lower=exp+log:fp32=mm", lambda: torch.mm(X16, X16), FP32),
    ("fp16:op_lists=device:fp32=matmul", lambda: X32 @ X32, FP32),
    ("fp16:op_lists=device:fp32=softmax", lambda: X32 @ X32, FP16),
    ("fp16:op_lists=device:lower=exp", lambda: X32.exp(), FP16),
    ("bf16:fp32=matmul", lambda: X32 @ X32, FP32),
    ("bf16:lower=exp", lambda: X32.exp(), BF16),
]


@pytest.mark.parametrize(("policy", "run", "dtype"), USER_LISTS)
def test_user_lists(policy: str, run: Callable[[], Tensor], dtype: torch.dtype) -> None:
    with casting(policy).region():
        assert run().dtype is dtype


def test_a_matmul_kept_in_fp32_is_the_fp32_product() -> None:
    with casting("fp16:fp32=matmul").region():
        assert torch.equal(X32 @ X32.mT, torch.matmul(X32, X32.mT))
        inside = X32 @ X32.mT
    assert torch.equal(inside, X32 @ X32.mT)


def test_named_modules_compute_in_fp32() -> None:
    model, x = mlp(4, 5, 3), randn(2, 4)
    policy = Policy.parse("fp16:fp32_modules=2")
    keep_fp32(model, policy, "cpu")
    with Casting.of(policy, "cpu").region():
        hidden = model[1](model[0](x))
        out = model(x)
    assert (hidden.dtype, out.dtype) == (FP16, FP32)
    assert torch.equal(out, F.linear(hidden.float(), model[2].weight, model[2].bias))


# --- activation checkpointing ----------------------------------------------------------------------------------------


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Softmax(-1), nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU())


class Blocks(nn.Module):
    """Two blocks that are computed again in the backward pass, with a softmax and a norm that FP16 would change."""

    def __init__(self, how: str, *, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.how = how
        first = block()
        self.blocks = nn.ModuleList([first, first if shared else block()])
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for one in self.blocks:
            x = one(x) if self.how == "plain" else checkpoint(one, x, use_reentrant=self.how == "reentrant")
        return F.cross_entropy(self.head(x), torch.tensor([0, 1, 1]))


CHECKPOINTED = [
    # torch's reentrant checkpoint does not work with autograd.grad
    *(("fp16", "reentrant", how) for how in ("casting.backward", "in the region", "autograd.backward")),
    *(
        ("fp16", "not reentrant", how)
        for how in ("casting.backward", "in the region", "autograd.backward", "autograd.grad")
    ),
    *(
        (policy, "reentrant", "casting.backward")
        for policy in ("bf16", "fp16:arithmetic=native", "fp16:op_lists=device")
    ),
]


@pytest.mark.parametrize(("policy", "how", "backward"), CHECKPOINTED)
def test_activation_checkpointing_changes_no_bit(policy: str, how: str, backward: str) -> None:
    results = []
    for way in ("plain", how):
        model, used = Blocks(way), casting(policy)
        x = randn(3, 6).requires_grad_()
        with used.region():
            loss = model(x)
            if backward == "in the region":
                loss.backward()  # type: ignore[no-untyped-call]
            elif backward == "autograd.backward":
                torch.autograd.backward(loss)
        if backward == "casting.backward":
            with used.backward():
                loss.backward()  # type: ignore[no-untyped-call]
        if backward == "autograd.grad":
            with used.backward():
                results.append([loss.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])])
        else:
            assert x.grad is not None
            results.append([loss.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    plain, checkpointed = results
    assert len(plain) == 2 + 14
    assert same_bits(plain, checkpointed)


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_a_region_opened_inside_what_is_checkpointed(how: str) -> None:
    results = []
    for way in ("plain", how):
        model, used = Blocks("plain"), casting("fp16")
        x = randn(3, 6).requires_grad_()

        def run(x: Tensor, model: nn.Module = model, used: Casting = used) -> Tensor:
            with used.region():
                return model(x)  # type: ignore[no-any-return]

        loss = run(x) if way == "plain" else checkpoint(run, x, use_reentrant=how == "reentrant")
        with used.backward():
            results.append(gradients(loss, model))
    assert len(results[0]) == 14
    assert same_bits(*results)


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_weights_shared_by_two_checkpointed_blocks(how: str) -> None:
    results = []
    for way in ("plain", how):
        model, used = Blocks(way, shared=True), casting("fp16")
        x = randn(3, 6).requires_grad_()
        with used.region():
            loss = model(x)
        with used.backward():
            results.append(gradients(loss, model))
    plain, checkpointed = results
    assert len(plain) == 8
    if how == "reentrant":  # each block's share of a gradient reaches the FP32 weight by itself, not by their FP16 sum
        torch.testing.assert_close(plain, checkpointed, rtol=2e-3, atol=1e-6)
    else:
        assert same_bits(plain, checkpointed)


# --- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while it traces
        yield
    torch._dynamo.reset()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv1d(2, 3, 2), nn.LayerNorm(3), nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).mT).softmax(-1)
        return self.head(y.flatten(1))  # type: ignore[no-any-return]


def run_under(policy: str, model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with casting(policy).region():
        return model(x)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("policy", ["fp16", "fp16:arithmetic=native", "fp16:op_lists=device:fp32=softmax"])
def test_compiled_without_graph_breaks_equals_eager(policy: str) -> None:
    model, x = Small(), randn(3, 2, 4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    eager, traced = run_under(policy, model, x), run_under(policy, compiled, x)
    assert eager.dtype is FP16
    assert same_bits([eager], [traced])
    assert same_bits(gradients(eager.float().square().sum(), model), gradients(traced.float().square().sum(), model))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_changed_policy_is_not_served_by_old_code() -> None:
    model, x = Small(), randn(3, 2, 4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    policies = ["fp16", "bf16", "fp16:fp32=matmul", "fp16:lower=softmax", "fp16:fp32=matmul+conv", "fp16"]
    outs = [run_under(policy, compiled, x) for policy in policies]
    assert [o.dtype for o in outs] == [FP16, BF16, FP32, FP16, FP32, FP16]
    for policy, out in zip(policies, outs, strict=True):
        assert same_bits([out], [run_under(policy, model, x)])
    assert same_bits([compiled(x)], [model(x)])  # and none at all


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_attention_and_recompute() -> None:
    layer, x = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), randn(2, 3, 4)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    eager, traced = run_under("fp16", layer, x), run_under("fp16", compiled, x)
    torch.testing.assert_close(traced, eager, rtol=2e-3, atol=2e-3)


# --- which way, and why ----------------------------------------------------------------------------------------------

OPERANDS = "weights and inputs are cast; operations run in their operands' format"
PORTABLE = "CUDA's kernels follow the portable lists"
WAYS = [
    ("fp32", "cpu", "none", "the policy casts nothing"),
    ("tf32", "cpu", "none", "the policy casts nothing"),
    ("fp16", "cpu", "table", "emulated arithmetic replaces the device's kernels"),
    ("fp16:arithmetic=native", "cpu", "table", "torch's lists for cpu differ from the portable ones"),
    ("fp16:op_lists=device", "cpu", "kernels", "the policy asks for the device's own lists"),
    ("fp16:op_lists=device:fp32=exp", "cpu", "overlay", "the device's lists, changed by the policy's own"),
    ("fp16-master", "cpu", "table", "emulated arithmetic replaces the device's kernels"),
    ("fp16-master:arithmetic=native", "cpu", "none", OPERANDS),
    ("fp16", "cuda", "kernels", PORTABLE),
    ("fp16:fp32=softmax", "cuda", "overlay", f"{PORTABLE}, changed by the policy's own"),
    ("fp8", "cuda", "kernels", PORTABLE),
    ("fp8:arithmetic=emulated", "cuda", "table", "emulated arithmetic replaces the device's kernels"),
]


@pytest.mark.parametrize(("policy", "device", "way", "reason"), WAYS)
def test_way_and_reason(policy: str, device: str, way: str, reason: str) -> None:
    from mezzo.devices import Device

    capability = (9, 0) if device == "cuda" else None
    chosen = Casting(Policy.parse(policy), Device(kind=device, name="a device", capability=capability))
    assert (chosen.way, chosen.choice.reason) == (way, reason)
    assert (chosen.choice.what, chosen.choice.value) == ("casting", way)
    assert (chosen.table is None) == (way in ("none", "kernels"))


def test_device_lists_are_torchs_own_bits() -> None:
    model, x = Small(), randn(3, 2, 4)
    with casting("fp16:op_lists=device").region():
        ours = model(x)
    with torch.autocast("cpu", dtype=FP16):
        theirs = model(x)
    assert same_bits([ours], [theirs])


def autocast_state() -> tuple[Any, ...]:
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    kinds = [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")]
    return kinds, nesting, torch.is_autocast_cache_enabled()


def test_device_lists_set_the_state_of_torchs_context_and_do_not_enter_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found, wanted, before = [], [], autocast_state()
    for opens, states in (
        (casting("fp16:op_lists=device").region, found),
        (partial(torch.autocast, "cpu", FP16), wanted),
    ):
        for _ in range(2):
            with suppress(ZeroDivisionError), opens():
                states.append(autocast_state())
                with torch.autocast("cpu", enabled=False), opens():
                    states.append(autocast_state())
                states.append(autocast_state())
                raise ZeroDivisionError
            states.append(autocast_state())
    assert found == wanted
    assert autocast_state() == before

    entered: list[Any] = []
    monkeypatch.setattr(torch.autocast, "__enter__", entered.append)
    model = nn.Linear(2, 2)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp16:op_lists=device")
    with casting("fp16:op_lists=device").region(), session.autocast():
        assert model(randn(2, 2)).dtype is FP16
    assert entered == []


@pytest.mark.usefixtures("fresh_dynamo")
def test_device_lists_inside_compiled_code() -> None:
    model, x, casts = Small(), randn(3, 2, 4), casting("fp16:op_lists=device")

    def run(x: Tensor) -> Tensor:
        with casts.region():
            return model(x)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    eager, traced = run(x), compiled(x)
    assert eager.dtype is FP16
    assert same_bits([eager], [traced])


# --- at the dispatcher: what a table of Python functions would not see ------------------------------------------------

HALF4 = randn(4, 4).half()


def scripted(x: Tensor) -> Tensor:
    return torch.mm(x, x).softmax(-1)


def interpolated(**settings: Any) -> Callable[[], Tensor]:
    return partial(F.interpolate, HALF4[None, None], **settings)


COMPOSED: dict[str, tuple[Callable[[], Any], torch.dtype]] = {
    "square": (HALF4.square, FP32),
    "square of a product": (lambda: (X32 @ X32).square(), FP32),
    "sum_to_size": (lambda: HALF4.sum_to_size(1, 4), FP32),
    "trapezoid": (lambda: torch.trapezoid(HALF4), FP32),
    "trapz": (lambda: torch.trapz(HALF4), FP32),
    "cumulative_trapezoid": (lambda: torch.cumulative_trapezoid(HALF4), FP32),
    "matrix_power": (lambda: torch.linalg.matrix_power(X32, 3), FP16),
    "float_power": (lambda: HALF4.float_power(2), FP64),
    "interpolate, by a factor": (interpolated(scale_factor=2, mode="bilinear", recompute_scale_factor=True), FP32),
    "interpolate, area": (interpolated(size=(2, 2), mode="area"), FP16),
    "TorchScript": (lambda: torch.jit.script(scripted)(X32), FP32),
    "by its name in ATen": (lambda: torch.ops.aten.mm(X32, X32), FP16),
    "vmap": (lambda: torch.vmap(torch.mv)(X32.expand(3, 4, 4), X32[:3]), FP16),
    "einsum of sublists": (lambda: torch.einsum(X32, [0, 1], X32, [1, 2], [0, 2]), FP16),
    "fft": (lambda: torch.fft.rfft(HALF4), torch.complex32),
    "irfft": (lambda: torch.fft.irfft(torch.fft.rfft(HALF4)), FP16),
    "fft of FP32": (lambda: torch.fft.rfft(X32), torch.complex64),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is (not supported|deprecated)")
@pytest.mark.parametrize("name", COMPOSED)
def test_composed_and_other_ways_to_call(name: str) -> None:
    run, dtype = COMPOSED[name]
    with fp16("emulated").region():
        assert run().dtype is dtype


@pytest.mark.parametrize("transform", ["grad", "vjp", "vmap of grad"])
def test_functional_transforms_give_autograds_gradients(transform: str) -> None:
    weight, x = randn(4, 4), randn(3, 4)

    def loss(w: Tensor, row: Tensor = x) -> Tensor:
        return F.linear(row, w).float().square().sum()

    used, leaf = fp16("emulated"), weight.clone().requires_grad_()
    with used.region():
        reference = loss(leaf)
        if transform == "grad":
            found = torch.func.grad(loss)(weight)
        elif transform == "vjp":
            found = torch.func.vjp(loss, weight)[1](torch.ones(()))[0]
        else:
            found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, x).sum(0)
    with used.backward():
        reference.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, leaf.grad, rtol=2e-3, atol=2e-3)


def test_torchs_own_autocast_is_unchanged() -> None:
    def run() -> list[torch.dtype]:
        with torch.autocast("cpu", dtype=FP16):
            y = F.linear(X32, X32)
            return [y.dtype, y.softmax(-1).dtype, y.sum().dtype, F.mse_loss(y, y).dtype, torch.fft.rfft(X32).dtype]

    before = [FP16, FP16, FP16, FP32, torch.complex64]  # torch's list for CPUs
    assert run() == before
    with fp16("emulated").region():
        assert (X32 @ X32).dtype is FP16
    assert run() == before


def test_a_region_reaches_the_threads_of_a_backward_pass() -> None:
    used, seen = fp16("emulated"), []
    with used.region():
        number = [(kind, torch.get_autocast_dtype(kind)) for kind in ("maia", "ipu")]

    def thread() -> None:  # as autograd's threads are: with autocast's state and nothing of Python's
        for kind, dtype in number:
            torch.set_autocast_enabled(kind, True)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", FP16)
        torch.autocast_increment_nesting()
        table = open_table()
        assert table is not None
        seen.append((table.number, (X32 @ X32).dtype, X16.softmax(-1).dtype))

    worker = threading.Thread(target=thread)
    worker.start()
    worker.join(10)
    assert used.table is not None
    assert seen == [(used.table.number, FP16, FP32)]


def test_equal_tables_share_a_number_and_others_do_not() -> None:
    texts = ["fp16:arithmetic=emulated", "fp16:arithmetic=emulated", "fp16:arithmetic=native", "bf16:arithmetic=native"]
    tables = [casting(text).table for text in texts]
    numbers = [t.number for t in tables if t is not None]
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) == 3
