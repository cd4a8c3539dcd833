"""Rank 0's part of a job: decide which run comes next, run its own process of it, and merge the records of all processes into one.

The other ranks follow (``following``), so that a command decides only once what to run, and all ranks execute the runs of a
comparison in the same order. Nothing here takes part in the script's own communication. A process that fails, hangs or vanishes ends
the run in all processes: the others get time to end by themselves, and are then stopped. Imports no torch.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from mezzo.children.signals import SIGNAL_GRACE_S, stoppable
from mezzo.errors import RecordError
from mezzo.launch.ranks.blame import ProcessEnd, blamed, take_position
from mezzo.launch.ranks.launched import PADDLE_STORE, REASON
from mezzo.launch.ranks.meeting import Meeting
from mezzo.launch.ranks.merged import counts_path, error_of, exit_code_of, for_rank, merged, record_path, run_of
from mezzo.launch.request import Request
from mezzo.observe.ranges.table import ObservedValues, ranges_record, read_values, values_of_all
from mezzo.policy import Policy
from mezzo.records import AnyRecord, RangesRecord, read_record, write_record

AFTER_FAILURE_S = 10.0
"""Time for the other processes to fail by themselves, so that their own errors are recorded."""
_STOPPING_S = 20.0
"""Time for a process to end after it is stopped, and again for its record to arrive."""
POLL_S = 0.05
"""Time between two reads of the other processes' messages."""

Interrupted = Callable[[], bool]
"""Returns whether to stop the run of this process."""


class RunOne(Protocol):
    """Runs a request's script in a child of this process, without a time limit, and returns its record."""

    def __call__(self, request: Request, *, output: Path | None, interrupted: Interrupted) -> AnyRecord:
        """Run to the end, or until ``interrupted``."""


_LEADER: ContextVar[Leader | None] = ContextVar("leader", default=None)


def leader() -> Leader | None:
    """Return the leader of the job in this process; None if there is only one process, or another one leads."""
    return _LEADER.get()


@contextmanager
def leading(meeting: Meeting) -> Iterator[Leader]:
    """Lead the job of the runs inside; a signal does not end this process before the others have left."""
    with stoppable():  # torchrun sends one as soon as the first process has ended
        meeting.open()
        lead = Leader(meeting)
        token = _LEADER.set(lead)
        try:
            yield lead
        finally:
            _LEADER.reset(token)
            lead.dismiss()
            meeting.leave()


@dataclass
class _Run:
    """A run in progress, as seen by rank 0."""

    number: int
    limit_s: float | None
    began_s: float
    ended: dict[int, tuple[dict[str, Any], float]]
    """The message that each other process left when it ended, and when it was read."""
    vanished: set[int]
    failed_s: float | None = None
    """When the first process failed."""
    stopped: bool = False
    over_limit: bool = False


