"""LitGPT's trainings in gpu_memory_large.csv: LoRA and full fine-tuning, and pre-training, on one GPU with weights in BF16.

The architecture, the settings and the order of the loop are read from the project's code (``litgpt/model.py``, ``litgpt/lora.py``,
``litgpt/finetune/``, ``config_hub/finetune/*/lora.yaml``); rows of October 2023 use the norms of that time, which stayed in BF16. The
head and the loss run over 128 tokens at a time, and Lightning's wrapper returns logits in FP32. Batches have the length that the row names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.prediction.zoo.trainings import NotBuilt, text
from mezzo.measure.predict.tape_memory import PredictedMemory, predict_memory
from mezzo.measure.predict.training import record_training
from mezzo.policy import Policy

_CHUNK = 128
_LEAST_STATES = 4
"""Weights, gradients and AdamW's two moments."""


@dataclass(frozen=True)
class Size:
    """The architecture of a model."""

    vocab: int
    layers: int = 16
    width: int = 4096
    heads: int = 32
    groups: int | None = None
    hidden: int | None = None
    """Width of a gated perceptron; None for GPT-NeoX's of four times the width."""
    rotary: float = 1.0
    parallel: bool = False
    shared_norm: bool = False
    gelu: bool = False
    biases: bool = False
    head_bias: bool = False

    @property
    def head_size(self) -> int:
        return self.width // self.heads


_LLAMA_2_7B, _LLAMA_3 = Size(32000, 32, 4096, 32, None, 11008), Size(128256, 32, 4096, 32, 8, 14336)
_TINYLLAMA = Size(32000, 22, 2048, 32, 4, 5632)
_NEOX: dict[str, Any] = {"parallel": True, "biases": True}
_PHI: dict[str, Any] = {"shared_norm": True, "head_bias": True, **_NEOX}
SIZES = {
    "phi-1.5": Size(51200, 24, 2048, 32, rotary=0.5, **_PHI),
    "phi-2": Size(51200, 32, 2560, 32, rotary=0.4, **_PHI),
    "stablelm": Size(50688, 16, 4096, 32, rotary=0.25, **_NEOX),
    **dict.fromkeys(("llama 2 7b", "llama-2-7b"), _LLAMA_2_7B),
    "llama 2 13b": Size(32000, 40, 5120, 40, None, 13824),
    **dict.fromkeys(("llama-3-8b", "llama-3.1-8b"), _LLAMA_3),
    "llama-3.2-1b": Size(128256, 16, 2048, 32, 8, 8192),
    "llama-3.2-3b": Size(128256, 28, 3072, 24, 8, 8192),
    "mistral-7b": Size(32000, 32, 4096, 32, 8, 14336),
    **dict.fromkeys(("tinyllama", "tiny-llama"), _TINYLLAMA),
    "phi-3": Size(32064, 32, 3072, 32, None, 8192),
    "falcon-7b": Size(65024, 32, 4544, 71, 1, parallel=True, shared_norm=True),
    "gemma-2b": Size(256000, 18, 2048, 8, 1, 16384, gelu=True),
}
"""By the beginning of a row's model name."""
_EVERYWHERE = ("phi-2", "phi-3", "tiny-llama", "gemma-2b")
"""Models whose files of settings adapt every product; the others adapt query and value."""
_RANK_8 = ("phi-2", "phi-3", "gemma-2b")


@dataclass(frozen=True)
class Setting:
    """The facts about a training that do not follow from the architecture."""

    rank: int = 0
    """The rank of the adapters; 0 trains everything."""
    everywhere: bool = False
    dropout: float = 0.05
    old: bool = False
    """Whether norms compute in BF16, as in October 2023."""
    mixed: bool = False
    """Whether weights stay in FP32, under automatic mixed precision."""


class _Rms(nn.Module):
    def __init__(self, width: int, old: bool) -> None:
        super().__init__()
        self.weight, self.old = nn.Parameter(torch.ones(width)), old

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        wide = x if self.old else x.float()
        normed = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)
        return self.weight * normed if self.old else (normed * self.weight.float()).to(dtype)


