"""Record every operation of a training step with the module it belongs to, at little cost.

A dispatch mode sees every operation below autograd and autocast. Hooks on every module keep a stack of the running modules. The forward
operation behind a graph node has the node's sequence number, so an operation of a backward pass is assigned to the module of its node's
forward operation, without hooks on tensors or changes to the graph. A node created inside a backward pass has an identity instead of a
number (``mezzo.observe.trace``). A node without a forward operation of its own is assigned the next node's; the nodes that
accumulate into ``.grad`` have a parameter instead.

While the step runs, each operation is recorded as a tuple without tensors, since those would keep memory alive; it is interpreted
afterwards (``mezzo.observe.audit.operations``). Views and allocations compute nothing and are left out.

This depends on private names of torch that have no public counterpart: ``torch._C._current_autograd_node``,
``GraphNode._sequence_nr``, ``torch.autograd._get_sequence_nr``, ``torch._C._current_graph_task_id``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FrameType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.engine.casts.autocast_kernels import flat_tensors
from mezzo.engine.matrix_units.block_linear import unrounded
from mezzo.engine.matrix_units.emulation import Emulation
from mezzo.formats import BF16, FP16, FP32, FP64, TF32
from mezzo.measure.flops import FLOP_COUNTS, OperandFormats
from mezzo.observe.source_lines import caller, script_line
from mezzo.observe.tensors import region
from mezzo.observe.trace import (
    CAST_NAMES,
    LAST_NUMBER,
    NOWHERE,
    BackwardNodes,
    GraphNode,
    Meta,
    RunningCall,
    ThreadNodes,
    Trace,
    TracedProduct,
)

_node_running = torch._C._current_autograd_node
_next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
_task_running = torch._C._current_graph_task_id


class TracerFlags(Protocol):
    """Flags that the tracer reads at every operation: attributes, because a call costs more."""

    recomputing: bool


class InspectOperation(Protocol):
    """An inspection of one finished operation; ``frame`` is the Python frame that called it."""

    def __call__(self, func: Any, args: Sequence[Any], result: Any, frame: FrameType | None) -> None:
        """Inspect it."""


class Tracer(TorchDispatchMode):
    """A dispatch mode that records every operation; ``start`` and ``stop`` enter and leave it."""

    def __init__(
        self,
        formats: OperandFormats,
        *,
        device_type: str,
        flags: TracerFlags | None = None,
        inspect: InspectOperation | None = None,
    ) -> None:
        """Create a tracer; ``start`` turns it on.

        Args:
            formats: returns the format that an operation computes in.
            device_type: torch's device type, for autocast's state.
            flags: whether activation checkpointing is recomputing; None if that is unknown.
            inspect: called with each operation outside backward passes and optimizers' steps; None to call nothing.
        """
        super().__init__()
        self.trace = Trace()
        self._formats = formats
        self._on_operation = inspect
        self._device_type = device_type
        self._flags = flags or SimpleNamespace(recomputing=False)
        self._local = ThreadNodes()
        self._backward_nodes = BackwardNodes()
        self._stepping = self._is_over = False
        self._thread = 0
        self._kinds: dict[int, int] = {}
        self._counts: dict[int, Any] = {}
        self._is_torch_class: dict[type, bool] = {}
        self._undo: list[Callable[[], None]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper would cost more than the mode; observed steps run eagerly anyway

    def start(self, *, stepping_is_called: bool = False) -> None:
        """Enter the mode and set the hooks.

        Args:
            stepping_is_called: whether the caller calls ``stepping`` itself. torch cannot take new optimizer hooks while it
                iterates over them, and an optimizer's closure runs inside one of the launcher's hooks.
        """
        hooks: list[Any] = [
            register_module_forward_pre_hook(self.enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        if not stepping_is_called:
            hooks.append(register_optimizer_step_pre_hook(lambda *_: self.stepping(True)))
            hooks.append(register_optimizer_step_post_hook(lambda *_: self.stepping(False)))
        self._undo = [hook.remove for hook in hooks]
        self._thread = threading.get_ident()
        self.__enter__()

    def stop(self) -> None:
        """Leave the mode, which only the thread that entered it can, and remove the hooks."""
        if self._thread == threading.get_ident():
            self.__exit__(None, None, None)
        self.leave_behind()

    def leave_behind(self) -> None:
        """Stop recording and remove the hooks; a mode that is still on in another thread only passes operations on from now on."""
        self._is_over = True
        for undo in self._undo:
            undo()
        self._undo, self._stepping = [], False

    def turn(self, index: int) -> Trace:
        """Return the operations before ``index`` as a trace, and continue with the rest as another."""
        before = self.trace
        self.trace = Trace(before.operations[index:], dict(before.forward), dict(before.recomputed), dict(before.roots))
        del before.operations[index:]
        return before

    def position(self) -> tuple[int, int]:
        """Return the number of operations so far, and the sequence number of the next graph node."""
        return len(self.trace.operations), _next_number()

    # --- modules -------------------------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: Any) -> None:
        """Record that a module is called."""
        local = self._local
        outer = local.entry
        if outer is None:
            self.trace.roots.setdefault(module)
        autocast = torch.is_autocast_enabled(self._device_type)
        in_backward = _node_running() is not None
        local.num_in_backward += in_backward
        local.entry = RunningCall(module, outer, autocast=autocast, nesting=_nesting(), in_backward=in_backward)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        local = self._local
        entry = local.entry
        while entry is not None and entry.module is not module:  # a module entered before the hooks were set
            entry = entry.outer
        if entry is not None:
            local.entry = entry.outer
            local.num_in_backward -= entry.in_backward

    def stepping(self, stepping: bool) -> None:
        """Record that an optimizer's update begins or ends."""
        self._stepping = stepping

    # --- operations ----------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation and record it."""
        result = func._op(*args, **kwargs) if kwargs else func._op(*args)
        if self._is_over:
            return result
        if (kind := self._kinds.get(id(func))) is None:  # hashing the operation itself is a Python call
            kind = self._classify(func)
        if self._stepping and kind <= _PLAIN:  # half of a small model's operations, with nothing more to record
            if kind == _PLAIN:
                self._note((func, NOWHERE, None, *_both(args, result), True, False, None, "", False, False, (), ""))
            return result
        local, running, recomputed, number = self._local, _node_running(), False, _next_number()
        if running is None:
            if self._on_operation is not None and not self._stepping:
                self._on_operation(func, args, result, sys._getframe().f_back)
            node, entry = None, local.entry or NOWHERE
            if number != local.number:
                self._place(number, entry)
        else:
            if local.results:
                self._backward_nodes.mark_known(local)
            node = (
                local.node
                if running is local.running
                else self._backward_nodes.describe(local, running, _task_running())
            )
            recomputed = local.num_in_backward > 0 or self._flags.recomputing
            entry = (local.entry if recomputed else None) or NOWHERE
            if number != local.number:
                self._place_in_backward(number, node, entry)
            if not local.is_marked:
                self._backward_nodes.await_node(local, args, flat_tensors((result,)))
        if kind == _SILENT:
            if node is not None and node.number == LAST_NUMBER:  # the first value of a gradient that was None
                self._note((func, entry, node, *_both(args, result), False, False, None, "", True, False, (), ""))
            return result
        product, line, hidden, by_policy, read, within = None, "", False, False, (), ""
        if entry is NOWHERE or kind == _CASTS:  # inside modules, only casts can come from elsewhere than the script
            owner = caller(sys._getframe().f_back)  # None in autograd's own thread, where no Python frame called it
            if owner == "mezzo":
                self._note((func, entry, node, *_both(args, result), False, recomputed, None, "", True, False, (), ""))
                return result
            by_policy = owner == "policy"
        if Emulation.ran:
            if kind != _COUNTED:
                hidden = self._formats.emulated() is not None
            elif not recomputed and self._formats.is_recomputation():
                return result
        if kind == _COUNTED:
            args = unrounded() or args
            product = self._product(func, result, args)
        elif kind == _CASTS:
            read = region(args[1] if func.overloadpacket.__name__.startswith("copy") else args[0])
        elif kind == _PARTS:
            within = _within(func, sys._getframe().f_back)
        if kind not in (_PLAIN, _PARTS) and (node is None or recomputed):
            of_torch = self._is_torch_module(entry)
            line = self._where(None if of_torch else product) if not of_torch or _has_short_path(entry) else ""
        rest = self._stepping, recomputed, product, line, hidden, by_policy, read, within
        self._note((func, entry, node, *_both(args, result), *rest))
        return result

    def _note(self, raw: tuple[Any, ...]) -> None:
        self.trace.operations.append(raw)

    def is_silent(self, func: Any) -> bool:
        """Return whether an operation computes nothing: it creates a view, allocates memory, or prepares a product inside a unit."""
        kind = self._kinds.get(id(func))
        kind = self._classify(func) if kind is None else kind
        return kind == _SILENT or (kind != _COUNTED and unrounded() is not None)

    def is_plain(self, func: Any) -> bool:
        """Return whether nothing but the operation itself is recorded: it is neither a product nor a cast."""
        kind = self._kinds.get(id(func))
        return (self._classify(func) if kind is None else kind) <= _PLAIN

    def _classify(self, func: Any) -> int:
        name, kind = func.overloadpacket.__name__, _PLAIN
        if (count := FLOP_COUNTS.get(func.overloadpacket)) is not None:
            self._counts[id(func)], kind = count, _COUNTED
        elif func.is_view or name in _COMPUTE_NOTHING or func.namespace == "profiler":
            kind = _SILENT
        elif name in _PART_OF:
            kind = _PARTS
        elif name in CAST_NAMES:
            kind = _CASTS
        self._kinds[id(func)] = kind
        return kind

    def _place(self, number: int, entry: RunningCall) -> None:
        """Record which call created a graph node: the first operation after that belongs to the node, and others may follow.

        Every thread of the script counts its own nodes, so a number may be known already.
        """
        self._backward_nodes.script_created_node()
        local = self._local
        local.number, local.created = number, number - 1
        self.trace.forward.setdefault(number - 1, entry)

    def _place_in_backward(self, number: int, node: GraphNode, entry: RunningCall) -> None:
        """Record which call created a node inside a backward pass: by recomputation, or by differentiating twice."""
        self.trace.recomputed[self._backward_nodes.new_identity(self._local, number)] = entry, node

    def _product(self, func: Any, result: Any, args: Sequence[Any]) -> TracedProduct:
        flops = self._counts[id(func)](result, *args)
        tensors = [t for t in (*flat_tensors(args), *flat_tensors((result,))) if t.layout is torch.strided]
        operands = [(tuple(t.shape), t.stride(), _alignment(t)) for t in tensors]
        rest = tuple([a for a in args if type(a) in _NOT_TENSORS or not isinstance(a, Tensor)])
        product = TracedProduct(self._format(func, args), flops, operands, self._local.created, rest)
        if product.format in _WIDE:
            product.nesting = _nesting()
        return product

    def _format(self, func: Any, args: Sequence[Any]) -> str:
        if not Emulation.ran and self._device_type == "cpu":
            known = _NAMES.get(args[0].dtype) if type(args[0]) is Tensor else None
            if known is not None:
                return known
        return self._formats.of(args, op=func.overloadpacket.__name__)

    def _is_torch_module(self, entry: RunningCall) -> bool:
        """Return whether the running module is one of torch's or Keras': its path is more informative than the line that called it."""
        kind = type(entry.module)
        known = self._is_torch_class.get(kind)
        if known is None:
            known = self._is_torch_class[kind] = kind.__module__.startswith(("torch.nn", "keras."))
        return known

    def _where(self, product: TracedProduct | None) -> str:
        """Return the script's running line; record the functions of torch around a product."""
        line, callers = script_line(sys._getframe(1).f_back)
        if product is not None:
            product.callers = callers
        return line


