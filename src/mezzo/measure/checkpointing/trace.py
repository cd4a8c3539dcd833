"""What a forward pass computes and saves for the backward pass, in order, and which calls of modules could be checkpointed.

The forward pass runs once on a sample with gradients enabled, and keeps nothing: autograd saves empty objects in place of tensors, so a
model whose training does not fit in memory can be traced wherever its evaluation fits. An empty object dies with its graph.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mezzo.engine.checkpointing import PRODUCT_OVERLOADS
from mezzo.engine.matrix_units.emulation_nodes import inner_memory
from mezzo.engine.randomness import HostStates
from mezzo.errors import SessionError
from mezzo.measure.predict.operations import operations_of

aten: Any = torch.ops.aten
_HARMLESS = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.layout)
"""Arguments besides tensors that a module cannot change."""
_CHECKPOINT_ENTRIES = ("_checkpoint_without_reentrant_generator", "CheckpointFunction")
"""What every call of torch's ``checkpoint`` looks up, even if that was imported by name."""


class Computed(NamedTuple):
    """An operation ran."""

    flops: int
    moved_bytes: int
    is_product: bool


class SavedTensor(NamedTuple):
    """Autograd saved a tensor, or a part of one."""

    storage: int
    alive: bool
    """Whether its graph was still alive after the forward pass."""


@dataclass(kw_only=True)
class ModuleCall:
    """One call of a module: the events from ``begin`` to ``end``, exclusive."""

    module: str
    begin: int
    end: int
    arguments: frozenset[int]
    """Storages of its tensor arguments, without the model's own."""
    products: frozenset[int] = frozenset()
    """Storages that its products wrote."""
    copied_bytes: int = 0
    """Bytes of the buffers that it changes, of which a checkpointed call keeps a copy."""
    refused: str = ""
    """Why it cannot be checkpointed."""
    products_refused: str = ""
    """Why it cannot keep its products' outputs."""


@dataclass(kw_only=True)
class ForwardTrace:
    """A forward pass as data."""

    events: Sequence[Computed | SavedTensor]
    sizes: Mapping[int, int]
    """Bytes of each storage."""
    calls: Sequence[ModuleCall]
    """In the order in which they began."""
    classes: Mapping[str, str]
    """The class of each module, by name."""
    changed: tuple[str, ...] = ()
    """Names of the buffers that the forward pass changed."""
    casts: frozenset[int] = frozenset()
    """Storages of weights in another format. A call that runs again casts them again; a plain pass may share them by autocast's cache."""


def trace(model: nn.Module, run: Callable[[nn.Module], Any]) -> ForwardTrace:
    """Return the trace of ``run(model)``; weights, buffers, attributes and random generators are left as they were.

    A model that changes plain attributes of its modules runs twice, to tell state from what is created once.

    Raises:
        SessionError: the forward pass runs a backward pass of its own, or checkpoints parts of itself.
    """
    before = Attributes(model)
    traced = _traced(model, run)
    if before.changed():  # what a second pass leaves alone was only created by the first, such as a cache
        between = Attributes(model)
        traced = _traced(model, run)
        changed = between.changed()
        before.restore(changed)
        for module, attribute in changed:
            _refuse_calls(traced, module, attribute)
    return traced


def _traced(model: nn.Module, run: Callable[[nn.Module], Any]) -> ForwardTrace:
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    tracer, host = _Tracer(model), HostStates.now()
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        try:
            with tracer.watching():
                outputs = run(model)
                tracer.finish()
            del outputs
        finally:
            host.set()
            changed = _restore(model, buffers)
    return tracer.trace(changed, {name: buffer.nbytes for name, buffer in buffers.items()})


def _refuse_calls(traced: ForwardTrace, module: str, attribute: str) -> None:
    """Refuse to checkpoint calls in which ``module`` changes an attribute: a second pass would change it again."""
    for call in traced.calls:
        if call.module in ("", module) or module.startswith(f"{call.module}."):
            where = f"its part {module}" if call.module != module and module else "it"
            call.refused = call.refused or f"{where} changes its attribute {attribute!r} in each pass"


