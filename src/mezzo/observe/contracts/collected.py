"""The formats of the tensors that models, optimizers and files hold at one moment, as tensors with an owner and a name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mezzo.engine.gradients import trained_leaves
from mezzo.engine.processes.shards import local
from mezzo.formats import BF16, FP16, FP32
from mezzo.observe.module_names import Names
from mezzo.observe.source_lines import running_line
from mezzo.observe.tensors import format_name
from mezzo.observe.tensors import readable as is_readable
from mezzo.records import ContractRole

_MASTER = re.compile(r"master|(^|_)fp32(_|$)|main_param", re.IGNORECASE)
"""Names under which optimizers keep copies of the weights in their state."""
_DEEPEST = 8
"""The most containers around a tensor in a file."""
_SAMPLED = 512
"""How many values of a tensor are compared."""
_LEAST_CHANGED = 32
"""Of a random FP32 value, one in 65,536 is a BF16 number."""
_QUANTIZED = (torch.int8, torch.uint8)


class Held(NamedTuple):
    """A tensor, or several, in one format."""

    role: ContractRole
    owner: Tensor | nn.Module | str
    """The weight or the module that it belongs to; its name where neither is known."""
    key: str
    """Its name at the owner: ``exp_avg``; empty for the weight itself."""
    formats: tuple[str, ...]
    tensor: Tensor | None = None
    """The tensor itself, where it stays."""


def stored_format(tensor: Tensor) -> str:
    """Return the name of the format that a tensor is stored in; of a sharded one, this process's part."""
    return format_name(local(tensor).dtype)


def models_hold(roots: Iterable[nn.Module]) -> Iterator[Held]:
    """Yield the weights and the floating-point buffers of models, each once."""
    modules = dict.fromkeys(module for root in roots for module in root.modules())
    shards = shards_of(modules)
    weights = (shards.get(id(weight), weight) for module in modules for weight in module.parameters(recurse=False))
    for weight in {id(weight): weight for weight in weights}.values():
        yield Held("weights", weight, "", (stored_format(weight),), weight)
    for module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                yield Held("buffers", module, name, (stored_format(buffer),), buffer)


def shards_of(modules: Iterable[nn.Module]) -> dict[int, Tensor]:
    """Return the sharded weights of ``fully_shard``, by the identity of the whole ones that stand for them in a forward pass."""
    sharded = (one for module in modules for one in _sharded(module))
    return {id(one._unsharded_param): one.sharded_param for one in sharded if hasattr(one, "_unsharded_param")}


def _sharded(module: nn.Module) -> Iterator[Any]:
    """Yield what ``fully_shard`` keeps of each weight that it shards with this module."""
    state_of = getattr(module, "_get_fsdp_state", None)
    state = None if state_of is None else state_of()
    for group in getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)]):
        yield from () if group is None else group.fsdp_params


def optimizer_holds(optimizer: Optimizer) -> Iterator[Held]:
    """Yield the weights that an optimizer trains, its state and its master weights."""
    for parameter in trained_leaves(optimizer):
        yield Held("weights", parameter, "", (stored_format(parameter),), parameter)
        yield from state_of(optimizer, parameter)


def state_of(optimizer: Optimizer, parameter: Tensor) -> Iterator[Held]:
    """Yield what an optimizer keeps of one of its parameters."""
    has_master = getattr(optimizer, "has_master", None)
    own_master = has_master is not None and has_master(parameter)
    if own_master:
        yield Held("master_weights", parameter, "", (stored_format(optimizer.master(parameter)),))  # type: ignore[attr-defined]
    for key, value in optimizer.state.get(parameter, {}).items():
        if (
            not isinstance(value, Tensor)
            or not value.dim()
            or not (value.is_floating_point() or value.dtype in _QUANTIZED)
        ):
            continue  # a count of steps, or an index
        if _MASTER.search(str(key)) and value.shape == parameter.shape:
            if not own_master:
                yield Held("master_weights", parameter, "", (stored_format(value),), value)
        elif not (own_master and key == "master"):
            yield Held("optimizer_state", parameter, str(key), (stored_format(value),), value)


def gradients_held(optimizer: Optimizer) -> Iterator[Held]:
    """Yield the gradients of the weights that an optimizer trains."""
    for parameter in trained_leaves(optimizer):
        if parameter.grad is not None:
            yield Held("gradients", parameter, "", (stored_format(parameter.grad),))


