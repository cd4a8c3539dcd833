"""The Triton way for NVIDIA and AMD GPUs: all tensors of a group in one launch, by tables of addresses.

A program works on one chunk of one tensor. It finds the chunk in a table, the tensor's memory in tables of addresses, and reads
gradient, master and moments once and writes them once. ``factor`` and ``found_inf`` are read on the device: where
``found_inf`` is above 0 a program ends before it loads anything else. The host only sends the tables, through pinned memory.

Tensors of different kinds (formats of weight, gradient and master) go in a launch each, because formats are compiled in.

On a CPU these kernels run under Triton's interpreter (``TRITON_INTERPRET=1``), which is how they are tested; what they reach on
a GPU is for ``benchmarks/`` to show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo.engine.kernels.batch import AdamWSettings, Batch, SGDSettings
from mezzo.engine.kernels.layout import dense
from mezzo.formats import BF16, FP16, FP32

CHUNK = 4096
"""Elements a program works on: 64 to 120 KB of memory traffic, enough to hide the table look-ups."""
_TYPES = {FP32.dtype: tl.float32, FP16.dtype: tl.float16, BF16.dtype: tl.bfloat16}
_ALONE, _MASTER, _SPLIT = 0, 1, 2


@triton.jit
def _place(chunks, sizes, BLOCK: tl.constexpr):
    """Return this program's tensor, its element offsets in it, and which of them exist."""
    program = tl.program_id(0)
    tensor = tl.load(chunks + 2 * program)
    at = tl.load(chunks + 2 * program + 1) + tl.arange(0, BLOCK).to(tl.int64)
    return tensor, at, at < tl.load(sizes + tensor)


@triton.jit
def _read(addresses, tensor, at, inside, TYPE: tl.constexpr):
    pointer = tl.load(addresses + tensor).to(tl.pointer_type(TYPE))
    return tl.load(pointer + at, mask=inside, other=0)


@triton.jit
def _write(addresses, tensor, at, inside, value, TYPE: tl.constexpr):
    pointer = tl.load(addresses + tensor).to(tl.pointer_type(TYPE))
    tl.store(pointer + at, value.to(TYPE), mask=inside)


