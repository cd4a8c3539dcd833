"""Change a script's models from outside at their first call: memory layout, checkpointing, torch.compile. Count each step's inputs."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from mezzo.engine.casts.casting import Casting
from mezzo.launch.request_parts import ModelChanges
from mezzo.launch.torch.models.checkpointed import CheckpointedModels
from mezzo.launch.torch.state import Run
from mezzo.records import CHANNELS_LAST, COMPILED, Reason

_IMAGE_DIMENSIONS = 4
"""Number of dimensions of a batch of images, and of a convolution's weight."""


class ChangedModels:
    """The models of a run that were changed, and the number of input elements of each step."""

    def __init__(self, run: Run, changes: ModelChanges) -> None:
        self._run, self._changes = run, changes
        self._seen: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        """By model called so far, whether its inputs become channels-last."""
        self._elements: Counter[int] = Counter()
        self._applied: dict[str, Reason] = {}
        self._checkpoints = CheckpointedModels(changes.checkpoint) if changes.checkpoint else None
        self._to_compile: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        """Models to compile once they are checkpointed, with the names of their classes."""

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Change a model at its first call from outside any module; return its inputs, in channels-last layout if it needs that."""
        if module not in self._seen:
            self._seen[module] = self._change(module)
        if self._changes.counts_inputs and module.training and torch.is_grad_enabled():
            tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self._elements[self._run.num_updates] += next((tensor.numel() for tensor in tensors), 0)
        if self._seen[module]:
            args, kwargs = tree_map(_channels_last, (args, kwargs))
        return args, kwargs

    def checkpoint(self, module: nn.Module, args: Any, kwargs: Any, casting: Casting | None) -> None:
        """Checkpoint a model at its first call in training, under its casting, before it is compiled."""
        if self._checkpoints is None:
            return
        self._checkpoints.called(module, args, kwargs, casting)
        if module in self._to_compile and module.training:
            self._compile(module, self._to_compile.pop(module))

    def compiled_called(self, modules: list[nn.Module]) -> None:
        """Record that a compiled function of the script calls models."""
        if self._checkpoints is not None:
            self._checkpoints.compiled_called(modules)

    def input_elements(self) -> float | None:
        """Return the elements per step (the median) of the first tensor passed to the models; None if none was seen."""
        counted = [count for count in self._elements.values() if count]
        return statistics.median(counted) if counted else None

    def explanation(self) -> list[Reason]:
        """Return what was changed."""
        return [*self._applied.values(), *(self._checkpoints.explanation() if self._checkpoints is not None else [])]

    def _change(self, module: nn.Module) -> bool:
        """Change one model; return whether its inputs become channels-last."""
        parameters = list(module.parameters())
        if not parameters:  # a loss or an activation
            return False
        name = type(module).__name__
        channels_last = self._changes.channels_last and self._to_channels_last(module, parameters, name)
        if self._changes.compiles and self._checkpoints is not None:
            self._to_compile[module] = name
        elif self._changes.compiles:
            self._compile(module, name)
        return channels_last

    def _to_channels_last(self, module: nn.Module, parameters: list[nn.Parameter], name: str) -> bool:
        kernels = [p for p in parameters if p.dim() == _IMAGE_DIMENSIONS]
        if not kernels:
            why = "it has no convolution weights for images"
            self._run.note_left_alone("channels-last", name, why)
            return False
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # in place: optimizers keep their parameters
        why = f"{len(kernels)} weights of {name}, and its input images"
        self._applied.setdefault(CHANNELS_LAST, Reason(what=CHANNELS_LAST, value="channels-last", reason=why))
        return True

    def _compile(self, module: nn.Module, name: str) -> None:
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            self._run.note_left_alone(COMPILED, name, "the script compiles it itself")
            return
        module.compile()
        why = f"{name} is compiled at its first call"
        self._applied.setdefault(COMPILED, Reason(what=COMPILED, value="on", reason=why))


def _channels_last(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == _IMAGE_DIMENSIONS:
        return value.contiguous(memory_format=torch.channels_last)
    return value
