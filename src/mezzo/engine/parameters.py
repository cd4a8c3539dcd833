"""The parameters that models have, and those that optimizers update."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def parameters_of(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of all models, each once."""
    return list(dict.fromkeys(p for model in models for p in model.parameters()))


def trained_by(optimizers: Iterable[torch.optim.Optimizer]) -> list[nn.Parameter]:
    """Return the parameters of all groups of all optimizers."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def all_parameters(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> list[nn.Parameter]:
    """Return the models' parameters and those that only an optimizer has."""
    return list(dict.fromkeys([*parameters_of(models), *trained_by(optimizers)]))


def trained_leaves(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the leaves that one optimizer updates."""
    groups = getattr(optimizer, "param_groups", ())  # missing if its constructor failed
    return [p for group in groups for p in group["params"] if p.is_leaf]
