"""A script's own GPU, while it is traced: what it asks to be on an accelerator stays on the CPU, where the tape is recorded.

Scripts that are written for a GPU say ``.cuda()``, ``.to("cuda")`` or ``device="cuda"``. Torch's CPU build refuses each, and no GPU is
needed to trace without numbers; which one is meant, ``--gpus`` says. Functions of ``torch.cuda`` that training loops call answer as on
an idle GPU.

Limit: ``torch.cuda.is_available()`` keeps its own answer, so a script that ends by its own check without a GPU ends here, too; and
``tensor.is_cuda`` is False.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
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


_ANSWERS: Mapping[str, Any] = {
    "set_device": _nothing,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "reset_peak_memory_stats": _nothing,
    "reset_max_memory_allocated": _nothing,
    "memory_allocated": _zero,
    "max_memory_allocated": _zero,
    "memory_reserved": _zero,
    "max_memory_reserved": _zero,
    "current_device": _zero,
    "current_stream": _Idle,
    "Event": _Idle,
    "Stream": _Idle,
    "stream": _Idle,
    "device": _Idle,
}


@contextmanager
def gpu_on_cpu() -> Iterator[None]:
    """Keep everything on the CPU that the block moves to an accelerator or makes on one."""
    with ExitStack() as stack:
        for name, answer in _ANSWERS.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(_OnCpu())
        yield


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