def _restore(model: nn.Module, buffers: Mapping[str, Tensor]) -> tuple[str, ...]:
    changed = []
    for name, before in buffers.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        now = owner._buffers[leaf]
        if now is None or now.shape != before.shape or not _same_numbers(owner, now, before):
            changed.append(name)
            if now is not None and now.shape == before.shape:
                now.copy_(before)
            else:
                owner._buffers[leaf] = before
    return tuple(changed)


def _same_numbers(owner: nn.Module, now: Tensor, before: Tensor) -> bool:
    if isinstance(now, FakeTensor):  # no numbers to compare: a normalisation changes what it tracks
        return not isinstance(owner, _NormBase)
    return torch.equal(now.nan_to_num(), before.nan_to_num())


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile`` and data parallel wrappers."""
    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif isinstance(model, torch._dynamo.OptimizedModule):
            model = model._orig_mod
        else:
            return model


class _RefusedCheckpoint:
    """Replacement of torch's checkpointing while a model is traced: no plan can be made for a model that checkpoints itself."""

    def __init__(self, running: Callable[[], str]) -> None:
        self._running = running

    def __call__(self, *_: Any, **__: Any) -> Any:
        name = self._running()
        raise SessionError(
            f"{f'module {name}' if name else 'the model'} checkpoints itself already, so no plan can be made for the model",
            hint="switch that off, as by model.gradient_checkpointing_disable() in transformers, or keep it and do without Mezzo's",
        )

    apply = __call__


class _Placeholder:
    """What autograd saves in place of a tensor; supports weak references."""


