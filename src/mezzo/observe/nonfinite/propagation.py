"""Follow values that leave their format's range through a training step: where each was lost, what it reached, what it changed.

Every operation's result is inspected. A result that is not finite although all operands are is a source, and so is one with zeros where
FP32 has none. Everything computed from a source remembers it, by storage, so that a loss or a gradient can be traced back.

Whether a source matters does not depend on the names of operations. The true values are kept beside the wrong ones, and operations that
read them run a second time on the true ones (``mezzo.observe.nonfinite.shadows``). A mask of -1e9 is -inf in FP16, and softmax returns
the same for both; ``1 / sqrt(inf)`` is 0, but ``1 / sqrt(1e5)`` is not. The second is silent saturation if it makes a gradient wrong.

A source is recomputed in FP32 from its operands: a finite result means that only its format is too narrow.

Cost: two reductions and one read of the device per operation, and a second run of operations that read lost values; so only chosen
steps are inspected. Limits: a fused kernel is one operation; an operation that draws random numbers is not recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from mezzo.measure.flops import OperandFormats
from mezzo.observe.nonfinite import recomputing
from mezzo.observe.nonfinite.evidence import Kind
from mezzo.observe.nonfinite.gradient_error import GradientErrors, weigh, weigh_gradients
from mezzo.observe.nonfinite.location import PlacingTracer
from mezzo.observe.nonfinite.operation_names import public_name
from mezzo.observe.nonfinite.shadows import RangeEnd, Storages, Twins, rounded
from mezzo.observe.nonfinite.sources import Source, Spoiled, together
from mezzo.observe.tensors import (
    by_design,
    floats,
    format_name,
    has_nan,
    is_finite,
    largest,
    norm,
    operand,
    readable,
    storage_of,
    storage_size,
)
from mezzo.observe.tracer import Flags

_INFINITE = (float("inf"), float("-inf"))
_MATERIAL = 2.0**-10
"""Share of a result's norm that may become 0 at one operation: hundreds in a row still lose less than a tenth."""
_DECISIONS = frozenset(("_amp_update_scale_", "_amp_update_scale"))
"""Operations whose results count as true: the loss scale follows from the overflow that was found."""
_REFUSED = "without overflow"


