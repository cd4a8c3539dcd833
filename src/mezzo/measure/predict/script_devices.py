"""A script's own GPU, while it is traced: what it asks to be on an accelerator stays on the CPU, where the tape is recorded.

Scripts that are written for a GPU say ``.cuda()``, ``.to("cuda")`` or ``device="cuda"``. Torch's CPU build refuses each, and no GPU is
needed to trace without numbers; which one is meant, ``--gpus`` says. Functions of ``torch.cuda`` and ``torch.accelerator`` that
training scripts call answer as on a machine with one idle GPU: its kind is the same for all GPUs that are predicted from the trace.

Limit: ``tensor.is_cuda`` is False.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU, _GPU = torch.device("cpu"), torch.device("cuda")
_TORCH = str(Path(torch.__file__).parent)
_ACCELERATORS = ("cuda", "xpu", "mps")
_STAYS = {Tensor.cuda, Tensor.xpu, Tensor.pin_memory}
"""Methods that move a tensor and do nothing else."""
_DEVICE_AT = {Tensor.to: 1, torch._C._nn._parse_to: 0}
"""The argument in which a number is a GPU's."""


class _Idle:
    """A stream or event of an idle GPU."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Take what ``torch.cuda.Event`` and ``Stream`` take."""

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def elapsed_time(self, other: object) -> float:
        """Return 1 ms: a script may divide by it."""
        return 1.0

    def query(self) -> bool:
        """Return True: nothing is under way."""
        return True

    def record(self, stream: object = None) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def wait_stream(self, stream: object) -> None:
        """Do nothing."""

    def wait_event(self, event: object) -> None:
        """Do nothing."""

    def wait(self, stream: object = None) -> None:
        """Do nothing."""


def _nothing(*args: object, **kwargs: object) -> None:
    pass


def _zero(*args: object, **kwargs: object) -> int:
    return 0


def _true(*args: object, **kwargs: object) -> bool:
    return True


def _one(*args: object, **kwargs: object) -> int:
    return 1


MEMORY_BYTES, CAPABILITY = 80 * 2**30, (8, 0)
"""Of the GPU that scripts are told of."""
GPU_TOLD = f"one idle GPU with {MEMORY_BYTES >> 30} GiB and compute capability {CAPABILITY[0]}.{CAPABILITY[1]}"
_NAME = "GPU of mezzo predict"


def _properties(*args: object, **kwargs: object) -> SimpleNamespace:
    major, minor = CAPABILITY
    return SimpleNamespace(
        name=_NAME, total_memory=MEMORY_BYTES, major=major, minor=minor, multi_processor_count=108, warp_size=32
    )


_ANSWERS: Mapping[str, Any] = {
    "init": _nothing,
    "set_device": _nothing,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "reset_peak_memory_stats": _nothing,
    "reset_max_memory_allocated": _nothing,
    "set_per_process_memory_fraction": _nothing,
    "memory_allocated": _zero,
    "max_memory_allocated": _zero,
    "memory_reserved": _zero,
    "max_memory_reserved": _zero,
    "current_device": _zero,
    "current_stream": _Idle,
    "default_stream": _Idle,
    "Event": _Idle,
    "Stream": _Idle,
    "stream": _Idle,
    "device": _Idle,
    "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "set_rng_state": _nothing,
    "set_rng_state_all": _nothing,
}
"""What functions of ``torch.cuda`` return: nothing runs there, and nothing is allocated."""
_OF_A_GPU: Mapping[str, Any] = {
    "is_available": _true,
    "is_bf16_supported": _true,
    "device_count": _one,
    "get_device_name": lambda *args, **kwargs: _NAME,
    "get_device_capability": lambda *args, **kwargs: CAPABILITY,
    "get_device_properties": _properties,
    "mem_get_info": lambda *args, **kwargs: (MEMORY_BYTES, MEMORY_BYTES),
    "get_arch_list": lambda: [f"sm_{major}{minor}" for major, minor in (CAPABILITY,)],
}
"""What they return of the machine: it has one GPU."""
_ACCELERATOR: Mapping[str, Any] = {
    "is_available": _true,
    "current_accelerator": lambda *args, **kwargs: _GPU,
    "device_count": _one,
    "current_device_index": _zero,
    "set_device_index": _nothing,
    "synchronize": _nothing,
}
"""The same of ``torch.accelerator``. Torch itself gets its own answers: its loaders would start a thread that pins memory."""


@contextmanager
def gpu_on_cpu(asked: list[str] | None = None, *, there: bool = True) -> Iterator[None]:
    """Keep everything on the CPU that the block moves to an accelerator or makes on one.

    Args:
        asked: gets the name of each function that tells the block of a GPU.
        there: whether functions that tell of the machine say that it has a GPU; otherwise they say what is true.
    """
    asked = [] if asked is None else asked
    with ExitStack() as stack:
        for name, answer in _ANSWERS.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        for name, answer in _OF_A_GPU.items() if there else ():
            stack.enter_context(patch.object(torch.cuda, name, _noted(torch.cuda, name, answer, asked)))
        for name, answer in _ACCELERATOR.items() if there else ():
            told = _noted(torch.accelerator, name, answer, asked, own_for_torch=True)
            stack.enter_context(patch.object(torch.accelerator, name, told))
        stack.enter_context(patch.object(torch.random, "fork_rng", _of_cpu_alone(torch.random.fork_rng)))
        stack.enter_context(_OnCpu())
        yield


def _of_cpu_alone(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.random.fork_rng`` without the random states of accelerators."""

    @functools.wraps(own)
    def forked(devices: object = None, enabled: bool = True, **_: object) -> Any:
        return own([], enabled)

    return forked


def _noted(
    module: ModuleType, name: str, answer: Callable[..., Any], asked: list[str], *, own_for_torch: bool = False
) -> Callable[..., Any]:
    """Return a function that answers as ``answer``, and notes its name in ``asked`` unless torch itself calls it."""
    own, called = getattr(module, name), f"{module.__name__}.{name}"

    @functools.wraps(own)
    def told(*args: Any, **kwargs: Any) -> Any:
        if not sys._getframe(1).f_code.co_filename.startswith(_TORCH):
            if called not in asked:
                asked.append(called)
        elif own_for_torch:
            return own(*args, **kwargs)
        return answer(*args, **kwargs)

    return told


class _OnCpu(TorchFunctionMode):
    """A mode that gives every function of torch the CPU in place of an accelerator."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call ``func`` with the CPU in place of an accelerator."""
        if func in _STAYS:
            return args[0]
        if func is torch.device:
            return _CPU if args and type(args[0]) is int else _on_cpu(func(*args, **(kwargs or {})))
        place = _DEVICE_AT.get(func)
        moved = [
            _on_cpu(value) if number == place or isinstance(value, (torch.device, str)) else value
            for number, value in enumerate(args)
        ]
        return func(
            *moved, **{name: _on_cpu(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        )


def _on_cpu(device: Any) -> Any:
    """Return the CPU for a device that is an accelerator, by object, name or number; anything else as it is."""
    if isinstance(device, torch.device):
        return _CPU if device.type in _ACCELERATORS else device
    if isinstance(device, str):
        return _CPU if device.partition(":")[0] in _ACCELERATORS else device
    return _CPU if type(device) is int else device
