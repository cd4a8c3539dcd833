"""Triton kernels for NVIDIA and AMD GPUs: all tensors of a group in one launch, by tables of addresses.

A program finds its chunk in a table, the tensor's memory in the table's rows of addresses, and the group's settings at its head;
``factor`` and ``found_inf`` are read on the device, and if ``found_inf`` is above 0 a program ends before it loads
anything else. The host only sends the table, through pinned memory, and only if the device has no equal one; a captured step sends
its tables once and afterwards only settings that changed.

Each kind of tensors (formats of weight, gradient, moments and master) has its own launch, because formats are
compiled in. Multiplications and additions are not fused, and roots and quotients are correctly rounded, for the reference's bits.

On a CPU these kernels run under Triton's interpreter (``TRITON_INTERPRET=1``), which is how their values are tested; for GPUs they
are compiled by tests that read the machine code, which needs no GPU. ``benchmarks/`` measures their speed.
"""

from __future__ import annotations

import contextlib
import functools
import math
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from mezzo.engine.kernels.exponent_bins import BINS, CUTS
from mezzo.engine.kernels.gpu_kernels import (
    EXACT,
    HEAD,
    TYPES,
    adamw_kernel,
    begin_kernel,
    exponent_kernel,
    sgd_kernel,
    square_kernel,
)
from mezzo.engine.kernels.reference import AdamWSettings, Batch, SGDSettings
from mezzo.engine.kernels.storage import dense
from mezzo.errors import SessionError
from mezzo.formats import BF16, FP64

PROGRAM_ELEMENTS = 4096
"""Elements that a program works on: 64 to 120 KB of memory traffic, enough to hide the table look-ups."""
SUMMING = {"TILE": 2048, "FEW": 8, "num_warps": 4, "enable_fp_fusion": True}
"""A tile is 16 elements per thread: 32 to 64 bytes in flight. FP32 adds up 16 squares (two tiles of 8) before FP64 does: at most 9
roundings, 6e-7 of the sum."""
UPDATING = {"TILE": 256, "num_warps": 2, "enable_fp_fusion": False}
"""A tile is 4 elements per thread: up to 56 bytes in flight, in 32 to 64 registers, so a thousand threads share a processor."""
_JOINING = {"maxnreg": 80} if torch.version.hip is None else {}
"""Split masters: compilers for older and newer GPUs than Hopper would use 96 registers needlessly."""
_UNPACKING = {"num_warps": 4}
"""8-bit moments need more registers per number: two elements per thread."""
_SMALL_NUMBERS = (
    {"enable_reflect_ftz": False} if torch.version.hip is None and isinstance(begin_kernel, JITFunction) else {}
)
"""Keeps CUDA's library from flushing subnormal numbers to 0; only NVIDIA GPUs have the option, not the interpreter."""
_BEGINNING = {"TILE": 128, "num_warps": 4, "enable_fp_fusion": False, **_SMALL_NUMBERS}
_NO_MASTER, _MASTER, _SPLIT, _STOCHASTIC = 0, 1, 2, 3
_EXACT, _ROUNDED = EXACT.value, 2 * (HEAD.value - EXACT.value)
_HEAD = struct.Struct(f"{_EXACT}d{_ROUNDED}f")
"""A table's head: FP64 settings, which only one program per tensor needs, and FP32 ones."""

Settings = AdamWSettings | SGDSettings


