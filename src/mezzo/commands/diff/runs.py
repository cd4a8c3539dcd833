"""Run both sides of a difference, the first one again, a control with mirrored rounding, and what could help. Imports no torch."""

from __future__ import annotations

import functools
import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mezzo.children.signals import stoppable
from mezzo.commands.diff.align import as_one
from mezzo.commands.diff.answer import answer, final_distance, not_comparable
from mezzo.commands.diff.helps import Trials, modules_of
from mezzo.commands.diff.judge import judge
from mezzo.commands.diff.record import DiffTrial
from mezzo.commands.diff.sides import Side
from mezzo.error_texts import is_about_peer
from mezzo.formats import FP32
from mezzo.launch import runner
from mezzo.launch.ranks.blame import ProcessEnd, blamed
from mezzo.launch.request import ModelChanges, Request
from mezzo.observe.settings import ValuesSettings
from mezzo.observe.values.log import VALUES_NAME, ValuesLog
from mezzo.policy import Policy
from mezzo.records import AnyRecord, RunRecord
from mezzo.studies.loop import Study
from mezzo.studies.side_by_side import output_of

_GRACE_S = 5.0
"""How long a process that lost another lets that one end by itself, so that its own reason is known."""


@dataclass(kw_only=True)
class DiffRuns:
    """The runs of one command."""

    a: Side
    b: Side
    folder: Path
    study: Study
    steps: tuple[int, ...]
    say: Callable[[str], None]
    records: dict[str, RunRecord] = field(default_factory=dict)
    failed: str = ""
    """Why there is nothing to compare; empty if there is."""

    def run(self) -> dict[str, Any]:
        """Return the parts of the record that the runs decide."""
        a = self._log("a", self.a, f"first run: {self.a.name}")
        b = None if a is None else self._log("b", self.b, f"second run: {self.b.name}", in_fp64=True)
        if a is not None and b is not None:
            a, b = self._in_one_arithmetic(a, b)
        if a is None or b is None:
            return {"verdict": "failed", "why": self.failed}
        found = judge(a, b)
        if found.identical or not_comparable(a, b, found):
            return answer(a, b, found, control=None, control_of_b=False)
        of_b, lower = self.measures_second, self.lowers
        again = self._log("a-again", self.a, f"first run again: {self.a.name}")
        measured = self.b if of_b else self.a
        control = self._log("control", measured, f"with mirrored rounding errors: {measured.name}", mirrored=True)
        found = judge(a, b, again=again, control=control, control_of_b=of_b, same_formats=not lower)
        parts = answer(a, b, found, control=control, control_of_b=of_b)
        if self.b.compiled and found.beginnings:
            differs = functools.cache(lambda names: self._differs(names, a, again, control))
            parts["compiled_alone"] = smallest_part(a, differs)
        if self.b.policy is not None and lower and parts["verdict"] in ("rounding", "beyond rounding"):
            parts["trials"] = self._trials(self.b.policy, a, b, final_distance(a, b, found))
        return parts

    def _in_one_arithmetic(self, a: ValuesLog, b: ValuesLog) -> tuple[ValuesLog | None, ValuesLog | None]:
        """Return the values of both sides; one beside layers in blocks, which every device emulates, is emulated as well.

        Else the first difference would be how a kernel adds up, in the first product that both compute in 16 bits.
        """
        emulated = [self.records[name].effective.emulated for name in ("a", "b")]
        policies = self.a.policy, self.b.policy
        if emulated[0] == emulated[1] or not any(policy is not None and policy.in_blocks for policy in policies):
            return a, b
        native = policies[emulated.index(False)]
        if native is None or not native.lowers or native.op_lists == "device" or native.arithmetic == "native":
            return a, b
        policy = native.replace(arithmetic="emulated")
        if emulated[1]:
            self.a = self.a.under(policy)
            return self._log("a", self.a, f"first run again, emulated as the second is: {self.a.name}"), b
        self.b = self.b.under(policy)
        return a, self._log("b", self.b, f"second run again, emulated as the first is: {self.b.name}", in_fp64=True)

    @property
    def lowers(self) -> bool:
        """Whether the sides differ in their policy, so that a narrower format is no mistake."""
        return self.a.policy != self.b.policy

    @property
    def measures_second(self) -> bool:
        """Whether the second side's rounding is measured: it computes in the coarser format."""
        return self.lowers and _coarsest(self.b.policy) >= _coarsest(self.a.policy)

    def _log(
        self,
        name: str,
        side: Side,
        what: str,
        *,
        steps: tuple[int, ...] | None = None,
        in_fp64: bool = False,
        mirrored: bool = False,
    ) -> ValuesLog | None:
        """Say ``what``, run a side in the folder ``name``, and return its values; None if it has none."""
        chosen = ValuesSettings(
            steps=steps or self.steps,
            seed=0,
            deterministic=True,
            outcomes_only=side.compiled,
            in_fp64=in_fp64,
            mirrored=mirrored,
        )
        folder = self.folder / name
        request = side.request(folder, chosen)
        self.say(what)
        (folder / VALUES_NAME).unlink(missing_ok=True)
        runs, failed = (
            run_ranks(request, size=side.ranks) if side.ranks else ([(request, self.study.record(request))], 0)
        )
        record = runs[failed][1]
        assert isinstance(record, RunRecord)
        self.records[name] = record
        paths = [Path(one.record_path).with_name(VALUES_NAME) for one, _ in runs]
        if record.exit_code or not all(path.is_file() for path in paths):
            why = (
                record.error
                or f"it ended with exit code {record.exit_code}; what it printed is in {output_of(runs[failed][0])}"
            )
            self.failed = self.failed or f"{side.name}: {why}"
            return None
        log = as_one([ValuesLog.load(path) for path in paths])
        if not log.events:
            self.failed = self.failed or f"{side.name}: no module was called"
            return None
        return log

    # --- what helps --------------------------------------------------------------------------------------------------------------

    def _trials(self, policy: Policy, a: ValuesLog, b: ValuesLog, distance: float) -> list[DiffTrial]:
        first = _first_step(a)
        numbers = itertools.count(1)

        def run(what: str, tried: Policy) -> float:
            log = self._log(f"trial-{next(numbers)}", self.b.under(tried), what, steps=(1,))
            return math.inf if log is None else final_distance(first, log, judge(first, log))

        trials = Trials(policy=policy, same_as=self.a.policy, b=b, distance=distance, run=run)
        return trials.all(searches=_coarsest(self.a.policy) < _coarsest(policy))

    # --- which compiled module ---------------------------------------------------------------------------------------------------

    def _differs(self, names: Sequence[str], a: ValuesLog, again: ValuesLog | None, control: ValuesLog | None) -> bool:
        """Return whether a difference begins with these modules alone compiled."""
        models = ModelChanges(compiles=True, compile_only=tuple(names))
        side = replace(self.b, name=", ".join(names), models=models)
        log = self._log(f"compiled-{len(self.records)}", side, f"compiled alone: {side.name}")
        return log is not None and bool(judge(a, log, again=again, control=control).beginnings)


