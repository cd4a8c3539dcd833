"""Keep on the CPU, where the tape is recorded, what a traced script places on an accelerator.

Scripts written for a GPU say ``.cuda()``, ``.to("cuda")`` or ``device="cuda"``. Torch's CPU build refuses each, and tracing without
numbers needs no GPU; ``--gpus`` says which one is meant. A script sees its own devices: from the first tensor that it moves to an
accelerator or creates there, its tensors report that device. Torch itself sees the CPU.

Limit: tensors that were not moved report that device too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.utils._device
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode

from mezzo.measure.cuda_answers import CUDA_TYPES, always, generators, nothing
from mezzo.measure.predict.script.gpu import called_by_script, simulated_gpu

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
