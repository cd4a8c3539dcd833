"""The state of a training as digests and simple values: its variables, optimizers and weights.

Cost: one pass over every tensor, and one number per tensor read from the device.
"""

from __future__ import annotations

import hashlib
import random
import sys
import types
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, Sampler

from mezzo.engine.gradients import trained_leaves
from mezzo.engine.processes.shards import is_shared
from mezzo.engine.randomness import random_states
from mezzo.launch.patches import Patches
from mezzo.launch.torch.state import TorchRun
from mezzo.measure.state_trace import Moment, ObjectState, OptimizerState
from mezzo.observe.tensors import bit_weights, sum_of_bits

_NOT_SETTINGS = ("params", "initial_lr")
_INTERNAL = ("_step_count", "_is_initial", "_get_lr_called_within_step", "verbose", "_enable")
"""Entries of a scheduler's state that do not affect its learning rates: they differ in a scheduler created with ``last_epoch``."""
_MIN_SHARE = 0.5
"""A container with at least this share of the model's weights, by shape, counts as a copy of them."""


def text_digest(value: object) -> str:
    """Return a digest of a value by its text."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def tensors_digest(values: Any) -> str:
    """Return a digest of the tensors in nested containers; empty for none."""
    found = [leaf.detach() for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and _is_dense(leaf)]
    return digest(found) if found else ""


def _is_dense(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_meta and not value.is_quantized and not value.is_nested


def by_name(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return a digest of each tensor."""
    return {name: digest([tensor.detach()]) for name, tensor in tensors if _is_dense(tensor)}


@torch.no_grad()
def optimizer_state(optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Return the state of an optimizer: each kind of entry over all parameters, and the numeric settings of its groups."""
    parts: dict[str, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, (Tensor, float, int)):
                    parts.setdefault(str(key), []).append(torch.as_tensor(value))
    return OptimizerState(
        name=type(optimizer).__name__,
        moments={key: Moment(digest=digest(values), rms=_rms(values)) for key, values in parts.items()},
        settings=[dict(_numbers(group)) for group in optimizer.param_groups],
    )


def _rms(values: list[Tensor]) -> float:
    count = sum(value.numel() for value in values) or 1
    return float((sum(float(value.double().abs().square().sum()) for value in values) / count) ** 0.5)


def _numbers(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in group.items():
        if key in _NOT_SETTINGS or isinstance(value, bool):
            continue
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            yield key, float(value)
        elif isinstance(value, tuple) and all(isinstance(number, (int, float)) for number in value):
            yield from ((f"{key}[{n}]", float(number)) for n, number in enumerate(value))


def object_state(stateful: Any) -> ObjectState:
    """Return the simple values in the state of a scheduler or GradScaler."""
    state = stateful.state_dict()
    values = {key: repr(value) for key, value in state.items() if key not in _INTERNAL and _is_simple(value)}
    return ObjectState(name=type(stateful).__name__, values=values)


def _is_simple(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, (int, float, str)) for item in value)
    return isinstance(value, (int, float, str, type(None)))


def generator_digests() -> dict[str, str]:
    """Return digests of the global random generators."""
    states = random_states()
    digests = {"python": text_digest(states.pop("python"))}
    name, keys, *rest = states.pop("numpy")
    digests["numpy"] = text_digest((name, keys.tobytes(), *rest))
    return digests | {name: tensors_digest(state) for name, state in states.items()}


def flat(entries: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield the container's path, the path and the value of each plain value among a frame's saved variables (``variables``)."""
    for name, entry in entries.items():
        inner = f"{path}.{name}" if path else str(name)
        ((kind, saved),) = entry.items()
        if kind == "value":
            yield path, inner, saved
        elif kind in ("items", "attributes"):
            yield from flat(saved, inner)


def copies_of(weights: Iterable[Tensor], values: Iterable[tuple[str, str, Any]]) -> dict[str, list[Tensor]]:
    """Return copies of the weights, by path: the tensors of containers that have the weights' shapes."""
    shapes = Counter(tuple(weight.shape) for weight in weights)
    groups: dict[str, list[Tensor]] = {}
    for container, _, value in values:
        if container and isinstance(value, Tensor) and value.is_floating_point() and value.dim():
            groups.setdefault(container, []).append(value)
    num_weights = sum(shapes.values())
    return {
        container: tensors
        for container, tensors in groups.items()
        if sum((Counter(tuple(t.shape) for t in tensors) & shapes).values()) >= max(_MIN_SHARE * num_weights, 2)
    }


def trained_by(
    optimizers: Iterable[torch.optim.Optimizer], modules: Mapping[str, nn.Module]
) -> list[tuple[str, Tensor]]:
    """Return the parameters that optimizers train, each with its name in ``modules``, or with a number if it is in none."""
    names: dict[int, str] = {}
    for module in modules.values():
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), name)
    trained = [parameter for optimizer in optimizers for parameter in trained_leaves(optimizer)]
    dense = [parameter for parameter in trained if _is_dense(parameter)]
    return [(names.get(id(parameter), f"parameter {n}"), parameter) for n, parameter in enumerate(dense)]


