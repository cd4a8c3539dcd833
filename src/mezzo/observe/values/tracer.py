"""Record every operation of a step as an event: what it reads, its settings, and fingerprints of its results.

Mezzo's own operations, views and allocations are left out; a view shows in the part of a value that is read. The casts around an emulated
product and its bias are part of it, so that its result is the rounded one, as a GPU's is. So is the rounding of its operands in blocks: it
reads them as they were before, and its error, which is mirrored, is the one of all its roundings. An optimizer's update is one event for
each parameter: its operations are not recorded.

With ``mirrored``, every result gets the opposite rounding error at random elements. Each operation is computed again in FP64 on the same
operands; ``x`` then becomes ``2 * exact - x``, rounded at random to one of the two nearest numbers of its format. So values move by as
much as rounding has moved them, and results without an error stay. Where a whole run goes from there is what rounding alone can do to it:
the random rounding of stochastic arithmetic (J. Vignes, "A stochastic arithmetic for reliable scientific computation", 1993), by whole
operations.

Cost: one fingerprint for each result; with FP64, a second run of each operation in it. Limits: a fused kernel is one operation; operations
that draw random numbers or have no kernel in FP64 are not mirrored.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mezzo.devices import has_fp64
from mezzo.engine.casts.autocast_kernels import flat_tensors
from mezzo.engine.kernels import cpu
from mezzo.engine.matrix_units.block_linear import unrounded
from mezzo.engine.matrix_units.emulation import running
from mezzo.formats import FP64
from mezzo.measure.flops import FLOP_COUNTS, OperandFormats
from mezzo.observe.location import OperationPlace, PlacingTracer
from mezzo.observe.replay import (
    COLLECTIVE_NAMESPACES,
    arguments_before,
    at_least,
    draws,
    operands,
    outputs,
    recomputed,
    wait_for_exchange,
    writes,
)
from mezzo.observe.source_lines import caller
from mezzo.observe.tensors import Storages, readable, storage
from mezzo.observe.trace import CAST_NAMES
from mezzo.observe.tracer import TracerFlags
from mezzo.observe.values.fingerprints import Fingerprints, flat_fp64
from mezzo.observe.values.log import UNSCALES, Event, EventKind, Phase, ValueRead

T = TypeVar("T")
_CONSTANTS = frozenset(("lift_fresh", "lift"))
"""Operations that turn numbers of the script into a tensor."""
_SETTINGS = (int, float, bool, str, type(None), torch.dtype)
_SEED = 1
_LARGE_BYTES = 2**26
_SHARE = 0.5
"""The share of elements whose error is mirrored."""


class _Passed(NamedTuple):
    """An operation that is about to run."""

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    kept: tuple[Sequence[Any], dict[str, Any]]
    """Its arguments as they were before; the arguments themselves if nothing is computed again."""
    reads: tuple[ValueRead, ...]
    place: OperationPlace


class ValuesTracer(PlacingTracer):
    """A tracer that records the values of a step."""

    def __init__(
        self,
        formats: OperandFormats,
        *,
        in_fp64: bool,
        mirrored: bool,
        device_type: str,
        flags: TracerFlags,
        problems: dict[str, str],
    ) -> None:
        """Create a tracer.

        Args:
            formats: returns the format that an operation computes in.
            in_fp64: whether each operation is computed again in FP64, for the error of its result.
            mirrored: whether results get the opposite error at random elements.
            device_type: torch's type of the device that the script trains on.
            flags: says whether activation checkpointing is recomputing.
            problems: takes the operations that could not be inspected, and why.
        """
        super().__init__(formats, device_type=device_type, flags=flags, problems=problems)
        self.events: list[Event] = []
        self.owners: list[nn.Module | Tensor | None] = []
        """The module of each event, or the parameter."""
        self.fingerprints = Fingerprints()
        self._in_fp64, self._mirrored = in_fp64 or mirrored, mirrored
        self._makers: Storages[tuple[int, int]] = Storages()
        """The event that last wrote into a storage, and which of its results it is."""
        self._leaves: Storages[int] = Storages()
        """The event of a value that no event made, by storage."""
        self._state: Storages[Tensor] = Storages()
        """The weights and buffers of the models called so far, by storage: a view of one stands for the whole."""
        self._roots: set[int] = set()
        self._constants: Storages[str] = Storages()
        """The lines that made constants."""
        self._inspecting = False
        """Whether the running operations compute fingerprints."""
        self._has_gradients = False
        """Whether a backward pass has ended since the last update."""
        self._errors: dict[int, Tensor] = {}
        self._generators: dict[torch.device, torch.Generator] = {}
        self._num_mirrored = 0
        self._products: dict[int, object] = {}
        """Products inside an emulated operation, with that operation."""

    # --- events ----------------------------------------------------------------------------------------------------------------

    def note(
        self,
        kind: EventKind,
        *,
        op: str,
        owner: nn.Module | Tensor | None = None,
        name: str = "",
        line: str = "",
        phase: Phase = "forward",
        settings: tuple[str, ...] = (),
        reads: Iterable[Tensor] = (),
        results: Sequence[tuple[Tensor, Tensor | None]] = (),
        makes: Sequence[Tensor] = (),
    ) -> int:
        """Add an event that is no operation; return its number.

        Args:
            kind: what it is.
            op: its name.
            owner: its module or parameter.
            name: the path, where it is not the owner's.
            line: the script's line.
            phase: where it runs.
            settings: what else determines its value.
            reads: what it reads.
            results: the values to keep fingerprints of, each with the tensor whose rounding affects it, if that is another.
            makes: the tensors that it writes.
        """
        known = tuple(self._read(tensor) for tensor in reads if readable(tensor))
        row = len(self.fingerprints)
        described = tuple(self.fingerprints.add(value, rounding_of=of) for value, of in results)
        event = Event(kind, 0, phase, op, name, line, settings, known, described, row)
        return self._add(event, owner, makes)

    def attempt(self, inspection: Callable[[], T]) -> T | None:
        """Let the script continue if its tensors cannot be inspected."""
        outer, self._inspecting = self._inspecting, True
        try:
            return super().attempt(inspection)
        finally:
            self._inspecting = outer

    def gradients_ready(self, *, ready: bool) -> None:
        """Record that a backward pass has ended, or that an update has used its gradients."""
        self._has_gradients = ready

    def forget(self) -> None:
        """Drop everything."""
        self.events, self.owners, self._errors = [], [], {}
        self.fingerprints, self._products = Fingerprints(), {}
        self._makers, self._leaves = Storages(), Storages()

    def keep(self, count: int) -> None:
        """Drop all events but the first ``count``."""
        if count < len(self.events):
            self.fingerprints.forget_after(self.events[count].row)
            del self.events[count:], self.owners[count:]

    def leaf(self, tensor: Tensor) -> int | None:
        """Return the event of a value that no event made; None for any other."""
        return self._leaves.get(tensor)

    def see(self, tensor: Tensor) -> None:
        """Record a value that no event made before it changes."""
        self._read(tensor)

    def knows(self, tensor: Tensor) -> bool:
        """Return whether any event has made or read a tensor."""
        return self._makers.get(tensor) is not None

    def finished_events(self) -> list[Event]:
        """Return the events with their errors; waits for the device."""
        found = self._errors
        return [replace(event, error=float(found[n])) if n in found else event for n, event in enumerate(self.events)]

    def _add(self, event: Event, owner: nn.Module | Tensor | None, makes: Iterable[Tensor]) -> int:
        number = len(self.events)
        self.events.append(event)
        self.owners.append(owner)
        for output, tensor in enumerate(makes):
            self._makers.put(tensor, (number, output))
        return number

    def _read(self, tensor: Tensor) -> ValueRead:
        known = self._makers.get(tensor)
        if known is None:
            line = self._constants.get(tensor)
            kind: EventKind = "data" if line is None else "constant"
            leaf = self.note(kind, op=kind, line=line or "", results=[(self._whole(tensor), None)], makes=[tensor])
            self._leaves.put(tensor, leaf)
            known = leaf, 0
        offset = tensor.storage_offset() if tensor.layout is torch.strided else 0
        return ValueRead(*known, (int(offset), *tensor.shape))

    def _whole(self, tensor: Tensor) -> Tensor:
        """Return the weight or buffer that a tensor is a view of, or all elements of a storage that is not too large."""
        owner, known = self._state.get(tensor), storage(tensor)
        if owner is not None:
            return owner
        if known is None or tensor.layout is not torch.strided or known.nbytes() > _LARGE_BYTES:
            return tensor
        if tensor.is_contiguous() and not _is_part(tensor):
            return tensor
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return whole.set_(known, 0, (known.nbytes() // tensor.itemsize,), (1,))

    def enter(self, module: nn.Module, args: Any) -> None:
        """Record that a module is called, and which weights and buffers a model has."""
        if self._local.entry is None and id(module) not in self._roots:
            self._roots.add(id(module))
            for tensor in (*module.parameters(), *module.buffers()):
                self._state.put(tensor, tensor)
        super().enter(module, args)

    # --- operations --------------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation and record it."""
        kwargs = kwargs or {}
        if self._is_over:
            return func(*args, **kwargs)
        self._running = func, args
        if self._stepping or self._is_own():
            result = super().__torch_dispatch__(func, types, args, kwargs)
            inside = self._stepping or self._inspecting or unrounded() is not None
            if func.overloadpacket is torch.ops.aten.mul and not inside:
                self.attempt(lambda: self._unscaled(args[0], result))
            return result
        if self.is_silent(func):
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if func.overloadpacket.__name__ in _CONSTANTS:
                self.attempt(lambda: self._constants.put(result, self.place_of_running().line))
            return result
        passed = self.attempt(lambda: self._passed(func, args, kwargs))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if passed is not None:
            self.attempt(lambda: self._ran(passed, result))
        return result

    def _is_own(self) -> bool:
        """Return whether Mezzo itself runs the operation, and not for the policy."""
        return self._local.entry is None and caller(sys._getframe(2)) == "mezzo"

    def _unscaled(self, gradient: Tensor, result: Tensor) -> None:
        """Record that Mezzo divides a gradient by the loss scale, so that its ancestors stay known."""
        if self._makers.get(gradient) is not None and gradient.shape == result.shape:
            self.note("cast", op=UNSCALES, phase="backward", reads=[gradient], results=[(result, None)], makes=[result])

    def _passed(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Passed:
        args = unrounded() or args
        again = self._runs_again(func)
        kept = arguments_before(func, args, kwargs) if again and writes(func) else (args, kwargs)
        read = [passed for _, passed in operands(func, (args, kwargs), (args, kwargs)) if readable(passed)]
        return _Passed(func, args, kwargs, kept, tuple(map(self._read, read)), self.place_of_running())

    def _runs_again(self, func: Any) -> bool:
        return self._in_fp64 and not draws(func) and func.namespace not in COLLECTIVE_NAMESPACES

    def _ran(self, passed: _Passed, result: Any) -> None:
        func = passed.func
        if func.namespace in COLLECTIVE_NAMESPACES:
            wait_for_exchange(func, result)
        made = [t for t in outputs(func, passed.args, passed.kwargs, result) if readable(t)]
        results = [*_shown(func, made), *self._written_silently(passed)]
        if not results:
            return
        is_cast = func.overloadpacket.__name__ in CAST_NAMES
        inside = self._emulated()
        error = None
        if self._runs_again(func):
            error = self._compare(passed, made)
        ends = inside is not None and (is_cast or func.overloadpacket is torch.ops.aten.add)
        if ends and self._ends_product(passed, inside, results[0], error):
            return
        event, place = self._event(passed, results, is_cast=is_cast), passed.place
        count = FLOP_COUNTS.get(func.overloadpacket)
        if count is not None:
            event = replace(event, flops=int(count(result, *passed.args)))
        hidden = [t for t in made if all(t is not one for one in results)]
        number = self._add(event, place.module, [*results, *hidden])
        if error is not None:
            self._errors[number] = error
        if inside is not None and count is not None:
            self._products[number] = inside

    def _event(self, passed: _Passed, results: Sequence[Tensor], *, is_cast: bool) -> Event:
        place, row = passed.place, len(self.fingerprints)
        described = tuple(self.fingerprints.add(result) for result in results)
        previous = tuple(
            ValueRead(*known, ()) for t in results if (known := self._makers.get(t)) is not None and _is_part(t)
        )
        return Event(
            "cast" if is_cast else "operation",
            0,
            self._phase(passed),
            place.op,
            "",
            place.line,
            (*_settings(passed.args), *(f"{k}={text}" for k, v in passed.kwargs.items() for text in _settings((v,)))),
            (*passed.reads, *(read for read in previous if all(r.event != read.event for r in passed.reads))),
            described,
            row,
            draws(passed.func),
            passed.func.overloadpacket.__name__.strip("_"),
        )

    def _phase(self, passed: _Passed) -> Phase:
        if passed.place.backward:
            return "backward"
        outside = self._has_gradients and passed.place.module is None
        return "gradients" if outside and not any(t.requires_grad for t in flat_tensors(passed.args)) else "forward"

    def _written_silently(self, passed: _Passed) -> list[Tensor]:
        """Return the running statistics that an operation changes without declaring it."""
        trains = any(value is True for value in passed.args)
        if "batch_norm" not in passed.func.overloadpacket.__name__ or passed.place.backward or not trains:
            return []
        weights = [t for t in flat_tensors(passed.args) if self._state.get(t) is not None]
        return [t for t in weights if not isinstance(self._state.get(t), nn.Parameter)]

    def _emulated(self) -> object | None:
        """Return the emulated operation that is running, forward or backward."""
        if self._formats.emulated() is None:
            return None
        return running() or self._formats.recomputing() or torch._C._current_autograd_node()

    def _ends_product(self, passed: _Passed, inside: object, result: Tensor, error: Tensor | None) -> bool:
        """Return whether a cast or a bias ends the product of the emulated operation: the result is then the product's."""
        number = next((read.event for read in passed.reads if self._products.get(read.event) is inside), None)
        event = None if number is None else self.events[number]
        if number is None or event is None or [math.prod(o.shape) for o in event.outputs] != [result.numel()]:
            return False
        others = tuple(read for read in passed.reads if read.event != number)
        if any(read.event > number for read in others):  # another product, or something made since
            return False
        before: Tensor = passed.args[0]
        if result.dtype.itemsize > before.dtype.itemsize:  # a gradient goes to its weight's format
            return False
        known = self._errors.get(number)
        if error is not None:
            share = torch.linalg.vector_norm(flat_fp64(before)) / torch.linalg.vector_norm(flat_fp64(result))
            self._errors[number] = error if known is None else torch.hypot(known * share if others else known, error)
        row, output = len(self.fingerprints), self.fingerprints.add(result)
        ended = (replace(output, shape=event.outputs[0].shape),)
        self.events[number] = replace(event, outputs=ended, row=row, reads=(*event.reads, *others))
        self._makers.put(result, (number, 0))
        return True

    # --- FP64 --------------------------------------------------------------------------------------------------------------------

    def _compare(self, passed: _Passed, results: Sequence[Tensor]) -> Tensor | None:
        """Return the relative error of the results; mirror their errors if that is wanted."""
        if not all(has_fp64(t.device) for t in results):
            return None
        exact = recomputed(passed.func, *passed.kept, lambda t: at_least(t, FP64.dtype), least=FP64.dtype)
        if exact is None or [t.shape for t in exact] != [t.shape for t in results]:
            return None
        worst: Tensor | None = None
        for wide, narrow in zip(exact, results, strict=True):
            if not narrow.is_floating_point() or not wide.is_floating_point() or narrow.dtype == FP64.dtype:
                continue
            relative = self._relative_error(wide, narrow)
            worst = relative if worst is None else torch.maximum(worst, relative)
        return worst

    def _relative_error(self, exact: Tensor, result: Tensor) -> Tensor:
        if cpu.takes_values(result):
            self._num_mirrored += 1
            seed = (_SEED << 32) + self._num_mirrored if self._mirrored else None
            apart, whole = cpu.errors(result, exact, seed=seed)
            return torch.tensor(apart, dtype=FP64.dtype).div_(whole).sqrt_()
        wide = flat_fp64(exact)
        relative: Tensor = torch.linalg.vector_norm(flat_fp64(result) - wide) / torch.linalg.vector_norm(wide)
        if self._mirrored and relative.item() != 0:
            self._mirror(exact, result)
        return relative

    def _mirror(self, exact: Tensor, result: Tensor) -> None:
        generator = self._generators.get(result.device)
        if generator is None:
            generator = self._generators[result.device] = torch.Generator(result.device).manual_seed(_SEED)
        drawn = torch.rand(
            result.shape, generator=generator, device=result.device
        )  # one draw for both: below the share, and where in it
        opposite = 2 * exact - result.double()
        # Rounding to nearest would return most results to where they were: an error of a quarter of a unit mirrors into half of one.
        unit = torch.finfo(result.dtype).eps * torch.frexp(opposite.abs())[1].sub_(1).double().exp2_()
        dither = drawn.div(_SHARE).frac_().sub_(0.5) * unit
        opposite = (opposite + dither * (exact != result)).to(result.dtype)
        result.copy_(torch.where((drawn < _SHARE) & opposite.isfinite(), opposite, result))


def _shown(func: Any, results: list[Tensor]) -> list[Tensor]:
    """Return the results that a script could see: no workspace, whose unused bytes are whatever lay in memory."""
    if func.overloadpacket.__name__.startswith("nll_loss"):  # the second one is the sum of the weights
        return results[:1]
    computes = any(t.is_floating_point() for t in results)
    return [t for t in results if not computes or t.dtype is not torch.uint8]


def _is_part(tensor: Tensor) -> bool:
    """Return whether a tensor covers less than its storage."""
    known = storage(tensor)
    return known is not None and known.nbytes() > tensor.numel() * tensor.itemsize


def _settings(values: Iterable[Any]) -> Iterable[str]:
    """Return the arguments that are not tensors, as texts."""
    for value in values:
        if isinstance(value, (list, tuple)):
            if value and not isinstance(value[0], Tensor):
                yield f"[{', '.join(_settings(value))}]"
        elif isinstance(value, _SETTINGS):
            yield repr(value).removeprefix("torch.")


def optimizer_settings(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings of an optimizer's group, by name."""
    found = []
    for name, value in sorted(group.items()):
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if name not in ("params", "initial_lr") and isinstance(number, (int, float, bool, tuple, type(None))):
            found.append(f"{name}={number!r}")
    return tuple(found)
