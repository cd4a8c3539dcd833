"""The models, optimizers, schedulers and scalers of a script, and their states: what a return to a snapshot restores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mezzo.engine.snapshots.contents import keep_formats
from mezzo.engine.snapshots.sharded import placed, placed_model, placed_optimizer

TRAINED = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)


def kind_of(value: Any) -> str:
    """Return the kind of an object that training changes; empty for any other value."""
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, Optimizer):
        return "optimizer"
    return "stateful" if isinstance(value, (LRScheduler, torch.amp.GradScaler)) else ""


def trained_among(objects: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    """Return the trained objects among others, by their names; of modules, those that are part of no other."""
    found = {name: value for name, value in objects if kind_of(value)}
    inner = {
        id(part)
        for value in found.values()
        if isinstance(value, nn.Module)
        for part in value.modules()
        if part is not value
    }
    return {name: value for name, value in found.items() if id(value) not in inner}


def states_of(objects: Mapping[str, Any]) -> list[list[Any]]:
    """Return the name, the kind and the state of each object."""
    return [[name, kind_of(value), _STATES[kind_of(value)](value)] for name, value in objects.items()]


def set_state(kind: str, value: Any, state: Any) -> None:
    """Give an object its saved state."""
    _SETTERS[kind](value, state)


def _module_state(module: nn.Module) -> dict[str, Any]:
    state = module.state_dict()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in state}
    return {"state": dict(state), "buffers": buffers, "gradients": gradients}


def _set_module(module: nn.Module, state: Mapping[str, Any]) -> None:
    module.load_state_dict(placed_model(state["state"], module))
    for name, buffer in module.named_buffers():
        if name in state["buffers"] and buffer.shape == state["buffers"][name].shape:
            buffer.copy_(state["buffers"][name])
    for name, parameter in module.named_parameters():
        gradient = placed(state["gradients"].get(name), parameter)
        parameter.grad = None if gradient is None else gradient.to(parameter.device)


def _set_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    state = placed_optimizer(state, optimizer)
    optimizer.load_state_dict(state)
    keep_formats(optimizer, state)


_STATES: dict[str, Callable[[Any], Any]] = {
    "module": _module_state,
    "optimizer": lambda optimizer: optimizer.state_dict(),
    "stateful": lambda obj: obj.state_dict(),
}
_SETTERS: dict[str, Callable[[Any, Any], Any]] = {
    "module": _set_module,
    "optimizer": _set_optimizer,
    "stateful": lambda obj, state: obj.load_state_dict(state),
}
