"""Follow values that are not finite through a training step: where each was made, what it reached, what swallowed it.

Every operation's result is looked at. One that is not finite although all that was read is finite is a source. What is
computed from it is tainted, by storage, so that a loss or a gradient can be traced to its source, and a source of no
consequence is told apart: an attention mask holds -inf by design, and softmax makes exact zeros of it.

An operation that reads infinities and returns finite numbers swallows them. Softmax, tanh or clamp then return what they
would of the true large value. A reciprocal, a root of one or a quotient do not: 1 / sqrt(inf) is 0 where 1 / sqrt(1e5) is
not. That is silent saturation, which neither the loss nor any gradient shows.

A source is computed once more in FP32 from what it read: a finite result means that only its format is too narrow.

Cost: one reduction and one read of the device an operation; so only chosen steps are looked at. Limits: what happens
inside one fused kernel is one operation, and a storage that the script writes in two parts counts as one.
"""

from __future__ import annotations

import bisect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from mezzo.diagnosis.lines import script_line
from mezzo.diagnosis.noted import LAST_NUMBER, NOWHERE, Entry, Node
from mezzo.diagnosis.trace import Flags, Tracer
from mezzo.diagnosis.values import (
    by_design,
    floats,
    format_name,
    has_nan,
    is_finite,
    largest,
    operand,
    storage_of,
    storage_size,
    widened,
)
from mezzo.engine import emulation
from mezzo.measure.flops import OperandFormats
from mezzo.records import Operand

_BOUNDED = frozenset(
    (
        *("softmax", "log_softmax", "safe_softmax", "logsumexp", "exp", "exp2", "sigmoid", "tanh", "erf", "atan"),
        *("clamp", "clamp_min", "clamp_max", "minimum", "maximum", "hardtanh", "hardsigmoid", "threshold", "relu"),
        *("amax", "amin", "max", "min", "topk", "sign", "where", "masked_fill", "nan_to_num", "zero", "fill"),
        *("index", "index_select", "gather", "slice_copy", "select_copy", "copy", "clone", "to_copy"),
    )
)
"""Operations that return of an infinity what they would of the large number it stands for, or leave it out."""
_OVERWRITES = frozenset(("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"))


@dataclass(eq=False)
class Source:
    """Hold one place where values stopped being finite."""

    index: int
    kind: Literal["made", "entered", "constant"]
    """``made`` of finite values; ``entered`` the step from outside; or a ``constant`` of the script."""
    op: str
    module: nn.Module | None
    line: str
    backward: bool
    trains: bool
    """Whether gradients were being kept."""
    format: str
    operands: list[Operand]
    wide: float | None
    """The largest magnitude that the result has in FP32; None where it is not finite there either."""
    scale: float
    """The loss scale."""
    parameter: bool = False
    """Whether what entered is a weight."""
    spoiled_backward: bool = False
    """Whether a value of a backward pass came from it."""
    swallowed: dict[str, None] = field(default_factory=dict)
    """Operations that made finite numbers of it where the result is another than of the true value."""


@dataclass
class Spoiled:
    """Hold one operation whose result was not finite."""

    index: int
    backward: bool
    sources: tuple[Source, ...]