# The digest is computed when the script leaves its process group, because the model is often gone once the script has ended, and at
# the end. Sharded weights are left out: every process has its own. Cost: one pass over the weights, and one number per parameter.


class WeightsDigest:
    """The latest digest of the weights that a run trains."""

    def __init__(self, run: TorchRun) -> None:
        self._run = run
        self._last = ""

    def install(self, patches: Patches) -> None:
        """Compute the digest whenever the script destroys a process group."""
        if dist.is_available():
            patches.around(dist, "destroy_process_group", self._before)

    def _before(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.text()
        return original(*args, **kwargs)

    def text(self) -> str:
        """Return the digest of the weights, or the last one computed if they are gone; empty if there is none."""
        weights = [p for optimizer in self._run.objects.optimizers for p in trained_leaves(optimizer)]
        weights = weights or [p for root in self._run.objects.roots for p in root.parameters()]
        unsharded = [p for p in weights if not is_shared(p) and p.layout is torch.strided and not p.is_meta]
        if unsharded:
            self._last = digest(unsharded)
        return self._last


@torch.no_grad()
def digest(weights: list[Tensor]) -> str:
    """Return a digest of the shapes, formats and values of tensors; of values, the sum of their bits weighted by position."""
    values = [torch.view_as_real(w) if w.is_complex() else w for w in weights]
    sums = [int(sum_of_bits(v, bit_weights(v.numel(), v.device))) for v in values]
    parts = [f"{tuple(w.shape)}{w.dtype}{bits}" for w, bits in zip(weights, sums, strict=True)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]


# In the frames of the script's own files every variable is followed: models, optimizers, schedulers, scalers and generators by their
# states, numbers, texts and lists by value, tensors by their elements, objects of the script's own classes by their attributes. The record
# names what cannot be followed. In a script that was started again, the same path leads to the same variable, whose state is then restored.

_LEAVES = (type(None), bool, int, float, str, bytes, complex, np.number, np.bool_)
_NOT_STATE = (
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.GeneratorType,
    type(annotations),  # what ``from __future__`` imports
    type,
    PurePath,
    ArgumentParser,
    torch.device,
    torch.dtype,
    Dataset,
    DataLoader,
    Sampler,
)
"""Kinds of objects that a script creates again, or that the position in the data covers."""
_MAX_BYTES = 2**20
"""Larger tensors that were never changed in place are data, not state."""
_MAX_VALUES = 100_000
_MAX_DEPTH = 6


class ScriptState:
    """The state of a script's variables, with the objects found in them, and what was left out."""

    def __init__(self, is_own: Callable[[str], bool]) -> None:
        """Start without variables; ``is_own`` returns whether a module's file is one of the script's."""
        self._is_own = is_own
        self._seen: set[int] = set()
        self._only_finds = False
        self.objects: dict[str, Any] = {}
        """Models, optimizers and the like, by their paths."""
        self.omitted: dict[str, str] = {}
        """What was not saved, and why, by path."""

    def frame(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a frame's variables."""
        named = {name: value for name, value in variables.items() if not name.startswith("_")}
        # A first walk only finds objects, so that the second does not save their parts once more, as variables of their own.
        self._only_finds, before = True, set(self._seen)
        objects, omitted = dict(self.objects), dict(self.omitted)
        self._entries(named, "")
        self._only_finds, self._seen = False, before | self._parts()
        self.objects, self.omitted = objects, omitted
        return self._entries(named, "")

    def _parts(self) -> set[int]:
        """Return the ids of the parts of objects that are saved whole: a model's layers and weights, an optimizer's groups."""
        parts: set[int] = set()
        for value in self.objects.values():
            if isinstance(value, nn.Module):
                inner = (*value.modules(), *value.parameters(), *value.buffers())
                parts |= {id(part) for part in inner} - {id(value)}
            elif isinstance(value, Optimizer):
                parts |= {id(part) for group in value.param_groups for part in (group, group["params"])}
                parts |= {id(value.param_groups), id(value.state)}
        return parts

    def _entries(self, values: Mapping[Any, Any], path: str) -> dict[Any, Any]:
        entries = {}
        for name, value in values.items():
            entry = self._entry(value, f"{path}.{name}" if path else str(name))
            if entry is not None:
                entries[name] = entry
        return entries

    def _entry(self, value: Any, path: str) -> dict[str, Any] | None:
        if isinstance(value, _NOT_STATE) or path.count(".") > _MAX_DEPTH:
            return None
        if isinstance(value, _LEAVES):
            return {"value": value}
        if id(value) in self._seen:  # another name for the same object
            return None
        self._seen.add(id(value))
        kind = kind_of(value)
        if kind is not None:
            self.objects[path] = value
            return {kind: None}
        if isinstance(value, (Tensor, np.ndarray)):
            return self._array(value, path)
        if _is_plain(value):
            return {"value": value}
        if isinstance(value, (list, tuple)):
            return {"items": self._entries(dict(enumerate(value)), path)}
        if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
            return {"items": self._entries(value, path)}
        if isinstance(value, (Namespace, types.SimpleNamespace)) or self._is_own(type(value).__module__):
            return {"attributes": self._entries(getattr(value, "__dict__", {}), path)}
        self.omitted[path] = f"a {type(value).__module__}.{type(value).__qualname__}"
        return None

    def _array(self, value: Any, path: str) -> dict[str, Any] | None:
        if isinstance(value, Tensor) and value.grad_fn is not None:  # a result of a step that is over
            return {"value": value.detach()} if value.numel() == 1 else None
        large = value.nbytes > _MAX_BYTES
        if large and not (isinstance(value, Tensor) and (value._version or value.requires_grad)):
            if isinstance(value, np.ndarray) or value.is_floating_point():
                self.omitted[path] = f"{value.nbytes:,} bytes that the loop has not changed in place, taken for data"
            return None
        return {"value": value.detach() if isinstance(value, Tensor) else value}


def kind_of(value: Any) -> str | None:
    """Return the kind of an object that has a state of its own; None for any other value."""
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, Optimizer):
        return "optimizer"
    if isinstance(value, (LRScheduler, torch.amp.GradScaler)):
        return "stateful"
    if isinstance(value, torch.Generator):
        return "generator"
    if isinstance(value, np.random.Generator):
        return "numpy"
    return "python" if isinstance(value, random.Random) else None


def _is_plain(value: Any) -> bool:
    """Return whether a container has only plain values, and not too many."""
    left, waiting = _MAX_VALUES, [value]
    while waiting and left > 0:
        item = waiting.pop()
        left -= 1
        if type(item) is dict:
            waiting += [*item.keys(), *item.values()]
        elif type(item) in (list, tuple, set):
            waiting += item
        elif not isinstance(item, _LEAVES):
            return False
    return not waiting


def script_folder() -> Path:
    """Return the folder of the script that is running."""
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "").absolute().parent


def is_below(folder: Path) -> Callable[[str], bool]:
    """Return a function that returns whether a module is one of the script's own: in ``folder``, and in no installed package."""

    def own(module: str) -> bool:
        file = getattr(sys.modules.get(module), "__file__", None)
        return module == "__main__" or is_own_file(file, folder)

    return own


def is_own_file(file: str | None, folder: Path) -> bool:
    """Return whether a file is one of the script's."""
    if file is None:
        return False
    path = Path(file).absolute()
    return folder in path.parents and "site-packages" not in path.parts
