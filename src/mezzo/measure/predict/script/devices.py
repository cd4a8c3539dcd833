"""Keep on the CPU, where the tape is recorded, what a traced script places on an accelerator.

Scripts written for a GPU say ``.cuda()``, ``.to("cuda")`` or ``device="cuda"``. Torch's CPU build refuses each, and tracing without
numbers needs no GPU; ``--gpus`` says which one is meant. A script sees its own devices: from the first tensor that it moves to an
accelerator or creates there, its tensors report that device. Torch itself sees the CPU.

Limit: tensors that were not moved report that device too.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed
import torch.utils._device
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode

from mezzo.measure.cuda_answers import (
    ANSWERS,
    CUDA_TYPES,
    Idle,
    always,
    answers_everywhere,
    each,
    generators,
    none_of_each,
    nothing,
    zero,
)

_CPU = torch.device("cpu")
_ACCELERATORS = {kind: torch.device(kind, 0) for kind in ("cuda", "xpu", "mps")}
"""The device that each kind of accelerator is to a script."""
_MOVES = {Tensor.cuda: "cuda", Tensor.xpu: "xpu", Tensor.pin_memory: ""}
"""Methods that only move a tensor, with the kind of device."""
_DEVICE_ARGUMENT = {Tensor.to: 1, torch._C._nn._parse_to: 0}
"""The index of the argument in which a number means a GPU."""


@contextmanager
def gpu_on_cpu(
    queries: list[str] | None = None,
    *,
    gpu_present: bool = True,
    moved: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Iterator[None]:
    """Keep everything on the CPU that the block moves to an accelerator or creates on one.

    Args:
        queries: receives the name of each function that reported the simulated GPU to the block.
        gpu_present: whether functions about the machine report a GPU; otherwise they answer truthfully.
        moved: called with each tensor that the block moves to an accelerator or creates there; returns the tensor to use.
    """
    queries = [] if queries is None else queries
    visible = _VisibleDevice(queries, gpu_present=gpu_present)
    context = torch.utils._device.DeviceContext
    replaced: list[tuple[Any, str, Any]] = [
        (context, "__init__", _context_on_cpu(context.__init__, visible)),
        (torch, "set_default_tensor_type", _type_on_cpu(torch.set_default_tensor_type, visible)),
        (torch, "Generator", generators(torch.Generator, always("cpu"))),
        (Tensor, "record_stream", nothing),
        (torch.random, "fork_rng", _of_cpu_alone(torch.random.fork_rng)),
        *visible.substitutes(),
    ]
    typed = [name for name in vars(torch.cuda) if name.endswith("Tensor") and hasattr(torch, name)]
    replaced += [(torch.cuda, name, getattr(torch, name)) for name in typed]
    with ExitStack() as stack:
        stack.enter_context(simulated_gpu(queries, present=gpu_present))
        for home, name, substitute in replaced:
            stack.enter_context(patch.object(home, name, substitute))
        stack.enter_context(_OnCpu(visible, moved))
        yield


class _VisibleDevice:
    """The device on which a script sees its tensors."""

    def __init__(self, queries: list[str], *, gpu_present: bool) -> None:
        self.gpu_present = gpu_present
        self._queries = queries
        self._device: torch.device | None = None

    def on_cpu(self, device: Any) -> Any:
        """Return the CPU for a device that is an accelerator, by object, name or number; anything else as it is."""
        kind = device.type if isinstance(device, torch.device) else device
        if isinstance(kind, str):
            kind = kind.partition(":")[0]
            if kind not in _ACCELERATORS:
                return device
        elif type(kind) is not int:
            return device
        self.note_use(kind if isinstance(kind, str) else "cuda")
        return _CPU

    def note_use(self, kind: str) -> None:
        """Note that the script moved something to an accelerator of this kind."""
        if kind and self._device is None and self.gpu_present:
            self._device = _ACCELERATORS[kind]

    def reported(self, what: str) -> torch.device | None:
        """Return the device that a tensor reports when a script queries ``what``; None for the true one."""
        if self._device is not None and what not in self._queries:
            self._queries.append(what)
        return self._device

    def substitutes(self) -> Iterator[tuple[type, str, Any]]:
        """Yield the class, the name and the substitute of each query for a tensor's device."""
        for kind in (Tensor, FakeTensor):
            original: Any = kind.device

            def device(tensor: Tensor, original: Any = original) -> torch.device:
                found = self.reported("Tensor.device") if called_by_script() else None
                return original.__get__(tensor) if found is None else found

            yield kind, "device", property(device)
        is_cuda: Any = Tensor.is_cuda
        get_device: Any = Tensor.get_device

        def on_cuda(tensor: Tensor) -> bool:
            found = self.reported("Tensor.is_cuda") if called_by_script() else None
            return bool(is_cuda.__get__(tensor)) if found is None else found.type == "cuda"

        def number(tensor: Tensor) -> int:
            found = self.reported("Tensor.get_device()") if called_by_script() else None
            return int(get_device(tensor)) if found is None else 0

        yield Tensor, "is_cuda", property(on_cuda)
        yield Tensor, "get_device", number


