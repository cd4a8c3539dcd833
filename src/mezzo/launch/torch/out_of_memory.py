"""Report what occupied the memory of a script that ran out of it.

The error's frames keep alive the objects that the script had when it was raised: its models, its optimizers, and the graphs that its
variables lead to. They are counted once the script has ended. A script that catches the error and continues is not covered.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.devices import cuda_devices_in_use
from mezzo.engine.gradients import trained_leaves
from mezzo.error_texts import is_of_full_host, requested_bytes
from mezzo.launch.torch.state import TorchRun
from mezzo.measure.checkpointing.wanted import bytes_text
from mezzo.measure.memory import optimizer_bytes, total_bytes
from mezzo.observe.module_names import Names
from mezzo.observe.observer import ModuleTree
from mezzo.records import HeldModule, Memory, Note, OutOfMemory

_MAX_MODULES = 5


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error says that a device or the host has no memory left."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and is_of_full_host(str(error))
    )


def request_that_failed(error: BaseException, *, step: int) -> OutOfMemory:
    """Return the allocation that failed in ``step``, without what occupied the memory."""
    return OutOfMemory(step=step, message=str(error).partition("\n")[0][:300], asked_bytes=requested_bytes(str(error)))


def out_of_memory(run: TorchRun, memory: Memory, error: BaseException) -> OutOfMemory:
    """Return what occupied the memory when ``error`` was raised; ``memory`` is what a step of the run used."""
    frames = [*_frames(error)]
    modules, optimizers = list(run.objects.roots), list(run.objects.optimizers)
    modules += [v for values in frames for v in values if isinstance(v, nn.Module) and v not in run.objects.roots]
    every = [p for m in modules for p in m.parameters()] + [p for o in optimizers for p in trained_leaves(o)]
    parameters = list({id(p): p for p in every}.values())
    held = {
        PARAMETERS: total_bytes(parameters),
        GRADIENTS: total_bytes(p.grad for p in parameters if p.grad is not None),
        OPTIMIZER: sum(optimizer_bytes(optimizer) for optimizer in optimizers),
    }
    weights = {_address(p) for p in parameters}
    saved = {
        _address(t): t for t in saved_by_graphs([v for values in frames for v in values]) if _address(t) not in weights
    }
    held[ACTIVATIONS] = total_bytes(saved.values())
    why = "what autograd saves does not say which module computed it"
    not_known = [Note(what="activations by module", value="not known", reason=why)]
    peak = None
    if run.precision.device_type == "cuda":
        allocated, peak = memory_of_devices()
        held[OTHER] = max(allocated - sum(held.values()), 0)
    else:
        why = "the CPU's allocator does not report how much it has allocated"
        not_known.append(Note(what=OTHER, value="not known", reason=why))
    if memory.activations_bytes is None:
        why = "no whole step was counted before memory ran out, so activations are those up to this point"
        not_known.append(Note(what="activations of a step", value="not known", reason=why))
    lowers = run.precision.effective is not None and run.precision.effective.lowers
    settings = memory_settings(held, lowers=lowers, step_activations=memory.activations_bytes, peak_bytes=peak)
    found = {
        "held_bytes": held,
        "modules": _largest(modules, parameters, optimizers),
        "not_known": not_known,
        "settings": settings,
    }
    return request_that_failed(error, step=run.update.num_updates + 1).model_copy(update=found)


def memory_of_devices() -> tuple[int, int]:
    """Return the bytes that this process has on all its CUDA devices, and the memory of these devices."""
    devices = cuda_devices_in_use() or [torch.cuda.current_device()]
    properties = map(torch.cuda.get_device_properties, devices)
    return sum(map(torch.cuda.memory_allocated, devices)), sum(each.total_memory for each in properties)


def _frames(error: BaseException) -> Iterator[list[Any]]:
    """Yield the values of each frame's variables, with the items of the lists, tuples and dicts among them."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        values = list(frame.f_locals.values())
        for value in list(values):
            if isinstance(value, (list, tuple)):
                values += value
            elif type(value) is dict:
                values += value.values()
        yield values


def _largest(
    modules: list[nn.Module], parameters: list[Tensor], optimizers: list[torch.optim.Optimizer]
) -> list[HeldModule]:
    names, sizes = Names(modules, ModuleTree()), Counter[str]()
    for parameter in parameters:
        states = [optimizer.state[parameter] for optimizer in optimizers if parameter in optimizer.state]
        moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        tensors = [parameter, *moments, *([] if parameter.grad is None else [parameter.grad])]
        sizes[names.of_parameter(id(parameter))] += total_bytes(tensors)
    return [HeldModule(name=name, bytes=size) for name, size in sizes.most_common(_MAX_MODULES)]


def saved_by_graphs(values: list[Any]) -> Iterator[Tensor]:
    """Yield the tensors saved in the autograd graphs of the tensors in ``values``."""
    waiting = [v.grad_fn for v in values if isinstance(v, Tensor) and v.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
        for name in names:
            try:
                saved = getattr(node, name)
            except (RuntimeError, AttributeError):  # freed by a backward pass
                continue
            yield from (v for v in (saved if isinstance(saved, (list, tuple)) else [saved]) if isinstance(v, Tensor))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer state"
ACTIVATIONS, OTHER = "saved activations", "other"
_EIGHT_BIT = 0.75
"""Share of FP32 moments that 8-bit moments save: 1 byte instead of 4, and a scale for each block."""


def memory_settings(
    bytes_by_kind: Mapping[str, int], *, lowers: bool, step_activations: int | None, peak_bytes: int | None = None
) -> list[Note]:
    """Return the settings to write, the greatest saving first.

    Args:
        bytes_by_kind: bytes in memory when it ran out, by kind.
        lowers: whether the policy computes below 32 bits already.
        step_activations: bytes that a whole step saved for its backward pass; None if no step was counted.
        peak_bytes: the most bytes that could be allocated; None if unknown.
    """
    activations = max(step_activations or 0, bytes_by_kind.get(ACTIVATIONS, 0))
    state = bytes_by_kind.get(OPTIMIZER, 0)
    savings: list[tuple[int, str, str]] = []
    if activations:
        why = "half of the saved activations wait for the backward pass at a time; the update equals the whole batch's"
        savings.append((activations // 2, 'half the batch: Session(micro_batch="auto"), or accumulate=2', why))
        why = "at most this much: a checkpointed block keeps its input and computes the rest again"
        savings.append((activations, "mezzo.checkpoint(model, sample, budget=...)", why))
        if not lowers:
            why = "activations in 16 bits; weights, gradients and optimizer state stay FP32"
            savings.append((activations // 2, "--policy bf16", why))
    if state:
        why = "moments take 1 byte a weight instead of 4"
        savings.append((int(_EIGHT_BIT * state), 'mezzo.AdamW(..., moments="8bit")', why))
    settings = [
        Note(what="write", value=setting, reason=f"saves {bytes_text(saved_bytes)}: {why}")
        for saved_bytes, setting, why in sorted(savings, key=lambda one: -one[0])
    ]
    permanent_bytes = sum(size for kind, size in bytes_by_kind.items() if kind in (PARAMETERS, GRADIENTS, OPTIMIZER))
    if peak_bytes is not None and step_activations and permanent_bytes < peak_bytes:
        share = (peak_bytes - permanent_bytes) / step_activations
        if share < 1:
            why = "the memory that parameters, gradients and optimizer state leave free, divided by what a whole step saves"
            value = f"{share:.0%} of the batch fits"
            settings.insert(0, Note(what="largest batch, estimated", value=value, reason=why))
    return settings
