"""Record a training on fake tensors as a tape: every storage that is allocated or freed, and every operation that computes.

Fake tensors have shapes and no numbers, so a step of a model with billions of weights takes seconds and no memory. They claim
to be on the CPU, because torch's CPU build cannot differentiate fake CUDA tensors (it aborts). Differences on a GPU are emulated:
dropout and attention in ``cuda_operators``, and two more here.

- With a dispatch mode on, autograd adds gradients out of place, where it would add them in place. The engine's own additions,
  those outside every node, therefore return their first operand.
- A storage is freed when its last tensor dies. The storage's Python object lives as long as the storage, so a weak reference
  to it shows when.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.engine.casts.registration import unwrapped
from mezzo.formats import format_of
from mezzo.measure.predict.operations import operations_of, tensors_in
from mezzo.measure.predict.tape import MemoryBlock, MemoryKind, TapePhase, TrainingTape
from mezzo.measure.predict.tape_memory import copied_bytes, trial_bytes

aten: Any = torch.ops.aten
_BY_CUBLAS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})
"""Operations whose first call in a thread allocates cuBLAS' workspace; autograd has a thread of its own."""
_DEVICE = torch.ops.prim.device.default
_LIST_OPERATION = "_foreach_"
_KEEP_SHAPES = frozenset(
    "abs add addcdiv addcmul copy div lerp maximum minimum mul neg reciprocal rsqrt sign sqrt sub zero".split()  # noqa: SIM905
)
"""Operations on lists of tensors whose results have the shapes and formats of the first list."""
_CONVOLUTIONS = frozenset({aten.convolution, aten.convolution_backward})
_COPIED_BY_CUDA = {aten.native_layer_norm: 1, aten.native_layer_norm_backward: 2}
"""How many of the first operands CUDA's kernel needs contiguous."""
_KIND_OF_PHASE: dict[TapePhase, MemoryKind] = {
    "setup": "parameters",
    "inputs": "inputs",
    "forward": "activations",
    "backward": "temporaries",
    "optimizer": "temporaries",
}