class Leader:
    """The leader of a job's processes."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._number = 0
        self._waits_for_late = True
        """Whether the end of the command is told to processes that have not joined yet: not once it has waited for them."""
        self.exit_code = 0
        """The command's exit code, which all processes return."""

    def run_command(self, command: Callable[[], int]) -> None:
        """Run the command that all processes run."""
        self.exit_code = 1  # in case the command raises
        self.exit_code = command()

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._meeting.launched.size

    @property
    def missing(self) -> str:
        """The processes that have not joined; empty if all have."""
        return self._meeting.missing

    def run(self, request: Request, *, output: Path | None, limit_s: float | None, run_one: RunOne) -> AnyRecord:
        """Run a request's script in all processes and return their merged record.

        Args:
            request: what to run.
            output: a file for the script's output; the other ranks' files are next to it.
            limit_s: seconds after which the run is stopped in all processes.
            run_one: runs the script in this process.

        Raises:
            ScriptError: not all processes have arrived.
            Stopped: a signal has stopped the command before.
        """
        if self._number == 0:
            self._waits_for_late = False
            with stoppable() as stop:
                self._meeting.wait_for_all(stop.check)
        self._number += 1
        request = request.model_copy(update={"variables": {**request.variables, **new_rendezvous(os.environ)}})
        run = _Run(self._number, limit_s, time.monotonic(), {}, set())
        sent = request.model_copy(update={"record_path": ""}).model_dump_json()
        output_path = None if output is None else str(output.absolute())
        place = str(Path(request.record_path).absolute())
        self._meeting.put(f"run-{run.number}", {"request": sent, "output": output_path, "record": place})
        request = for_rank(request, 0, folder=self._folder(0), number=run.number, ranks=self.size)
        own = run_one(request, output=output, interrupted=lambda: self._over(run))
        own_end_s = time.monotonic()
        own_end = ProcessEnd(
            rank=0, error=error_of(own), exit_code=exit_code_of(own), at_s=own_end_s, stopped=run.stopped
        )
        if own_end.failure is not None and run.failed_s is None:
            run.failed_s = own_end_s
        self._wait_for_others(run)
        own_end = replace(own_end, **take_position(request)._asdict())
        record = self._merged({0: own, **self._records(run)}, own_end, run)
        if isinstance(record, RangesRecord) and (counts := self._counts(run)):
            record = ranges_record(record.run, values_of_all(counts), policy=Policy.parse(record.policy))
        write_record(record, Path(request.record_path))
        return record

    def dismiss(self) -> None:
        """Notify the other processes that the command is over, and wait until they have left."""
        with suppress(OSError):
            self._meeting.put("over", {"exit_code": self.exit_code, "reason": REASON.text, "rank": REASON.rank})
        end = time.monotonic() + _STOPPING_S
        waited_for = [r for r in self._meeting.others if self._waits_for_late or self._meeting.has_joined(r)]
        while waited_for and time.monotonic() < end:
            waited_for = [r for r in waited_for if not self._meeting.has_left(r)]
            time.sleep(POLL_S)

    # --- while it runs -----------------------------------------------------------------------------------------------------------

    def _over(self, run: _Run) -> bool:
        """Read what the other processes report; return whether to stop the run."""
        now = time.monotonic()
        for rank in self._meeting.others:
            if rank in run.ended or rank in run.vanished:
                continue
            is_gone = self._meeting.gone(rank)  # before its message is read: it leaves one and ends
            message = self._meeting.get(f"ended-{run.number}-{rank}")
            if message is not None:
                run.ended[rank] = message, now
                failed = message["error"] is not None or message["exit_code"] != 0
            else:
                failed = is_gone
                if failed:
                    run.vanished.add(rank)
            if failed and run.failed_s is None:
                run.failed_s = now
        if run.limit_s is not None and now - run.began_s > run.limit_s:
            run.over_limit = True
        if run.over_limit or (run.failed_s is not None and now - run.failed_s > AFTER_FAILURE_S):
            self._stop(run)
        return run.stopped

    def _stop(self, run: _Run) -> None:
        if not run.stopped:
            run.stopped = True
            self._meeting.put(f"stop-{run.number}", {})

    def _wait_for_others(self, run: _Run) -> None:
        """Wait until all other processes have ended, or are gone."""
        end_s: float | None = None
        with stoppable() as stop:
            while len(run.ended) + len(run.vanished) < len(self._meeting.others):
                self._over(run)
                if stop.stopped and end_s is None:  # their launcher, or the terminal, has sent them the signal too
                    end_s = time.monotonic() + SIGNAL_GRACE_S
                if stop.stopped and end_s is not None and time.monotonic() > end_s:
                    self._stop(run)
                if run.stopped and end_s is None:
                    end_s = time.monotonic() + _STOPPING_S
                if end_s is not None and time.monotonic() > end_s + _STOPPING_S:
                    return
                time.sleep(POLL_S)

    # --- when it is over ---------------------------------------------------------------------------------------------------------

    def _merged(self, records: Mapping[int, AnyRecord], own_end: ProcessEnd, run: _Run) -> AnyRecord:
        """Merge the records of a run's processes into one; note which process is to blame for a failure."""
        updates = {rank: len(part.steps) for rank, record in records.items() if (part := run_of(record)) is not None}
        ends = [own_end, *(self._end_of(rank, run) for rank in self._meeting.others)]
        ends = [replace(end, updates=updates.get(end.rank)) for end in ends]
        hosts = {rank: self._meeting.host_of(rank) for rank in self._meeting.others} | {0: socket.gethostname()}
        blame = blamed(ends)
        if blame is not None:
            REASON.found(None, rank=blame[0])
        return merged(records, ends=ends, blame=blame, hosts=hosts, limit_s=run.limit_s if run.over_limit else None)

    def _end_of(self, rank: int, run: _Run) -> ProcessEnd:
        if rank not in run.ended:
            return ProcessEnd(rank=rank, error=None, vanished=True)
        message, at_s = run.ended[rank]
        return ProcessEnd(rank=rank, at_s=at_s, **message)

    def _records(self, run: _Run) -> dict[int, AnyRecord]:
        records = {}
        for rank in run.ended:
            with suppress(RecordError):
                records[rank] = read_record(record_path(self._folder(rank), run.number))
        return records

    def _counts(self, run: _Run) -> list[ObservedValues]:
        """Return the values that each process counted, to be merged into the ranges of all."""
        folders = [self._folder(rank) for rank in range(self.size)]
        counts = [read_values(counts_path(folder, run.number)) for folder in folders]
        return [values for values in counts if values is not None]

    def _folder(self, rank: int) -> Path:
        return self._meeting.folder_for(f"rank-{rank}")


def new_rendezvous(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give the next run's processes a store of their own: one left by an earlier run must not answer them.

    The script's first process then opens the store, on rank 0's machine, where this port is free.
    """
    fresh: dict[str, str] = {}
    if "MASTER_PORT" in variables:
        fresh |= {"MASTER_PORT": str(free_port()), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    if PADDLE_STORE in variables:
        fresh[PADDLE_STORE] = f"{variables[PADDLE_STORE].rpartition(':')[0]}:{free_port()}"
    return fresh


_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _USUAL = 10_240, 32_768
"""The lowest port that is chosen, and the usual first port of outgoing connections, for systems that do not report theirs."""
_TRIES = 100


def free_port() -> int:
    """Return a port that is free and remains so: one below the range that the system uses for outgoing connections.

    A port that the system chooses lies in that range: until the store is opened, any connection on the machine, such as one between
    processes of another job, may use it.
    """
    generator, first = random.SystemRandom(), _first_outgoing_port()
    for _ in range(_TRIES if first > _LOWEST else 0):
        port = generator.randrange(_LOWEST, first)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    with socket.socket() as probe:  # nearly all are in use, or the range begins low
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _first_outgoing_port() -> int:
    try:
        return int(_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL
