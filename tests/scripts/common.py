"""What the scenario scripts share; an imported module beside the script, as real scripts have."""

import json
from itertools import pairwise

import torch
from torch import nn


def report(**values):
    """Print in one piece: several processes share a pipe, and unbuffered (PYTHONUNBUFFERED) a line and its end are two writes."""
    print(json.dumps(values) + "\n", end="", flush=True)


def mlp(*widths, seed=0):
    torch.manual_seed(seed)
    layers = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batches(count, size=8, width=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, size, width, generator=generator)
    weight = torch.randn(width, 2, generator=generator)
    return [(x, (x @ weight).sin()) for x in inputs]


def labelled():
    inputs, targets = torch.randn(32, 6), torch.randint(0, 2, (32,))
    return torch.utils.data.DataLoader(list(zip(inputs, targets, strict=True)), batch_size=8)


def norm(parameters):
    return torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm().item()
