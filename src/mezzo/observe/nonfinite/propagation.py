"""Follow values that leave their format's range through a training step: where each was lost, and which results it reached and changed.

Every operation's result is inspected. A result that is not finite although all operands are is a source, and so is one with zeros where
FP32 has none. Everything computed from a source remembers it, by storage, so that a loss or a gradient can be traced back.

Whether a source matters does not depend on the names of operations. The true values are kept alongside the wrong ones, and operations that
read them run a second time on the true values (``mezzo.observe.nonfinite.shadows``). A mask of -1e9 is -inf in FP16, and softmax returns
the same for both; ``1 / sqrt(inf)`` is 0, but ``1 / sqrt(1e5)`` is not. The latter is silent saturation if it makes a gradient wrong.

A source is recomputed in FP32 from its operands: a finite result means that only its format is too narrow. Where FP32 has none either, it
is recomputed in FP64, so that an infinity of FP32 that becomes a wrong finite number is followed as well.

Cost: two reductions and one read of the device per operation, and a second run of operations that read lost values; so only chosen
steps are inspected. Limits: a fused kernel is one operation; an operation that draws random numbers is not recomputed.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from mezzo.devices import has_fp64
from mezzo.engine.casts.autocast_kernels import flat_tensors
from mezzo.engine.matrix_units.block_linear import unrounded
from mezzo.engine.matrix_units.emulation import running
from mezzo.error_texts import leaves_range
from mezzo.formats import FP32, FP64
from mezzo.measure.flops import OperandFormats
from mezzo.observe.location import PlacingTracer
from mezzo.observe.nonfinite.evidence import (
    FaultSource,
    GradientErrors,
    NonFiniteResult,
    SourceKind,
    WrongGradient,
    merge_sources,
)
from mezzo.observe.nonfinite.shadows import (
    RangeEnd,
    Recomputable,
    Shadows,
    largest_of,
    measure_errors,
    measure_gradients,
    rounded,
    wrong_losses,
)
from mezzo.observe.replay import COLLECTIVE_NAMESPACES, arguments_before, operands, wait_for_exchange, writes
from mezzo.observe.source_lines import caller, script_line
from mezzo.observe.tensors import (
    Storages,
    by_design,
    format_name,
    has_floats,
    has_nan,
    is_finite,
    largest,
    norm,
    operand,
    readable,
    storage_of,
    storage_size,
)
from mezzo.observe.tracer import TracerFlags

T = TypeVar("T")

_INFINITE = (float("inf"), float("-inf"))
_ENDS = tuple(RangeEnd)
_MATERIAL = 2.0**-10
"""Share of a result's norm that may become 0 in one operation: hundreds in a row still lose less than a tenth."""
_DECISIONS = frozenset(("_amp_update_scale_", "_amp_update_scale"))
"""Operations whose results count as true: the loss scale has to follow from the overflow that was detected."""
_SQUARES = ("exp_avg_sq", "square_avg", "sum")
"""The names of squared gradients in the state of torch's optimizers, which divide by their root plus eps."""
_SCALES = frozenset(("mul", "div", "foreach_mul", "foreach_div"))
_LEAST_SCALE = 64.0
"""A smaller factor counts as the weight of a loss."""