def weights_behind(optimizers: Iterable[Optimizer], roots: Sequence[nn.Module]) -> dict[int, Tensor | str]:
    """Return the owners of those parameters of optimizers that are in no model, by identity.

    They are masters of weights that require gradients and that no optimizer trains, of the same shapes in the same order; others get a name
    from their place.
    """
    several = list(optimizers)
    shards = shards_of(module for root in roots for module in root.modules())
    weights = [shards.get(id(weight), weight) for root in roots for weight in root.parameters()]
    known = set(map(id, weights))
    trained = {id(parameter) for optimizer in several for parameter in trained_leaves(optimizer)}
    waiting = [weight for weight in dict.fromkeys(weights) if weight.requires_grad and id(weight) not in trained]
    owners: dict[int, Tensor | str] = {}
    for optimizer in several:
        for group, settings in enumerate(getattr(optimizer, "param_groups", ())):
            for place, parameter in enumerate(settings["params"]):
                if id(parameter) not in known:
                    at = next((n for n, weight in enumerate(waiting) if weight.shape == parameter.shape), None)
                    name = f"{type(optimizer).__name__}.{group}.{place}"
                    owners[id(parameter)] = name if at is None else waiting.pop(at)
    return owners


def placed(held: Held, behind: Mapping[int, Tensor | str]) -> Held:
    """Return a tensor with the weight that its owner stands for, if that is in no model: the owner itself is then a master."""
    owner = behind.get(id(held.owner)) if isinstance(held.owner, Tensor) else None
    if owner is None:
        return held
    is_master = held.role == "weights" and isinstance(owner, Tensor)
    return held._replace(owner=owner, role="master_weights" if is_master else held.role)


def reductions_by_replicas(roots: Iterable[nn.Module]) -> Iterator[Held]:
    """Yield what ``DistributedDataParallel`` reduces gradients in, where it does so itself: in the format of the weights."""
    for module in (module for root in roots for module in root.modules()):
        if not isinstance(module, DistributedDataParallel) or module._comm_hooks:
            continue
        if torch.distributed.get_world_size(module.process_group) > 1:
            for weight in (weight for weight in module.parameters() if weight.grad is not None):
                yield Held("reduction", weight, "", (stored_format(weight),))


def sharded_exchanges(roots: Iterable[nn.Module]) -> Iterator[Held]:
    """Yield what ``fully_shard`` gathers weights and reduces gradients in, as it has set itself up in its first forward pass."""
    for parameter in (one for root in roots for module in root.modules() for one in _sharded(module)):
        own = getattr(parameter, "orig_dtype", None)
        if own is not None:  # set in the first forward pass
            gathered = parameter.param_dtype or own
            yield Held("gather", parameter.sharded_param, "", (format_name(gathered),))
            yield Held("reduction", parameter.sharded_param, "", (format_name(parameter.reduce_dtype or gathered),))


