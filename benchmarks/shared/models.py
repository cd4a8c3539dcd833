"""Small models, and the shapes of a large one, that several benchmarks time."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def digits_cnn() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return the convolutional net of ``examples/digits.py`` and its loss on a batch of 64 images of 8 x 8."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 16, 10),
    )
    inputs, targets = torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,))
    return model, lambda net: F.cross_entropy(net(inputs).float(), targets)


def small_transformer() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return two pre-norm encoder layers of width 128 and their loss on a batch of 16 sequences of 64."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    inputs = torch.randn(16, 64, 128)
    return model, lambda net: net(inputs).float().square().mean()


def bert_base_shapes(layers: int = 12) -> list[tuple[int, ...]]:
    """Return the shapes of BERT-base's parameters: with 12 layers 199 of them, 109,482,240 parameters."""
    embeddings: list[tuple[int, ...]] = [(30522, 768), (512, 768), (2, 768), (768,), (768,)]
    attention: list[tuple[int, ...]] = [(768, 768), (768,)] * 4
    layer = [*attention, (768,), (768,), (3072, 768), (3072,), (768, 3072), (768,), (768,), (768,)]
    return [*embeddings, *layer * layers, (768, 768), (768,)]


def mlp() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return three linear layers of width 64 with ReLU between them, and their loss on a batch of 32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    inputs, targets = torch.randn(32, 64), torch.randn(32, 64)
    return model, lambda net: F.mse_loss(net(inputs), targets)