class InfinityTracer(Tracer):
    """Note operations, and look at every result."""

    def __init__(
        self,
        formats: OperandFormats,
        *,
        device_type: str,
        flags: Flags,
        scale: Callable[[], float],
        weights: Callable[[], Iterable[Tensor]],
    ) -> None:
        """Get ready.

        Args:
            formats: tells the format that an operation computes in.
            device_type: of torch.
            flags: whether activation checkpointing computes something again.
            scale: gives the loss scale of the moment.
            weights: gives the parameters that are trained.
        """
        super().__init__(formats, device_type=device_type, flags=flags)
        self.sources: list[Source] = []
        self.spoiled: list[Spoiled] = []
        self._scale, self._weights = scale, weights
        self._taint: dict[int, tuple[Source, ...]] = {}
        self._lines: dict[int, str] = {}
        self._ops: dict[int, str] = {}
        self._func: Any = None

    def leave_behind(self) -> None:
        """Remove the hooks; the mode ends with the thread that it is on in."""
        for undo in self._undo:
            undo()
        self._undo = []

    def forget(self) -> None:
        """Forget all that was seen; what is tainted stays so."""
        super().turn(len(self.trace.operations))
        self.sources, self.spoiled = [], []

    def keep_after(self, index: int) -> None:
        """Forget what was seen before ``index``."""
        super().turn(index)
        for source in self.sources:
            source.index -= index
        for spoiled in self.spoiled:
            spoiled.index -= index
        self.sources = [s for s in self.sources if s.index >= 0]
        self.spoiled = [s for s in self.spoiled if s.index >= 0]

    # --- what the tracer calls ---------------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: Any) -> None:
        """Take note of a module that was called before the hooks were set."""
        self._enter(module, args)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if getattr(self._local, "entry", None) is None:
            self._local.trains = torch.is_grad_enabled()  # inside a custom function it is off
        super()._enter(module, args)

    def _place(self, number: int, entry: Entry) -> None:
        super()._place(number, entry)
        self._remember(number - 1)

    def _place_again(self, node: Node, entry: Entry) -> None:
        super()._place_again(node, entry)
        self._remember(self._number - 1)

    def _remember(self, number: int) -> None:
        if number not in self._ops:
            self._ops[number] = self._forward_name()
            self._lines[number] = script_line(sys._getframe(3))[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation and look at its result."""
        self._func = func
        kwargs = kwargs or {}
        read: Any = None
        if func._schema.is_mutable and not self._stepping:
            with torch._C.DisableTorchFunction():
                read = _before(func, args)
        noted = len(self.trace.operations)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.trace.operations) > noted and not self._stepping:
            with torch._C.DisableTorchFunction(), torch.autocast(self._device_type, enabled=False):
                self._look(noted, args if read is None else read, kwargs, args, result)
        return result

    # --- values ------------------------------------------------------------------------------------------------------------------

    def _look(self, index: int, read: Any, kwargs: dict[str, Any], given: Any, result: Any) -> None:
        results = floats((result,))
        spoiled = [t for t in results if not is_finite(t)]
        known = {id(t): storage for t, storage in _with_storages(read, given)}
        if not spoiled:
            self._swallow([t for t in floats(read) if known.get(id(t)) in self._taint], bool(results))
            for tensor in results:
                if tensor.numel() * tensor.element_size() == storage_size(tensor):
                    self._taint.pop(storage_of(tensor), None)
            return
        sources = self._sources_of(index, read, kwargs, known, spoiled[0])
        backward = self._in_backward()
        for source in sources:
            source.spoiled_backward |= backward
        for tensor in spoiled:
            self._taint[storage_of(tensor)] = sources
        self.spoiled.append(Spoiled(index, backward, sources))

    def _sources_of(
        self, index: int, read: Any, kwargs: dict[str, Any], known: dict[int, int], result: Tensor
    ) -> tuple[Source, ...]:
        tensors = floats((read, kwargs))
        bad = [t for t in tensors if not is_finite(t)]
        if bad:
            found = {s: None for t in bad for s in self._taint.get(known.get(id(t), storage_of(t)), ())}
            strange = [t for t in bad if known.get(id(t), storage_of(t)) not in self._taint]
            if strange:
                constant = all(map(by_design, strange)) and not self._in_backward()
                entered = self._source(index, "constant" if constant else "entered", tensors, None, result)
                entered.parameter = bool({storage_of(t) for t in strange} & {storage_of(p) for p in self._weights()})
                found[entered] = None
                for tensor in strange:
                    self._taint[known.get(id(tensor), storage_of(tensor))] = (entered,)
            if all(s.kind == "constant" for s in found) and has_nan(result) and not any(map(has_nan, bad)):
                return (self._source(index, "made", tensors, None, result),)  # as a softmax of nothing but -inf does
            return tuple(found)
        if self._func.namespace == "c10d" or "c10d" in str(self._func):
            return (self._source(index, "entered", tensors, None, result),)
        numbers = [x for x in tree_leaves((read, kwargs)) if isinstance(x, float)]
        infinite = any(x != x or x in (float("inf"), float("-inf")) for x in numbers)
        if infinite or not tensors:
            return (self._source(index, "constant", tensors, None, result),)
        return (self._source(index, "made", tensors, self._in_fp32(read, kwargs), result),)

    def _source(
        self,
        index: int,
        kind: Literal["made", "entered", "constant"],
        tensors: Sequence[Tensor],
        wide: float | None,
        result: Tensor,
    ) -> Source:
        module, line, backward = self._place_of_running()
        inside = getattr(self._local, "entry", None) is not None
        source = Source(
            index=index,
            kind=kind,
            op=self._backward_name() if backward else self._forward_name(),
            module=module,
            line=line,
            backward=backward,
            trains=getattr(self._local, "trains", False) if inside else torch.is_grad_enabled(),
            format=format_name(result),
            operands=[operand(t) for t in tensors[:4]],
            wide=wide,
            scale=self._scale(),
        )
        self.sources.append(source)
        return source

    def _swallow(self, tainted: Iterable[Tensor], gives_numbers: bool) -> None:
        op = self._forward_name()
        if not gives_numbers or op in _BOUNDED or op.startswith("scaled_dot_product"):
            return
        for tensor in tainted:
            if not is_finite(tensor):
                for source in self._taint[storage_of(tensor)]:
                    source.swallowed[op] = None

    def _in_fp32(self, args: Any, kwargs: dict[str, Any]) -> float | None:
        """Return the largest magnitude of the result in FP32, None where it is not finite."""
        func = self._func
        if torch.Tag.nondeterministic_seeded in func.tags:
            return max((largest(t) for t in floats(args)), default=0.0)
        if func._schema.name in ("aten::_to_copy", "aten::copy_"):
            source = floats(args)[-1]
            return largest(source)
        try:
            result = func(*widened(args), **widened(kwargs))
        except (RuntimeError, NotImplementedError, TypeError):  # a kernel for 16 bits alone: its operands tell nothing
            return None
        found = floats((result,))
        return max(map(largest, found), default=0.0) if all(map(is_finite, found)) else None

    # --- names and places -----------------------------------------------------------------------------------------------------------

    def _in_backward(self) -> bool:
        if torch._C._current_autograd_node() is None:
            return False
        entry = getattr(self._local, "entry", None)
        return not (self._flags.recomputing or (entry is not None and entry.again))

    def _place_of_running(self) -> tuple[nn.Module | None, str, bool]:
        """Return the module and the script's line of the running operation, and whether it is one of a backward pass."""
        if not self._in_backward():
            entry = getattr(self._local, "entry", None) or NOWHERE
            return entry.module, script_line(sys._getframe(2))[0], False
        number = torch._C._current_autograd_node()._sequence_nr()
        if number == LAST_NUMBER:
            return None, "", True
        place = _nearest(sorted(self._ops), number)
        line = self._lines.get(place, "")
        if place in self.trace.forward:
            return self.trace.forward[place].module, line, True
        again = self.trace.recomputed.get(place)
        return (again[0].module if again is not None else None), line, True

    def _forward_name(self) -> str:
        running = emulation.running()
        name = running.name if running is not None else self._func.overloadpacket.__name__
        return str(name).strip("_").removeprefix("native_")

    def _backward_name(self) -> str:
        node = torch._C._current_autograd_node()
        assert node is not None
        name = node.name()
        if self._formats.emulated() is not None:  # named by what it emulates
            name = self._ops.get(node._sequence_nr(), name)
        return _snake(name)


def _nearest(numbers: Sequence[int], number: int) -> int:
    """Return ``number``, or of a node without an operation of its own the next one's, else the last one's."""
    place = bisect.bisect_left(numbers, number)
    return numbers[min(place, len(numbers) - 1)] if numbers else -1


def _snake(node: str) -> str:
    name = re.sub(r"Backward\d*$", "", node.split("::")[-1]).strip("_")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().removeprefix("native_")


def _before(func: Any, args: Sequence[Any]) -> list[Any]:
    """Return what an operation that changes its arguments reads, kept from the change."""
    overwrites = func.overloadpacket.__name__ in _OVERWRITES
    kept: list[Any] = []
    for spec, value in zip(func._schema.arguments, args, strict=False):
        if spec.alias_info is None or not spec.alias_info.is_write:
            kept.append(value)
        elif not overwrites:
            kept.append(tree_map_only(Tensor, lambda t: t.clone() if t.is_floating_point() else t, value))
    return kept


def _with_storages(read: Any, given: Any) -> list[tuple[Tensor, int]]:
    """Return the tensors that are read, each with its own storage or that of the tensor it was cloned from."""
    pairs = zip(reversed(tree_leaves(read)), reversed(tree_leaves(given)), strict=False)
    return [(a, storage_of(b)) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)]
