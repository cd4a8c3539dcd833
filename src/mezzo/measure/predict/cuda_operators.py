"""Operations that a GPU computes by other kernels than a CPU, replaced while a step is recorded: dropout, attention, recurrent layers.

On a CPU dropout multiplies by a mask of floating-point numbers; a GPU saves a mask of booleans. Attention takes the path that
keeps all scores on a CPU; a GPU uses flash attention in 16 bits, and the memory-efficient kernel in FP32. The functions of
``torch.nn.functional`` are replaced rather than caught by a mode, because activation checkpointing recomputes outside modes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mezzo.engine.casts.half import HALF
from mezzo.measure.predict.recurrent_layers import recurrent_layers

aten: Any = torch.ops.aten
_FLASH_HEAD = 256
"""Largest head dimension of flash attention."""


@contextmanager
def cuda_operators() -> Iterator[None]:
    """Replace the functions for the block."""
    originals = F.dropout, F.scaled_dot_product_attention
    F.dropout, F.scaled_dot_product_attention = _dropout, _attention
    try:
        with recurrent_layers(_cast):
            yield
    finally:
        F.dropout, F.scaled_dot_product_attention = originals


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    result: Tensor = aten.native_dropout(input, p, True)[0]
    return result


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *settings: Any, enable_gqa: bool = False, **named: Any
) -> Tensor:
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        repeat = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(repeat, -3) for t in (key, value))
    return _attention_kernel(_cast(query, key, value), *settings, **named)


def _attention_kernel(
    operands: Sequence[Tensor],
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Tensor:
    """Call the operator that CUDA chooses: FlashAttention in 16 bits without a mask, else the memory-efficient one."""
    query, key, value = operands
    scale = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    if attn_mask is None and query.dtype in HALF and query.shape[-1] <= _FLASH_HEAD:
        result: Tensor = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return result
    bias = None
    if attn_mask is not None:
        mask = attn_mask if attn_mask.dtype is not torch.bool else torch.zeros_like(attn_mask, dtype=query.dtype)
        bias = mask.expand(*query.shape[:-1], key.shape[-2])
    needs_sums = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    efficient: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_sums, dropout_p, is_causal, scale=scale
    )[0]
    return efficient


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    # Autocast's lists for CUDA put attention and recurrent layers in the lower precision; the operators called here are not on them.
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    dtype = torch.get_autocast_dtype("cpu")
    return tuple(t.to(dtype) for t in tensors)