@functools.lru_cache(maxsize=256)
def _chunks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return (tensor, start) of every chunk of tensors of these sizes, on the device.

    Cached: 110 M parameters have 27,000 chunks, and listing them each time would take longer than the update.
    """
    numbers = [
        number for i, size in enumerate(sizes) for start in range(0, size, PROGRAM_ELEMENTS) for number in (i, start)
    ]
    chunks = torch.empty(len(numbers), dtype=torch.int64, device=device)
    _send(numbers, chunks)
    return chunks


class LaunchTable:
    """The table that a launch reads on the device: settings, then rows of sizes, numbers, corrections and addresses; all int64."""

    def __init__(
        self,
        rows: tuple[int, ...],
        sizes: tuple[int, ...],
        device: torch.device,
        *,
        settings: Settings | None = None,
        memory: Tensor | None = None,
    ) -> None:
        """Create the table in new memory, or in the memory of another table of this length, without sending it."""
        self.count, self.settings = len(sizes), settings
        self.chunks = _chunks(sizes, device)
        self.programs = len(self.chunks) // 2
        self._head, self._rows = _head(settings), rows
        length = len(self._head) + len(rows)
        self.memory = torch.empty(length, dtype=torch.int64, device=device) if memory is None else memory
        assert len(self.memory) == length

    def send(self) -> None:
        """Send everything to the device, without waiting for it."""
        _send((*self._head, *self._rows), self.memory)

    def set(self, settings: Settings | None) -> None:
        """Set the settings, and send them if they changed."""
        self.settings = settings
        head = _head(settings)
        if head != self._head:
            self._head = head
            _send(head, self.memory[: len(head)])

    def refresh(self) -> None:
        """Set the group's current settings.

        Raises:
            SessionError: a setting changed that is compiled into the launch.
        """
        if self.settings is None or self.settings.now is None:
            return
        current = self.settings.now()
        if current == self.settings:
            return
        if _compiled_in(current) != _compiled_in(self.settings):
            raise SessionError(
                f"settings of a captured step changed from {self.settings} to {current}; allowed: other numbers, but not "
                "amsgrad, nesterov, momentum from or to 0, or beta1 across 0.5",
                hint="capture the step again after such a change",
            )
        self.set(current)


_recorded: list[LaunchTable] | None = None
_memories: Iterator[Tensor] | None = None


@contextlib.contextmanager
def recording(rehearsed: Sequence[LaunchTable] = ()) -> Iterator[list[LaunchTable]]:
    """Collect the tables of the launches inside.

    Args:
        rehearsed: tables of the same launches, collected before. With them the launches are captured: their tables are laid out in
            the memory of these, which no graph's pool owns, and the caller sends them afterwards. A captured copy
            would be replayed, from host memory that has long been reused.
    """
    global _recorded, _memories
    _recorded, _memories = [], iter([table.memory for table in rehearsed]) if rehearsed else None
    try:
        yield _recorded
    finally:
        _recorded = _memories = None


class LaunchTables:
    """The most recent tables of a launch, by their contents: allocators often reuse an earlier step's addresses for gradients."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tables: dict[tuple[int, ...], LaunchTable] = {}

    def sent(self, rows: tuple[int, ...], sizes: tuple[int, ...], device: torch.device) -> LaunchTable:
        """Return a table of these rows that was sent to the device."""
        table = self._tables.pop(rows, None)
        if table is None:
            table = LaunchTable(rows, sizes, device)
            table.send()
            while len(self._tables) >= self._most:
                del self._tables[next(iter(self._tables))]
        self._tables[rows] = table  # the most recently used table is the last to be dropped
        return table


def table_of(
    lists: Sequence[Sequence[Tensor]],
    *,
    kept: LaunchTables,
    numbers: Sequence[int] = (),
    settings: Settings | None = None,
) -> LaunchTable:
    """Return a table that was sent to the device; one of ``kept`` if an earlier step had the same addresses."""
    device, sizes = lists[0][0].device, tuple([t.numel() for t in lists[0]])
    zeros = (0,) * len(sizes)
    rows = (*sizes, *(numbers or zeros), *zeros, *[t.data_ptr() for tensors in lists for t in tensors])
    if _recorded is None:
        table = kept.sent(rows, sizes, device)
        table.set(settings)
        return table
    # A captured step's tables are its own: an eager step in between would leave other gradients' addresses there.
    memory = None if _memories is None else next(_memories)
    table = LaunchTable(rows, sizes, device, settings=settings, memory=memory)
    if memory is None:
        table.send()
    _recorded.append(table)
    return table


def _send(numbers: Sequence[int], to: Tensor) -> None:
    packed = torch.frombuffer(array("q", numbers), dtype=torch.int64)
    # Through pinned memory: a pageable copy would make the host wait.
    to.copy_(packed.pin_memory() if to.is_cuda else packed, non_blocking=True)


