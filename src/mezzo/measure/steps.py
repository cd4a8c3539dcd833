"""Record every training step: loss, loss scale, skipped or not, gradient norm, time.

Losses, norms, scales and flags stay on their device and are read once at the end: reading them in every step would make it wait for the
device.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mezzo.engine.alarms import UpdateNumbers
from mezzo.formats import FP32
from mezzo.measure.live import Reports
from mezzo.measure.plain_steps import Owners, SeparateLosses, known_scales
from mezzo.records import Loss, Steps

# One tensor per number would take 512 bytes of GPU memory each; one read per number would make each step wait for the device.

CHUNK_LENGTH = 512
"""How many numbers fit into one chunk of a buffer."""


class StoredNumber(NamedTuple):
    """A stored number: its buffer and its position there."""

    buffer: NumberBuffer
    position: int


class NumberBuffer:
    """FP32 numbers of one device, in a buffer that grows by chunks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._chunks: list[Tensor] = []
        self.next_index = CHUNK_LENGTH
        """Index of the next number in the open chunk; ``CHUNK_LENGTH`` if that is full."""
        self._cells: list[Any] = []
        """The memory of each chunk, as ``cells``."""
        self.cells: Any = None
        """The open chunk as a C array if it is in host memory: writing a float there takes a tenth of the time of ``Tensor.copy_``."""
        self.views: Sequence[Tensor] = ()
        """The elements of the open chunk, on devices only: making a view takes as long as copying into it."""
        self._transfer: tuple[int, list[Tensor], torch.cuda.Event] | None = None
        """How many numbers are being copied to the host, their buffers there, and the event that marks the end of the copy."""
        self._arrived: list[float] = []

    def __len__(self) -> int:
        return self.chunk_start + self.next_index

    @property
    def chunk_start(self) -> int:
        """The index of the open chunk's first element."""
        return CHUNK_LENGTH * len(self._chunks) - CHUNK_LENGTH

    def keep(self, value: Tensor) -> StoredNumber:
        """Copy a scalar tensor without waiting for the device."""
        if self.next_index == CHUNK_LENGTH:
            self.grow()
        (self.views or self._chunks[-1])[self.next_index].copy_(value)
        self.next_index += 1
        return StoredNumber(self, len(self) - 1)

    def tensor_at(self, index: int) -> Tensor:
        """Return a stored number as a tensor on its device."""
        return self._chunks[index // CHUNK_LENGTH][index % CHUNK_LENGTH]

    def on_host(self, index: int) -> float | None:
        """Return a stored number, or None if it is on a device and ``send`` has not copied it yet.

        Reads the memory directly: a torch call would show up in the dispatch mode of a script or an observer.
        """
        if index < len(self._arrived):
            return self._arrived[index]
        cells = self._cells[index // CHUNK_LENGTH]
        return None if cells is None else cells[index % CHUNK_LENGTH]

    def send(self) -> None:
        """Send the numbers of a CUDA device to the host without waiting, or collect those that have arrived."""
        if self.device.type != "cuda":
            return
        if self._transfer is None:
            count, first = len(self), len(self._arrived) // CHUNK_LENGTH
            copies = [torch.empty(CHUNK_LENGTH, dtype=FP32.dtype, pin_memory=True) for _ in self._chunks[first:]]
            for copy, chunk in zip(copies, self._chunks[first:], strict=True):
                copy.copy_(chunk, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self._transfer = count, copies, event
        elif self._transfer[2].query():
            (count, copies, _), self._transfer = self._transfer, None
            whole = len(self._arrived) // CHUNK_LENGTH * CHUNK_LENGTH
            self._arrived = [*self._arrived[:whole], *(value for copy in copies for value in copy.tolist())][:count]

    def read(self) -> list[float]:
        """Return all numbers; waits for the device. All are NaN if the device has failed, for example after an assertion in a kernel."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # they may have been computed on other streams
            numbers: list[float] = torch.cat(self._chunks).tolist() if self._chunks else []
        except RuntimeError:
            return [math.nan] * len(self)
        return numbers[: len(self)]

    def grow(self) -> None:
        """Add an empty chunk, which becomes the open one."""
        with torch.inference_mode(mode=False), torch.no_grad():
            chunk = torch.empty(CHUNK_LENGTH, dtype=FP32.dtype, device=self.device)
            in_host_memory = self.device.type == "cpu" and type(chunk) is Tensor and chunk.data_ptr()
            self.views = () if in_host_memory else chunk.unbind()
        self._chunks.append(chunk)
        self.cells = (ctypes.c_float * CHUNK_LENGTH).from_address(chunk.data_ptr()) if in_host_memory else None
        self.next_index = 0
        self._cells.append(self.cells)


Losses = tuple[StoredNumber, ...]
"""Losses whose sum is the step's loss."""
STEPS_BETWEEN_NORMS = 32
"""Steps from one measured gradient norm to the next, where not every step has one."""


class StepRecorder:
    """A recorder of a run's steps; a step is everything between two updates."""

    def __init__(self) -> None:
        self._numbers: dict[torch.device, NumberBuffer] = {}
        self._loss: list[Losses] = []
        self._weight: list[float] = []
        """Factor of each step's losses."""
        self._norm: list[tuple[StoredNumber, ...]] = []
        """For each step, the norms of the optimizers that made its update."""
        self._scale: list[StoredNumber | float | None] = []
        self._skipped: list[StoredNumber | bool] = []
        self.num_closed = 0
        """Number of closed steps; a plain value, because hooks read it in every step."""
        self._open_loss: Losses = ()
        self._open_weight = 1.0
        self._open_norms: tuple[StoredNumber, ...] = ()
        self._pending: list[tuple[StepEnd, int]] = []
        """For each closed step that is not in the columns yet: its end, and the index of the next step's loss in the open chunk."""
        self._pending_buffer: NumberBuffer | None = None
        self._made_by: Owners = frozenset()
        self._pending_scale: float | None = None
        self._num_extras = 0
        """How many numbers ``advance`` stores for a step besides its loss."""
        self.separate_losses: SeparateLosses[Losses] = SeparateLosses(lambda one, other: one + other)
        """The separate losses of a script that has several."""
        self.measures = True
        """Whether backward passes add to the open step; False while an optimizer re-evaluates its closure."""
        self.clock = StepClock()
        self.reports = Reports()
        """Reports of the latest numbers while the script runs."""

    def measure_no_more(self) -> None:
        """Add no backward pass to the open step until ``measure_again``."""
        self.measures = False

    def measure_again(self) -> None:
        """Add backward passes to the open step again."""
        self.measures = True

    def replacement(self) -> StepRecorder:
        """Return an empty recorder that replaces this one and keeps its reports and device."""
        other = StepRecorder()
        other.reports = self.reports
        other.clock.begin_on(self.clock.device)
        return other

    def loss(self, loss: Tensor, *, reached: Owners | None = None, name: str = "") -> None:
        """Add a backward pass's loss to the open step: micro-batches and several losses add up.

        Args:
            loss: one value, or several to be summed.
            reached: the optimizers whose parameters the pass reaches, if known.
            name: the script's name for it, if known.
        """
        if not self.measures:
            return
        self.flush()
        value = loss.detach()
        kept = (self._keep(value.sum() if value.dim() else value),)
        self._open_loss += kept
        self.separate_losses.add(kept, reached=reached, name=name)

    @property
    def has_any_loss(self) -> bool:
        """Whether any step, including the open one, has a loss yet."""
        return bool(self._loss or self._open_loss)

    @property
    def num_open(self) -> int:
        """Number of losses of the open step."""
        self.flush()
        return len(self._open_loss)

    @property
    def open_weight(self) -> float:
        """Factor of the open step's losses."""
        return self._open_weight

    def forget(self, *, keep: int = 0) -> None:
        """Discard the open step's losses after the first ``keep``, because they will be evaluated again."""
        self.choose(range(min(keep, self.num_open)))

    def choose(self, positions: Sequence[int]) -> None:
        """Keep only the open step's losses at ``positions``, counted from 0."""
        self.flush()
        self._open_loss = tuple(self._open_loss[position] for position in positions)
        self.separate_losses.choose(positions)

    def weigh(self, factor: float) -> None:
        """Multiply the open step's losses, which were divided by more micro-batches than the step turned out to have."""
        self.flush()
        self._open_weight *= factor

    def norm(self, norm: Tensor) -> None:
        """Add the gradient norm of one optimizer's update to the open step."""
        self.flush()
        self._open_norms += (
            self._keep(norm.detach() if norm.requires_grad else norm),
        )  # create_graph=True gives it a graph

    @property
    def has_norm(self) -> bool:
        """Whether the open step has a gradient norm yet."""
        self.flush()
        return bool(self._open_norms)

    def updated(self) -> None:
        """Record the time of an update; the last one before the step closes counts."""
        self.clock.mark()

    def close(self, *, skipped: bool | Tensor, scale: float | Tensor | None, made_by: Owners = frozenset()) -> None:
        """Close the open step.

        Args:
            skipped: whether its update was skipped; a tensor is above 0 if so.
            scale: the loss scale after it, None if there is none.
            made_by: the optimizers that made its update, by number.
        """
        self.flush()
        ended = self.clock.take()
        self._loss.append(self._open_loss)
        self._weight.append(self._open_weight)
        self._norm.append(self._open_norms)
        self._skipped.append(self._keep(skipped) if isinstance(skipped, Tensor) else skipped)
        self._scale.append(self._keep(scale) if isinstance(scale, Tensor) else scale)
        self.clock.add(ended)
        self._open_loss, self._open_norms, self._open_weight = (), (), 1.0
        self.num_closed += 1
        self.separate_losses.close(self.num_closed, made_by=made_by)
        if ended[0] >= self.reports.due_s:
            self._send(ended[0])

    def prepare_advance(self, made_by: Owners, *, scale: float | None = None, num_extras: int = 0) -> None:
        """Prepare ``advance`` to record the following steps in the buffer of the last loss.

        Args:
            made_by: the optimizers that make their updates.
            scale: the loss scale after each; None if there is none, or only the device knows it.
            num_extras: how many tensors ``advance`` gets with each loss: 1 for the loss scale, 2 for a flag and the loss scale.
        """
        self.flush()
        self._made_by, self._pending_scale, self._num_extras = made_by, scale, num_extras
        self._pending_buffer = self._loss[-1][-1].buffer if self._loss and self._loss[-1] else None

    def advance(self, loss: Any, extras: tuple[Any, ...] = ()) -> bool:
        """Close the open step and add the first loss of the next one, as ``close`` and ``loss`` do.

        ``extras`` are the numbers of the closed step that ``prepare_advance`` announced: a flag above 0 if it was skipped, and its loss
        scale. Without them the step was not skipped and left the scale as it was.

        Return False, and do nothing, unless ``loss`` is a scalar on the device of the earlier losses. Most steps of a run end and
        begin like this. By then the model's arithmetic has evicted our objects from the CPU's caches, so each object touched costs
        about 0.1 us and each nested call about 2 us: only the time and the loss are stored here, and ``flush`` moves them into the columns.
        """
        buffer = self._pending_buffer
        if buffer is None or type(loss) is not Tensor or loss.dim():
            return False
        clock, index, cells = self.clock, buffer.next_index, buffer.cells
        if not (loss.is_cpu if cells is not None else loss.device == buffer.device):
            return False
        if extras or self._num_extras:
            if len(extras) != self._num_extras or extras[-1].device != buffer.device:
                return False
            if index + len(extras) >= CHUNK_LENGTH:
                index = CHUNK_LENGTH  # the numbers of one step lie in one chunk
        if index == CHUNK_LENGTH:
            self.flush()
            buffer.grow()
            index, cells = 0, buffer.cells
        for value in extras:
            if cells is None:
                buffer.views[index].copy_(value)
            else:
                cells[index] = value.item()
            index += 1
        if cells is None:
            buffer.views[index].copy_(loss.detach())
        else:
            cells[index] = loss.item().real  # item() gives a complex number for a complex loss
        buffer.next_index = index + 1
        ended = clock.ended or clock.take()
        clock.ended = None
        self._pending.append((ended, index))
        self.num_closed += 1
        if ended[0] >= self.reports.due_s:
            self.flush()
            self._send(ended[0])
        return True

    def flush(self) -> None:
        """Move the steps that ``advance`` has closed into the columns."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        buffer, new = self._pending_buffer, tuple.__new__  # StoredNumber(...) would be a Python call for each
        assert buffer is not None
        start = buffer.chunk_start  # whatever adds a chunk flushes first
        kept: list[Losses] = [(new(StoredNumber, (buffer, start + index)),) for _, index in pending]
        num_more, num_extras = len(pending) - 1, self._num_extras
        self.separate_losses.advance(kept, len(self._loss) + 1, made_by=self._made_by)
        self._loss += [self._open_loss, *kept[:-1]]
        self._weight += [self._open_weight] + [1.0] * num_more
        self._norm += [self._open_norms] + [()] * num_more  # adding a norm flushes first
        if num_extras < 2:
            self._skipped += [False] * len(pending)
        else:
            self._skipped += [new(StoredNumber, (buffer, start + index - 2)) for _, index in pending]
        if num_extras < 1:
            self._scale += [self._pending_scale] * len(pending)
        else:
            self._scale += [new(StoredNumber, (buffer, start + index - 1)) for _, index in pending]
        self.clock.add(*[ended for ended, _ in pending])
        self._open_loss, self._open_norms, self._open_weight = kept[-1], (), 1.0

    def _send(self, ended_s: float) -> None:
        losses = [kept.buffer.on_host(kept.position) for kept in self._loss[-1]]
        known = [loss for loss in losses if loss is not None]
        loss = self._weight[-1] * sum(known) if losses and len(known) == len(losses) else None
        scale = self._scale[-1]
        loss_scale = scale.buffer.on_host(scale.position) if isinstance(scale, StoredNumber) else scale
        measured = next((norms for norms in reversed(self._norm[-STEPS_BETWEEN_NORMS:]) if norms), ())
        norms = [kept.buffer.on_host(kept.position) for kept in measured]
        read = [norm for norm in norms if norm is not None]
        grad_norm = _combined_norm(read) if read and len(read) == len(norms) else None
        self.reports.send(ended_s, loss=loss, skipped=self._skipped, loss_scale=loss_scale, grad_norm=grad_norm)

    def finite_flags(self) -> Tensor:
        """Return, on their device, whether the last closed step's loss and gradient norm are finite; unknown ones count as finite."""
        self.flush()
        losses, norms = self._loss[-1], self._norm[-1]
        device = (losses or norms)[0].buffer.tensor_at(0).device if losses or norms else None
        return torch.stack([_all_finite(losses, device), _all_finite(norms, device)])

    def last_skipped(self) -> bool:
        """Return whether the last closed step's update was skipped; waits for the device if only the device knows."""
        self.flush()
        last = self._skipped[-1]
        return bool(last.buffer.tensor_at(last.position)) if isinstance(last, StoredNumber) else last

    def send_numbers(self) -> None:
        """Copy the numbers on devices to the host without waiting; ``seen_from`` returns them once they have arrived."""
        for numbers in self._numbers.values():
            numbers.send()

    def seen_from(self, first: int) -> list[UpdateNumbers]:
        """Return the closed steps from number ``first`` (from 0) up to the first whose numbers have not reached the host yet."""
        self.flush()
        seen: list[UpdateNumbers] = []
        new = tuple.__new__  # UpdateNumbers(...) would be a Python call
        columns = (self._loss, self._norm, self._skipped, self._scale, self._weight)
        for step, row in enumerate(zip(*[column[first:] for column in columns], strict=True), start=first + 1):
            losses, norms, skipped, scale, weight = row
            if skipped is False and not norms and len(losses) == 1 and not isinstance(scale, StoredNumber):
                buffer, index = losses[0]
                loss = buffer.on_host(index)
                if loss is None:
                    return seen
                seen.append(new(UpdateNumbers, (step, weight * loss, None, False, scale)))
                continue  # the usual case; the code below would return the same
            kept = losses + norms
            if isinstance(skipped, StoredNumber):
                kept += (skipped,)
            if isinstance(scale, StoredNumber):
                kept += (scale,)
            values: list[float] = []  # filled in a loop: until Python 3.12 a comprehension is a call
            for buffer, index in kept:
                value = buffer.on_host(index)
                if value is None:
                    return seen
                values.append(value)
            if isinstance(scale, StoredNumber):
                scale = values.pop()
            if isinstance(skipped, StoredNumber):
                skipped = values.pop() > 0
            loss = weight * sum(values[: len(losses)]) if losses else None
            norm = _combined_norm(values[len(losses) :]) if norms else None
            seen.append(new(UpdateNumbers, (step, loss, norm, skipped, scale)))
        return seen

    def steps(self, names: Mapping[int, str] | None = None) -> Steps:
        """Return all closed steps; waits for the device once.

        Args:
            names: names of what the optimizers train, by optimizer number, if known.
        """
        self.flush()
        time_ms = self.clock.time_ms()
        read = {id(numbers): numbers.read() for numbers in self._numbers.values()}
        weights = self._weight

        def value(kept: StoredNumber) -> float:
            return read[id(kept.buffer)][kept.position]

        def total(losses: Losses, step: int) -> float:
            return weights[step] * sum(map(value, losses)) if losses else math.nan

        def part(losses: Sequence[Losses], steps: Sequence[int]) -> list[float]:
            return [weights[step - 1] * sum(map(value, one)) for one, step in zip(losses, steps, strict=True)]

        columns = self.separate_losses.columns(names or {}).items()
        return Steps(
            loss=[total(losses, step) for step, losses in enumerate(self._loss)],
            losses=[Loss(name=name, steps=c.steps, values=part(c.values, c.steps)) for name, c in columns],
            loss_scale=known_scales([value(s) if isinstance(s, StoredNumber) else s for s in self._scale]),
            skipped=[value(s) > 0 if isinstance(s, StoredNumber) else s for s in self._skipped],
            grad_norm=[_combined_norm([value(norm) for norm in norms]) for norms in self._norm],
            time_ms=list(time_ms),
            cpu_ms=self.clock.cpu_ms(),
        )

    def _keep(self, value: Tensor) -> StoredNumber:
        device = value.device
        numbers = self._numbers.get(device)
        if numbers is None:
            numbers = self._numbers[device] = NumberBuffer(device)
        return numbers.keep(value)


def _all_finite(values: Sequence[StoredNumber], device: torch.device | None) -> Tensor:
    flags = [kept.buffer.tensor_at(kept.position).isfinite().to(device) for kept in values]
    return torch.stack(flags).all() if flags else torch.tensor(True, device=device)


def _combined_norm(norms: Sequence[float]) -> float:
    """Return the norm of a gradient from the norms of its parts."""
    return math.sqrt(sum(norm * norm for norm in norms)) if norms else math.nan


# A host that never waits for its GPU runs ahead of it: its clock would measure how long a step takes to enqueue, and a policy that reads a
# flag in every step would look slow next to others. Events are read long after they have happened, so nothing waits for them.

_UNREAD = 64
"""Events kept before the first is read: a step's event has happened long before 64 more are enqueued."""
STEPS_PER_CPU_READING = 10
"""Steps between readings of the CPU time in a steady run: each is a system call of 1 to 3 us."""

StepEnd: TypeAlias = tuple[float, float | None, Any]
"""End of a step: the host's clock and the process's CPU time in seconds (None if that was not read), and a ``torch.cuda.Event`` (None
off GPUs)."""


class StepClock:
    """A clock that times each step."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        """The device that the run trains on, once known; the queue of a GPU is timed."""
        self.ended: StepEnd | None = None
        """The last mark of the open step."""
        self._last = self._mark()
        self.began_s = self._last[0]
        """Time of ``time.perf_counter`` from which the first step counts."""
        self._time_ms: list[float] = []
        self._cpu_ms: list[float] = []
        self._last_cpu_s = time.process_time()
        self._num_unshared = 0
        """Steps since the last reading of the CPU time."""
        self._unread: deque[tuple[int, StepEnd, StepEnd]] = deque()
        """Steps by number, with both ends, that still have the host's times."""
        self._free: list[Any] = []
        """Events to reuse."""

    def begin_on(self, device: torch.device | None) -> None:
        """Time the queue of this device from now on."""
        self.device = device

    def mark(self) -> None:
        """Record the time of an update; the last one before the step closes counts."""
        self.ended = self._mark(None if self.ended is None else self.ended[2])

    def take(self) -> StepEnd:
        """End the step at its last mark, or now; ``add`` that mark before another step's."""
        now, self.ended = self.ended or self._mark(), None
        return now

    def add(self, *ends: StepEnd) -> None:
        """Add the times of the steps that ended at ``ends``."""
        begins, self._last = (self._last, *ends[:-1]), ends[-1]
        if self.device is not None and self.device.type == "cuda":
            first = len(self._time_ms)
            for step, (last, now) in enumerate(zip(begins, ends, strict=True), start=first):
                if last[2] is not None and now[2] is not None:
                    self._unread.append((step, last, now))
        self._time_ms += [(now[0] - last[0]) * 1e3 for last, now in zip(begins, ends, strict=True)]
        for _, cpu_s, _ in ends:
            if cpu_s is None:
                self._num_unshared += 1
            else:
                self._share_cpu(cpu_s)
        while len(self._unread) > _UNREAD and self._unread[0][2][2].query():
            self._read_first()

    def _share_cpu(self, cpu_s: float) -> None:
        """Add the CPU time of a step and of those before it whose ends were not read."""
        num_steps = self._num_unshared + 1
        self._cpu_ms += [(cpu_s - self._last_cpu_s) * 1e3 / num_steps] * num_steps
        self._last_cpu_s, self._num_unshared = cpu_s, 0

    def cpu_ms(self) -> list[float]:
        """Return the process's CPU time in each step: between two readings their mean, after the last reading the latest mean."""
        return self._cpu_ms + self._cpu_ms[-1:] * self._num_unshared

    def time_ms(self) -> list[float]:
        """Return the time of each step; waits for the device."""
        try:
            if self._unread:
                self._unread[-1][2][2].synchronize()
            while self._unread:
                self._read_first()
        except RuntimeError:  # the device has failed: keep the host's times
            self._unread.clear()
        return self._time_ms

    def _read_first(self) -> None:
        number, (_, _, begin), (_, _, end) = self._unread[0]
        self._time_ms[number] = begin.elapsed_time(end)
        self._unread.popleft()
        self._free.append(begin)

    def _mark(self, event: Any = None) -> StepEnd:
        return (time.perf_counter(), time.process_time(), self._recorded(event))

    def _recorded(self, event: Any) -> Any:
        """Return an event at the end of the queue; None off GPUs and while the script captures a graph."""
        if self.device is None or self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None
        if event is None:
            event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
