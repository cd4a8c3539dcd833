"""Check the operations of the counted step, or of audited ones, for numbers that a 16-bit format cannot tell apart.

A dispatch mode sees every operation of such a step. In the forward pass it checks those that the script or a library calls, and of
those that functions of torch call, bounds and small terms: the default eps of ``F.normalize`` is 0 in FP16. Most checks need formats and
Python numbers only. Where values decide, the device computes a few numbers, which are read at the end of the run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mezzo.engine.casts.conversion import HALF
from mezzo.formats import FP32, FP64, Format, format_of
from mezzo.observe.lint.misuse_log import MisuseLog
from mezzo.observe.source_lines import caller, is_of_torch, running_line
from mezzo.observe.tensors import readable, storage, storage_of

if TYPE_CHECKING:
    from mezzo.observe.tracer import InspectOperation

_INTEGERS = (torch.int32, torch.int64)
"""Wider than pixels and samples of sound, which are numbers and no labels."""
_BOUNDS = ("clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "maximum", "minimum")
_ADDITIONS = ("add", "add_", "sub", "sub_")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "mv", "addmv", "dot")
_MAX_CHECKED = 2**20
_MAX_PENDING = 128
_MIN_ANGLES = 16
_STILL = 0.25
"""Share of addends that a cumulative sum has to lose to be reported."""
_BLURRED_RADIANS = 0.5
"""Angles are reported if neighbouring numbers of their format are at least this far apart."""


class _Pending(NamedTuple):
    """A finding that depends on values: it is reported if ``judge`` returns a detail for them."""

    code: str
    values: Tensor
    judge: Callable[[list[float]], str]
    line: str
    step: int
    result: torch.UntypedStorage | None
    """The memory of a cast integer, which is no finding if it only divides, or of a sum, which is none if it is also multiplied."""


class _Rounded(NamedTuple):
    """Numbers that a cast to 16 bits rounded, or products of them."""

    memory: torch.UntypedStorage
    """Kept, so that its address is not used again."""
    form: Format
    changed: Tensor
    """Whether the cast changed any of them."""
    line: str
    """The line of the cast."""


@dataclass
class SeenProducts:
    """The formats of the inspected step."""

    step: int
    first: str
    """The operation of the first product."""
    formats: set[torch.dtype]
    """The formats of all results, not only of products."""


class CheckedOperations:
    """The checked operations of a run."""

    def __init__(self, log: MisuseLog) -> None:
        self._log = log
        self._pending: list[_Pending] = []
        self._created: set[int] = set()
        """The addresses of the 16-bit results of the step: any other 16-bit tensor is older than the step."""
        self._not_totals: set[int] = set()
        """The addresses of tensors that the step multiplies or overwrites, so they are no sums."""
        self._reported: set[tuple[str, str]] = set()
        """The codes and lines that were reported: the next forward pass runs under the mode, too."""
        self._step = 0
        self._results: set[torch.dtype] = set()
        self.products: SeenProducts | None = None
        """What the last inspected step computed in; None without a product."""
        self._rounded: dict[int, _Rounded] = {}
        """Untrained numbers that a cast to 16 bits rounded, and their products, by the address of their memory."""
        self._checks: dict[str, Callable[[str, Sequence[Any], Any], None]] = {
            **dict.fromkeys(_ADDITIONS, self._added),
            **dict.fromkeys(_BOUNDS, self._bounded),
            **dict.fromkeys(("_to_copy", "copy_"), self._copied),
            **dict.fromkeys(("mul", "mm", "bmm"), self._multiplied),
            **dict.fromkeys(("div", "div_"), self._divided),
            **dict.fromkeys(("arange", "linspace"), self._counted),
            **dict.fromkeys(("sin", "cos", "polar"), self._turned),
            **dict.fromkeys(("cumsum", "cumsum_"), self._summed),
            **dict.fromkeys(("mul_", "lerp_", "zero_", "fill_"), self._rewritten),
        }

    def mode(self, *, step: int, in_step: Callable[[], bool]) -> TorchDispatchMode:
        """Return a mode that checks the operations of step number ``step``; ``in_step`` returns whether an optimizer is stepping."""
        self.begin(step)
        return _Mode(self.inspect, in_step)

    def begin(self, step: int) -> None:
        """Begin to check step number ``step``."""
        self._step = step
        self._rounded = {}
        self._created, self._not_totals = set(), set()
        self._results, self.products = set(), None

    def inspect(self, func: Any, args: Sequence[Any], result: Any, frame: FrameType | None) -> None:
        """Check one operation outside backward passes and optimizers' steps, which the code of ``frame`` called."""
        name = func.overloadpacket.__name__
        if isinstance(result, Tensor):
            self._results.add(result.dtype)
            if self.products is None and (name in _PRODUCTS or "attention" in name):
                self.products = SeenProducts(self._step, name, self._results)
        check = self._checks.get(name)
        if check is not None and args and caller(frame) == "script":
            if not is_of_torch(frame):
                check(name, args, result)
            elif name in (*_ADDITIONS, *_BOUNDS):
                self._check_term(name, args, result)
        if _half_of(result) is not None and not name.endswith("_"):
            self._created.add(storage_of(result))

    def report(self) -> None:
        """Read the values that decide, and report."""
        pending, self._pending, self._rounded = self._pending, [], {}
        for one in pending:
            detail = one.judge([float(v) for v in one.values.tolist()])
            if detail:
                self._report(one.code, detail, one.line, one.step)

    # --- bounds and small terms --------------------------------------------------------------------------------------------------

    def _added(self, name: str, args: Sequence[Any], result: Any) -> None:
        form, term = _half_of(result), args[1] if len(args) > 1 else None
        if form is not None and name == "add_" and isinstance(term, Tensor):
            self._totalled(result, term, form)
        elif name in ("add", "sub"):
            self._cast(name, args, result)
        self._check_term(name, args, result)

    def _bounded(self, name: str, args: Sequence[Any], result: Any) -> None:
        self._check_term(name, args, result)

    def _check_term(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Check the numbers that are added to 16-bit values, or limit them."""
        form = _half_of(result)
        judge = _term if name in _ADDITIONS else _bound
        for number in args[1:3] if form is not None else ():
            if type(number) is float:
                detail = judge(number, form)  # type: ignore[arg-type]
                if detail:
                    self._add("A620", detail)
            elif _is_number(number) and number.dtype not in HALF:
                with _disable_current_modes():
                    values = number.detach().clone()[None]
                self._wait("A620", values, lambda v: judge(v[0], form))  # type: ignore[arg-type]

    # --- running sums ------------------------------------------------------------------------------------------------------------

    def _totalled(self, total: Tensor, addend: Tensor, form: Format) -> None:
        """Check a sum of numbers that are not negative, in a 16-bit tensor that is older than the step."""
        memory = storage(total)
        known = self._created | self._not_totals
        if memory is None or memory.data_ptr() in known or total.requires_grad or not readable(addend):
            return
        if not 0 < addend.numel() <= _MAX_CHECKED or total.numel() > _MAX_CHECKED:
            return
        with _disable_current_modes():
            wide = addend.detach().float()
            before = total.detach().float() - wide
            values = torch.stack([wide.amin(), wide.amax(), before.amin(), before.amax()])
        self._wait("A625", values, lambda v: _total(v, form), memory)

    def _rewritten(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Leave out a tensor that is multiplied or overwritten, before it is added to or afterwards."""
        if _half_of(result) is not None:
            self._not_totals.add(storage_of(result))
            self._leave_out(storage_of(result))

    def _summed(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Check a cumulative sum: where an addend that is not 0 leaves it as it is."""
        form, addends = _half_of(result), args[0]
        if form is None or name.endswith("_") or not isinstance(addends, Tensor) or not readable(addends):
            return
        dim = args[1] if len(args) > 1 and type(args[1]) is int else 0
        count = result.shape[dim] if result.dim() else 0
        if count < 2 or result.numel() > _MAX_CHECKED:
            return
        with _disable_current_modes():
            sums, added = result.detach(), addends.detach().narrow(dim, 1, count - 1) != 0
            still = (sums.narrow(dim, 1, count - 1) == sums.narrow(dim, 0, count - 1)) & added
            values = torch.stack([still.sum().float(), added.sum().float(), sums.abs().amax().float()])
        self._wait("A625", values, lambda v: _cumulative(v, form))

    # --- integers ----------------------------------------------------------------------------------------------------------------

    def _cast(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Check integers that are cast to 16 bits, or meet 16-bit numbers in an operation."""
        form, source = _half_of(result), args[1] if name == "copy_" and len(args) > 1 else args[0]
        meets = name in ("mul", "add", "sub")
        if meets and len(args) > 1 and isinstance(source, Tensor) and source.dtype not in _INTEGERS:
            source = args[1]
        if form is None or not isinstance(source, Tensor) or source.dtype not in _INTEGERS:
            return
        if meets and source.dim() == 0:  # computed in the format of the other operand, or wider
            return
        if not readable(source) or not 1 < source.numel() <= _MAX_CHECKED:
            return
        with _disable_current_modes():
            flat = source.detach().flatten()
            back, exact = flat.to(result.dtype).float(), flat.float()
            first = (back != exact).int().argmax()
            values = torch.stack([exact.take(first), back.take(first)])
        memory = None if meets else storage(result)
        self._wait("A621", values, lambda v: _integers(v, form), memory)

    def _divided(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Leave out integers that divide: a count is as exact as its quotient."""
        self._follow(args[:1], result)
        divisor = storage(args[1]) if len(args) > 1 and isinstance(args[1], Tensor) else None
        if divisor is not None:
            self._leave_out(divisor.data_ptr())

    def _counted(self, name: str, args: Sequence[Any], result: Any) -> None:
        form = _half_of(result)
        numbers = [float(a) for a in args if type(a) in (int, float)]
        if form is None or result.numel() < 2 or len(numbers) != len(args):
            return
        start, end = (0.0, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
        step = (end - start) / (result.numel() - 1)
        if name == "arange":
            step = numbers[2] if len(numbers) > 2 else 1.0
            end = start + step * (result.numel() - 1)
        farthest = max(abs(start), abs(end))
        if _spacing(farthest, form) > abs(step):
            detail = (
                f"{name} counts to {farthest:g} in steps of {abs(step):g} in {form.name.upper()}, whose numbers are "
            )
            self._add("A621", f"{detail}{_spacing(farthest, form):g} apart there: neighbours are equal")

    # --- angles ------------------------------------------------------------------------------------------------------------------

    def _copied(self, name: str, args: Sequence[Any], result: Any) -> None:
        self._cast(name, args, result)
        source = args[1] if name == "copy_" and len(args) > 1 else args[0]
        form = _half_of(result)
        if form is None or not isinstance(source, Tensor) or source.dtype not in (FP32.dtype, FP64.dtype):
            self._follow([source], result)
        elif readable(source) and not source.requires_grad and 1 < source.numel() <= _MAX_CHECKED:
            with _disable_current_modes():
                exact = source.detach()  # the result may be on another device
                changed = (exact.to(result.dtype) != exact).any().float()
            self._keep(result, form, changed, running_line())

    def _multiplied(self, name: str, args: Sequence[Any], result: Any) -> None:
        if name == "mul":
            self._cast(name, args, result)
        if _half_of(result) is None:  # the values of 16-bit angles tell
            self._follow(args, result)

    def _follow(self, sources: Sequence[Any], result: Any) -> None:
        """Keep a result that is computed from rounded numbers, and not from trained ones."""
        found = next((one for one in map(self._rounded_of, sources) if one is not None), None)
        if found is not None and isinstance(result, Tensor) and not result.requires_grad:
            self._keep(result, found.form, found.changed, found.line)

    def _keep(self, result: Tensor, form: Format, changed: Tensor, line: str) -> None:
        memory = storage(result)
        if memory is not None and len(self._rounded) < _MAX_PENDING and result.numel() <= _MAX_CHECKED:
            self._rounded[memory.data_ptr()] = _Rounded(memory, form, changed, line)

    def _rounded_of(self, source: Any) -> _Rounded | None:
        memory = storage(source) if self._rounded and isinstance(source, Tensor) else None
        return None if memory is None else self._rounded.get(memory.data_ptr())

    def _turned(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Check angles of which neighbours are far apart: those whose values all are 16-bit numbers, and products of rounded ones."""
        angles = args[1] if name == "polar" and len(args) > 1 else args[0]
        if not isinstance(angles, Tensor) or not readable(angles):
            return
        rounded = self._rounded_of(angles)
        if angles.dtype not in (*HALF, FP32.dtype, FP64.dtype) or not _MIN_ANGLES <= angles.numel() <= _MAX_CHECKED:
            return
        dtypes = [angles.dtype] if angles.dtype in HALF else list(HALF)
        formats = [form for dtype in dtypes if (form := format_of(dtype)) is not None]
        with _disable_current_modes():
            wide = FP64.dtype if angles.dtype is FP64.dtype else FP32.dtype
            exact = angles.detach().to(wide)
            fits = [(exact.to(form.dtype).to(wide) == exact).all().to(wide) for form in formats]
            largest, whole = exact.abs().amax(), (exact == exact.round()).all().to(wide)
            values = torch.stack([largest, whole, *fits])
            of_products = None if rounded is None else torch.cat([rounded.changed.to(values)[None], values])
        self._wait("A623", values, lambda v: _angles(v, formats))
        if rounded is not None and of_products is not None:
            self._wait("A623", of_products, lambda v: _products(v, rounded.form, formats), line=rounded.line)

    # --- findings ----------------------------------------------------------------------------------------------------------------

    def _add(self, code: str, detail: str) -> None:
        self._report(code, detail, running_line(), self._step)

    def _report(self, code: str, detail: str, line: str, step: int) -> None:
        if (code, line) not in self._reported:
            self._reported.add((code, line))
            self._log.add(code, detail, line=line, step=step)

    def _leave_out(self, address: int) -> None:
        self._pending = [p for p in self._pending if p.result is None or p.result.data_ptr() != address]

    def _wait(
        self,
        code: str,
        values: Tensor,
        judge: Callable[[list[float]], str],
        result: torch.UntypedStorage | None = None,
        line: str = "",
    ) -> None:
        if len(self._pending) < _MAX_PENDING:
            self._pending.append(_Pending(code, values, judge, line or running_line(), self._step, result))


class _Mode(TorchDispatchMode):
    """A mode that passes the operations of forward passes on."""

    def __init__(self, inspect: InspectOperation, in_step: Callable[[], bool]) -> None:
        super().__init__()
        self._inspect, self._in_step = inspect, in_step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation and check it."""
        result = func(*args, **(kwargs or {}))
        if torch._C._current_autograd_node() is None and not self._in_step():
            self._inspect(func, args, result, sys._getframe(1))
        return result

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allow torch.compile under this mode."""
        return True


def _half_of(result: Any) -> Format | None:
    """Return the format of a 16-bit result; None for any other."""
    return format_of(result.dtype) if isinstance(result, Tensor) and result.dtype in HALF else None


def _rounded(value: float, form: Format) -> float:
    return torch.tensor(value, dtype=FP64.dtype).to(form.dtype).item()


def _is_number(value: Any) -> bool:
    """Return whether a value is an untrained number in a tensor."""
    return isinstance(value, Tensor) and not value.dim() and not value.requires_grad and readable(value)


def _term(term: float, form: Format) -> str:
    name = form.name.upper()
    return (
        f"{term:g} is added to {name} values, and rounds to 0 in that format"
        if term and not _rounded(term, form)
        else ""
    )


def _bound(bound: float, form: Format) -> str:
    rounded = _rounded(bound, form)
    if not math.isfinite(bound) or rounded == bound or rounded not in (-1.0, 0.0, 1.0):
        return ""
    return f"a bound of {bound!r} on {form.name.upper()} values is {rounded:g} in that format"


def _spacing(value: float, form: Format) -> float:
    """Return the distance between the numbers of a format near ``value``."""
    return math.ldexp(form.eps, math.frexp(max(value, form.min_normal))[1] - 1)


def _integers(values: list[float], form: Format) -> str:
    before, after = values
    name = form.name.upper()
    return "" if before == after else f"the integer {before:.0f} becomes {after:.0f} in {name}"


def _total(values: list[float], form: Format) -> str:
    least, largest, least_before, most_before = values
    if least < 0 or not 0 < largest < math.inf or least_before < 0 or not most_before > 0:
        return ""
    count = round(4 / form.eps)
    return (
        f"numbers up to {largest:.3g} are added to a {form.name.upper()} tensor kept from earlier steps: "
        f"once it is {count} times as large as one of them, adding it changes nothing"
    )


def _cumulative(values: list[float], form: Format) -> str:
    still, added, largest = values
    if not math.isfinite(largest) or not added or still < _STILL * added:
        return ""
    name = form.name.upper()
    return (
        f"{still / added:.0%} of the addends of a cumulative sum in {name} do not change it; it reaches {largest:.3g}"
    )


def _angles(values: list[float], formats: list[Format]) -> str:
    """Return what is wrong with angles of which the largest, whether all are integers, and whether each format holds them are known."""
    largest, whole, *fits = values
    for form, fit in zip(formats, fits, strict=True) if math.isfinite(largest) else ():
        spacing = _spacing(largest, form)
        if fit and spacing >= _BLURRED_RADIANS and not (whole and spacing <= 1):
            return (
                f"angles up to {largest:g} are {form.name.upper()} numbers, which are {spacing:g} radians apart there"
            )
    return ""


def _products(values: list[float], form: Format, formats: list[Format]) -> str:
    """Return what is wrong with angles that are products of numbers of ``form``, if rounding changed these."""
    changed, largest, *_ = values
    spacing = _spacing(largest, form) if math.isfinite(largest) else 0.0
    if not changed or spacing < _BLURRED_RADIANS or _angles(values[1:], formats):
        return ""
    return f"angles up to {largest:g} are products of numbers rounded to {form.name.upper()}, and as uncertain: by {spacing:g} radians"