_KEPT = 4
"""Most tables of a launch: allocators alternate between a few sets of addresses for gradients."""
_NORMS = LaunchTables(32)
"""The tables of norms: a launch for each format of gradients and set of optimizers."""


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context whose launches run on ``device``: Triton uses the current device, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Return the sum of all squares in FP64, to 1e-6 of it: not finite exactly when a gradient is not."""
    kept = [g for g in map(dense, gradients) if g.numel()]  # an empty table cannot be sent
    if not kept:
        return torch.zeros((), dtype=FP64.dtype, device=gradients[0].device)
    kinds = dict.fromkeys((g.device, g.dtype) for g in kept)  # a launch reads the memory of one device
    parts = [_squares([g for g in kept if g.dtype is dtype and g.device == device]) for device, dtype in kinds]
    return torch.stack([part.to(parts[0].device) for part in parts]).sum()


def _squares(gradients: list[Tensor]) -> Tensor:
    """Return the sum of the squares of gradients of one format on one device."""
    table = table_of([gradients], kept=_NORMS)
    device = table.memory.device
    partials = torch.empty(table.programs, dtype=FP64.dtype, device=device)
    kind = {"TYPE": TYPES[gradients[0].dtype], "BLOCK": PROGRAM_ELEMENTS}
    with on(device):
        square_kernel[(table.programs,)](table.memory, table.chunks, partials, table.count, **kind, **SUMMING)
    return partials.sum()


def try_out(device: torch.device) -> None:
    """Reduce and update one number: a Triton that cannot compile raises its compiler's error."""
    one = torch.ones((), device=device)
    weight, mean, square = torch.ones(3, 1, device=device).unbind()
    sum_of_squares([weight])
    moments = {"exp_avg": [mean], "exp_avg_sq": [square]}
    batch = Batch(weights=[weight], gradients=[square.clone()], masters=[weight], steps=[one.clone()], moments=moments)
    settings = AdamWSettings(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, amsgrad=False, maximize=False)
    adamw(batch, settings, one, torch.zeros_like(one))


def adamw(batch: Batch, settings: AdamWSettings, factor: Tensor, found_inf: Tensor) -> None:
    """Update like ``reference.adamw``, in one pass."""
    moments = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if settings.amsgrad else ()))
    amsgrad, mostly_old = _compiled_in(settings)
    _launch(adamw_kernel, batch, moments, settings, factor, found_inf, AMSGRAD=amsgrad, MOSTLY_OLD=mostly_old)


def sgd(batch: Batch, settings: SGDSettings, factor: Tensor, found_inf: Tensor) -> None:
    """Update like ``reference.sgd``, in one pass."""
    momentum, nesterov = _compiled_in(settings)
    moments = ("momentum_buffer",) if momentum else ("",)
    _launch(sgd_kernel, batch, moments, settings, factor, found_inf, MOMENTUM=momentum, NESTEROV=nesterov)


