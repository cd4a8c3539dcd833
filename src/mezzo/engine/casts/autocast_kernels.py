"""Replace the kernels of ``torch.autocast``, which decide below Python and above autograd how an operation is cast.

Every operation passes through torch's dispatcher. While autocast is on for a device, an operation that has a kernel at that
device's autocast key runs this kernel first; it casts the operands and calls the operation again below autocast.
torch registers one fixed list of kernels per device. Mezzo registers a Python kernel over each of them. It finds the
*cast table* of the open region and casts by the table's rules. With no region open it calls torch's own kernel, so plain
``torch.autocast`` works as before.

At this key Mezzo sees exactly the operations that CUDA's autocast sees: the parts of composite operations (``square`` calls
``pow``, ``trapezoid`` calls ``sum``), TorchScript, ``torch.func`` and everything that ``torch.compile`` traces.

Autograd's threads, which recompute checkpointed forward passes, and the guards of compiled code both depend on
autocast's state. So an open table encodes its number there: autocast is turned on for two device types without tensors,
with two dtypes as the digits of the number. torch copies this state into autograd's threads and recompiles
when it changes. ``compiling`` has the compiler's other settings.

Costs: about 5 us for each listed operation, nothing for others. Registered kernels stay for the life of the process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import (  # torch's own, also where a launcher has replaced what a script finds under these names
    Tensor,
    get_autocast_dtype,
    is_autocast_enabled,
    nn,
    set_autocast_dtype,
    set_autocast_enabled,
)

from mezzo.engine.casts import registration
from mezzo.engine.casts.conversion import HALF
from mezzo.engine.casts.registration import Operator
from mezzo.engine.matrix_units.emulation import Emulation
from mezzo.formats import FP32, Format
from mezzo.oplists import Precision

_FP32 = FP32.dtype
_CASTABLE = (*HALF, _FP32)  # FP64 is never cast: code that asks for it needs it


@dataclass(frozen=True)
class CastRule:
    """The rule for calls of one operation."""

    precision: Precision
    emulation: Emulation | None = None
    """Computes the operation on 16-bit operands in its place."""
    keeps_weight: bool = False
    """Whether the call is a linear layer whose emulation takes the weight uncast."""
    dtypes: frozenset[torch.dtype] | None = None
    """The rule is for calls with an operand of one of these dtypes; None if for all calls."""


class CastTable:
    """A policy's rules for the operations on one kind of device."""

    def __init__(
        self,
        rules: Mapping[Operator, CastRule],
        *,
        device_type: str,
        low: Format,
        casts_operands: bool = True,
        keeps_kernels: bool = False,
    ) -> None:
        """Register the kernels that the table needs.

        Args:
            rules: the rule for each operation.
            device_type: torch's name of the kind of device.
            low: the format that operations of the lower precision compute in.
            casts_operands: whether operands are cast; otherwise operations on 16-bit operands are emulated and nothing is cast.
            keeps_kernels: whether torch's own kernels run for operations without a rule; otherwise these are not cast.
        """
        self.rules = dict(rules)
        self.device_type, self.low, self._low = device_type, low, low.dtype
        self.casts_operands, self.keeps_kernels = casts_operands, keeps_kernels
        self.number = _number_of(self)
        registration.register(device_type, self.rules, open_table, include_native=not keeps_kernels)
        if any(rule.emulation is not None for rule in self.rules.values()):
            registration.keep_roundings()

    def rule(self, op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CastRule | None:
        """Return the rule for a call of ``op``; None if it has none, and inside one of our kernels."""
        rule = None if _LOCAL.casting else self.rules.get(op)
        if rule is None or rule.dtypes is None:
            return rule
        return rule if any(t.dtype in rule.dtypes for t in flat_tensors((*args, *kwargs.values()))) else None

    def dispatch(self, op: Operator, rule: CastRule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run ``op`` under ``rule``, or unchanged in a backward pass."""
        _LOCAL.casting = True
        try:
            return registration.call_op(op, args, kwargs) if _is_backward() else self.run(op, rule, args, kwargs)
        finally:
            _LOCAL.casting = False

    def run(self, op: Operator, rule: CastRule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run ``op`` below autocast under ``rule``."""
        if rule.keeps_weight and self.casts_operands and self._casts(args):
            assert rule.emulation is not None
            x, weight, *bias = args
            return rule.emulation(self._lower(x), weight, *map(self._lower, bias))
        if rule.precision == "lower":
            if self.casts_operands:
                args, kwargs = self._lower(args), {k: self._lower(v) for k, v in kwargs.items()}
            if rule.emulation is not None and _all_half((*args, *kwargs.values())):
                return rule.emulation(*args, **kwargs)
        elif rule.precision == "follow" and rule.emulation is not None:
            return rule.emulation(*args, **kwargs)
        elif rule.precision == "fp32":
            if kwargs.get("dtype") is None:  # an explicit dtype (softmax, sum, ...) is the author's own choice
                args, kwargs = self._cast(args, _FP32), self._cast(kwargs, _FP32)
        elif rule.precision == "widest" and len(_dtypes((*args, *kwargs.values()))) > 1:
            args, kwargs = self._cast(args, _FP32), self._cast(kwargs, _FP32)
        return registration.call_op(op, args, kwargs)

    def cast_weight(self, weight: Tensor) -> Tensor:
        """Return a weight in the lower format; each weight is cast once while a region is open."""
        # A thread without an open region keeps no casts.
        return _LOCAL.casts.of(weight, self._low) if _LOCAL.open.depth else weight.to(self._low)

    def _casts(self, operands: Sequence[Any]) -> bool:
        return all(t.dtype in _CASTABLE and t.device.type == self.device_type for t in operands if t is not None)

    def _lower(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            low = self._low
            if value.dtype is low or value.dtype not in _CASTABLE or value.device.type != self.device_type:
                return value
            if value.requires_grad and value.is_leaf and type(value) in _PLAIN and value.dtype is _FP32:
                return self.cast_weight(value)
            return value.to(low)
        if isinstance(value, (list, tuple)):
            return type(value)([self._lower(v) for v in value])
        return value

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, Tensor):
            casts = value.dtype in HALF and value.dtype is not dtype and value.device.type == self.device_type
            return value.to(dtype) if casts else value
        if isinstance(value, (list, tuple)):
            return type(value)([self._cast(v, dtype) for v in value])
        if isinstance(value, dict):
            return {k: self._cast(v, dtype) for k, v in value.items()}
        return value


_PLAIN = (Tensor, nn.Parameter)  # not the fake tensors of tracing, whose casts have no values to keep


def flat_tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors in arguments, and in lists and tuples among them; quicker than a walk of all containers."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += flat_tensors(value)
    return tensors


def _all_half(values: Sequence[Any]) -> bool:
    dtypes = [t.dtype for t in flat_tensors(values) if t.is_floating_point()]
    return bool(dtypes) and all(dtype in HALF for dtype in dtypes)


def _dtypes(values: Sequence[Any]) -> set[torch.dtype]:
    return {t.dtype for t in flat_tensors(values) if t.dtype in _CASTABLE}


class WeightCasts:
    """Casts of weights, reused until a weight changes.

    Casts made with and without gradients are kept separately, so that validation does not cut the graph.
    """

    def __init__(self) -> None:
        # By id, whether gradients are recorded, and dtype. The entry keeps the weight alive: an id is unique among living objects only.
        self.kept: dict[tuple[int, bool, torch.dtype], tuple[Tensor, int, Tensor]] = {}

    def of(self, weight: Tensor, low: torch.dtype) -> Tensor:
        """Return ``weight`` cast to ``low``."""
        key, version = (id(weight), torch.is_grad_enabled(), low), weight._version
        kept = self.kept.get(key)
        if kept is None or kept[1] != version:
            kept = self.kept[key] = (weight, version, weight.to(low))
        return kept[2]

    def clear(self) -> None:
        """Drop all casts."""
        self.kept = {}

    def keys(self) -> set[tuple[int, bool, torch.dtype]]:
        """Return the keys of all casts."""
        return set(self.kept)

    def keep_only(self, keys: set[tuple[int, bool, torch.dtype]]) -> None:
        """Drop the casts whose keys are not in ``keys``."""
        self.kept = {key: kept for key, kept in self.kept.items() if key in keys}

    def items(self) -> dict[Tensor, Tensor]:
        """Return the casts by weight."""
        return {weight: cast for weight, _, cast in self.kept.values()}


class _Open(NamedTuple):
    """The innermost open region."""

    table: CastTable | None
    depth: int
    """Number of open regions, this one included."""
    nesting: int
    """Number of autocast contexts that were open when the region was opened, its own included."""
    node: Any
    """The node of the autograd graph in whose backward pass the region was opened."""


class _Local(threading.local):
    """A thread's state."""

    def __init__(self) -> None:
        self.open = _Open(None, 0, 0, None)  # one value: each access to a thread-local costs about 0.1 us
        self.casting = False
        """Whether one of our kernels is running: at each of its levels torch.func turns autocast on again for the operations inside."""
        self.casts = WeightCasts()
        """Kept until the outermost region ends."""


_LOCAL = _Local()
_MHA: Any = torch.backends.mha


class _FusedEncoders:
    """torch's fused kernel of encoder layers in evaluation, which reads the memory of operands that a table casts: off in regions.

    torch has one switch for all threads.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_regions = 0
        """Open regions with a table, of all threads."""
        self.enabled = True
        """Whether the kernel was on before."""


_FUSED = _FusedEncoders()


class AutocastRegion:
    """Autocast on or off for one kind of device, with a cast table or with torch's own lists; regions nest."""

    def __init__(self, table: CastTable | None, device_type: str, dtype: torch.dtype, *, enabled: bool) -> None:
        self._table, self._device_type, self._dtype, self._enabled = table, device_type, dtype, enabled

    def __enter__(self) -> None:
        """Set autocast's state and the table.

        It uses the state's functions, not ``torch.autocast``: that may be patched for the script, and costs 5 us more.
        """
        kind, table = self._device_type, self._table
        outer = _LOCAL.open
        before = get_autocast_dtype(kind)
        self._before = outer, is_autocast_enabled(kind), before
        if table is not outer.table:
            _encode(table)
        node = None if table is None else torch._C._current_autograd_node()  # only a table's operations need it
        inner = (table, outer.depth + 1, torch.autocast_increment_nesting(), node)
        _LOCAL.open = tuple.__new__(_Open, inner)  # _Open(...) would be a Python call
        if table is not None:
            with _FUSED.lock:
                if _FUSED.num_regions == 0:
                    _FUSED.enabled = _MHA.get_fastpath_enabled()
                    _MHA.set_fastpath_enabled(False)
                _FUSED.num_regions += 1
        set_autocast_enabled(kind, self._enabled)
        if before is not self._dtype:
            set_autocast_dtype(kind, self._dtype)

    def __exit__(self, *error: object) -> None:
        """Restore the previous state."""
        kind = self._device_type
        outer, enabled, dtype = self._before
        set_autocast_enabled(kind, enabled)
        set_autocast_dtype(kind, dtype)
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        if self._table is not outer.table:
            _encode(outer.table)
        _LOCAL.open = outer
        if self._table is not None:
            with _FUSED.lock:
                _FUSED.num_regions -= 1
                if _FUSED.num_regions == 0:
                    _MHA.set_fastpath_enabled(_FUSED.enabled)
        if outer.depth == 0 and _LOCAL.casts.kept:
            _LOCAL.casts.clear()


def weight_casts() -> WeightCasts:
    """Return the casts of weights that this thread's region keeps."""
    return _LOCAL.casts


def open_table() -> CastTable | None:
    """Return the table of the open region, also in autograd's threads."""
    return _LOCAL.open.table or _table_of_state()


def is_off_inside() -> bool:
    """Return whether a region is open in this thread and code inside it has turned autocast off again."""
    inner = _LOCAL.open
    if not inner.depth:
        return False
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > inner.nesting


_DIGITS = ("maia", "ipu")
"""Device types whose autocast state encodes the number of the open table: torch knows their names but has no tensors there."""
_DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
_VALUE = {dtype: value for value, dtype in enumerate(_DTYPES)}
_TABLES: list[CastTable] = []
_LOCK = threading.Lock()


def _number_of(table: CastTable) -> int:
    """Return the number of an equal table, or the next one."""
    content = (table.rules, table.device_type, table.low, table.casts_operands, table.keeps_kernels)
    with _LOCK:
        for number, other in enumerate(_TABLES):
            if content == (other.rules, other.device_type, other.low, other.casts_operands, other.keeps_kernels):
                return number
        if len(_TABLES) == len(_DTYPES) ** len(_DIGITS):  # over 2,000 policies: drop compiled code, number from 0 again
            _TABLES.clear()
            torch.compiler.reset()
        _TABLES.append(table)
        return len(_TABLES) - 1


def _encode(table: CastTable | None) -> None:
    """Encode a table's number in autocast's state, which autograd's threads inherit."""
    number = 0 if table is None else table.number
    for kind in _DIGITS:
        number, digit = divmod(number, len(_DTYPES))
        set_autocast_enabled(kind, table is not None)
        set_autocast_dtype(kind, _DTYPES[digit])


def _is_backward() -> bool:
    """Return whether an operation belongs to a backward pass rather than to a forward pass recomputed in it.

    A backward pass inside a region runs with autocast on, and none of its operations may be cast. A recomputed forward pass is cast;
    it opens autocast or a region of its own.
    """
    node = torch._C._current_autograd_node()
    if node is None or node is _LOCAL.open.node:
        return False
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() == _LOCAL.open.nesting


def _table_of_state() -> CastTable | None:
    if not is_autocast_enabled(_DIGITS[0]):
        return None
    number = 0
    for kind in reversed(_DIGITS):
        number = number * len(_DTYPES) + _VALUE[get_autocast_dtype(kind)]
    return _TABLES[number]
