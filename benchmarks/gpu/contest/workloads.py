"""The models, from configurations and with random weights, and the batches that they train on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEED = 0


@dataclass(frozen=True)
class Workload:
    """A model, its data and its loss."""

    make: Callable[[], nn.Module]
    """Builds the model; raises ImportError if its library is missing."""
    batch: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    """Computes the loss from the model and a batch."""
    unit: str
    units_a_sample: int = 1
    images: bool = False

    def model(self, device: str) -> nn.Module:
        """Return the model with the weights that every way starts from."""
        torch.manual_seed(SEED)
        model = self.make().train().to(device)
        # Tensor Cores need channels-last for convolutions in 16 bits; it is the same for all ways.
        return model.to(memory_format=torch.channels_last) if self.images and device == "cuda" else model

    def batches(self, size: int, device: str, count: int) -> list[tuple[Tensor, ...]]:
        torch.manual_seed(SEED + 1)
        made = [self.batch(size) for _ in range(count)]
        return [tuple(self._placed(t.to(device)) for t in batch) for batch in made]

    def _placed(self, tensor: Tensor) -> Tensor:
        lay = tensor.dim() == 4 and tensor.is_cuda
        return tensor.contiguous(memory_format=torch.channels_last) if lay else tensor


def workload(name: str, *, tiny: bool) -> Workload:
    """Return the workload of that name; ``tiny`` selects sizes that a CPU trains in milliseconds."""
    if name in _TIMM:
        side, classes = (32, 8) if tiny else (224, 1000)
        return _images(lambda: _timm(_TIMM[name][tiny], classes), side, classes)
    if name == "bert_base":
        return _text(lambda: _bert(tiny), words=128 if tiny else 30522, length=16 if tiny else 128, masked=True)
    if name == "gpt2":
        return _text(lambda: _gpt2(tiny), words=128 if tiny else 50257, length=16 if tiny else 1024, masked=False)
    if name == "tiny_convnet":
        return _images(_convnet, 16, 8)
    return Workload(_transformer, lambda n: (torch.randn(n, 8, 32),), _square, "tokens", 8)


_TIMM = {"mobilenetv3_large": ("mobilenetv3_large_100", "mobilenetv3_small_050"), "resnet50": ("resnet50", "resnet10t")}


def _images(make: Callable[[], nn.Module], side: int, classes: int) -> Workload:
    def batch(size: int) -> tuple[Tensor, ...]:
        return torch.randn(size, 3, side, side), torch.randint(0, classes, (size,))

    def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images).float(), labels)

    return Workload(make, batch, loss, "images", images=True)


def _text(make: Callable[[], nn.Module], *, words: int, length: int, masked: bool) -> Workload:
    def batch(size: int) -> tuple[Tensor, ...]:
        tokens = torch.randint(0, words, (size, length))
        # 15% of the words are predicted, the rest ignored, as BERT is trained; GPT-2 predicts all.
        labels = torch.where(torch.rand(size, length) < 0.15, tokens, -100) if masked else tokens
        return tokens, labels

    def loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens, labels=labels).loss
        return found

    return Workload(make, batch, loss, "tokens", length)


def _timm(name: str, classes: int) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, num_classes=classes)
    return model


def _no_mask(*_: Any, **__: Any) -> None:
    """Replace transformers' masks: these batches have no padding and are not packed.

    To find that out, transformers reads every batch, and the host waits; inside a captured or compiled step it cannot read the batch
    and makes a mask that prevents fast attention. Without a mask, attention is the same (causal in GPT-2), and equal in all ways.
    """


def _bert(tiny: bool) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM
    from transformers.models.bert import modeling_bert

    modeling_bert.create_bidirectional_mask = _no_mask
    small: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 128}
    # Without a padding token the model does not search every batch for it, which would make the host wait.
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": None}
    model: nn.Module = BertForMaskedLM(BertConfig(**none, **({**small, "intermediate_size": 64} if tiny else {})))
    return model


def _gpt2(tiny: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.models.gpt2 import modeling_gpt2

    modeling_gpt2.create_causal_mask = _no_mask
    small: dict[str, Any] = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 128, "n_positions": 16}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    words = {"bos_token_id": 0, "eos_token_id": 0} if tiny else {}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**none, **words, **(small if tiny else {})))
    return model


def _convnet() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8))


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def _square(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).float().square().mean()