def _context_on_cpu(original: Callable[..., None], visible: _VisibleDevice) -> Callable[..., None]:
    """Return ``DeviceContext.__init__``, which ``with torch.device`` and ``set_default_device`` call, for the CPU."""

    @functools.wraps(original)
    def init(context: Any, device: Any) -> None:
        original(context, visible.on_cpu(device))

    return init


def _type_on_cpu(original: Callable[..., None], visible: _VisibleDevice) -> Callable[..., None]:
    """Return ``torch.set_default_tensor_type`` for types of the CPU."""

    @functools.wraps(original)
    def chosen(kind: Any) -> None:
        original(_cpu_type(kind, visible))

    return chosen


def _cpu_type(kind: Any, visible: _VisibleDevice) -> Any:
    """Return the name of a tensor type on the CPU for one on a GPU; anything else as it is."""
    if not isinstance(kind, str) or not kind.startswith(CUDA_TYPES):
        return kind
    visible.note_use("cuda")
    return "torch." + kind.removeprefix(CUDA_TYPES)


def _of_cpu_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.random.fork_rng`` without the random states of accelerators."""

    @functools.wraps(original)
    def forked(devices: object = None, enabled: bool = True, **_: object) -> Any:
        return original([], enabled)

    return forked


class _OnCpu(TorchFunctionMode):
    """A mode that gives every function of torch the CPU in place of an accelerator."""

    def __init__(self, visible: _VisibleDevice, moved: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._visible, self._moved = visible, moved

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call ``func`` with the CPU in place of an accelerator."""
        on_cpu, kwargs = self._visible.on_cpu, kwargs or {}
        if func in _MOVES:
            self._visible.note_use(_MOVES[func])
            return self._moved(args[0]) if _MOVES[func] else args[0]
        if func is torch.device:
            return self._device(args, kwargs, for_script=called_by_script())
        if func is Tensor.type:
            return self._type(args, kwargs, for_script=called_by_script())
        number_at = _DEVICE_ARGUMENT.get(func)
        here = [
            on_cpu(value) if number == number_at or isinstance(value, (torch.device, str)) else value
            for number, value in enumerate(args)
        ]
        named = {name: on_cpu(value) if name == "device" else value for name, value in kwargs.items()}
        result = func(*here, **named)
        replaced = any(a is not b for a, b in zip(here, args, strict=True))
        changed = replaced or named.get("device") is not kwargs.get("device")
        return self._moved(result) if changed and isinstance(result, Tensor) else result

    def _device(self, args: tuple[Any, ...], kwargs: Any, *, for_script: bool) -> torch.device:
        by_number = bool(args) and type(args[0]) is int  # torch's CPU build knows no number
        device = torch.device("cuda", args[0]) if by_number else torch.device(*args, **kwargs)
        on_gpu = device.type in _ACCELERATORS
        return _CPU if on_gpu and not (for_script and self._visible.gpu_present) else device

    def _type(self, args: tuple[Any, ...], kwargs: Any, *, for_script: bool) -> Any:
        tensor, *kind = args
        found = tensor.type(*(_cpu_type(one, self._visible) for one in kind), **kwargs)
        if isinstance(found, str) and for_script and self._visible.reported("Tensor.type()") is not None:
            return found.replace("torch.", CUDA_TYPES, 1)
        return found


# All GPUs that are predicted from the trace share this stand-in. Nothing runs on it, and nothing is allocated there.

_NOT_THE_SCRIPT = tuple(str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[3]))
MEMORY_BYTES, CAPABILITY = 80 * 2**30, (8, 0)
"""Of the GPU that a traced script sees."""
SIMULATED_GPU = f"one idle GPU with {MEMORY_BYTES >> 30} GiB and compute capability {CAPABILITY[0]}.{CAPABILITY[1]}"
_NAME, _CUDA, _CUDNN = "GPU of mezzo predict", "12.8", 91002
_GPU = torch.device("cuda")