def _coarsest(policy: Policy | None) -> float:
    """Return the largest distance of two numbers at 1 in what a policy computes in; the script's own precision counts as FP32."""
    return max(one.eps for one in ((FP32,) if policy is None else policy.required_formats))


def smallest_part(a: ValuesLog, differs: Callable[[tuple[str, ...]], bool]) -> list[str]:
    """Return the smallest part of a model found that differs on its own; empty if none does.

    Args:
        a: the first run, which names the modules.
        differs: returns whether some modules, changed alone, begin a difference.
    """
    found: list[str] = []
    names = tuple(_children(a, ""))
    while names:
        left = names
        while len(left) > 1:
            half = left[: len(left) // 2]
            left = half if differs(half) else left[len(half) :]
        if not differs(left):
            return found
        found, names = list(left), tuple(_children(a, left[0]))
    return found


def _children(log: ValuesLog, parent: str) -> dict[str, None]:
    """Return the modules directly inside one that compute anything, in the order of the run."""
    start = f"{parent}." if parent else ""
    paths = modules_of(log)
    used = [event.module for event in log.events if event.kind == "operation" and event.module in paths]
    below = (module.removeprefix(start).partition(".")[0] for module in used if module.startswith(start))
    return {f"{start}{name}": None for name in below if name}


def _first_step(log: ValuesLog) -> ValuesLog:
    events = [event for event in log.events if event.step == 1]
    return replace(log, events=events)


# --- several processes -----------------------------------------------------------------------------------------------------------------


def run_ranks(request: Request, *, size: int) -> tuple[list[tuple[Request, AnyRecord]], int]:
    """Run a script in several processes of this machine, as ``torchrun`` would; if one fails, stop the others.

    Returns:
        The request and the record of each rank, and the rank that is to blame for a failure; 0 if none failed.

    Raises:
        Stopped: a signal has stopped the command.
    """
    port = _free_port()
    requests = [_of_rank(request, rank, size=size, port=port) for rank in range(size)]
    ends: list[ProcessEnd] = []
    over = threading.Event()

    def work(rank: int) -> AnyRecord:
        one, record = requests[rank], None
        try:
            with runner.shared_imports(prints_why_not=False):
                record = runner.run_alone(one, output=output_of(one), interrupted=over.is_set)
            return record
        finally:
            end = _end_of(rank, record, stopped=over.is_set())
            ends.append(end)
            if end.failure is not None:  # a process that lost another may notice before that one has ended
                later = threading.Timer(_GRACE_S if is_about_peer(end.failure) else 0.0, over.set)
                later.daemon = True
                later.start()

    with stoppable() as stop, ThreadPoolExecutor(size) as threads:  # entered in the thread that receives the signals
        waiting = [threads.submit(copy_context().run, work, rank) for rank in range(size)]
        records = [one.result() for one in waiting]
        stop.check()
    at_fault = blamed(ends)
    return list(zip(requests, records, strict=True)), 0 if at_fault is None else at_fault[0]


def _end_of(rank: int, record: AnyRecord | None, *, stopped: bool) -> ProcessEnd:
    error: str | None = "it has no record"
    exit_code = 0
    if isinstance(record, RunRecord):
        error, exit_code = record.error, record.exit_code
    return ProcessEnd(rank=rank, error=error, exit_code=exit_code, at_s=time.monotonic(), stopped=stopped)


def _of_rank(request: Request, rank: int, *, size: int, port: int) -> Request:
    path = Path(request.record_path)
    folder = path.parent if rank == 0 else path.parent / f"rank-{rank}"
    settings = request.observe
    assert isinstance(settings, ValuesSettings)
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    values = settings.model_copy(update={"path": str(folder / Path(settings.path).name)})
    changes = {"record_path": str(folder / path.name), "variables": variables, "observe": values}
    return request.model_copy(update=changes)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