class InfinityTracer(PlacingTracer):
    """A tracer that inspects every result."""

    def __init__(
        self,
        formats: OperandFormats,
        *,
        device_type: str,
        flags: TracerFlags,
        scale: Callable[[], float],
        weights: Callable[[], Iterable[Tensor]],
        problems: dict[str, str],
    ) -> None:
        """Create a tracer.

        Args:
            formats: returns the format that an operation computes in.
            device_type: torch's device type.
            flags: whether activation checkpointing is recomputing.
            scale: returns the current loss scale.
            weights: returns the trained parameters.
            problems: takes the operations that could not be inspected, and why.
        """
        super().__init__(formats, device_type=device_type, flags=flags, problems=problems)
        self.sources: list[FaultSource] = []
        self.nonfinite_results: list[NonFiniteResult] = []
        self.update_sources: list[FaultSource] = []
        """Where an optimizer's step made a weight infinite or NaN."""
        self.gradient_errors: list[GradientErrors] = []
        self._problems = problems
        self.in_update = False
        """Whether a backward pass has ended and no module was called since: clipping and unscaling run then."""
        self._storages_of_weights: frozenset[int] = frozenset()
        self._storages_of_gradients: set[int] = set()
        """Found once a step and once an update: a model may have thousands, and each may be asked about."""
        self.narrow = False
        """Whether an operation read or returned 16-bit values."""
        self.raised: FaultSource | None = None
        """The last operation that raised an error."""
        self._factors: dict[float, None] = {}
        """Large numbers by which the script multiplied a single value, such as its loss."""
        self._undone: dict[float, None] = {}
        """The numbers by which it divided, or multiplied by their inverses, between the backward pass and the update."""
        self._emulation: Any = None
        """The emulated operation that runs, or the node of its backward pass."""
        self._parts: dict[int, tuple[Tensor, list[Tensor]]] = {}
        """What its parts have computed so far, each with the operands of the emulated operation that it follows from, by storage.

        Kept alive until the next emulated operation, so that no address is used twice.
        """
        self._wrong_losses: list[WrongGradient] = []
        """The losses of the update so far that differ from their true values."""
        self._before_reduction: GradientErrors | None = None
        """The errors of the gradients before a reduction over all processes."""
        self._scale, self._weights = scale, weights
        self._taint: Storages[tuple[FaultSource, ...]] = Storages()
        self._shadows: dict[RangeEnd, Shadows[FaultSource]] = {end: Shadows(end) for end in RangeEnd}

    def forget(self) -> None:
        """Discard what was recorded; values that are already lost remain known as lost."""
        super().turn(len(self.trace.operations))
        self.sources, self.nonfinite_results, self.gradient_errors, self.update_sources = [], [], [], []
        self._wrong_losses = []

    def mark(self) -> int:
        """Mark everything recorded so far as belonging to the step; return the number of operations."""
        for shadows in self._shadows.values():
            shadows.mark()
        return len(self.trace.operations)

    def keep_after(self, index: int) -> None:
        """Discard what was recorded before ``index``, the last mark."""
        super().turn(index)
        for shadows in self._shadows.values():
            shadows.turn()
        for source in self.sources:
            source.index -= index
        for result in self.nonfinite_results:
            result.index -= index
        self.sources = [s for s in self.sources if s.index >= 0]
        self.nonfinite_results = [r for r in self.nonfinite_results if r.index >= 0]
        self.gradient_errors, self.update_sources, self._wrong_losses = [], [], []
        self._undone, self._storages_of_weights = {}, frozenset()

    def static_scale(self) -> float | None:
        """Return the number by which the script itself scales its loss, and divides its gradients; None if there is none."""
        factor = next((factor for factor in self._factors if factor in self._undone), None)
        return None if factor is None or self._scale() != 1 else factor

    def _note_numbers(self, func: Any, args: Sequence[Any], result: Any) -> None:
        gradients = self._gradients_among(args[:1]) if self.in_update else []
        if gradients and not writes(func):  # the script may put the result in the place of the gradient
            sizes = {t.numel() for t in gradients}
            self._storages_of_gradients |= {storage_of(t) for t in flat_tensors((result,)) if t.numel() in sizes}
        if func.overloadpacket.__name__.strip("_") not in _SCALES:
            return
        numbers = [float(x) for x in tree_leaves(tuple(args)) if type(x) in (int, float) and x]
        if gradients:
            self._undone.update(dict.fromkeys(n for x in numbers for n in (x, 1 / x)))
        elif not self.in_update and isinstance(result, Tensor) and result.numel() == 1:
            self._factors.update(dict.fromkeys(x for x in numbers if _LEAST_SCALE <= x < math.inf))

    def _gradients_among(self, values: Sequence[Any]) -> list[Tensor]:
        if not self._storages_of_gradients:
            self._storages_of_gradients = {storage_of(p.grad) for p in self._weights() if p.grad is not None}
        return [t for t in flat_tensors(values) if storage_of(t) in self._storages_of_gradients]

    def _is_weight(self, tensor: Tensor) -> bool:
        if not self._storages_of_weights:
            self._storages_of_weights = frozenset(map(storage_of, self._weights()))
        return storage_of(tensor) in self._storages_of_weights

    def backward_ended(self) -> None:
        """Compare the current gradients with their true values; what follows belongs to the update."""
        self.compare_gradients()
        self.in_update, self._storages_of_gradients = True, set()

    def enter(self, module: nn.Module, args: Any) -> None:
        """Record that a module is called."""
        self.in_update = False
        super().enter(module, args)

    def inspect_update(self, optimizer: torch.optim.Optimizer, owner_of: Callable[[Tensor], nn.Module | None]) -> None:
        """Record the first weight that an optimizer's step made infinite or NaN; reads one flag for each weight.

        Args:
            optimizer: the optimizer, whose step just ended.
            owner_of: returns the module that owns a weight.
        """
        with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    if weight.grad is None or is_finite(weight) or not is_finite(weight.grad):
                        continue
                    self._update_broke(optimizer, group, weight, owner_of(weight))
                    return

    def _update_broke(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], weight: Tensor, module: nn.Module | None
    ) -> None:
        state = optimizer.state.get(weight, {})
        read = [t for t in (weight.grad, *(state.get(name) for name in _SQUARES)) if isinstance(t, Tensor)]
        eps = group.get("eps")
        rounds_to_0 = isinstance(eps, float) and eps > 0 and float(torch.tensor(eps, dtype=weight.dtype)) == 0
        line, _ = script_line(sys._getframe(1))
        source = FaultSource(
            index=len(self.trace.operations),
            kind="made",
            op=f"{type(optimizer).__name__}.step",
            module=module,
            line=line,
            backward=False,
            in_update=True,
            zero_eps=eps if rounds_to_0 else None,
            format=format_name(weight.dtype),
            operands=[operand(t) for t in read],
            wide=None,
            scale=self._scale(),
        )
        self.update_sources.append(source)

    def compare_losses(self, losses: Iterable[Tensor]) -> None:
        """Compare the losses of a backward pass that begins with their true values."""
        with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
            self._wrong_losses += wrong_losses(losses, self._shadows[RangeEnd.ABOVE])

    def compare_gradients(self) -> None:
        """Compare the current gradients with their true values; of a step's comparisons, the last counts."""
        with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
            errors = measure_errors(len(self.trace.operations), self._weights(), self._shadows)
        sent, self._before_reduction = self._before_reduction, None
        errors = sent if sent is not None and errors.nothing else errors
        self.gradient_errors.append(dataclasses.replace(errors, losses=tuple(self._wrong_losses)))

    # --- operations --------------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation and inspect its result."""
        kwargs = kwargs or {}
        if self._is_over:
            return func(*args, **kwargs)
        self._running = func, args
        index = len(self.trace.operations)
        if self._stepping and self.is_plain(func):  # thousands, none of them inspected
            return func(*args, **kwargs)
        if self._stepping or self.is_silent(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        operation = self.attempt(lambda: self._prepared(func, unrounded() or args, kwargs))
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            if operation is not None:
                self._note_error(index, operation, error)
            raise
        if not self.in_backward():
            self._note_numbers(func, args, result)
        if operation is not None:
            self.attempt(lambda: self._inspect(index, operation, result))
        return result

    # --- values ------------------------------------------------------------------------------------------------------------------

    def _prepared(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Recomputable:
        """Return an operation that is about to run, with its operands."""
        kept = arguments_before(func, args, kwargs) if writes(func) else (list(args), kwargs)
        pairs = operands(func, kept, (args, kwargs))
        read = [pair for pair in pairs if has_floats(pair[0])]
        truths = {}
        for end, shadows in self._shadows.items():
            known = [(before, shadows.read(passed)) for before, passed in pairs if readable(passed)] if shadows else []
            found = [(before, truth) for before, truth in known if truth is not None]
            if found:
                sources = merge_sources(s for _, (_, sources) in found for s in sources)
                truths[end] = {id(before): true for before, (true, _) in found}, sources
        if truths and func.namespace in COLLECTIVE_NAMESPACES:
            sent = measure_gradients(len(self.trace.operations), read, self._shadows)
            if self._before_reduction is None or self._before_reduction.nothing:
                self._before_reduction = sent
        return Recomputable(func, args, kwargs, kept, read, truths)

    def _inspect(self, index: int, operation: Recomputable, result: Any) -> None:
        if operation.func.namespace in COLLECTIVE_NAMESPACES:
            wait_for_exchange(operation.func, result)
        outputs = operation.outputs(result)
        results = [t for t in outputs if has_floats(t)]
        self._note_parts(operation, results)
        bad_results = [t for t in results if not is_finite(t)]
        if operation.func.namespace in COLLECTIVE_NAMESPACES:
            self._inspect_collective(index, operation, results, bad_results)
            return
        if operation.func.overloadpacket.__name__ in _DECISIONS:
            operation = dataclasses.replace(operation, truths={})
            for tensor in results:
                self._forget_truth(tensor)
        # Without bad results only operands that are known to be bad say something: these may have been swallowed.
        suspects = operation.read if bad_results else self._known_bad(operation.read)
        bad_operands = [pair for pair in suspects if not is_finite(pair[0])]
        made = bool(bad_results) and not bad_operands
        local = self._computed_locally(operation, results, result, made=made)
        if not (bad_results or bad_operands or operation.truths) and local is None:  # nearly every operation
            self._forget_taint(results)
            return
        true = {end: operation.computed(result, known) for end, (known, _) in operation.truths.items()}
        new: dict[RangeEnd, tuple[FaultSource, ...]] = {}
        beyond: list[Tensor] | None = None
        if bad_results:
            wide = largest_of(local, outputs)
            finite_ends = [end for end in true if largest_of(true[end], outputs) is not None]
            sources = self._sources_of(index, operation, bad_operands, bad_results[0], wide, finite_ends)
            if made and wide is None and any(source.kind == "made" for source in sources):
                beyond = self._computed_beyond_fp32(operation, result, outputs, sources)
            new[RangeEnd.ABOVE] = sources if not bad_operands else ()
            self._record_nonfinite(index, sources, bad_results)
        read_sources = [source for _, passed in bad_operands for source in self._taint.get(passed) or ()]
        bad = {id(t) for t in bad_results}
        self._forget_taint(t for t in results if id(t) not in bad)
        new[RangeEnd.BELOW] = self._vanished(index, operation, outputs, local)
        for end in _ENDS:
            found = beyond if end is RangeEnd.ABOVE and beyond is not None else local
            self._keep_true(end, operation, outputs, found, true, new.get(end, ()))
        if bad_operands and not bad_results and results:
            self._swallowed(read_sources, results)

    def _known_bad(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        return [pair for pair in pairs if self._taint.get(pair[1]) is not None] if len(self._taint) else []

    def _forget_taint(self, finite: Iterable[Tensor]) -> None:
        """Forget what is known of storages that finite results fill."""
        for tensor in finite if len(self._taint) else ():
            if tensor.numel() * tensor.element_size() == storage_size(tensor):
                self._taint.pop(tensor)

    def _note_parts(self, operation: Recomputable, results: list[Tensor]) -> None:
        """Keep the results of an emulated operation's parts, such as a product in FP32 before it is rounded."""
        emulation = None
        if self._formats.emulated() is not None:
            emulation = running() or torch._C._current_autograd_node()
        if emulation is not self._emulation:
            self._emulation, self._parts = emulation, {}
        if emulation is not None:
            read = self._read_by(operation)
            self._parts |= {storage_of(t): (t, read) for t in results if t.element_size() >= FP32.dtype.itemsize}

    def _read_by(self, operation: Recomputable) -> list[Tensor]:
        """Return the tensors that an operation reads; of an emulated one's part, those that the whole operation reads."""
        pairs = (self._parts.get(storage_of(passed), (None, [read]))[1] for read, passed in operation.read)
        return list({id(t): t for tensors in pairs for t in tensors}.values())

    def _computed_locally(
        self, operation: Recomputable, results: list[Tensor], result: Any, *, made: bool
    ) -> list[Tensor] | None:
        """Return an operation's FP32 results from its operands if it may have lost values; else None."""
        sizes = [t.element_size() for t in results] + [read.element_size() for read, _ in operation.read]
        narrow = min(sizes, default=4) < 4
        self.narrow = self.narrow or narrow
        if not operation.read or not narrow:
            return None
        if not made and (operation.draws or operation.keeps_magnitude()):
            return None
        if made or any(RangeEnd.BELOW.loses(t.dtype) and int(t.count_nonzero()) < t.numel() for t in results):
            return operation.computed(result)
        return None

    def _computed_beyond_fp32(
        self, operation: Recomputable, result: Any, outputs: list[Tensor], sources: tuple[FaultSource, ...]
    ) -> list[Tensor] | None:
        """Return results in FP64 where FP32 has none that is finite; None if FP64 has none either, or the device no FP64."""
        if not all(has_fp64(read.device) for read, _ in operation.read):
            return None
        found = operation.computed(result, least=FP64.dtype)
        reached = largest_of(found, outputs)
        for source in sources if reached is not None else ():
            source.in_fp64 = reached
        return found if reached is not None else None

    def _vanished(
        self, index: int, operation: Recomputable, outputs: list[Tensor], local: list[Tensor] | None
    ) -> tuple[FaultSource, ...]:
        """Return a source for each result that lost a material share of its norm, or a tiny number of the script's."""
        found: list[FaultSource] = []
        for tensor, true in zip(outputs, local or (), strict=bool(local)):
            if not has_floats(tensor) or not RangeEnd.BELOW.loses(tensor.dtype):
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
        operation: Recomputable,
        outputs: list[Tensor],
        local: list[Tensor] | None,
        true: dict[RangeEnd, list[Tensor] | None],
        new: tuple[FaultSource, ...],
    ) -> None:
        """Keep the true values of results that differ from them at one end of the range."""
        shadows = self._shadows[end]
        values = true.get(end)
        if end not in operation.truths:
            values = local if new else None
        elif values is None:  # unknown: the actual values count as true
            for tensor in filter(readable, outputs):
                self._forget_truth(tensor)
        if values is None:
            return
        inherited = operation.truths[end][1] if end in operation.truths else ()
        for tensor, wide in zip(outputs, values, strict=True):
            if not readable(tensor):
                continue
            if end in operation.truths:
                shadows.write(tensor, rounded(wide, tensor.dtype, end), merge_sources((*inherited, *new)))
            elif tensor.is_floating_point():
                found = tensor.to(wide.dtype)
                shadows.write(tensor, torch.where(end.lost(found, wide), wide, found), new)

    def _swallowed(self, sources: list[FaultSource], results: list[Tensor]) -> None:
        """Record that an operation turned infinities into finite numbers, and whether these are right."""
        wrong = any(self._shadows[RangeEnd.ABOVE].read(t) is not None for t in results)
        op = self.forward_name()
        for source in sources:
            (source.swallowed if wrong else source.absorbed)[op] = None

    def _inspect_collective(
        self, index: int, operation: Recomputable, results: list[Tensor], bad_results: list[Tensor]
    ) -> None:
        """Record an operation between processes, whose results depend on the operands of all of them."""
        if bad_results:
            bad_operands = [pair for pair in operation.read if not is_finite(pair[0])]
            self._record_nonfinite(
                index, self._sources_of(index, operation, bad_operands, bad_results[0], None, ()), bad_results
            )
        for tensor in results:  # returned, but not declared as written
            self._forget_truth(tensor)

    def _forget_truth(self, tensor: Tensor) -> None:
        for shadows in self._shadows.values():
            shadows.forget(tensor)

    def _record_nonfinite(self, index: int, sources: tuple[FaultSource, ...], bad_results: list[Tensor]) -> None:
        for tensor in bad_results:
            self._taint.put(tensor, sources)
        backward = self.in_backward()
        in_update = self.in_update and not backward
        if in_update and caller(sys._getframe(1)) == "mezzo":  # such as the norm that a record keeps
            return
        self.nonfinite_results.append(NonFiniteResult(index, backward, in_update, sources))

    # --- sources -----------------------------------------------------------------------------------------------------------------

    def _sources_of(
        self,
        index: int,
        operation: Recomputable,
        bad_operands: list[tuple[Tensor, Tensor]],
        result: Tensor,
        largest_in_fp32: float | None,
        finite: Sequence[RangeEnd],
    ) -> tuple[FaultSource, ...]:
        """Return the sources of values that are not finite: the operands' sources, or a new one here."""
        tensors = self._read_by(operation)
        if bad_operands:
            return self._inherited(index, bad_operands, tensors, result)
        if operation.func.namespace in COLLECTIVE_NAMESPACES:
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
        self, index: int, bad_operands: list[tuple[Tensor, Tensor]], tensors: list[Tensor], result: Tensor
    ) -> tuple[FaultSource, ...]:
        found = {s: None for _, passed in bad_operands for s in self._taint.get(passed) or ()}
        unknown = [(read, passed) for read, passed in bad_operands if self._taint.get(passed) is None]
        if unknown:
            constant = all(by_design(read) for read, _ in unknown) and not self.in_backward()
            entered = self._source(index, "constant" if constant else "entered", tensors, None, result)
            entered.parameter = any(self._is_weight(passed) for _, passed in unknown)
            found[entered] = None
            for _, passed in unknown:
                self._taint.put(passed, (entered,))
        if (
            all(s.kind == "constant" for s in found)
            and has_nan(result)
            and not any(has_nan(read) for read, _ in bad_operands)
        ):
            return (self._source(index, "made", tensors, None, result),)  # such as a softmax of -inf only
        return merge_sources(found)

    def _note_error(self, index: int, operation: Recomputable, error: Exception) -> None:
        """Record where an operation raised an error: it ends the script unless that catches it."""
        tensors = [read for read, _ in operation.read]
        narrow = min((t.dtype for t in tensors), key=lambda dtype: dtype.itemsize, default=FP32.dtype)
        self.raised = self._made_source(index, "raised", tensors, None, torch.empty(0, dtype=narrow))
        if leaves_range(str(error)):
            self._refused(index, operation)

    def _refused(self, index: int, operation: Recomputable) -> None:
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
        self, index: int, kind: SourceKind, tensors: Sequence[Tensor], largest: float | None, result: Tensor
    ) -> FaultSource:
        source = self._made_source(index, kind, tensors, largest, result)
        self.sources.append(source)
        return source

    def _made_source(
        self, index: int, kind: SourceKind, tensors: Sequence[Tensor], largest: float | None, result: Tensor
    ) -> FaultSource:
        place = self.place_of_running()
        return FaultSource(
            index=index,
            kind=kind,
            op=place.op,
            module=place.module,
            line=place.line,
            backward=place.backward,
            in_update=self.in_update and not place.backward and place.module is None,
            format=format_name(result.dtype),
            operands=[operand(t) for t in tensors[:4]],
            wide=largest,
            scale=self._scale(),
        )