def _has_short_path(entry: RunningCall) -> bool:
    """Return whether a module's path is only its class or a number: a model itself, or a part of a Sequential model."""
    outer = entry.outer
    if outer is None or outer.module is None:
        return True
    return type(outer.module) is nn.Sequential and (outer.outer is None or outer.outer.module is None)


def _within(func: Any, frame: FrameType | None) -> str:
    """Return the function of torch that the running operation is a part of, if the script called that function."""
    whole = _PART_OF[func.overloadpacket.__name__]
    return whole if whole in script_line(frame)[1] else ""


_SILENT, _PLAIN, _PARTS, _CASTS, _COUNTED = range(5)

_PART_OF = {"_log_softmax": "cross_entropy"}
"""Operations inside functions of torch that run in their operand's format, out of autocast's reach: op lists name the function."""

_COMPUTE_NOTHING = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "detach_", "alias"}
    | {"resize_", "set_", "record_stream", "_local_scalar_dense", "is_same_size", "lift_fresh"}
)


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


_NAMES = {f.dtype: f.name for f in (FP64, FP32, FP16, BF16)}
_WIDE = (FP32.name, TF32.name)
_Parameter = nn.Parameter
_NOT_TENSORS = frozenset({int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout})


def _metas(values: Iterable[Any]) -> list[Meta]:
    found: list[Meta] = []
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is _Parameter:
            found.append((value.untyped_storage().data_ptr(), value.dtype, value.nbytes))
        elif kind is list or kind is tuple:
            if value and type(value[0]) not in _NOT_TENSORS:
                found += _metas(value)
        elif kind not in _NOT_TENSORS and isinstance(value, Tensor):
            found.append((value.untyped_storage().data_ptr(), value.dtype, value.nbytes))
    return found


def _both(args: Sequence[Any], result: Any) -> tuple[list[Meta], list[Meta]]:
    """Return the metadata of the operands and of the results."""
    try:
        ins = _metas(args)
        return ins, ins[:1] if args and result is args[0] and ins else _metas((result,))
    except (RuntimeError, NotImplementedError):  # a tensor without a storage: sparse, or a wrapper around others
        return _bare_metas(args), _bare_metas((result,))


def _bare_metas(values: Iterable[Any]) -> list[Meta]:
    return [(_address(t), t.dtype, t.numel() * t.itemsize) for t in flat_tensors(values)]


def _address(tensor: Tensor) -> int:
    """Return the address of the storage of a tensor, or of a wrapper's first tensor; 0 without one."""
    if hasattr(tensor, "__tensor_flatten__"):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _alignment(tensor: Tensor) -> int:
    try:
        # A CPU address says nothing about a GPU's, where memory begins at multiples of 512 and views at an offset.
        address = tensor.data_ptr() if tensor.is_cuda else int(tensor.storage_offset()) * tensor.itemsize
    except RuntimeError:  # a wrapper around other tensors
        return 16
    return min(16, address & -address) if address else 16
