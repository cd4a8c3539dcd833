"""Change a script's models from outside at their first call: memory layout, checkpointing, torch.compile. Count each step's inputs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from mezzo.engine.casts.casting import Casting
from mezzo.engine.casts.conversion import OwnForward
from mezzo.errors import ScriptError
from mezzo.launch.request import ModelChanges
from mezzo.launch.torch.notes import RunNotes
from mezzo.launch.torch.open_update import OpenUpdate
from mezzo.measure.checkpointing.plan import CheckpointPlan, plan_for
from mezzo.measure.checkpointing.trace import trace, unwrapped
from mezzo.measure.checkpointing.wanted import bytes_text
from mezzo.records import ModelChange, Note

_CHECKPOINTING = "activation checkpointing"
_NO_MODEL = "no model with weights to train was called in training mode"
_IMAGE_DIMENSIONS = 4
"""Number of dimensions of a batch of images, and of a convolution's weight."""


class ChangedModels:
    """The models of a run that were changed, and the number of input elements of each step."""

    def __init__(self, update: OpenUpdate, notes: RunNotes, changes: ModelChanges) -> None:
        self._update, self._notes, self._changes = update, notes, changes
        self._seen: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        """By model called so far, whether its inputs become channels-last."""
        self._elements: Counter[int] = Counter()
        self._applied: dict[ModelChange, Note] = {}
        self._why_not: dict[ModelChange, str] = {}
        self._checkpoints = CheckpointedModels(changes.checkpoint) if changes.checkpoint else None
        self._to_compile: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        """Models to compile once they are checkpointed, with the names of their classes."""

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Change a model at its first call from outside any module; return its inputs, in channels-last layout if it needs that."""
        if module not in self._seen:
            self._seen[module] = self._change(module)
        if self._changes.counts_inputs and module.training and torch.is_grad_enabled():
            tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self._elements[self._update.num_updates] += next((tensor.numel() for tensor in tensors), 0)
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

    def explanation(self) -> list[Note]:
        """Return what was changed."""
        return [*self._applied.values(), *(self._checkpoints.explanation() if self._checkpoints is not None else [])]

    def unmade(self) -> dict[ModelChange, str]:
        """Return the requested changes that were not made to any model, and why."""
        requested: dict[ModelChange, bool] = {
            "channels_last": self._changes.channels_last,
            "compile": self._changes.compiles,
            "checkpoint": self._checkpoints is not None and not self._checkpoints.done,
        }
        missing = [change for change, is_requested in requested.items() if is_requested and change not in self._applied]
        return {change: self._why_not.get(change, _NO_MODEL) for change in missing}

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
            self._leave_alone("channels_last", "channels-last", name, why)
            return False
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # in place: optimizers keep their parameters
        why = f"{len(kernels)} weights of {name}, and its input images"
        self._applied.setdefault("channels_last", Note(what="memory layout", value="channels-last", reason=why))
        return True

    def _compile(self, module: nn.Module, name: str) -> None:
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            self._leave_alone("compile", "torch.compile", name, "the script compiles it itself")
            return
        only = self._changes.compile_only
        parts = [part for path, part in module.named_modules() if path in only] if only else [module]
        for part in parts:
            part.compile()
        if not parts:
            return
        why = f"{', '.join(only) or name} is compiled at its first call"
        self._applied.setdefault("compile", Note(what="torch.compile", value="on", reason=why))

    def _leave_alone(self, change: ModelChange, what: str, name: str, why: str) -> None:
        self._why_not.setdefault(change, why)
        self._notes.note_left_alone(what, name, why)


def _channels_last(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == _IMAGE_DIMENSIONS:
        return value.contiguous(memory_format=torch.channels_last)
    return value


_IN_SCRIPT = "call mezzo.checkpoint(model, sample, ...) in the script, where the model is created"
_SHARDED = ("FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")


class CheckpointedModels:
    """The models of a run that are checkpointed, and how."""

    def __init__(self, wanted: str) -> None:
        """Start without models; ``wanted`` is a plan's name, or a budget for each model."""
        self._wanted = wanted
        self._known: WeakSet[nn.Module] = WeakSet()
        self.done: list[Note] = []
        """What was checkpointed, with what is kept and what is recomputed."""

    def called(self, model: nn.Module, args: Any, kwargs: Any, casting: Casting | None) -> None:
        """Checkpoint ``model`` if this is its first call in training, with these arguments as the sample.

        For that, the forward pass runs once more without saving anything, under ``casting`` like the call itself.

        Raises:
            ScriptError: the model cannot be checkpointed from outside.
            UsageError: no plan fits the budget.
            SessionError: the model checkpoints itself, or runs a backward pass in its forward pass.
        """
        if model in self._known or not (model.training and torch.is_grad_enabled()):
            return
        if torch._C._current_autograd_node() is not None:  # called inside a backward pass
            return
        self._known.add(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return
        name = type(unwrapped(model)).__name__
        if why := next(_refusals(model), "") or _single_use(args, kwargs):
            raise ScriptError(
                f"--checkpoint {self._wanted} cannot be applied to {name}: {why}",
                hint=f"leave --checkpoint out, or {_IN_SCRIPT}",
            )
        self._checkpoint(unwrapped(model), name, lambda module: module(*args, **kwargs), casting)

    def compiled_called(self, modules: list[nn.Module]) -> None:
        """Refuse a compiled function that calls models: its calls cannot be seen from outside."""
        trained = [type(m).__name__ for m in modules if any(p.requires_grad for p in m.parameters())]
        if trained and not all(module in self._known for module in modules):
            raise ScriptError(
                f"--checkpoint {self._wanted} cannot be applied to {trained[0]}: a function that the script compiles calls it",
                hint="call mezzo.checkpoint(model, sample, ...) in the script, before torch.compile",
            )

    def explanation(self) -> list[Note]:
        """Return what was checkpointed, with what is kept and what is recomputed."""
        return self.done or [Note(what=_CHECKPOINTING, value="not applied", reason=_NO_MODEL)]

    def _checkpoint(
        self, model: nn.Module, name: str, call: Callable[[nn.Module], Any], casting: Casting | None
    ) -> None:
        def run(module: nn.Module) -> Any:
            with nullcontext() if casting is None else casting.region():
                return call(module)

        traced = trace(model, run)
        torch.clear_autocast_cache()  # weights that were cast while autograd saved nothing
        plan = plan_for(traced, self._wanted)
        refused = next((f"{module or 'the model'}: {why}" for module, why in plan.refused.items()), "")
        if not plan.regions and refused:
            raise ScriptError(
                f"--checkpoint {self._wanted} cannot be applied to {name}: no module can be checkpointed ({refused})",
                hint="leave --checkpoint out, or change what the reason says",
            )
        plan.apply(model)
        self.done.append(Note(what=_CHECKPOINTING, value=plan.name, reason=f"{name}: {_words(plan)}"))


def _words(plan: CheckpointPlan) -> str:
    if not plan.regions:
        return f"keeps all of {bytes_text(plan.plain_bytes)}: nothing has to be computed again"
    share = plan.recomputed_flops / plan.forward_flops if plan.forward_flops else 0.0
    modules = [name or "the model" for name in plan.regions]
    listed = ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")
    return (
        f"{len(modules)} module{'s' * (len(modules) > 1)} ({listed}) run again in the backward pass; {bytes_text(plan.kept_bytes)} of "
        f"{bytes_text(plan.plain_bytes)} are kept, at most {bytes_text(plan.peak_bytes)} at once; {share:.0%} of the forward pass's "
        "FLOPs are computed again"
    )


def _single_use(args: Any, kwargs: Any) -> str:
    """Return which argument is an iterator, which the pass for the plan would exhaust; empty if none is."""
    iterator = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Iterator)), None)
    return "" if iterator is None else f"it is called with a {type(iterator).__name__}, which can be read only once"


def _refusals(model: nn.Module) -> Iterator[str]:
    """Yield why ``model`` cannot be checkpointed from outside."""
    for name, module in model.named_modules():
        where = f"its part {name}" if name else "it"
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None:
            yield f"the script compiles {where}"
        if isinstance(module, torch.jit.ScriptModule):
            yield f"{where} is TorchScript"
        if sharded := kinds & set(_SHARDED):
            yield f"{where} is sharded ({', '.join(sorted(sharded))})"
        if library := _wrapped_by(module):
            yield f"{library} wraps the forward of {where}"
    if any(map(is_lazy, model.parameters())):
        yield "its parameters get their shapes in its first call"


def _wrapped_by(module: nn.Module) -> str:
    """Return the library that replaced the forward of ``module``; empty for its class's forward, or Mezzo's."""
    forward: Any = vars(module).get("forward")
    while isinstance(forward, partial) and forward.func.__module__.startswith("mezzo."):
        forward = forward.args[0]
    if forward is None or isinstance(forward, OwnForward):
        return ""
    function = getattr(forward, "func", forward)
    return str(getattr(function, "__module__", None) or type(function).__module__).partition(".")[0]
