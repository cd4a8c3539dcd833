"""The Triton kernels themselves: a program works on one chunk of one tensor, reads it once and writes it once."""

from __future__ import annotations

import triton
import triton.language as tl

from mezzo.engine.kernels.gpu_formats import (
    close_master,
    close_moment,
    for_first,
    for_second,
    hashed,
    open_master,
    open_moment,
    place,
    read,
    setting,
)


@triton.jit
def square_kernel(gradients, chunks, sizes, partials, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Write a chunk's sum of squares, in FP64."""
    tensor, at, inside = place(chunks, sizes, BLOCK)
    g = read(gradients, tensor, at, inside, TYPE).to(tl.float64)
    tl.store(partials + tl.program_id(0), tl.sum(g * g))


@triton.jit
def adamw_kernel(
    weights,
    gradients,
    masters,
    means,
    squares,
    largest,
    steps,
    numbers,
    sizes,
    chunks,
    settings,
    factor,
    found_inf,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENT: tl.constexpr,
    KIND: tl.constexpr,
    AMSGRAD: tl.constexpr,
    MOSTLY_OLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update a chunk by AdamW; the settings are lr, weight_decay, sign, beta1, beta2, eps and the betas' logarithms."""
    if tl.load(found_inf) == 0:
        tensor, at, inside = place(chunks, sizes, BLOCK)
        step = tl.load(tl.load(steps + tensor).to(tl.pointer_type(tl.float32)))
        h = hashed(numbers, tensor, step, at)
        lr, sign = setting(settings, 0), setting(settings, 2).to(tl.float32)
        beta1, beta2 = setting(settings, 3), setting(settings, 4)
        length = (lr / (1.0 - tl.exp(step.to(tl.float64) * setting(settings, 6)))).to(tl.float32)
        root = tl.sqrt(1.0 - tl.exp(step.to(tl.float64) * setting(settings, 7))).to(tl.float32)
        decay = (lr * setting(settings, 1)).to(tl.float32)
        g = read(gradients, tensor, at, inside, GRADIENT).to(tl.float32) * (tl.load(factor) * sign)
        m = open_moment(means, sizes, tensor, at, inside, True, MOMENT)
        v = open_moment(squares, sizes, tensor, at, inside, False, MOMENT)
        p = open_master(weights, masters, tensor, at, inside, WEIGHT, KIND)
        # torch.lerp's two forms
        m = m + (g - m) * (1.0 - beta1).to(tl.float32) if MOSTLY_OLD else g - (g - m) * beta1.to(tl.float32)
        v = v * beta2.to(tl.float32) + (1.0 - beta2).to(tl.float32) * g * g
        close_moment(means, sizes, tensor, at, inside, m, for_first(h), True, MOMENT, BLOCK)
        close_moment(squares, sizes, tensor, at, inside, v, for_second(h), False, MOMENT, BLOCK)
        if AMSGRAD:
            v = tl.maximum(v, open_moment(largest, sizes, tensor, at, inside, False, MOMENT))
            close_moment(largest, sizes, tensor, at, inside, v, for_second(h), False, MOMENT, BLOCK)
        p -= decay * p + length * (m / (tl.sqrt(v) / root + setting(settings, 5).to(tl.float32)))
        close_master(weights, masters, tensor, at, inside, p, h, WEIGHT, KIND)


@triton.jit
def sgd_kernel(
    weights,
    gradients,
    masters,
    buffers,
    steps,
    numbers,
    sizes,
    chunks,
    settings,
    factor,
    found_inf,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENT: tl.constexpr,
    KIND: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update a chunk by SGD; the settings are lr, weight_decay, sign, momentum and what is fresh in the buffer."""
    if tl.load(found_inf) == 0:
        tensor, at, inside = place(chunks, sizes, BLOCK)
        step = tl.load(tl.load(steps + tensor).to(tl.pointer_type(tl.float32)))
        h = hashed(numbers, tensor, step, at)
        lr, decay = setting(settings, 0).to(tl.float32), setting(settings, 1).to(tl.float32)
        sign, momentum = setting(settings, 2).to(tl.float32), setting(settings, 3).to(tl.float32)
        p = open_master(weights, masters, tensor, at, inside, WEIGHT, KIND)
        g = read(gradients, tensor, at, inside, GRADIENT).to(tl.float32) * (tl.load(factor) * sign) + decay * p
        direction = g
        if MOMENTUM:
            b = open_moment(buffers, sizes, tensor, at, inside, True, MOMENT)
            b = tl.where(step == 1.0, g, momentum * b + setting(settings, 4).to(tl.float32) * g)
            close_moment(buffers, sizes, tensor, at, inside, b, for_first(h), True, MOMENT, BLOCK)
            direction = b
            if NESTEROV:
                direction = g + momentum * b
        close_master(weights, masters, tensor, at, inside, p - lr * direction, h, WEIGHT, KIND)