def floats_in(value: Any) -> tuple[str, ...]:
    """Return the formats of the floating-point tensors in a module's results."""
    if type(value) is Tensor:
        return (stored_format(value),) if value.is_floating_point() else ()
    leaves = torch.utils._pytree.tree_leaves(value)
    return tuple(
        sorted({stored_format(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()})
    )


def saved_in(value: Any, path: str = "", *, depth: int = 0) -> Iterator[Held]:
    """Yield the floating-point tensors in what a script saves, by the keys that lead to them; single numbers are left out."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.dim():
            yield Held("checkpoints", path, "", (stored_format(value),))
        return
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, nn.Module):
        entries = value.state_dict().items()
    elif isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, (list, tuple)):
        entries = enumerate(value)
    if depth < _DEEPEST:
        for key, each in entries:
            yield from saved_in(each, f"{path}.{key}" if path else str(key), depth=depth + 1)


class TensorNames:
    """Names of owners, which stay known after their model is gone."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def learn(self, roots: Iterable[nn.Module], tree: Any) -> None:
        """Learn the names in these models; a later call with more models renames what it finds again."""
        names = Names(roots, tree)
        several = sum(any(True for _ in root.parameters()) for root in names.outermost) > 1
        for root in names.outermost:
            shards = shards_of(root.modules())
            for _, module in tree.modules(root):
                self._known[id(module)] = names.of(module)
                for own, weight in tree.parameters(module):
                    name = names.parameter(weight)
                    whole = f"{names.of(root)}.{own}" if several and name == own else name
                    self._known[id(shards.get(id(weight), weight))] = whole

    def of(self, held: Held) -> tuple[str, str]:
        """Return the module of a tensor, and its name in it."""
        if isinstance(held.owner, nn.Module):
            return self._known.get(id(held.owner), type(held.owner).__name__), held.key
        name = held.owner if isinstance(held.owner, str) else self._known.get(id(held.owner), Names.no_path)
        module, _, last = name.rpartition(".")
        return module, ".".join(filter(None, (last, held.key)))


class Rounding:
    """Whether values that are stored in FP32 are 16-bit numbers: two samples of a tensor, from after two updates.

    Evidence are only elements that the second update has changed: each new value is then one that the update has written. Elements of
    the gradient are none: under autocast a gradient of FP32 weights has 16-bit numbers, and some optimizers keep it.
    """

    def __init__(self) -> None:
        self._samples: dict[tuple[ContractRole, int | str, str], tuple[Held, list[Tensor]]] = {}
        self._gradients: dict[int, Tensor] = {}

    def gradients(self, optimizer: Optimizer) -> None:
        """Copy some values of the gradients that an optimizer has just used."""
        for parameter in trained_leaves(optimizer):
            if parameter.grad is not None and parameter.grad.layout is torch.strided:
                self._gradients[id(parameter)] = _some_of(parameter.grad)

    def sample(self, found: Iterable[Held]) -> None:
        """Copy some values of each tensor; nothing waits for the device."""
        for held in found:
            if held.tensor is None or held.formats != (FP32.name,) or not is_readable(held.tensor):
                continue
            owner = held.owner if isinstance(held.owner, str) else id(held.owner)
            self._samples.setdefault((held.role, owner, held.key), (held, []))[1].append(_some_of(held.tensor))

    def found(self) -> list[tuple[Held, str]]:
        """Return the tensors whose changed values are all numbers of a 16-bit format, with its name; waits for the device."""
        try:
            return list(self._found())
        except RuntimeError:  # the device has failed, and so has the script
            return []

    def _found(self) -> Iterator[tuple[Held, str]]:
        for held, samples in self._samples.values():
            if len(samples) < 2 or samples[-1].shape != samples[-2].shape:
                continue
            before, after = samples[-2:]
            evidence = (after != before) & (after != 0)
            gradient = self._gradients.get(id(held.owner))
            if gradient is not None and gradient.shape == after.shape:
                evidence &= after.abs() != gradient.abs()
            values = after[evidence]
            for narrow in (BF16, FP16):
                if len(values) >= _LEAST_CHANGED and torch.equal(values.to(narrow.dtype).to(FP32.dtype), values):
                    yield held, narrow.name
                    break


def _some_of(tensor: Tensor) -> Tensor:
    flat = local(tensor.detach()).reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED)][:_SAMPLED].clone()


class Origins:
    """The lines of a script that gave weights and buffers their formats: the line that registers one, and that casts its module."""

    def __init__(self) -> None:
        self._lines: dict[int, tuple[ref[Tensor], torch.dtype, str]] = {}
        self._casting = False

    def made(self, tensor: Tensor | None) -> None:
        """Note that the running line registers a tensor."""
        if isinstance(tensor, Tensor):
            self._lines[id(tensor)] = ref(tensor), tensor.dtype, running_line()

    def line(self, tensor: Tensor | None) -> str:
        """Return the line that gave a tensor its format; empty if that was not seen."""
        known = self._lines.get(id(tensor))
        if tensor is None or known is None or known[0]() is not tensor or known[1] != tensor.dtype:
            return ""
        return known[2]

    def cast(self, apply: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Let ``apply`` change a module's tensors, and note the running line for those whose format it changes."""
        if self._casting:  # of a module inside it
            return apply(module, *args, **kwargs)
        before = {id(t): (t, t.dtype) for t in (*module.parameters(), *module.buffers())}
        self._casting = True
        try:
            result = apply(module, *args, **kwargs)
        finally:
            self._casting = False
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) not in before or before[id(tensor)][1] != tensor.dtype:
                self.made(tensor)
        return result
