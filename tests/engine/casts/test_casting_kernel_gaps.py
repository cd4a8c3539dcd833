"""What an emulated policy refuses because CUDA does, and what it emulates because only CUDA computes it: see oracles/cuda_kernels.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers_engine import casting, randn, same_bits
from mezzo import cuda_kernels
from mezzo.engine.casts.casting import Casting
from mezzo.engine.casts.registration import find_op
from mezzo.errors import NoKernelError
from mezzo.policy import Policy
from oracles import cuda_kernels as oracle

FP16, BF16, CHALF = torch.float16, torch.bfloat16, torch.complex32
SAMPLE = (
    *("linalg.c", "linalg.i", "linalg.ldl", "linalg.v", "fft.rfft", "fft.hfft"),
    *("special.", "igamma", "angle", "histc", "stft", "mm"),
)
"""The beginnings of the names that the quick test runs."""
COUNTS = {  # entries that are refused, and that are computed, by policy: forward, and with backward
    "fp16": ((88, 569), (56, 483)),
    "bf16": ((108, 549), (77, 462)),
    "fp16-pure": ((91, 567), (59, 481)),
    "bf16-pure": ((111, 547), (80, 460)),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", COUNTS)
def test_every_entry_of_the_database_is_refused_where_cuda_refuses_it_and_nowhere_else(policy: str) -> None:
    passes = oracle.agreement(policy)
    assert [found.apart for found in passes] == [[], []]
    assert tuple((found.refused, found.computed) for found in passes) == COUNTS[policy]


@pytest.mark.parametrize("policy", ["fp16", "bf16-pure"])
def test_entries_of_many_kinds(policy: str) -> None:
    found, _ = oracle.agreement(policy, names=lambda name: name.startswith(SAMPLE), most=24)
    assert found.apart == []
    assert found.refused > 40
    assert found.computed > 10


def test_the_list_names_operations_of_this_torch() -> None:
    missing = [row.op for row in cuda_kernels.MISSING_KERNELS]
    assert [op for op in missing if find_op(op) is None and not hasattr(torch.ops.aten, op)] == []
    assert [op for op in cuda_kernels.CPU_LACKS if not hasattr(torch.ops.aten, op)] == []
    assert set(cuda_kernels.DRAWS) <= set(cuda_kernels.CPU_LACKS)


HALF = randn(4, 96).half()
EYE = torch.eye(3).half()
POWERS = "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, but got a signal size of[96]"
WIDE = "expected a tensor with 2 or more dimensions of float, double, cfloat or cdouble types"
CTC = (randn(4, 1, 3).half(), torch.tensor([[1]]), [4], [1])
WORDS: dict[str, tuple[Callable[[], Any], str]] = {
    "rfft": (lambda: torch.fft.rfft(HALF), POWERS),
    "bf16 fft": (lambda: torch.fft.fft(HALF.bfloat16()), "Unsupported dtype BFloat16"),
    "det": (lambda: torch.linalg.det(EYE), "\"lu_factor_cublas\" not implemented for 'Half'"),
    "solve": (lambda: torch.linalg.solve(EYE, EYE), "\"lu_factor_cublas\" not implemented for 'Half'"),
    "svd": (lambda: torch.linalg.svd(EYE.bfloat16()), "\"svd_cuda_gesvdj\" not implemented for 'BFloat16'"),
    "inv": (lambda: torch.linalg.inv(EYE), "linalg.inv: Low precision dtypes not supported. Got Half"),
    "pinv": (lambda: torch.linalg.pinv(EYE), f"linalg.pinv(Half{{[3, 3]}}): {WIDE}"),
    "angle": (lambda: HALF.angle(), "\"angle_cuda\" not implemented for 'Half'"),
    "histc": (lambda: torch.histc(HALF), "HalfTensor is not supported"),
    "histc in bf16": (lambda: torch.histc(HALF.bfloat16()), "\"histc\" not implemented for 'BFloat16'"),
    "in place": (lambda: HALF.clone().igamma_(HALF), "\"igamma_cuda\" not implemented for 'Half'"),
    "a scalar": (lambda: torch.special.zeta(2.0, HALF), "\"zeta_cuda\" not implemented for 'Half'"),
    "ctc": (lambda: F.ctc_loss(*CTC), "\"ctc_loss_cuda\" not implemented for 'Half'"),
}


@pytest.mark.parametrize("name", WORDS)
def test_a_refusal_has_the_words_of_cuda_and_says_what_to_keep_in_fp32(name: str) -> None:
    call, words = WORDS[name]
    low = "BF16" if "bf16" in name or "BFloat16" in words else "FP16"
    with casting("fp16:arithmetic=emulated").region(), pytest.raises(NotImplementedError) as caught:
        call()
    assert isinstance(caught.value, NoKernelError)
    assert caught.value.message == words
    line = call.__code__.co_firstlineno
    assert caught.value.hint == (
        f"CUDA has no kernel for this in {low}: keep the operation at test_casting_kernel_gaps.py:{line} in FP32: "
        "call it on .float() operands inside torch.autocast(x.device.type, enabled=False)"
    )


class Spectral(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x).abs()


def test_the_hint_names_the_module_whose_pattern_keeps_it_in_fp32() -> None:
    model = nn.Sequential(nn.Linear(96, 96), nn.Sequential(nn.Tanh(), Spectral()))
    with casting("fp16:arithmetic=emulated").region(), pytest.raises(NoKernelError) as caught:
        model(HALF.float())
    assert caught.value.hint.endswith(", or keep its module by the policy's fp32_modules=1.1")


FOURIER: dict[str, tuple[Callable[[Tensor], Tensor], list[int] | None]] = {
    "rfft": (lambda x: torch.fft.rfft(x[:, :64]), None),
    "rfft cut to 64": (lambda x: torch.fft.rfft(x, n=64), None),
    "rfft of 96": (lambda x: torch.fft.rfft(x), [96]),
    "fft over the other dimension": (lambda x: torch.fft.fft(x, dim=0), None),
    "irfft to 64": (lambda x: torch.fft.irfft(x[:, :33].to(CHALF)), None),
    "irfft to 94": (lambda x: torch.fft.irfft(x[:, :48].to(CHALF)), [94]),
    "irfft to n": (lambda x: torch.fft.irfft(x[:, :48].to(CHALF), n=32), None),
    "hfft to 94": (lambda x: torch.fft.hfft(x[:, :48]), [94]),
    "ihfft of 64": (lambda x: torch.fft.ihfft(x[:, :64]), None),
    "ihfft of 96": (lambda x: torch.fft.ihfft(x), [96]),
    "fft2": (lambda x: torch.fft.fft2(x), [4, 96]),
    "fft2 to s": (lambda x: torch.fft.fft2(x, s=(3, 64)), [3, 64]),
    "fftn over one dimension": (lambda x: torch.fft.fftn(x, dim=(0,)), None),
    "fftn to s": (lambda x: torch.fft.fftn(x, s=(64,)), None),
    "irfftn": (lambda x: torch.fft.irfftn(x[:, :33].to(CHALF)), None),
    "irfft2 to s": (lambda x: torch.fft.irfft2(x[:, :33].to(CHALF), s=(4, 60)), [4, 60]),
    "stft of 16": (lambda x: torch.stft(x, 16, window=torch.ones(16).half(), return_complex=True), None),
    "stft of 12": (lambda x: torch.stft(x, 12, window=torch.ones(12).half(), return_complex=True), [12]),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", FOURIER)
def test_sizes_of_fourier_transforms_in_fp16(name: str) -> None:
    call, refused = FOURIER[name]
    with casting("fp16:arithmetic=emulated").region():
        if refused is None:
            assert call(HALF).dtype in (FP16, CHALF)
            return
        with pytest.raises(NoKernelError) as caught:
            call(HALF)
    assert caught.value.message.endswith(f"signal size of{refused}")


def test_operands_in_fp32_are_not_refused() -> None:
    x = randn(3, 3).requires_grad_()
    with casting("fp16:arithmetic=emulated").region():
        assert torch.equal(torch.linalg.inv(x), torch.linalg.inv(x))
        assert torch.fft.rfft(randn(4, 96)).dtype is torch.complex64
        assert torch.cdist(EYE, EYE).dtype is torch.float32  # of the FP32 list
        with torch.autocast("cpu", enabled=False):
            assert HALF.angle().dtype is FP16


def test_an_operation_without_elements_is_not_refused() -> None:
    with casting("fp16:arithmetic=emulated").region():
        assert HALF[:0].angle().shape == (0, 96)


def test_a_gradient_that_cuda_lacks_is_refused_in_the_backward_pass() -> None:
    x = randn(5).half().requires_grad_()
    with casting("fp16:arithmetic=emulated").region():
        y = torch.special.i1(x)
    with pytest.raises(NoKernelError, match="\"i1_backward\" not implemented for 'Half'"):
        y.sum().backward()


@pytest.mark.parametrize("policy", ["fp16", "bf16"])
def test_the_gradient_of_the_weights_of_an_embedding_bag(policy: str) -> None:
    low = Policy.parse(policy).storage.dtype
    table, weights = randn(5, 4).to(low).requires_grad_(), randn(2, 3).to(low).requires_grad_()
    rows = torch.tensor([[0, 1, 2], [2, 3, 4]])
    with casting(f"{policy}:arithmetic=emulated").region():
        F.embedding_bag(rows, table, mode="sum").sum().backward()
        y = F.embedding_bag(rows, table, mode="sum", per_sample_weights=weights)
    if low is FP16:
        y.sum().backward()
        return
    with pytest.raises(NoKernelError, match="_embedding_bag_per_sample_weights_backward_cuda"):
        y.sum().backward()


EMULATED: dict[str, Callable[[Tensor], Tensor]] = {
    "avg_pool3d": lambda x: F.avg_pool3d(x.view(1, 4, 4, 4, 6), 2),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x.view(4, 96), torch.tensor([0, 1, 2, 3])),
    "antialiased": lambda x: F.interpolate(x.view(1, 1, 16, 24), (8, 8), mode="bilinear", antialias=True),
    "safe softmax": lambda x: torch.ops.aten._safe_softmax(x, 1),
}


@pytest.mark.parametrize("low", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", EMULATED)
def test_what_only_cuda_computes_is_rounded_once_forward_and_backward(name: str, low: torch.dtype) -> None:
    policy = "fp16-pure" if low is FP16 else "bf16-pure"
    x = HALF.to(low).clone().requires_grad_()
    wide = x.detach().float().requires_grad_()
    torch.manual_seed(3)
    with Casting.of(Policy.parse(policy).replace(arithmetic="emulated"), "cpu").region():
        y = EMULATED[name](x)
    torch.manual_seed(3)
    exact = EMULATED[name](wide)
    assert same_bits([y], [exact.to(low)])
    y.sum().backward()
    exact.backward(torch.ones_like(exact))
    assert x.grad is not None
    assert wide.grad is not None
    assert same_bits([x.grad], [wide.grad.to(low)])


def test_in_place_where_only_cuda_computes_it() -> None:
    x = HALF.clone()
    with casting("fp16:arithmetic=emulated").region():
        torch.manual_seed(3)
        y = F.rrelu(x, training=True, inplace=True)
    torch.manual_seed(3)
    assert y is x
    assert torch.equal(x, F.rrelu(HALF.float(), training=True).half())


@pytest.mark.parametrize("shapes", [((3, 0), (0, 4)), ((2, 3, 0), (0, 4)), ((2, 3, 0), (2, 0, 4))])
def test_gradients_of_products_without_elements(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = (torch.zeros(shape, dtype=FP16, requires_grad=True) for shape in shapes)
    with casting("fp16:arithmetic=emulated").region():
        (a @ b).sum().backward()
    assert a.grad is not None
    assert (a.grad.shape, a.grad.dtype) == (a.shape, FP16)


def test_native_arithmetic_refuses_nothing() -> None:
    with casting("fp16:arithmetic=native").region():
        assert HALF.angle().dtype is FP16