@triton.jit
def _open(weights, masters, tensor, at, inside, TYPE: tl.constexpr, KIND: tl.constexpr):
    if KIND == 0:
        return _read(weights, tensor, at, inside, TYPE).to(tl.float32)
    if KIND == 1:
        return _read(masters, tensor, at, inside, tl.float32)
    low = _read(masters, tensor, at, inside, tl.int16)
    high = _read(weights, tensor, at, inside, tl.int16).to(tl.int32) - (low < 0).to(tl.int32)
    return ((high << 16) | (low.to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _close(weights, masters, tensor, at, inside, value, TYPE: tl.constexpr, KIND: tl.constexpr):
    if KIND == 2:
        bits = value.to(tl.int32, bitcast=True)
        low = bits.to(tl.int16)
        high = (bits >> 16) + (low < 0).to(tl.int32)
        _write(weights, tensor, at, inside, high, tl.int16)
        _write(masters, tensor, at, inside, low, tl.int16)
    else:
        if KIND == 1:
            _write(masters, tensor, at, inside, value, tl.float32)
        _write(weights, tensor, at, inside, value, TYPE)


@triton.jit
def _square_kernel(gradients, chunks, sizes, partials, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    tensor, at, inside = _place(chunks, sizes, BLOCK)
    g = _read(gradients, tensor, at, inside, TYPE).to(tl.float64)
    tl.store(partials + tl.program_id(0), tl.sum(g * g))


@triton.jit
def _adamw_kernel(
    weights,
    gradients,
    masters,
    means,
    squares,
    largest,
    steps,
    chunks,
    sizes,
    factor,
    found_inf,
    lr,
    keep,
    beta1,
    to_mean,
    beta2,
    to_square,
    log_beta1,
    log_beta2,
    eps,
    sign,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    KIND: tl.constexpr,
    AMSGRAD: tl.constexpr,
    MOSTLY_OLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(found_inf) == 0:
        tensor, at, inside = _place(chunks, sizes, BLOCK)
        step = tl.load(tl.load(steps + tensor).to(tl.pointer_type(tl.float32))).to(tl.float64)
        length = (lr / (1.0 - tl.exp(step * log_beta1))).to(tl.float32)
        root = tl.sqrt(1.0 - tl.exp(step * log_beta2)).to(tl.float32)
        g = _read(gradients, tensor, at, inside, GRADIENT).to(tl.float32) * (tl.load(factor) * sign)
        m = _read(means, tensor, at, inside, tl.float32)
        v = _read(squares, tensor, at, inside, tl.float32)
        p = _open(weights, masters, tensor, at, inside, WEIGHT, KIND)
        m = m + (g - m) * to_mean if MOSTLY_OLD else g - (g - m) * beta1  # torch.lerp's two forms
        v = v * beta2 + to_square * g * g
        _write(means, tensor, at, inside, m, tl.float32)
        _write(squares, tensor, at, inside, v, tl.float32)
        if AMSGRAD:
            v = tl.maximum(v, _read(largest, tensor, at, inside, tl.float32))
            _write(largest, tensor, at, inside, v, tl.float32)
        p = p * keep - length * (m / (tl.sqrt(v) / root + eps))
        _close(weights, masters, tensor, at, inside, p, WEIGHT, KIND)


@triton.jit
def _sgd_kernel(
    weights,
    gradients,
    masters,
    buffers,
    steps,
    chunks,
    sizes,
    factor,
    found_inf,
    lr,
    decay,
    momentum,
    fresh,
    sign,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    KIND: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(found_inf) == 0:
        tensor, at, inside = _place(chunks, sizes, BLOCK)
        p = _open(weights, masters, tensor, at, inside, WEIGHT, KIND)
        g = _read(gradients, tensor, at, inside, GRADIENT).to(tl.float32) * (tl.load(factor) * sign) + decay * p
        direction = g
        if MOMENTUM:
            first = tl.load(tl.load(steps + tensor).to(tl.pointer_type(tl.float32))) == 1.0
            b = _read(buffers, tensor, at, inside, tl.float32)
            b = tl.where(first, g, momentum * b + fresh * g)
            _write(buffers, tensor, at, inside, b, tl.float32)
            direction = b
            if NESTEROV:
                direction = g + momentum * b
        _close(weights, masters, tensor, at, inside, p - lr * direction, WEIGHT, KIND)


def sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Return the sum of all squares in FP64: not finite exactly when a gradient is not."""
    parts, gradients = [], [dense(g) for g in gradients]
    for dtype in dict.fromkeys(g.dtype for g in gradients):
        own = [g for g in gradients if g.dtype is dtype]
        addresses, sizes, chunks = _tables([own])
        partials = torch.empty(len(chunks) // 2, dtype=torch.double, device=own[0].device)
        _square_kernel[(len(partials),)](addresses[0], chunks, sizes, partials, TYPE=_TYPES[dtype], BLOCK=CHUNK)
        parts.append(partials.sum())
    return torch.stack(parts).sum()


def adamw(batch: Batch, settings: AdamWSettings, factor: Tensor, found_inf: Tensor) -> None:
    """Update as ``reference.adamw`` says, in one pass."""
    s = settings
    torch._foreach_add_(batch.steps, [1 - found_inf] * len(batch.steps))
    for kind, numbers in _kinds(batch):
        lists = _chosen(batch, numbers, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq" if s.amsgrad else "exp_avg_sq"))
        addresses, sizes, chunks = _tables(lists)
        _adamw_kernel[(len(chunks) // 2,)](
            *addresses,
            chunks,
            sizes,
            factor,
            found_inf,
            s.lr,
            1.0 - s.lr * s.weight_decay,
            s.beta1,
            1.0 - s.beta1,
            s.beta2,
            1.0 - s.beta2,
            math.log(s.beta1) if s.beta1 else -math.inf,
            math.log(s.beta2) if s.beta2 else -math.inf,
            s.eps,
            -1.0 if s.maximize else 1.0,
            **kind,
            AMSGRAD=s.amsgrad,
            MOSTLY_OLD=1.0 - s.beta1 < 0.5,
            BLOCK=CHUNK,
        )


def sgd(batch: Batch, settings: SGDSettings, factor: Tensor, found_inf: Tensor) -> None:
    """Update as ``reference.sgd`` says, in one pass."""
    s = settings
    torch._foreach_add_(batch.steps, [1 - found_inf] * len(batch.steps))
    for kind, numbers in _kinds(batch):
        addresses, sizes, chunks = _tables(_chosen(batch, numbers, ("momentum_buffer",) if s.momentum else ("",)))
        _sgd_kernel[(len(chunks) // 2,)](
            *addresses,
            chunks,
            sizes,
            factor,
            found_inf,
            s.lr,
            s.weight_decay,
            s.momentum,
            1.0 - s.dampening,
            -1.0 if s.maximize else 1.0,
            **kind,
            MOMENTUM=s.momentum != 0,
            NESTEROV=s.nesterov,
            BLOCK=CHUNK,
        )


def _kinds(batch: Batch) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yield what is compiled in for each kind of tensor, and the numbers of the tensors of that kind."""
    found: dict[tuple[Any, Any, int], list[int]] = {}
    for i, (weight, gradient, master) in enumerate(zip(batch.weights, batch.gradients, batch.masters, strict=True)):
        kind = _SPLIT if master.dtype is torch.int16 else _ALONE if weight is master else _MASTER
        found.setdefault((weight.dtype, gradient.dtype, kind), []).append(i)
    for (weight_dtype, gradient_dtype, kind), numbers in found.items():
        yield {"WEIGHT": _TYPES[weight_dtype], "GRADIENT": _TYPES[gradient_dtype], "KIND": kind}, numbers


def _chosen(batch: Batch, numbers: Sequence[int], moments: Sequence[str]) -> list[list[Tensor]]:
    lists = [batch.weights, batch.gradients, batch.masters]
    lists += [batch.moments.get(name, batch.masters) for name in moments]  # masters stand in for what is not touched
    return [[tensors[i] for i in numbers] for tensors in (*lists, batch.steps)]


def _tables(lists: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the addresses of each list, the sizes of the first list's tensors, and (tensor, start) of every chunk; int64 on the device."""
    first = lists[0]
    sizes = [t.numel() for t in first]
    chunks = [number for i, size in enumerate(sizes) for start in range(0, size, CHUNK) for number in (i, start)]
    numbers = [*(t.data_ptr() for tensors in lists for t in tensors), *sizes, *chunks]
    cuda = first[0].is_cuda
    # One copy through pinned memory: a pageable one would make the host wait.
    sent = torch.tensor(numbers, dtype=torch.int64, pin_memory=cuda).to(first[0].device, non_blocking=True)
    count = len(first)
    addresses = [sent[i * count : (i + 1) * count] for i in range(len(lists))]
    rest = sent[len(lists) * count :]
    return addresses, rest[:count], rest[count:]
