"""Count the values of training steps by magnitude: activations, their gradients, weights, weight gradients and updates.

The script runs in FP32, with its own mixed precision turned off: in an FP16 run, values that became zero are gone and values that
overflowed are infinite, so neither can be counted. Hooks on modules see outputs; hooks on those outputs and on parameters see gradients
as they are computed, before accumulation and clipping. Weights are counted as they were before an optimizer's step, with its updates.

Values that activation checkpointing recomputes are not counted twice. A container that returns a module's output does not count it
again, unless the values were changed in place. Limits: operations outside modules and between a module's parts are not counted, nor are
updates by the script's own arithmetic; each process of a distributed run counts only its own values.

Cost, in observed steps only: one pass over each of these tensors, and a copy of the weights while an optimizer steps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.engine.casts.registration import unwrapped
from mezzo.engine.gradients import trained_by
from mezzo.engine.kernels import exponents
from mezzo.engine.processes.shards import local
from mezzo.formats import BF16, FP16
from mezzo.observe.module_names import free_title
from mezzo.observe.observer import ObservedRun, Observer
from mezzo.observe.ranges.block_losses import BlockLosses
from mezzo.observe.ranges.listed_formats import JudgedFormats, ListedFormats
from mezzo.observe.ranges.table import Counts, ObservedValues, ranges_record, write_values
from mezzo.observe.settings import RangesSettings
from mezzo.records import RangeKind, RangesRecord, RunRecord

Key: TypeAlias = tuple[RangeKind, str]
WEIGHT_FORMATS = (FP16, BF16)
"""The formats of weights without master weights."""
_REENTRANT = "CheckpointFunction"
_STEPS_IN_BLOCKS = 5
"""Observed steps that count losses in blocks: each rounds every operand to every format."""


class Tally:
    """Tables of counts by name; counts since the last mark are separate from those that certainly belong to the step."""

    def __init__(self) -> None:
        self._kept: dict[Any, Tensor] = {}
        self._current: dict[Any, Tensor] = {}
        self._aside: dict[Any, Tensor] = {}

    def put_aside(self) -> None:
        """Set the current counts aside until ``decide``."""
        self._aside, self._current = self._current, {}

    def decide(self, *, belongs: bool) -> None:
        """Add the counts that were set aside to the current ones, or discard them."""
        aside, self._aside = self._aside, {}
        for key, table in aside.items() if belongs else ():
            self.current(key, table).add_(table)

    def current(self, key: Any, like: Tensor) -> Tensor:
        """Return the table of current counts under ``key``; a new one has the shape of ``like``."""
        if key not in self._current:
            self._current[key] = torch.zeros_like(like)
        return self._current[key]

    def keep(self) -> None:
        """Keep the counts since the last mark."""
        with temporarily_clear_interpreter_stack():  # a gradient of torch.func ends a backward pass inside torch.func
            for key, table in self._current.items():
                self._kept[key] = self._kept[key] + table if key in self._kept else table
        self._current = {}

    def forget(self) -> None:
        """Discard the counts since the last mark."""
        self._current = {}

    def read(self) -> dict[Any, list[Any]]:
        """Return the kept counts; waits for the device."""
        return {key: table.tolist() for key, table in self._kept.items()}


class Ranges(Observer):
    """An observer that counts values by exponent."""

    def __init__(self, settings: RangesSettings, run: ObservedRun, formats: JudgedFormats | None = None) -> None:
        super().__init__(run, steps=settings.steps)
        self._policy, self._counts_path = settings.policy, settings.counts_path
        self._formats = formats or ListedFormats(settings.policy)
        self._lowered: set[Key] = set()
        """Counted tensors that have 16 bits under the policy; the op lists keep all others in FP32."""
        self._tables, self._swallowed, self._blocks = Tally(), Tally(), Tally()
        self._block_losses = BlockLosses(settings.policy, self._blocks.current) if settings.policy.in_blocks else None
        self._empty: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._outermost: WeakSet[nn.Module] = WeakSet()
        self._planned: WeakSet[nn.Module] = WeakSet()
        self._parameters = WeakTensorKeyDictionary()
        self._labels: dict[str, bool] = {}
        """The prefix of the names inside an outermost module, and whether it has modules inside."""
        self._handles: list[Any] = []
        self._hooked = WeakTensorKeyDictionary()
        self._counted = WeakTensorKeyDictionary()
        """Counted outputs, with their version: a container may return the same tensor again."""
        self._before: dict[Tensor, Tensor] = {}
        """Copies of the weights from before the steps of the running optimizers."""
        self._on = self._updates = False
        self._num_set_aside = 0
        """1 once the calls before the first optimizer are set aside; 0 before."""
        self._belong: bool | None = None
        """Whether gradients arrived at the outputs that were set aside, so that they are part of a step; None if none are set aside."""

    # --- observation ------------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin immediately if the first step is observed: this observer sets hooks and enters no modes, which belong to a thread."""
        if self._waiting[:1] == [1]:
            self._begin_immediately()

    def begin(self, step: int) -> None:
        """Set the hooks."""
        self._on = True
        self._handles = [
            register_module_forward_pre_hook(self._entering),
            register_module_forward_hook(self._returned),
            register_optimizer_step_pre_hook(self._stepping),
        ]

    def restart(self) -> None:
        """Discard the counts since the last mark."""
        for tally in (self._tables, self._swallowed, self._blocks):
            tally.forget()

    def optimizer_created(self) -> None:
        """Set the calls so far aside: a script may try its model before it trains it."""
        if self._on:
            self._num_set_aside, self._belong = 1, False
            self._tables.put_aside()

    def mark(self) -> None:
        """Keep the counts so far."""
        if self._belong is not None:
            self._tables.decide(belongs=self._belong)
            self._belong = None
        for tally in (self._tables, self._swallowed, self._blocks):
            tally.keep()

    def turn(self, step: int) -> None:
        """Continue: the counts since the mark belong to the next step."""

    def end(self) -> None:
        """Remove the hooks and discard the counts after the last mark."""
        self._on = False
        for handle in [*self._handles, *self._hooked.values()]:
            handle.remove()
        self._handles, self._hooked, self._before = [], WeakTensorKeyDictionary(), {}
        self.restart()

    def record(self, run: RunRecord) -> RangesRecord:
        """Return the record of the counts."""
        values = ObservedValues(
            counts={key: Counts(table) for key, table in self._tables.read().items()},
            swallowed=self._swallowed.read(),
            blocks=self._blocks.read(),
            lowered=self._lowered,
            steps=self.watched,
            forced_eager=self.forced_eager,
            updates_seen=self._updates,
            models=[label for label, inside in self._labels.items() if inside],
        )
        if self._counts_path:
            write_values(values, Path(self._counts_path))
        return ranges_record(run, values, policy=self._policy)

    # --- what the launcher and the hooks call --------------------------------------------------------------------------------------

    def autocast_entered(self, *, off: bool, in_module: bool) -> Any:
        """Record where the script turns autocast off itself."""
        if not self._on:
            self._formats.off.forget()
        return self._formats.off.enter(off=off, in_module=in_module)

    def autocast_left(self, entered: Any) -> None:
        """Record where that region ends."""
        self._formats.off.leave(entered)

    def backward_begins(self, losses: Sequence[Tensor]) -> None:
        """Hook every known parameter: its hooks see gradients before accumulation."""
        if not self._on:
            return
        self._name_parameters()
        self._formats.forget()
        for parameter, name in list(self._parameters.items()):
            if not self._formats.gradient_is_wide(parameter):
                self._lowered.add(("weight gradients", name))
            if parameter.requires_grad and parameter not in self._hooked:
                hook = functools.partial(self._gradient, ("weight gradients", name))
                self._hooked[parameter] = parameter.register_hook(hook)

    def updated(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Count weights, updates and what rounding would lose of them, then record the update."""
        before, self._before = self._before, {}
        self._updates = self._updates or bool(before)
        if self._on:
            self._name_parameters()  # not before the step: a closure may call the first module inside it
            for parameter, old in before.items():
                self._update(local(parameter.detach()), old, self._parameters.get(parameter, "a parameter"))
        super().updated(optimizer)

    def _entering(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._formats.off.module_called(module)
        self._name(module)
        if self._block_losses is not None and module in self._outermost and module not in self._planned:
            self._planned.add(module)
            self._block_losses.called(module)
        if module in self._outermost and torch.is_grad_enabled() and not self._computed_again():
            name = f"{self._names[module]} (input)"
            self._count("activations", name, args)
            self._lowered.add(("activations", name))  # its first operation may be a product

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        self._formats.off.module_returned(module)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self._computed_again():
            return
        name = self._names.get(module, type(module).__name__)
        if self._block_losses is not None and len(self.watched) < _STEPS_IN_BLOCKS:
            self._block_losses.returned(module, name, args, output)
        for tensor in self._count("activations", name, output):
            lowered = not self._formats.is_wide(tensor, module)
            if lowered:
                self._lowered.add(("activations", name))
            if tensor.requires_grad and not tensor.is_leaf:
                key: Key = ("activation gradients", name)
                tensor.register_hook(functools.partial(self._activation_gradient, key, self._num_set_aside))
                if lowered:
                    self._lowered.add(key)

    def _computed_again(self) -> bool:
        if not self.run.phase.recomputing:
            return False
        # Reentrant checkpointing first runs without gradients: the second run counts.
        node = torch._C._current_autograd_node()
        return node is None or not node.name().startswith(_REENTRANT)

    def _stepping(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in trained_by([optimizer]):
            if parameter not in self._before and parameter.is_floating_point():
                self._before[parameter] = local(parameter.detach()).clone()

    # --- counting ----------------------------------------------------------------------------------------------------------------

    def _count(self, kind: RangeKind, name: str, values: Any) -> list[Tensor]:
        """Count the tensors in ``values`` that no inner module has counted; return them."""
        counted = []
        for tensor in tree_leaves(values):
            if not isinstance(tensor, Tensor) or not _countable(tensor):
                continue
            if self._counted.get(tensor) == tensor._version:
                continue
            self._counted[tensor] = tensor._version
            self._add((kind, name), tensor)
            counted.append(tensor)
        return counted

    def _activation_gradient(self, key: Key, num_set_aside: int, gradient: Tensor) -> None:
        if self._belong is False and num_set_aside < self._num_set_aside:
            self._belong = True
        self._gradient(key, gradient)

    def _gradient(self, key: Key, gradient: Tensor) -> None:
        if self._on and _countable(gradient):
            self._add(key, gradient)

    def _add(self, key: Key, tensor: Tensor) -> None:
        values = unwrapped(local(tensor.detach()))  # the kernels read memory: of a sharded tensor, the local part
        if values.layout is torch.sparse_coo:
            values = values.coalesce().values()
        with torch.no_grad(), temporarily_clear_interpreter_stack():  # inside torch.func new tensors are wrapped
            exponents.add([values], [self._tables.current(key, self._zeros(values)[0])])

    def _update(self, new: Tensor, old: Tensor, name: str) -> None:
        with torch.no_grad():
            update = new.float() - old.float()
            self._add(("weights", name), old)
            self._add(("updates", name), update)
            moves = update != 0
            numbers = [moves.sum()]
            for target in WEIGHT_FORMATS:
                kept = old.to(target.dtype)
                numbers.append(((kept.float() + update).to(target.dtype) == kept).logical_and_(moves).sum())
            table = self._swallowed.current(name, self._zeros(old)[1])
            table += torch.stack(numbers)

    def _zeros(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if like.device not in self._empty:
            numbers = torch.zeros(1 + len(WEIGHT_FORMATS), dtype=torch.int64, device=like.device)
            self._empty[like.device] = exponents.tables(1, like.device)[0], numbers
        return self._empty[like.device]

    # --- names -------------------------------------------------------------------------------------------------------------------

    def _name(self, module: nn.Module) -> None:
        """Name a new module and all modules inside it: a module that no earlier one contains is an outermost module."""
        if module in self._names:
            return
        self._outermost.add(module)
        label = self._label(module)
        for path, inner in self.run.objects.tree.modules(module):
            self._names.setdefault(inner, f"{label}.{path}" if path else label)

    def _label(self, module: nn.Module) -> str:
        """Return the prefix of the names inside ``module``: its class, and a number if that is taken."""
        inside = any(inner is not module for _, inner in self.run.objects.tree.modules(module))
        children = list(module.named_children())
        self.forced_eager = self.forced_eager or (
            self._eager is not None and [name for name, _ in children] == ["_orig_mod"]
        )
        while len(children) == 1 and children[0][0] in ("_orig_mod", "module"):
            module = children[0][1]
            children = list(module.named_children())
            inside = bool(children)
        label = free_title(self.run.objects.tree.title(module), self._labels)
        self._labels[label] = inside
        return label

    def _name_parameters(self) -> None:
        for module, label in list(self._names.items()):
            for name, parameter in self.run.objects.tree.parameters(module):
                if parameter not in self._parameters:
                    self._parameters[parameter] = f"{label}.{name}"
        for number, optimizer in enumerate(list(self.run.objects.optimizers)):
            for place, parameter in enumerate(trained_by([optimizer])):
                if parameter not in self._parameters:
                    self._parameters[parameter] = f"{type(optimizer).__name__}#{number + 1}.params[{place}]"


def _countable(tensor: Tensor) -> bool:
    known = tensor.layout in (torch.strided, torch.sparse_coo)
    return tensor.is_floating_point() and known and not isinstance(tensor, torch._subclasses.FakeTensor)