class Recorder(TorchDispatchMode):
    """A dispatch mode that writes a tape."""

    def __init__(
        self, *, batch: int, units: Mapping[str, int] | None = None, recording: bool = True, gpu: bool = True
    ) -> None:
        """Start an empty tape.

        Args:
            batch: the batch size.
            units: the tape's ``units``, if known.
            recording: whether operations are recorded from the beginning; blocks that exist are freed in any case.
            gpu: whether the operations are a GPU's or a CPU's.
        """
        super().__init__()
        self.tape = TrainingTape(batch=batch, units=dict(units or {}))
        self.phase: TapePhase = "setup"
        self.recording = recording
        self._gpu = gpu
        self.running = ""
        """The name of the running module."""
        self._numbers: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._handles: set[TapePhase] = set()
        self._modules: dict[int, str] = {}
        """The module of each autograd node, by the node's sequence number."""

    def add_existing(self, tensors: Iterable[Tensor], kind: MemoryKind) -> None:
        """Record as allocated what exists already, such as the storages of parameters."""
        for tensor in tensors:
            number = self._allocated(tensor)
            if number is not None:
                self.tape.blocks[number] = replace(self.tape.blocks[number], kind=kind)

    def has_block(self, tensor: Tensor) -> bool:
        """Return whether the storage of ``tensor`` has a block."""
        return storage_key(tensor) in self._numbers

    def label(self, tensors: Iterable[Tensor], kind: MemoryKind) -> None:
        """Set the kind of the storages of ``tensors``, once it is known: gradients, or the optimizer's state."""
        for tensor in tensors:
            number = self._numbers.get(storage_key(tensor))
            if number is not None:
                self.tape.blocks[number] = replace(self.tape.blocks[number], kind=kind)

    def step_begins(self) -> None:
        """Begin a step; the tape keeps the operations of the last one."""
        self.tape.step_starts.append(len(self.tape.events))
        self.tape.operations.clear()

    def backward_begins(self) -> None:
        """Begin a backward pass."""
        self.tape.backward_starts.append(len(self.tape.events))
        self.begin("backward")

    def update_begins(self) -> None:
        """Begin a call of an optimizer."""
        self.tape.optimizer_starts.append(len(self.tape.events))
        self.begin("optimizer")

    def begin(self, phase: TapePhase) -> None:
        """Record what runs from now on, as a part of ``phase``."""
        self.phase, self.recording = phase, True

    def name_module(self, name: str) -> None:
        """Record operations from now on with this name of the running module."""
        self.running = name

    def stop(self) -> None:
        """Record nothing until the next phase."""
        self.recording = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing that the block runs."""
        recording, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = recording

    @contextmanager
    def modules_named(self, model: nn.Module) -> Iterator[None]:
        """Record operations in the block with the name of the running module."""
        handles = []
        outer: list[str] = []

        def entering(name: str) -> Callable[..., None]:
            def enter(*_: Any) -> None:
                outer.append(self.running)
                self.running = name

            return enter

        def leave(*_: Any) -> None:
            if outer:  # the outermost call may have begun before its module was named
                self.running = outer.pop()

        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(entering(name)))
            handles.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def finished(self, num_events: int) -> TrainingTape:
        """Return the tape with its first ``num_events`` events; later frees are not recorded."""
        self._numbers.clear()
        del self.tape.events[num_events:]
        return self.tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation and record it."""
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # autograd asks for it so often that these are most of the calls
        if func is aten.add.Tensor and self.recording and self.phase == "backward" and self._is_engine_addition():
            result = args[0]
        elif (result := _list_results(func, args, kwargs)) is NotImplemented:
            result = func(*self._as_cuda_expects(func, args), **(kwargs or {}))
        if self.recording:
            self._record(func, args, kwargs, result)
        return result

    def _as_cuda_expects(self, func: Any, args: Any) -> Any:
        # CUDA's layer norm copies operands that are not contiguous, and its result is contiguous; meta kernels keep strides.
        num_copied = _COPIED_BY_CUDA.get(func.overloadpacket, 0)
        return (*map(self._contiguous, args[:num_copied]), *args[num_copied:])

    def _contiguous(self, tensor: Tensor) -> Tensor:
        if tensor.is_contiguous():
            return tensor
        copy = tensor.contiguous()
        self._allocated(copy)
        return copy

    def _is_engine_addition(self) -> bool:
        return torch._C._current_autograd_node() is None and not torch.is_grad_enabled()

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func.overloadpacket in _BY_CUBLAS and self.phase not in self._handles:
            self._handles.add(self.phase)
            self.tape.events.append(len(self.tape.blocks))
            self.tape.blocks.append(MemoryBlock(0, "workspaces"))
        for tensor in tensors_in(result):
            if not (self.phase == "optimizer" and self._is_part_of_unknown(tensor, args)):
                self._allocated(tensor)
        if func.overloadpacket in _CONVOLUTIONS:
            self._record_workspaces(func, args, result)
        self.tape.operations.extend(
            operations_of(func, args, kwargs, result, self.phase, self._module_of_node(), gpu=self._gpu)
        )

    def _is_part_of_unknown(self, tensor: Tensor, args: Any) -> bool:
        """Return whether ``tensor`` is a view of an operand without a block, such as data that wait on the host for the next batch."""
        return not self.has_block(tensor) and storage_key(tensor) in map(storage_key, tensors_in(args))

    def _record_workspaces(self, func: Any, args: Any, result: Any) -> None:
        found = format_of(args[0].dtype)
        form = found.name if found is not None else "other"
        workspaces = [MemoryBlock(copied_bytes(func, args, result), "workspaces", form)]
        # cuDNN tries its algorithms on each new shape. In FP32 it then uses Winograd's, which multiplies least; in 16 bits it does not.
        if torch.backends.cudnn.benchmark and not self.tape.tries_algorithms:
            self.tape = replace(self.tape, tries_algorithms=True)
        if torch.backends.cudnn.benchmark and (len(self.tape.step_starts) == 1 or args[0].dtype is torch.float32):
            workspaces.append(MemoryBlock(trial_bytes(func, args), "workspaces"))
        for block in workspaces:
            if block.size_bytes:
                self.tape.events.extend([len(self.tape.blocks), ~len(self.tape.blocks)])
                self.tape.blocks.append(block)

    def _module_of_node(self) -> str:
        """Return the module whose forward pass created the running backward node; the running module in the forward pass."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            if self.phase == "forward":
                # The first operation after a node is created is the node's own; operations without nodes may follow.
                self._modules.setdefault(torch._C._autograd._get_sequence_nr() - 1, self.running)
            return self.running
        return self._modules.get(node._sequence_nr(), "")

    def _allocated(self, tensor: Tensor) -> int | None:
        """Return the number of the tensor's block, allocated now if it is new; None if it takes no memory."""
        storage = unwrapped(tensor).untyped_storage()
        key = storage._cdata
        if key in self._numbers:
            return self._numbers[key]
        size = storage.nbytes()
        if size == 0 or (tensor.dim() == 0 and (self.phase == "optimizer" or not tensor.is_floating_point())):
            # Step counters and single whole numbers stay on the host: a loop over samples creates one for each.
            return None
        number = len(self.tape.blocks)
        self.tape.blocks.append(MemoryBlock(size, _KIND_OF_PHASE[self.phase]))
        self.tape.events.append(number)
        self._numbers[key] = number
        self._references[key] = weakref.ref(storage, partial(self._freed, key))
        return number

    def _freed(self, key: int, _: object = None) -> None:
        number = self._numbers.pop(key, None)
        self._references.pop(key, None)
        if number is not None:
            self.tape.events.append(~number)


def _list_results(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the results of an optimizer's operation on lists; NotImplemented for one whose shapes torch has to find out.

    Where all lists have the same shapes and formats, so have the results: one empty tensor each, or nothing new if it works in place.
    Torch would compute them one by one, which took a third of the time of a trace.
    """
    name = func.overloadpacket.__name__
    if (
        not name.startswith(_LIST_OPERATION)
        or kwargs
        or name.removeprefix(_LIST_OPERATION).rstrip("_") not in _KEEP_SHAPES
    ):
        return NotImplemented
    lists = [part for part in args if isinstance(part, list) and part and isinstance(part[0], Tensor)]
    first = [_layout(tensor) for tensor in args[0]]
    if not all(map(_is_fake_float, args[0])) or any([_layout(t) for t in part] != first for part in lists):
        return NotImplemented
    if any(isinstance(part, Tensor) and part.dim() for part in args):
        return NotImplemented
    return None if name.endswith("_") else [torch.empty_like(tensor) for tensor in args[0]]


def _is_fake_float(tensor: Tensor) -> bool:
    return type(tensor) is FakeTensor and tensor.dtype.is_floating_point


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def storage_key(tensor: Tensor) -> int:
    """Return a number that identifies the storage of ``tensor`` while it lives."""
    return int(unwrapped(tensor).untyped_storage()._cdata)