def called_by_script() -> bool:
    """Return whether the caller's own caller belongs to the script or a library, and not to torch or Mezzo."""
    return not sys._getframe(2).f_code.co_filename.startswith(_NOT_THE_SCRIPT)


_one, _true, _no_text = always(1), always(True), always("")
_capability, _memory = always(CAPABILITY), always((MEMORY_BYTES, MEMORY_BYTES))


def _properties(*args: object, **kwargs: object) -> SimpleNamespace:
    major, minor = CAPABILITY
    return SimpleNamespace(
        name=_NAME, total_memory=MEMORY_BYTES, major=major, minor=minor, multi_processor_count=108, warp_size=32
    )


_OF_A_GPU: Mapping[str, Any] = {
    **each("is_available is_bf16_supported is_tf32_supported", _true),
    "device_count": _one,
    "get_device_name": always(_NAME),
    "get_device_capability": _capability,
    "get_device_properties": _properties,
    "mem_get_info": _memory,
    "get_arch_list": lambda: ["sm_{}{}".format(*CAPABILITY)],
    "get_gencode_flags": _no_text,
}
"""Answers of ``torch.cuda`` about the machine, which has one GPU."""
_ACCELERATOR: Mapping[str, Any] = {
    "is_available": _true,
    "current_accelerator": always(_GPU),
    "device_count": _one,
    "get_device_capability": _capability,
    "get_memory_info": _memory,
    "current_stream": Idle,
    "device_index": Idle,
    **each("current_device_index current_device_idx memory_allocated max_memory_allocated", zero),
    **each("memory_reserved max_memory_reserved", zero),
    **each("set_device_index set_device_idx synchronize set_stream empty_cache empty_host_cache", nothing),
    **each("reset_peak_memory_stats reset_accumulated_memory_stats", nothing),
    "memory_stats": none_of_each,
}
"""Answers of ``torch.accelerator``. Torch itself gets the true ones: its loaders would start a thread that pins memory."""
_FACTS: Sequence[tuple[ModuleType, Mapping[str, Any]]] = (
    (torch.version, {"cuda": _CUDA}),
    (torch.backends.cuda, {"is_built": _true}),
    (torch.backends.cudnn, {"version": always(_CUDNN), "is_available": _true}),
    (torch.cuda, {"is_initialized": _true}),
    (torch.cuda.nccl, {"version": always((2, 27, 3))}),
    (torch.distributed, {"is_nccl_available": _true}),
)
"""Other facts about a machine with a GPU; torch itself gets the true ones."""


@contextmanager
def simulated_gpu(queries: list[str], *, present: bool) -> Iterator[None]:
    """Answer the script's queries in the block.

    Args:
        queries: receives the name of each function that reported the simulated GPU to the script.
        present: whether functions about the machine report a GPU; otherwise they answer truthfully.
    """
    with ExitStack() as stack:
        for module, name, answer in answers_everywhere(ANSWERS):
            stack.enter_context(patch.object(module, name, answer))
        if present:
            _simulate(stack, queries)
        yield


def _simulate(stack: ExitStack, queries: list[str]) -> None:
    for name, answer in _OF_A_GPU.items():
        stack.enter_context(patch.object(torch.cuda, name, _noted(torch.cuda, name, answer, queries)))
    for module, answers in ((torch.accelerator, _ACCELERATOR), *_FACTS):
        for name, answer in answers.items():
            if not hasattr(module, name):
                continue  # this torch is older than the function
            substitute = _noted(module, name, answer, queries, original_for_torch=True) if callable(answer) else answer
            stack.enter_context(patch.object(module, name, substitute))


def _noted(
    module: ModuleType, name: str, answer: Callable[..., Any], queries: list[str], *, original_for_torch: bool = False
) -> Callable[..., Any]:
    """Return a function that answers as ``answer`` does, and adds its name to ``queries`` unless torch itself calls it."""
    original, query = getattr(module, name), f"{module.__name__}.{name}()"

    @functools.wraps(original)
    def answered(*args: Any, **kwargs: Any) -> Any:
        if called_by_script():
            if query not in queries:
                queries.append(query)
        elif original_for_torch:
            return original(*args, **kwargs)
        return answer(*args, **kwargs)

    return answered
