"""How the language models of the memory tables differ between transformers 4 and 5.

The rows of gpu_memory_xmem.csv were measured with torch 2.6, so with transformers of early 2025. That version keeps other
tensors than version 5, so a prediction with version 5 describes a program that was never run:

- GPT-2 has a causal mask of (positions)^2 booleans in each layer.
- GPT-2's attention makes query, key and value contiguous, so copies of views of the joint product are saved.
- T5's attention has no fused kernel: bias and mask are added once per stack, in full size, and each layer keeps its probabilities.
- The cache of keys and values keeps the first ones themselves; version 5 concatenates them with an empty tensor, a copy.

Traced with transformers 4.50.3 itself, 28 of the 29 rows have the same predictions within 0.5%; no file keeps these. T5's peaks, which
no finished row of the table has, are within 0.1% of that version's too; with version 5 they would be 4% to 15% lower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.prediction.zoo.trainings import installed


@contextmanager
def transformers_4() -> Iterator[None]:
    """In the block, let models of transformers 5 keep the tensors that version 4 keeps."""
    if int(installed("transformers").__version__.split(".")[0]) < 5:
        yield
        return
    from transformers.cache_utils import DynamicLayer
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own_update, own_attention = DynamicLayer.update, ALL_ATTENTION_FUNCTIONS["sdpa"]

    def update(layer: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if layer.is_initialized:
            return own_update(layer, keys, values, *args, **kwargs)  # type: ignore[no-any-return]
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        return keys, values

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(module).__name__ == "T5Attention":
            return _t5_attention(module, query, key, value, **kwargs)
        if _is_gpt2(module):
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        return own_attention(module, query, key, value, *args, **kwargs)

    with (
        patch.object(DynamicLayer, "update", update),
        patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {"sdpa": attention}),
    ):
        yield


def _t5_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *, position_bias: Any, dropout: float, **_: Any
) -> tuple[Tensor, Tensor]:
    scores = torch.matmul(query, key.transpose(3, 2))
    masked = getattr(position_bias, "masked", None)  # a stack's layers share the bias of its first one
    if masked is None:
        masked = position_bias.masked = position_bias + query.new_zeros(query.shape[0], 1, 1, key.shape[2])
    scores += masked
    weights = nn.functional.dropout(nn.functional.softmax(scores.float(), dim=-1), p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def with_causal_masks(model: nn.Module) -> nn.Module:
    """Return a GPT-2 with the causal masks of transformers 4 as buffers; other models unchanged."""
    for name, module in model.named_modules():
        if name.endswith(".attn") and _is_gpt2(module) and not hasattr(module, "bias"):
            size = model.config.n_positions  # type: ignore[union-attr]
            module.register_buffer("bias", torch.empty(1, 1, size, size, dtype=torch.bool), persistent=False)
    return model


def _is_gpt2(module: nn.Module) -> bool:
    return type(module).__name__ == "GPT2Attention"
