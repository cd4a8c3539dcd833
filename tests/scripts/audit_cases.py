"""One script for each finding of an audit: planted, with what the finding is about, and healthy, without it."""

import sys
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

BF16, CPU = torch.bfloat16, "cpu"


class Around(nn.Module):
    """A linear layer, what the case is about, and another linear layer."""

    def __init__(self, middle, width=16, out=16):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, width), middle, nn.Linear(width, out)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


class Middle(nn.Module):
    """A module made of one function of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        return self.function(self, x)


def without_autocast(self, x):
    with torch.autocast(CPU, enabled=False):
        return x.float() @ self.weight


def into_given_memory(self, x):
    with torch.no_grad():
        return x + torch.mm(x.to(BF16).float(), self.weight, out=torch.empty(x.shape)).to(x.dtype)


def shared(self, x):
    return F.linear(F.linear(x, self.weight).relu(), self.weight)


def softmaxes(cast):
    def function(self, x):
        for _ in range(8):
            x = F.softmax(x.float(), -1).to(BF16) if cast else F.softmax(x, -1)
        return x

    return function


def shifted(self, x):
    return F.linear(F.pad(x, (0, 8))[:, 1:17], self.weight)


def promoted_product(self, x):
    return F.linear(x * torch.ones(16), self.weight.float()).to(x.dtype)


def convolutions(model_first, images_first):
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(1))
    first, last = torch.contiguous_format, torch.channels_last
    images = torch.randn(4, 8, 8, 8).to(memory_format=first if images_first else last)
    return model.to(memory_format=first if model_first else last), images


def case(code, planted):
    """Return the model, its input, whether it runs under autocast, whether its casts are kept, and what follows it."""
    x, enabled, cache, after = torch.randn(32, 16), True, True, nn.Identity()
    same = Middle(lambda self, x: F.linear(x, self.weight))
    model = Around(same)
    if code == "A101" and planted:
        enabled = None
    elif code == "A108":
        enabled = not planted
    elif code == "A102" and planted:
        wide = torch.randn(16, 16, requires_grad=True)

        def after(y):
            return y.float() @ wide

    elif code == "A103" and planted:
        model = Around(Middle(without_autocast))
    elif code == "A105":
        model, enabled = Around(Middle(promoted_product) if planted else same).to(BF16), False
        x = x.to(BF16)
    elif code == "A106" and planted:
        model = Around(Middle(into_given_memory))
    elif code == "A107" and planted:
        model, x = model.double(), x.double()
    elif code == "A201":
        model = Around(nn.ReLU(), width=12 if planted else 24)
    elif code == "A202" and planted:
        model = Around(Middle(shifted))
    elif code == "A203":
        model, x = convolutions(planted, planted)
    elif code == "A205":
        model, x = convolutions(False, planted)
    elif code == "A301" and planted:
        model = Around(Middle(lambda self, x: x.float().relu()))
    elif code == "A302":
        model, cache = Around(Middle(shared)), not planted
    elif code == "A303":
        model = Around(Middle(softmaxes(planted)))
        x = torch.randn(512, 16)
    elif code == "A304":
        shift = torch.ones(16) if planted else torch.ones(16, dtype=BF16)
        model = Around(Middle(lambda self, x: x + shift))
    elif code == "A305":
        model = Around(nn.LayerNorm(16))
    elif code == "A401" and planted:
        model, x, enabled = model.to(BF16), x.to(BF16), False
    elif code == "A402":
        model = Around(Middle(lambda self, x: F.softmax(x if planted else x.float(), -1)))
    return model, x, enabled, cache, after


if __name__ == "__main__":
    torch.manual_seed(0)
    model, x, enabled, cache, after = case(sys.argv[1], sys.argv[2] == "planted")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        amp = (
            nullcontext() if enabled is None else torch.autocast(CPU, dtype=BF16, enabled=enabled, cache_enabled=cache)
        )
        with amp:
            y = model(x)
        after(y).float().square().mean().backward()
        optimizer.step()