class InfinityTracer(PlacingTracer):
    """A tracer that inspects every result."""

    def __init__(
        self,
        formats: OperandFormats,
        *,
        device_type: str,
        flags: Flags,
        scale: Callable[[], float],
        weights: Callable[[], Iterable[Tensor]],
    ) -> None:
        """Create a tracer.

        Args:
            formats: returns the format that an operation computes in.
            device_type: torch's device type.
            flags: whether activation checkpointing is recomputing.
            scale: returns the current loss scale.
            weights: returns the trained parameters.
        """
        super().__init__(formats, device_type=device_type, flags=flags)
        self.sources: list[Source] = []
        self.spoiled: list[Spoiled] = []
        self.weighed: list[GradientErrors] = []
        self.problems: dict[str, str] = {}
        """Operations that could not be inspected, and why."""
        self._sent: GradientErrors | None = None
        """The errors of the gradients before a reduction over all processes."""
        self._scale, self._weights = scale, weights
        self._taint: Storages[tuple[Source, ...]] = Storages()
        self._twins: dict[RangeEnd, Twins[Source]] = {end: Twins(end) for end in RangeEnd}

    def forget(self) -> None:
        """Discard what was recorded; values that are already lost remain known as lost."""
        super().turn(len(self.trace.operations))
        self.sources, self.spoiled, self.weighed = [], [], []

    def mark(self) -> int:
        """Mark everything recorded so far as belonging to the step; return the number of operations."""
        for twins in self._twins.values():
            twins.mark()
        return len(self.trace.operations)

    def keep_after(self, index: int) -> None:
        """Discard what was recorded before ``index``, the last mark."""
        super().turn(index)
        for twins in self._twins.values():
            twins.turn()
        for source in self.sources:
            source.index -= index
        for spoiled in self.spoiled:
            spoiled.index -= index
        self.sources = [s for s in self.sources if s.index >= 0]
        self.spoiled = [s for s in self.spoiled if s.index >= 0]
        self.weighed = []

    def weigh(self) -> None:
        """Compare the current gradients with their true values; a step's last comparison counts."""
        with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
            found = weigh(len(self.trace.operations), self._weights(), self._twins)
        sent, self._sent = self._sent, None
        self.weighed.append(sent if sent is not None and found.nothing else found)

    # --- what the tracer calls ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation and inspect its result."""
        kwargs = kwargs or {}
        if self._is_over:
            return func(*args, **kwargs)
        self._running = func, args
        index = len(self.trace.operations)
        if self._stepping or self.is_silent(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        operation: recomputing.Recomputable | None = None
        with self._guarded():
            operation = self._prepared(func, args, kwargs)
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except RuntimeError as error:
            if _REFUSED in str(error) and operation is not None:
                self._refused(index, operation)
            raise
        if operation is not None:
            with self._guarded(), torch.autocast(self._device_type, enabled=False):
                self._inspect(index, operation, result)
        return result

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Keep the script alive if its tensors cannot be inspected; the record says so."""
        with torch._C.DisableTorchFunction():
            try:
                yield
            except Exception as error:
                op = public_name(self._running[0].overloadpacket.__name__)
                self.problems.setdefault(op, f"{type(error).__name__}: {error}".splitlines()[0])

    # --- values ------------------------------------------------------------------------------------------------------------------

    def _prepared(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> recomputing.Recomputable:
        """Return an operation that is about to run, with its operands."""
        kept = recomputing.before(func, args, kwargs) if func._schema.is_mutable else (list(args), kwargs)
        pairs = recomputing.operands(func, kept, (args, kwargs))
        read = [pair for pair in pairs if floats(pair[0])]
        truths = {}
        for end, twins in self._twins.items():
            known = [(before, twins.read(given)) for before, given in pairs if readable(given)] if twins else []
            found = [(before, truth) for before, truth in known if truth is not None]
            if found:
                sources = together(s for _, (_, sources) in found for s in sources)
                truths[end] = {id(before): true for before, (true, _) in found}, sources
        if truths and func.namespace in recomputing.COLLECTIVES:
            sent = weigh_gradients(len(self.trace.operations), read, self._twins)
            self._sent = sent if self._sent is None or self._sent.nothing else self._sent
        return recomputing.Recomputable(func, args, kwargs, kept, read, truths)

    def _inspect(self, index: int, operation: recomputing.Recomputable, result: Any) -> None:
        given = operation.outputs(result)
        results = floats(given)
        bad = [t for t in results if not is_finite(t)]
        if operation.func.namespace in recomputing.COLLECTIVES:
            self._inspect_collective(index, operation, results, bad)
            return
        if operation.func.overloadpacket.__name__ in _DECISIONS:
            operation.truths = {}
            for tensor in results:
                self._forget_truth(tensor)
        strange = [pair for pair in operation.read if not is_finite(pair[0])] if bad or len(self._taint) else []
        local = self._computed_locally(operation, results, result, made=bool(bad) and not strange)
        true = {end: operation.computed(result, known) for end, (known, _) in operation.truths.items()}
        new: dict[RangeEnd, tuple[Source, ...]] = {}
        if bad:
            wide = recomputing.largest_of(local, given)
            finite = [end for end in true if recomputing.largest_of(true[end], given) is not None]
            sources = self._sources_of(index, operation, strange, bad[0], wide, finite)
            new[RangeEnd.ABOVE] = sources if not strange else ()
            self._spoil(index, sources, bad)
        held = [source for _, given_one in strange for source in self._taint.get(given_one) or ()]
        for tensor in results:
            if not any(tensor is one for one in bad) and tensor.numel() * tensor.element_size() == storage_size(tensor):
                self._taint.pop(tensor)
        new[RangeEnd.BELOW] = self._vanished(index, operation, given, local)
        for end in RangeEnd:
            self._keep_true(end, operation, given, local, true, new.get(end, ()))
        if strange and not bad and results:
            self._swallowed(held, results)

    def _computed_locally(
        self, operation: recomputing.Recomputable, results: list[Tensor], result: Any, *, made: bool
    ) -> list[Tensor] | None:
        """Return an operation's FP32 results from its operands if it may have lost values; else None."""
        narrow = any(t.element_size() < 4 for t in (*results, *(read for read, _ in operation.read)))
        if not operation.read or not narrow:
            return None
        if not made and (operation.draws or operation.moves()):
            return None
        if made or any(RangeEnd.BELOW.loses(t.dtype) and bool((t == 0).any()) for t in results):
            return operation.computed(result)
        return None

    def _vanished(
        self, index: int, operation: recomputing.Recomputable, given: list[Tensor], local: list[Tensor] | None
    ) -> tuple[Source, ...]:
        """Return a source for each result that lost a material share of its norm, or a tiny number of the script's."""
        found: list[Source] = []
        for tensor, true in zip(given, local or (), strict=bool(local)):
            if not floats(tensor) or not RangeEnd.BELOW.loses(tensor.dtype):
                continue
            lost = RangeEnd.BELOW.lost(tensor, true)
            if not bool(lost.any()):
                continue
            values = true[lost]
            whole, gone = norm(true[true.isfinite()]), norm(values)
            share = gone / whole if whole else gone * math.inf
            if share > _MATERIAL or operation.has_tiny_number():
                source = self._source(index, "vanished", [], float(values.abs().max()), tensor)
                source.share = share
                found.append(source)
        return tuple(found)

    def _keep_true(
        self,
        end: RangeEnd,
        operation: recomputing.Recomputable,
        given: list[Tensor],
        local: list[Tensor] | None,
        true: dict[RangeEnd, list[Tensor] | None],
        new: tuple[Source, ...],
    ) -> None:
        """Keep the true values of results that differ from them at one end of the range."""
        twins = self._twins[end]
        values = true.get(end)
        if end not in operation.truths:
            values = local if new else None
        elif values is None:  # unknown: the actual values count as true
            for tensor in filter(readable, given):
                self._forget_truth(tensor)
        if values is None:
            return
        inherited = operation.truths[end][1] if end in operation.truths else ()
        for tensor, wide_one in zip(given, values, strict=True):
            if not readable(tensor):
                continue
            if end in operation.truths:
                twins.write(tensor, rounded(wide_one, tensor.dtype, end), together((*inherited, *new)))
            elif tensor.is_floating_point():
                found = tensor.to(wide_one.dtype)
                twins.write(tensor, torch.where(end.lost(found, wide_one), wide_one, found), new)

    def _swallowed(self, held: list[Source], results: list[Tensor]) -> None:
        """Record that an operation turned infinities into finite numbers, and whether these are right."""
        wrong = any(self._twins[RangeEnd.ABOVE].read(t) is not None for t in results)
        op = self.forward_name()
        for source in held:
            (source.swallowed if wrong else source.absorbed)[op] = None

    def _inspect_collective(
        self, index: int, operation: recomputing.Recomputable, results: list[Tensor], bad: list[Tensor]
    ) -> None:
        """Record an operation between processes: its results depend on the operands of all of them."""
        if bad:
            strange = [pair for pair in operation.read if not is_finite(pair[0])]
            self._spoil(index, self._sources_of(index, operation, strange, bad[0], None, ()), bad)
        for tensor in results:  # returned, but not declared as written
            self._forget_truth(tensor)

    def _forget_truth(self, tensor: Tensor) -> None:
        for twins in self._twins.values():
            twins.forget(tensor)

    def _spoil(self, index: int, sources: tuple[Source, ...], bad: list[Tensor]) -> None:
        for tensor in bad:
            self._taint.put(tensor, sources)
        self.spoiled.append(Spoiled(index, self.in_backward(), sources))

    # --- sources -----------------------------------------------------------------------------------------------------------------

    def _sources_of(
        self,
        index: int,
        operation: recomputing.Recomputable,
        strange: list[tuple[Tensor, Tensor]],
        result: Tensor,
        largest_in_fp32: float | None,
        finite: Sequence[RangeEnd],
    ) -> tuple[Source, ...]:
        """Return the sources of values that are not finite: those of its operands, or a new one here."""
        tensors = [read for read, _ in operation.read]
        if strange:
            return self._inherited(index, strange, tensors, result)
        if operation.func.namespace in recomputing.COLLECTIVES:
            return (self._source(index, "entered", tensors, None, result),)
        leaves = tree_leaves((operation.args, operation.kwargs))
        numbers = [x for x in leaves if isinstance(x, float)]
        if any(isinstance(x, Tensor) and x.is_floating_point() and not x.numel() for x in leaves):
            return (self._source(index, "made", tensors, None, result),)  # such as a mean of no values
        if not tensors or any(x != x or x in _INFINITE for x in numbers):
            return (self._source(index, "constant", tensors, None, result),)
        if operation.draws and largest_in_fp32 is None:
            largest_in_fp32 = max(map(largest, tensors))
        source = self._source(index, "made", tensors, largest_in_fp32, result)
        if largest_in_fp32 is None:
            ends = [end for end in (RangeEnd.BELOW, RangeEnd.ABOVE) if end in finite]
            source.because = operation.truths[ends[0]][1] if ends else ()
        return (source,)

    def _inherited(
        self, index: int, strange: list[tuple[Tensor, Tensor]], tensors: list[Tensor], result: Tensor
    ) -> tuple[Source, ...]:
        found = {s: None for _, given in strange for s in self._taint.get(given) or ()}
        unknown = [(read, given) for read, given in strange if self._taint.get(given) is None]
        if unknown:
            constant = all(by_design(read) for read, _ in unknown) and not self.in_backward()
            entered = self._source(index, "constant" if constant else "entered", tensors, None, result)
            weights = {storage_of(p) for p in self._weights()}
            entered.parameter = any(storage_of(given) in weights for _, given in unknown)
            found[entered] = None
            for _, given in unknown:
                self._taint.put(given, (entered,))
        if (
            all(s.kind == "constant" for s in found)
            and has_nan(result)
            and not any(has_nan(read) for read, _ in strange)
        ):
            return (self._source(index, "made", tensors, None, result),)  # such as a softmax of -inf only
        return together(found)

    def _refused(self, index: int, operation: recomputing.Recomputable) -> None:
        """Record a number that torch refuses to write into a format because it would overflow."""
        tensors = [read for read, _ in operation.read]
        leaves = tree_leaves((operation.args, operation.kwargs))
        numbers = [abs(float(x)) for x in leaves if isinstance(x, (int, float)) and not isinstance(x, bool)]
        numbers += [largest(t) for t in tensors if t.dim() == 0]
        dtypes = [x for x in leaves if isinstance(x, torch.dtype)] or [t.dtype for t in tensors]
        narrow = min(dtypes, key=lambda d: d.itemsize, default=None)
        if numbers and narrow is not None:
            self._source(index, "refused", tensors, max(numbers), torch.empty(0, dtype=narrow))

    def _source(
        self, index: int, kind: Kind, tensors: Sequence[Tensor], largest: float | None, result: Tensor
    ) -> Source:
        place = self.place_of_running()
        source = Source(
            index=index,
            kind=kind,
            op=place.op,
            module=place.module,
            line=place.line,
            backward=place.backward,
            format=format_name(result.dtype),
            operands=[operand(t) for t in tensors[:4]],
            wide=largest,
            scale=self._scale(),
        )
        self.sources.append(source)
        return source
