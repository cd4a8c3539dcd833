"""Restore what a function changes by training, so that it can be called again from the same state.

Parameters, gradients, buffers, learning rates, schedules and random number generators are restored. Anything else, such as the
position of an iterator that it reads from, is not.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from mezzo.launch.torch.premade import find_premade


@contextmanager
def state_restored() -> Iterator[list[Any]]:
    """Restore every module, optimizer, scheduler and random number generator at the end; yield the optimizers."""
    optimizers, modules, schedulers = find_premade(torch.optim.Optimizer, nn.Module, LRScheduler)
    with ExitStack() as stack:
        _restore_random_numbers(stack)
        for module in modules:
            _restore_module(stack, module)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                stack.callback(group.update, {k: copy.copy(v) for k, v in group.items() if k != "params"})
        for scheduler in schedulers:
            stack.callback(scheduler.__dict__.update, _plain_state(scheduler))
        yield optimizers


def _plain_state(scheduler: Any) -> dict[str, Any]:
    kept = {k: v for k, v in vars(scheduler).items() if isinstance(v, (int, float, str, list, tuple, dict))}
    return {k: copy.copy(v) for k, v in kept.items()}


def _restore_random_numbers(stack: ExitStack) -> None:
    stack.callback(random.setstate, random.getstate())
    stack.callback(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        stack.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        stack.callback(numpy.random.set_state, numpy.random.get_state())


def _restore_module(stack: ExitStack, module: Any) -> None:
    attributes = module.__dict__
    if not isinstance(attributes.get("_parameters"), dict):  # a module under construction, or a stand-in
        return
    forward = attributes.get("forward")
    if forward is None:
        stack.callback(attributes.pop, "forward", None)
    else:
        stack.callback(attributes.__setitem__, "forward", forward)
    stack.callback(attributes.__setitem__, "training", attributes.get("training", True))
    for parameter in attributes["_parameters"].values():
        if parameter is not None:
            gradient = None if parameter.grad is None else parameter.grad.clone()
            stack.callback(_restore, parameter, parameter.data, gradient)
    for buffer in attributes["_buffers"].values():
        if buffer is not None:
            stack.callback(_assign, buffer, buffer.data, buffer.detach().clone())


def _restore(parameter: Any, storage: Any, gradient: Any) -> None:
    parameter.grad = None  # a gradient of another format would not fit the weight
    parameter.data = storage
    parameter.grad = gradient


def _assign(buffer: Any, storage: Any, value: Any) -> None:
    buffer.data = storage  # its own storage again, if it was cast
    buffer.data.copy_(value)