def _launch(
    kernel: Any,
    batch: Batch,
    moments: Sequence[str],
    settings: Settings,
    factor: Tensor,
    found_inf: Tensor,
    **compiled_in: bool,
) -> None:
    for kind, indices in _kinds(batch, moments[0]):
        lists = [batch.weights, batch.gradients, batch.masters, batch.steps]
        # Masters stand in for moments that the kernel does not touch.
        lists += [batch.moments.get(name, batch.masters) for name in moments]
        numbers = [batch.numbers[i] for i in indices] if batch.numbers else ()
        kept = batch.remembered.setdefault(tuple(kind.values()), LaunchTables(_KEPT))
        chosen = [[tensors[i] for i in indices] for tensors in lists]
        table = table_of(chosen, kept=kept, numbers=numbers, settings=settings)
        constants = {"ADAMW": kernel is adamw_kernel, **_BEGINNING}
        arguments = (table.memory, table.chunks, factor, found_inf, table.count)
        with on(table.memory.device):
            begin_kernel[(-(-table.count // constants["TILE"]),)](table.memory, found_inf, table.count, **constants)
            kernel[(table.programs,)](*arguments, **kind, **compiled_in, BLOCK=PROGRAM_ELEMENTS, **_updating(kind))


def _updating(kind: dict[str, Any]) -> dict[str, Any]:
    packed, joined = kind["MOMENT"] is tl.uint8, kind["KIND"] == _SPLIT
    return {**UPDATING, **(_UNPACKING if packed else {}), **(_JOINING if joined else {})}


def _kinds(batch: Batch, moment: str) -> Iterator[tuple[dict[str, Any], Sequence[int]]]:
    """Yield the compiled-in constants of each kind of tensor, and the numbers of the tensors of that kind."""
    kept = batch.moments.get(moment, batch.weights)
    lists = (batch.weights, batch.gradients, kept, batch.masters)
    alone = [weight is master for weight, master in zip(batch.weights, batch.masters, strict=True)]
    kinds = list(zip(*[[t.dtype for t in tensors] for tensors in lists], alone, strict=True))
    for kind in dict.fromkeys(kinds):
        weight, gradient, moments, master, is_alone = kind
        indices = [i for i, other in enumerate(kinds) if other == kind]
        types = {"WEIGHT": TYPES[weight], "GRADIENT": TYPES[gradient], "MOMENT": TYPES[moments]}
        if is_alone:
            code = _STOCHASTIC if batch.stochastic and weight is BF16.dtype else _NO_MASTER
        else:
            code = _SPLIT if master is torch.int16 else _MASTER
        yield {**types, "KIND": code}, indices


def _head(settings: Settings | None) -> tuple[int, ...]:
    """Return a group's settings in the layout of ``_HEAD``, as eight-byte integers."""
    exact: list[float] = [0.0] * _EXACT
    rounded: list[float] = []
    if isinstance(settings, AdamWSettings):
        s = settings
        exact = [s.lr, *(math.log(b) if b else -math.inf for b in (s.beta1, s.beta2))]
        rounded = [s.lr * s.weight_decay, s.beta1, 1.0 - s.beta1, s.beta2, 1.0 - s.beta2, s.eps]
    elif isinstance(settings, SGDSettings):
        rounded = [settings.weight_decay, settings.lr, settings.momentum, 1.0 - settings.dampening]
    if settings is not None:
        rounded = [-1.0 if settings.maximize else 1.0, *rounded]
    rounded += [0.0] * (_ROUNDED - len(rounded))
    return struct.unpack(f"{HEAD.value}q", _HEAD.pack(*exact, *rounded))


def _compiled_in(settings: Settings) -> tuple[bool, bool]:
    """Return the settings that are compiled into a kernel."""
    if isinstance(settings, AdamWSettings):
        return settings.amsgrad, 1.0 - settings.beta1 < 0.5
    return settings.momentum != 0, settings.nesterov


# Triton before 3.8 counts in registers, a warp's bins in its 32 threads: 512 bins fit, so the chunk is read five times, from the cache.
# Later ones count in shared memory, all bins at once. A part is a power of two.
_PARTS, _PART_BINS = (1, 4096) if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8) else (5, 512)
assert _PARTS * _PART_BINS >= BINS
_TILE = 1024
_WARPS = 8


@functools.cache
def _cuts(device: torch.device) -> Tensor:
    return torch.tensor(CUTS, dtype=torch.int32, device=device)


def count(tensors: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Count the elements of dense tensors into their tables, like ``exponents.reference``.

    A program adds its chunk's counts to the tensor's table, so even the most frequent bin costs one atomic addition per chunk.
    """
    kinds = dict.fromkeys((t.dtype, t.device) for t in tensors if t.numel())
    for dtype, device in kinds:
        alike = [
            (t, r) for t, r in zip(tensors, rows, strict=True) if t.numel() and (t.dtype, t.device) == (dtype, device)
        ]
        # No table is kept: the tensors are others each time.
        table = table_of([[t for t, _ in alike], [r for _, r in alike]], kept=LaunchTables(1))
        compiled_in = {"TYPE": TYPES[dtype], "CUTS": len(CUTS), "BINS": BINS, "BLOCK": PROGRAM_ELEMENTS}
        with on(device):
            exponent_kernel[(table.programs,)](
                table.memory,
                table.chunks,
                _cuts(device),
                table.count,
                **compiled_in,
                PARTS=_PARTS,
                PART=_PART_BINS,
                TILE=_TILE,
                num_warps=_WARPS,
                enable_fp_fusion=True,
            )
