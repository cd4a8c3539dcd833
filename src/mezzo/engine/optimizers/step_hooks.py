"""Optimizer hooks around ``step`` and state dicts: torch's own, and methods that others replaced.

A session's one pass reads scaled gradients and lets the device decide whether to skip: there is no call to hook into. If there are
hooks, the host reads whether the update is made, unscales the gradients and calls ``step``, as a loop with GradScaler does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import optimizer as torchs


def have_hooks(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Return whether a step of any of ``optimizers`` runs hooks, of its own or of all optimizers."""
    hooked = [o for o in optimizers if o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks]
    return bool(hooked or torchs._global_optimizer_pre_hooks or torchs._global_optimizer_post_hooks)


def step_is_own(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer.step`` is that of its class in torch or mezzo, neither overridden nor wrapped."""
    step: Any = optimizer.step
    while step is not None:
        function = getattr(step, "__func__", step)
        home = getattr(function, "__globals__", {}).get("__name__", "")
        if not home.startswith(("torch.", "mezzo.")):
            return False
        step = getattr(function, "__wrapped__", None)  # by torch's hooks, its no_grad, and its learning rate schedulers
    return True


@contextmanager
def hooks_deferred(hooks: MutableMapping[int, Callable[..., Any]]) -> Iterator[list[Callable[..., Any]]]:
    """Keep torch from running ``hooks`` inside the block; yield them for the caller to run when their argument is complete."""
    deferred = dict(hooks)
    hooks.clear()
    try:
        yield list(deferred.values())
    finally:
        hooks.update(deferred)