class _Tracer:
    """Records a trace."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.events: list[Computed | SavedTensor] = []
        self.sizes: dict[int, int] = {}
        self.calls: list[ModuleCall] = []
        self._saved: list[tuple[int, SavedTensor, weakref.ref[_Placeholder]]] = []
        """For each saved tensor its index among the events, its event, and a reference to what dies with its graph."""
        self._numbers: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._open: list[ModuleCall] = []
        self._product_outputs: dict[int, tuple[int, list[ModuleCall]]] = {}
        """For each storage that a product wrote: the event, and the calls that were running."""
        self._argument_of: dict[int, list[ModuleCall]] = {}
        """For each storage: the calls that got it as an argument."""
        self._casts: set[int] = set()
        self._own_storages = {t.untyped_storage()._cdata for t in (*self.model.parameters(), *self.model.buffers())}
        """Storages that exist whether or not they are saved."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Trace what the block runs."""
        inner_memory.begin()
        try:
            with ExitStack() as stack:
                for name, module in self.model.named_modules():
                    entered = partial(self._entered, name)
                    for handle in (
                        module.register_forward_pre_hook(entered, with_kwargs=True),
                        module.register_forward_hook(self._exited, prepend=True),
                    ):
                        stack.callback(handle.remove)
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                for entry in _CHECKPOINT_ENTRIES:
                    stack.callback(setattr, torch.utils.checkpoint, entry, getattr(torch.utils.checkpoint, entry))
                    setattr(torch.utils.checkpoint, entry, _RefusedCheckpoint(self._running))
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, _refuse))
                stack.enter_context(_Operations(self))
                yield
        finally:
            inner_memory.end()

    def _running(self) -> str:
        """Return the name of the module that is running."""
        return self._open[-1].module if self._open else ""

    def finish(self) -> None:
        """Mark the saved tensors whose graphs are alive."""
        for index, saved, placeholder in self._saved:
            self.events[index] = saved._replace(alive=placeholder() is not None)

    def trace(self, changed: tuple[str, ...], buffer_bytes: Mapping[str, int]) -> ForwardTrace:
        """Return the trace, with the buffers that turned out to be changed."""
        for call in self.calls:
            prefix = f"{call.module}." if call.module else ""
            call.copied_bytes = sum(buffer_bytes[name] for name in changed if name.startswith(prefix))
        return ForwardTrace(
            events=self.events,
            sizes=self.sizes,
            calls=self.calls,
            classes={name: type(module).__name__ for name, module in self.model.named_modules()},
            changed=changed,
            casts=frozenset(self._casts),
        )

    def computed(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operation, and what it changed in place."""
        found = operations_of(func, args, kwargs, result, "forward", "")
        is_product = func in PRODUCT_OVERLOADS
        if func is aten._to_copy.default and args[0].untyped_storage()._cdata in self._own_storages:
            self._casts.add(self._number(result))
        if found:
            moved = sum(one.read_bytes + one.written_bytes for one in found)
            self.events.append(Computed(sum(one.flops for one in found), moved, is_product))
        for tensor in _changed_by(func, args, kwargs):
            self._note_change(self._number(tensor))
        if is_product:
            written = frozenset(self._number(t) for t in tree_leaves(result) if isinstance(t, Tensor))
            for storage in written:
                self._product_outputs[storage] = (len(self.events), list(self._open))
            for call in self._open:
                call.products |= written

    def _note_change(self, storage: int) -> None:
        for call in self._argument_of.get(storage, ()):
            call.refused = call.refused or "an input is changed in place later"
        for call in self._product_outputs.get(storage, (0, []))[1]:
            call.products_refused = "the output of a product is changed in place"

    def _entered(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors, opaque = _arguments((args, kwargs))
        storages = frozenset(self._number(t) for t in tensors if t.untyped_storage()._cdata not in self._own_storages)
        refused = f"it receives a {opaque}, which it may change" if opaque else ""
        call = ModuleCall(module=name, begin=len(self.events), end=0, arguments=storages, refused=refused)
        for storage in storages:
            self._argument_of.setdefault(storage, []).append(call)
        self.calls.append(call)
        self._open.append(call)

    def _exited(self, *_: Any) -> None:
        self._open.pop().end = len(self.events)

    def _save(self, tensor: Tensor) -> _Placeholder:
        placeholder = _Placeholder()
        takes_memory = tensor.layout is torch.strided and tensor.untyped_storage()._cdata not in self._own_storages
        # A tensor without a storage of its own still marks where a second pass may end.
        saved = SavedTensor(self._number(tensor) if takes_memory else -1, alive=False)
        self._saved.append((len(self.events), saved, weakref.ref(placeholder)))
        self.events.append(saved)
        return placeholder

    def _number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage, which no later storage gets."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            self._numbers[key] = len(self.sizes)
            self.sizes[len(self.sizes)] = storage.nbytes()
            self._references[key] = weakref.ref(storage, partial(self._freed, key))
        return self._numbers[key]

    def _freed(self, key: int, _: object) -> None:
        self._numbers.pop(key, None)
        self._references.pop(key, None)


class _Operations(TorchDispatchMode):
    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._tracer.computed(func, args, kwargs, result)
        return result


def _changed_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    schema = func._schema
    if not schema.is_mutable:
        return []
    values = [*zip(schema.arguments, args, strict=False), *((a, (kwargs or {}).get(a.name)) for a in schema.arguments)]
    written = [value for argument, value in values if argument.alias_info is not None and argument.alias_info.is_write]
    return [t for t in tree_leaves(written) if isinstance(t, Tensor)]


def _refuse(_: _Placeholder) -> Tensor:
    raise SessionError(
        "the forward pass runs a backward pass of its own, so its memory cannot be traced",
        hint="checkpoint the part of the model that does not, by passing that module and its inputs to mezzo.checkpoint",
    )


def _arguments(arguments: Any) -> tuple[list[Tensor], str]:
    """Return the tensors in arguments, and the class of another object that a module could change; empty if there is none."""
    tensors, opaque = list[Tensor](), ""
    rest = [arguments]
    while rest:
        value = rest.pop()
        if isinstance(value, Tensor):
            tensors.append(value)
        elif type(value) is dict:
            rest += value.values()
        elif isinstance(value, (list, tuple)):
            rest += value
        elif not isinstance(value, _HARMLESS):
            opaque = opaque or type(value).__name__
    return tensors, opaque


# A forward pass that changes such state cannot run twice for one step: a counter would count twice.

_TORCH_ATTRIBUTES = frozenset([*vars(nn.Module()), "forward", "_compiled_call_impl"])
"""Attributes that torch and checkpointing itself add to every module."""
_SIMPLE = (int, float, complex, str, bytes, tuple, frozenset)
_CONTAINERS = (list, dict, set)


class Attributes:
    """The plain attributes of all modules of a model at one moment."""

    def __init__(self, model: nn.Module) -> None:
        """Copy them: tensors and generators with their content; lists, dicts and sets shallowly."""
        self._model = model
        self._before = {
            name: {key: _SavedValue(value) for key, value in _plain_attributes(module).items()}
            for name, module in model.named_modules()
        }

    def changed(self) -> list[tuple[str, str]]:
        """Return the attributes that differ from their copies, each with its module's name."""
        found = []
        for name, module in self._model.named_modules():
            before, now = self._before.get(name, {}), _plain_attributes(module)
            for key in dict.fromkeys([*before, *now]):
                same = key in before and key in now and before[key].equals(now[key])
                if not same and not _is_reparametrised(module, key):
                    found.append((name, key))
        return found

    def restore(self, names: Iterable[tuple[str, str]]) -> None:
        """Restore the values of these attributes; delete those that did not exist."""
        for name, key in names:
            module = self._model.get_submodule(name)
            before = self._before.get(name, {}).get(key)
            if before is None:
                vars(module).pop(key, None)
            else:
                vars(module)[key] = before.restore()


class _SavedValue:
    """The value of an attribute, and a copy to restore it from."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._copy: Any = None
        if isinstance(value, Tensor):
            self._copy = value.detach().clone()
        elif isinstance(value, torch.Generator):
            self._copy = value.get_state()
        elif isinstance(value, _CONTAINERS):
            self._copy = copy.copy(value)

    def equals(self, now: Any) -> bool:
        """Return whether the attribute's value ``now`` is what it was."""
        if isinstance(self.value, _SIMPLE):
            return now is self.value or (type(now) is type(self.value) and _equal(now, self.value))
        if now is not self.value:
            return False
        if isinstance(now, Tensor):
            return _same_tensors(now, self._copy)
        if isinstance(now, torch.Generator):
            return torch.equal(now.get_state(), self._copy)
        if isinstance(now, dict):
            return [*map(id, now)] == [*map(id, self._copy)] and _same_items(now.values(), self._copy.values())
        return not isinstance(now, _CONTAINERS) or _same_items(now, self._copy)

    def restore(self) -> Any:
        """Return the value, restored in place."""
        if isinstance(self.value, Tensor):
            with torch.no_grad():
                self.value.detach().copy_(self._copy)
        elif isinstance(self.value, torch.Generator):
            self.value.set_state(self._copy)
        elif isinstance(self.value, list):
            self.value[:] = self._copy
        elif isinstance(self.value, (dict, set)):
            self.value.clear()
            self.value.update(self._copy)
        return self.value


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in _TORCH_ATTRIBUTES}


def _same_items(now: Any, before: Any) -> bool:
    one, other = list(now), list(before)
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _equal(one: Any, other: Any) -> bool:
    """Return whether two simple values are equal; tuples may contain values whose comparison is no bool."""
    try:
        return bool(one == other)
    except Exception:
        return False


def _same_tensors(now: Tensor, before: Tensor) -> bool:
    if now.shape != before.shape or now.dtype != before.dtype:
        return False
    fake = isinstance(now, FakeTensor) or isinstance(before, FakeTensor)
    return fake or torch.equal(now.nan_to_num(), before.nan_to_num())


def _is_reparametrised(module: nn.Module, key: str) -> bool:
    """Return whether a hook, such as ``weight_norm``'s, computes the attribute from parameters in every pass."""
    return f"{key}_orig" in module._parameters or f"{key}_g" in module._parameters
