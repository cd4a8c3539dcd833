"""Small models, and the shapes of a large one, that several benchmarks time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LossOf = Callable[[nn.Module], Tensor]


def digits_cnn() -> tuple[nn.Module, LossOf]:
    """Return the convolutional net of ``examples/digits.py`` and its loss on a batch of 64 images of 8 x 8."""
    torch.manual_seed(0)
    parts = [m for a, b in ((1, 32), (32, 64)) for m in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())]
    model = nn.Sequential(*parts, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 16, 10))
    inputs, targets = torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,))
    return model, lambda net: F.cross_entropy(net(inputs).float(), targets)


def small_transformer() -> tuple[nn.Module, LossOf]:
    """Return two pre-norm encoder layers of width 128 and their loss on a batch of 16 sequences of 64."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    inputs = torch.randn(16, 64, 128)
    return model, lambda net: net(inputs).float().square().mean()


def mlp() -> tuple[nn.Module, LossOf]:
    """Return three linear layers of width 64 with ReLU between them, and their loss on a batch of 32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    inputs, targets = torch.randn(32, 64), torch.randn(32, 64)
    return model, lambda net: F.mse_loss(net(inputs), targets)


class _Block(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(ins, outs, 3, stride, 1, bias=False), nn.BatchNorm2d(outs)
        self.second, self.last = nn.Conv2d(outs, outs, 3, 1, 1, bias=False), nn.BatchNorm2d(outs)
        same = ins == outs and stride == 1
        self.short = nn.Identity() if same else nn.Conv2d(ins, outs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.second(F.relu(self.norm(self.first(x)))))
        return F.relu(y + self.short(x))


class _Layer(nn.Module):
    """A pre-norm transformer layer with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.last = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.last(x))


def small_models() -> Iterator[tuple[str, nn.Module, LossOf]]:
    """Yield a ResNet on 16 images of 32 x 32 and a GPT on 12 sequences of 64, each with its name and its loss."""
    torch.manual_seed(0)
    sizes = ((16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1))
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [_Block(*size) for size in sizes]
    resnet = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    images, classes = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    yield _named("ResNet", resnet), resnet, lambda net: F.cross_entropy(net(images), classes)
    torch.manual_seed(0)
    layers = [_Layer(128, 4) for _ in range(4)]
    gpt = nn.Sequential(nn.Embedding(256, 128), *layers, nn.LayerNorm(128), nn.Linear(128, 256, bias=False))
    tokens, words = torch.randint(0, 256, (12, 64)), torch.randint(0, 256, (12 * 64,))
    yield _named("GPT", gpt), gpt, lambda net: F.cross_entropy(net(tokens).flatten(0, 1), words)


def _named(kind: str, model: nn.Module) -> str:
    return f"{kind} of {sum(p.numel() for p in model.parameters()) // 1000} thousand weights"


Shapes = list[tuple[int, ...]]


def bert_base_shapes(layers: int = 12) -> Shapes:
    """Return the shapes of BERT-base's parameters: with 12 layers 199 of them, 109,482,240 parameters."""
    embeddings: Shapes = [(30522, 768), (512, 768), (2, 768), (768,), (768,)]
    attention: Shapes = [(768, 768), (768,)] * 4
    layer = [*attention, (768,), (768,), (3072, 768), (3072,), (768, 3072), (768,), (768,), (768,)]
    return [*embeddings, *layer * layers, (768, 768), (768,)]


def resnet50_shapes() -> Shapes:
    """Return the 161 shapes of ResNet-50: 25,557,032 parameters."""
    convolutions: Shapes = [(64, 3, 7, 7)]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions += [(width, before, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            convolutions += [(4 * width, before, 1, 1)] if block == 0 else []
            before = 4 * width
    return [shape for one in convolutions for shape in (one, (one[0],), (one[0],))] + [(1000, 2048), (1000,)]
