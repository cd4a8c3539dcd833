"""Parts of a training's state as digests and simple values.

Cost: one pass over every tensor, and one number per tensor read from the device.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mezzo.engine.gradients import trained_leaves
from mezzo.engine.randomness import random_states
from mezzo.launch.torch.counting.weights_digest import digest
from mezzo.measure.state_trace import Moment, ObjectState, OptimizerState

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
    """Return copies of the weights, by path: the tensors of containers whose shapes are those of the weights."""
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