class _Product(nn.Module):
    """A product, with an adapter of low rank where it is adapted; ``parts`` are the outputs that an adapter reaches."""

    def __init__(self, size_in: int, size_out: int, bias: bool, setting: Setting, parts: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.linear = nn.Linear(size_in, size_out, bias=bias)
        self.parts, self.dropout = parts, setting.dropout
        if parts:
            self.down = nn.Parameter(torch.empty(setting.rank * len(parts), size_in))
            self.up = nn.Parameter(torch.empty(sum(parts), setting.rank))

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = self.linear(x)
        if not self.parts:
            return base
        small = F.linear(F.dropout(x, self.dropout, True), self.down)
        if len(self.parts) == 1:
            return base + small @ self.up.transpose(0, 1) * 2.0
        ins, ups = small.transpose(1, 2).chunk(len(self.parts), 1), self.up.unsqueeze(-1).split(list(self.parts))
        wide = torch.cat([F.conv1d(a, b) for a, b in zip(ins, ups, strict=True)], 1).transpose(1, 2)
        if wide.shape[-1] < base.shape[-1]:  # keys are not adapted
            index = torch.empty(wide.shape[-1], dtype=torch.long)
            wide = wide.new_zeros(base.shape).index_copy(-1, index, wide)
        return base + wide * 2.0


def _roped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return (x * cos + turned * sin).to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, size: Size, setting: Setting) -> None:
        super().__init__()
        self.size, head = size, size.head_size
        groups = size.groups or size.heads
        query, value = size.heads * head, groups * head
        parts = (query, value, value) if setting.everywhere else (query, value)
        self.joined = _Product(size.width, query + 2 * value, size.biases, setting, parts if setting.rank else ())
        own = (size.width,) if setting.everywhere else ()
        self.out = _Product(size.width, size.width, size.biases, setting, own)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        size, (n, length, _) = self.size, x.shape
        groups, head = size.groups or size.heads, size.head_size
        each = size.heads // groups
        qkv = self.joined(x).view(n, length, groups, each + 2, head).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((each, 1, 1), dim=2)
        if 1 < groups < size.heads:
            k, v = (t.expand(n, groups, each, length, head) for t in (k, v))
        q, k, v = (t.reshape(n, -1, length, head) for t in (q, k, v))
        turned = cos.shape[-1]
        q, k = (torch.cat((_roped(t[..., :turned], cos, sin), t[..., turned:]), -1) for t in (q, k))
        k, v = (t.expand_as(q) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.out(y.transpose(1, 2).reshape(n, length, size.width))
        return found


class _Perceptron(nn.Module):
    def __init__(self, size: Size, setting: Setting) -> None:
        super().__init__()
        hidden, self.gated = size.hidden or 4 * size.width, size.hidden is not None
        self.function = partial(F.gelu, approximate="tanh") if size.gelu or not self.gated else F.silu
        adapted: tuple[int, ...] = (hidden,) if setting.everywhere else ()
        made = partial(_Product, bias=size.biases, setting=setting)
        self.first = made(size.width, hidden, parts=adapted)
        self.second = made(size.width, hidden, parts=adapted) if self.gated else None
        self.last = made(hidden, size.width, parts=(size.width,) if setting.everywhere else ())

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        if self.second is None:
            return self.last(self.function(first))  # type: ignore[no-any-return]
        second = self.second(x)
        return self.last(self.function(first) * second)  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, size: Size, setting: Setting) -> None:
        super().__init__()
        norm = partial(nn.LayerNorm, size.width) if size.parallel else partial(_Rms, size.width, setting.old)
        self.size, self.norm_1 = size, norm()
        self.norm_2 = None if size.shared_norm else norm()
        self.attention, self.perceptron = _Attention(size, setting), _Perceptron(size, setting)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first = self.norm_1(x)
        attended = self.attention(first, cos, sin)
        if self.size.parallel:
            second = first if self.norm_2 is None else self.norm_2(x)
            return self.perceptron(second) + attended + x  # type: ignore[no-any-return]
        x = attended + x
        return self.perceptron(first if self.norm_2 is None else self.norm_2(x)) + x  # type: ignore[no-any-return]


