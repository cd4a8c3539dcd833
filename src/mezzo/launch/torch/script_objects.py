"""The models and optimizers that a script was found to train."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mezzo.engine.gradients import trained_leaves
from mezzo.launch.request_parts import ModelChanges
from mezzo.launch.torch.models.model_changes import ChangedModels
from mezzo.launch.torch.notes import RunNotes
from mezzo.launch.torch.restoring import ExistingOptimizers
from mezzo.launch.torch.updates.open_update import OpenUpdate
from mezzo.launch.torch.updates.owners import OptimizerOwners
from mezzo.observe.observer import ModuleTree


class ScriptObjects:
    """A script's models and optimizers."""

    def __init__(self) -> None:
        # Weak, so that the models of a script that trains one after the other are not all kept.
        self.roots: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        """Modules called from outside any module, in order."""
        self.tree = ModuleTree()
        self.optimizers: WeakKeyDictionary[torch.optim.Optimizer, None] = WeakKeyDictionary()
        self.existing = ExistingOptimizers(self.optimizers)
        self.numbers = OptimizerOwners()
        self.on_root_call: Callable[[nn.Module, Any], None] | None = None
        """Called with every module that is called from outside any module, and its arguments; None to call nothing."""
        self.changed_models: ChangedModels | None = None
        """What is changed in the models besides their precision; None for nothing."""

    def change_models(self, changes: ModelChanges, update: OpenUpdate, notes: RunNotes) -> ChangedModels:
        """Change every model at its first call."""
        self.changed_models = ChangedModels(update, notes, changes)
        return self.changed_models

    def owns(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether an optimizer of the script trains one of ``parameters``."""
        trained = {id(p) for o in self.optimizers for p in trained_leaves(o)}
        return any(id(p) in trained for p in parameters)

    def notify_of_calls(self, listener: Callable[[nn.Module, Any], None]) -> None:
        """Call ``listener`` at every call of a module from outside any module."""
        self.on_root_call = listener

    def end_notices(self) -> None:
        """Call no listener any more."""
        self.on_root_call = None
