"""What does a step cost that ``mezzo audit`` records?

The step is forward, backward and update. The trace is interpreted once, after the traced steps; this is timed separately.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.shared.harness import interleave, median_ms, ratio, report, spread
from mezzo.measure.flops import OperandFormats
from mezzo.observe.audit.operations import interpret, weights_of
from mezzo.observe.module_names import Names
from mezzo.observe.observer import ModuleTree
from mezzo.observe.tracer import Tracer

ROUNDS = 15


def main() -> None:
    """Measure a small ResNet and a small GPT."""
    rows, data = [], {}
    for kind, make in (("ResNet", small_resnet), ("GPT", small_gpt)):
        model, loss_of = make()
        name = f"{kind} of {sum(p.numel() for p in model.parameters()) // 1000} thousand weights"
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        step = _step(loss_of, optimizer)
        tracers: list[Tracer] = []
        pieces = {
            "plain": step,
            "audited": lambda step=step, tracers=tracers: _audited(step, tracers),
            "FlopCounterMode": lambda step=step: _counted(step),
            "meaning": lambda tracers=tracers, o=optimizer: _meaning(tracers, o),
        }
        times = interleave(pieces, rounds=ROUNDS)
        rows += [
            (f"{name}: audited step against plain step", spread(ratio(times, "audited", "plain")), "1.6 or less"),
            (f"{name}: FlopCounterMode", spread(ratio(times, "FlopCounterMode", "plain")), ""),
            (f"{name}: working out the meaning, once", f"{median_ms(times)['meaning']:.1f} ms", ""),
        ]
        data[name] = {"median_ms": median_ms(times)}
    report("audit", rows, data)


def _step(loss_of: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        loss_of().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _audited(step: Callable[[], None], tracers: list[Tracer]) -> None:
    tracer = Tracer(OperandFormats(), device_type="cpu")
    tracer.start()
    step()
    tracer.stop()
    tracers[:] = [tracer]


def _counted(step: Callable[[], None]) -> None:
    with FlopCounterMode(display=False):
        step()


def _meaning(tracers: list[Tracer], optimizer: torch.optim.Optimizer) -> None:
    names = Names(tracers[0].trace.roots, ModuleTree())
    interpret(tracers[0].trace, names, weights_of(names.roots, [optimizer]))


class Block(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(ins, outs, 3, stride, 1, bias=False), nn.BatchNorm2d(outs)
        self.second, self.last = nn.Conv2d(outs, outs, 3, 1, 1, bias=False), nn.BatchNorm2d(outs)
        same = ins == outs and stride == 1
        self.short = nn.Identity() if same else nn.Conv2d(ins, outs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = self.last(self.second(F.relu(self.norm(self.first(x)))))
        return F.relu(y + self.short(x))


def small_resnet() -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return six blocks of 16 to 64 channels and their loss on 16 images of 32 x 32."""
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [
        Block(i, o, s) for i, o, s in ((16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1))
    ]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    images, targets = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    return model, lambda: F.cross_entropy(model(images), targets)


class Layer(nn.Module):
    """A pre-norm transformer layer with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.last = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.last(x))


def small_gpt() -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return four layers of width 128 and their loss on 12 sequences of 64."""
    torch.manual_seed(0)
    layers = [Layer(128, 4) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(256, 128), *layers, nn.LayerNorm(128), nn.Linear(128, 256, bias=False))
    tokens, targets = torch.randint(0, 256, (12, 64)), torch.randint(0, 256, (12 * 64,))
    return model, lambda: F.cross_entropy(model(tokens).flatten(0, 1), targets)