class _Gpt(nn.Module):
    """LitGPT's model, its weights in BF16 but under mixed precision, frozen but for its adapters if it has any."""

    def __init__(self, size: Size, setting: Setting) -> None:
        super().__init__()
        self.size, self.setting = size, setting
        self.words = nn.Embedding(size.vocab, size.width)
        self.blocks = nn.ModuleList(_Block(size, setting) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width) if size.parallel else _Rms(size.width, setting.old)
        own = (size.vocab,) if setting.everywhere else ()
        self.head = _Product(size.width, size.vocab, size.head_bias, setting, own)
        self.to(torch.float32 if setting.mixed else torch.bfloat16)
        if setting.rank:
            for name, parameter in self.named_parameters():
                parameter.requires_grad = name.endswith((".down", ".up"))

    def forward(self, ids: Tensor) -> Tensor:
        turned = int(self.size.rotary * self.size.head_size)
        dtype = torch.float16 if self.setting.old else torch.float32
        cos, sin = (torch.empty(ids.shape[1], turned, dtype=dtype) for _ in range(2))
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x)  # type: ignore[no-any-return]


def _loss(model: nn.Module, inputs: Mapping[str, Tensor], *, whole_head: bool) -> tuple[Tensor, Any]:
    head_of: Any = model
    hidden, targets, head = model(inputs["ids"]), inputs["labels"], head_of.head
    if whole_head:
        logits = list(head(hidden).float().flatten(0, 1).split(_CHUNK))  # Lightning returns a model's outputs in FP32
        wanted = targets.flatten().split(_CHUNK)
    else:
        lowered = [head(part) for part in hidden.split(_CHUNK, dim=1)]
        logits = [part.float() for part in lowered]
        del lowered
        logits[-1] = logits[-1][:, :-1]
        wanted = [part.reshape(-1) for part in targets[:, 1:].split(_CHUNK, dim=1)]  # type: ignore[assignment]
    head_of.kept = logits  # the loop's variable keeps them until the next step's exist
    flat = [one.reshape(-1, one.shape[-1]) for one in logits]
    losses = [F.cross_entropy(a, b, reduction="none") for a, b in zip(flat, wanted, strict=True)]
    return torch.cat(losses).sum() / targets.numel(), None


def memory_of(cells: Mapping[str, str]) -> PredictedMemory:
    """Return the predicted memory of a row.

    Raises:
        NotBuilt: the row's training is none of those above.
    """
    model, precision = cells["model"].lower(), cells["precision"]
    if cells["parallelism"] != "none" or cells["n_gpus"] != "1":
        raise NotBuilt("several GPUs")
    if "nf4" in precision:
        raise NotBuilt("weights in 4 bits")
    mixed = precision.startswith("bf16-mixed")
    if cells["compile"] not in ("no", "Eager"):
        raise NotBuilt("a compiled step")
    name = max((known for known in SIZES if model.startswith(known)), key=len, default="")
    kind = re.search(r"lora|full|pre-training", model)
    if not name or kind is None or "gemma-2-9b" in model or "adapter" in model:
        raise NotBuilt("an adapter of prompts" if "adapter" in model else "a model of another architecture")
    size = SIZES[name]
    rank, old = 0, "r8" in model
    if kind.group() == "lora":
        rank = 8 if old or name in _RANK_8 or (name == "stablelm" and cells["sequence"] != "512") else 32
    everywhere = bool(rank) and name in _EVERYWHERE and not old
    setting = Setting(rank, everywhere, 0.1 if name == "gemma-2b" else 0.05, old, mixed)
    batch, length = int(cells["micro_batch_per_gpu"]), int(cells["sequence"])
    pre_training = kind.group() == "pre-training"
    tape = record_training(
        partial(_Gpt, size, setting),
        partial(text, length, words=("ids", "labels")),
        partial(_loss, whole_head=pre_training),
        batch=batch,
        optimizer=partial(torch.optim.AdamW, fused=True) if pre_training else torch.optim.AdamW,
        policy=Policy.parse("bf16") if mixed else None,
        # Fine-tuning accumulates batches: gradients stay through the forward pass.
        zero_grad="before_backward" if kind.group() == "full" else "after_step",
    )
    states = _LEAST_STATES * sum(block.size_bytes for block in tape.blocks if block.kind == "parameters")
    if not rank and float(cells["memory_gib"]) * 2**30 < states:
        raise NotBuilt("less than the weights, gradients and AdamW's states that the row names")
    return predict_memory(tape)
