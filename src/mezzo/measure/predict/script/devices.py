"""Keep on the CPU, where the tape is recorded, what a traced script wants on an accelerator.

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

from mezzo.measure.predict.script.gpu import asked_by_script, gpu_told, nothing

_CPU = torch.device("cpu")
_ACCELERATORS = {kind: torch.device(kind, 0) for kind in ("cuda", "xpu", "mps")}
"""The device that each kind of accelerator is to a script."""
_STAYS = {Tensor.cuda: "cuda", Tensor.xpu: "xpu", Tensor.pin_memory: ""}
"""Methods that move a tensor and do nothing else, with the kind of device."""
_DEVICE_AT = {Tensor.to: 1, torch._C._nn._parse_to: 0}
"""The argument in which a number is a GPU's."""
_TYPED = "torch.cuda."
"""How the names of tensor types begin that lie on a GPU."""


@contextmanager
def gpu_on_cpu(
    asked: list[str] | None = None, *, there: bool = True, moved: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Iterator[None]:
    """Keep everything on the CPU that the block moves to an accelerator or makes on one.

    Args:
        asked: receives the name of each function that told the block of a GPU.
        there: whether functions about the machine say that it has a GPU; otherwise they tell the truth.
        moved: called with each tensor that the block moves to an accelerator or creates there; returns the tensor to use.
    """
    asked = [] if asked is None else asked
    place = _Place(asked, there=there)
    context = torch.utils._device.DeviceContext
    replaced: list[tuple[Any, str, Any]] = [
        (context, "__init__", _context_on_cpu(context.__init__, place)),
        (torch, "set_default_tensor_type", _type_on_cpu(torch.set_default_tensor_type, place)),
        (torch, "Generator", _generator_on_cpu(torch.Generator)),
        (Tensor, "record_stream", nothing),
        (torch.random, "fork_rng", _of_cpu_alone(torch.random.fork_rng)),
        *place.answers(),
    ]
    typed = [name for name in vars(torch.cuda) if name.endswith("Tensor") and hasattr(torch, name)]
    replaced += [(torch.cuda, name, getattr(torch, name)) for name in typed]
    with ExitStack() as stack:
        stack.enter_context(gpu_told(asked, there=there))
        for home, name, made in replaced:
            stack.enter_context(patch.object(home, name, made))
        stack.enter_context(_OnCpu(place, moved))
        yield


class _Place:
    """Where a script's tensors lie, as it sees them."""

    def __init__(self, asked: list[str], *, there: bool) -> None:
        self.there = there
        self._asked = asked
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
        self.used(kind if isinstance(kind, str) else "cuda")
        return _CPU

    def used(self, kind: str) -> None:
        """Remember that the script moved something to an accelerator of this kind."""
        if kind and self._device is None and self.there:
            self._device = _ACCELERATORS[kind]

    def seen(self, what: str) -> torch.device | None:
        """Return what tensors tell a script that asks for ``what``; None for what is true."""
        if self._device is not None and what not in self._asked:
            self._asked.append(what)
        return self._device

    def answers(self) -> Iterator[tuple[type, str, Any]]:
        """Yield the class, the name and the substitute of each question for a tensor's place."""
        for kind in (Tensor, FakeTensor):
            own: Any = kind.device

            def device(tensor: Tensor, own: Any = own) -> torch.device:
                found = self.seen("Tensor.device") if asked_by_script() else None
                return own.__get__(tensor) if found is None else found

            yield kind, "device", property(device)
        is_cuda: Any = Tensor.is_cuda
        get_device: Any = Tensor.get_device

        def on_cuda(tensor: Tensor) -> bool:
            found = self.seen("Tensor.is_cuda") if asked_by_script() else None
            return bool(is_cuda.__get__(tensor)) if found is None else found.type == "cuda"

        def number(tensor: Tensor) -> int:
            found = self.seen("Tensor.get_device()") if asked_by_script() else None
            return int(get_device(tensor)) if found is None else 0

        yield Tensor, "is_cuda", property(on_cuda)
        yield Tensor, "get_device", number


def _context_on_cpu(own: Callable[..., None], place: _Place) -> Callable[..., None]:
    """Return ``DeviceContext.__init__``, which ``with torch.device`` and ``set_default_device`` call, for the CPU."""

    @functools.wraps(own)
    def init(context: Any, device: Any) -> None:
        own(context, place.on_cpu(device))

    return init


def _type_on_cpu(own: Callable[..., None], place: _Place) -> Callable[..., None]:
    """Return ``torch.set_default_tensor_type`` for types of the CPU."""

    @functools.wraps(own)
    def chosen(kind: Any) -> None:
        own(_cpu_type(kind, place))

    return chosen


def _cpu_type(kind: Any, place: _Place) -> Any:
    """Return the name of a tensor type on the CPU for one on a GPU; anything else as it is."""
    if not isinstance(kind, str) or not kind.startswith(_TYPED):
        return kind
    place.used("cuda")
    return "torch." + kind.removeprefix(_TYPED)


def _generator_on_cpu(own: Any) -> type:
    """Return ``torch.Generator`` whose generators are the CPU's."""

    class Kind(type(own)):  # type: ignore[misc]
        def __instancecheck__(cls, one: object) -> bool:
            return isinstance(one, own)

    class Generator(own, metaclass=Kind):  # type: ignore[misc]
        def __new__(cls, device: Any = None) -> Any:
            return own()

    return Generator


def _of_cpu_alone(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.random.fork_rng`` without the random states of accelerators."""

    @functools.wraps(own)
    def forked(devices: object = None, enabled: bool = True, **_: object) -> Any:
        return own([], enabled)

    return forked


class _OnCpu(TorchFunctionMode):
    """A mode that gives every function of torch the CPU in place of an accelerator."""

    def __init__(self, place: _Place, moved: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._place, self._moved = place, moved

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call ``func`` with the CPU in place of an accelerator."""
        on_cpu, kwargs = self._place.on_cpu, kwargs or {}
        if func in _STAYS:
            self._place.used(_STAYS[func])
            return self._moved(args[0]) if _STAYS[func] else args[0]
        if func is torch.device:
            return self._device(args, kwargs, for_script=asked_by_script())
        if func is Tensor.type:
            return self._type(args, kwargs, for_script=asked_by_script())
        number_at = _DEVICE_AT.get(func)
        here = [
            on_cpu(value) if number == number_at or isinstance(value, (torch.device, str)) else value
            for number, value in enumerate(args)
        ]
        named = {name: on_cpu(value) if name == "device" else value for name, value in kwargs.items()}
        made = func(*here, **named)
        replaced = any(a is not b for a, b in zip(here, args, strict=True))
        changed = replaced or named.get("device") is not kwargs.get("device")
        return self._moved(made) if changed and isinstance(made, Tensor) else made

    def _device(self, args: tuple[Any, ...], kwargs: Any, *, for_script: bool) -> torch.device:
        by_number = bool(args) and type(args[0]) is int  # torch's CPU build knows no number
        made = torch.device("cuda", args[0]) if by_number else torch.device(*args, **kwargs)
        on_gpu = made.type in _ACCELERATORS
        return _CPU if on_gpu and not (for_script and self._place.there) else made

    def _type(self, args: tuple[Any, ...], kwargs: Any, *, for_script: bool) -> Any:
        tensor, *kind = args
        found = tensor.type(*(_cpu_type(one, self._place) for one in kind), **kwargs)
        if isinstance(found, str) and for_script and self._place.seen("Tensor.type()") is not None:
            return found.replace("torch.", _TYPED, 1)
        return found
