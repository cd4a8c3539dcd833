"""Run a script to its end, run it again and stop it, start it once more, and compare. Imports no torch.

Each of the two trainings has its own files: a copy of the folder, or the places that ``{run}`` in the arguments leads to.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mezzo.errors import ScriptError
from mezzo.launch.process.command_signals import stoppable
from mezzo.launch.request import Request
from mezzo.launch.request_parts import TraceRequest
from mezzo.launch.runner import run_child
from mezzo.launch.several.compared_runs import named_arguments
from mezzo.launch.several.work_copies import copy_folder
from mezzo.measure.resumption.judgement import Judgement, Runs, judged
from mezzo.measure.resumption.trace import RunTrace, Written, read_trace
from mezzo.records import FileRead, RunRecord
from mezzo.records.run import RUN_NAME

WHOLE, STOPPED, RESUMED = "whole", "stopped", "resumed"
_LEAST_STEPS = 4
_TIMES_LONGER, _LEAST_LIMIT_S = 5.0, 120.0
"""A later run may take this many times as long as the first one."""
_OTHER_SEED = 1
"""Seed of the global generators when a run is started again: a script that sets none gets another one, as under python."""
_MAGIC = (b"PK\x03\x04", b"\x80", b"\x93NUMPY", b"\x89HDF", b"SQLite format 3")
"""How files begin that hold arrays or objects: zip (torch, NumPy), pickle, NumPy, HDF5, SQLite."""


@dataclass(kw_only=True)
class ResumeCheck:
    """A check under way."""

    folder: Path
    target: str
    arguments: Sequence[str]
    """The script's own."""
    resume_with: Sequence[str]
    """Further arguments when it is started again."""
    make_request: Callable[..., Request]
    say: Callable[[str], None]
    stop_after: int | None = None
    """None: in the middle of the run, between two checkpoints if it writes any."""
    notice_s: float = 10.0
    records: dict[str, RunRecord] = field(default_factory=dict)
    traces: dict[str, RunTrace] = field(default_factory=dict)
    checkpoints: list[str] = field(default_factory=list)
    stopped_after: int | None = None
    stopped_by: str = ""

    def __post_init__(self) -> None:
        self._since_s, self._here = time.time(), Path.cwd()
        self._copies = not any(RUN_NAME in word for word in self.arguments)

    def run(self) -> Judgement | None:
        """Make the three runs and return the verdict; None if the script fails undisturbed.

        Raises:
            ScriptError: it makes too few steps, or its steps cannot be traced.
            Stopped: a signal has stopped the command.
        """
        for name in (WHOLE, STOPPED, RESUMED):  # what an earlier check left there would be resumed
            shutil.rmtree(self.folder / name, ignore_errors=True)
        whole = self._ran(WHOLE)
        if whole.exit_code:
            return None
        trace = self.traces[WHOLE]
        self._check(trace, whole)
        self.stopped_after = self.stop_after or stop_of(trace)
        stopped = self._ran(STOPPED, stop_after=self.stopped_after)
        self.stopped_by = "SIGKILL" if stopped.exit_code == 128 + 9 else "SIGTERM, which it handles"
        self.checkpoints = _left_by(self.traces[STOPPED].written)
        shared = self._shared(stopped)
        if shared is not None:
            return shared
        resumed = self._ran(RESUMED)
        return judged(
            Runs(
                whole=trace,
                stopped=self.traces[STOPPED],
                resumed=self.traces[RESUMED],
                whole_losses=whole.steps.loss,
                resumed_losses=resumed.steps.loss,
                stopped_after=self.stopped_after,
                error=resumed.error if resumed.exit_code else None,
                checkpoints=self.checkpoints,
            )
        )

    def _ran(self, name: str, *, stop_after: int | None = None) -> RunRecord:
        training = WHOLE if name == WHOLE else STOPPED
        place = self.folder / name
        place.mkdir(parents=True, exist_ok=True)
        more = self.resume_with if name == RESUMED else ()
        limit_s = None
        if name != WHOLE:
            limit_s = max(_TIMES_LONGER * self.records[WHOLE].duration_s, _LEAST_LIMIT_S) + self.notice_s
        request = self.make_request(
            None,
            folder=place.absolute(),
            arguments=named_arguments([*self.arguments, *more], training),
            seed=0,
            compared_since_s=self._since_s,
            work_folder=self._work_folder(training),
            trace=TraceRequest(
                path=str((place / "trace.jsonl").absolute()),
                stop_after=stop_after,
                notice_s=self.notice_s,
                first_seed=_OTHER_SEED if name == RESUMED else None,
            ),
        )
        self.say(_ANNOUNCED[name].format(step=stop_after))
        with stoppable() as stop:
            found = run_child(request, output=place / "output.log", limit_s=limit_s)
            stop.check()
        self.records[name] = found
        self.traces[name] = read_trace(place / "trace.jsonl")
        return found

    def _work_folder(self, training: str) -> str | None:
        if not self._copies:
            return None
        place = (self.folder / training / "work").absolute()
        if not place.exists():
            copy_folder(self._here, place, without=self.folder)
        return str(place)

    def _check(self, trace: RunTrace, whole: RunRecord) -> None:
        steps = trace.num_updates
        if whole.replays:
            raise ScriptError(
                f"{self.target} trains by {whole.replays} of a CUDA graph, and the state in these cannot be traced",
                hint="check the script without its graph: what it saves and restores is the same",
            )
        if not trace.points:
            raise ScriptError(
                f"{self.target} calls no module in its training steps, so its state cannot be traced",
                hint="call the model as a module, in training mode",
            )
        if steps < _LEAST_STEPS:
            raise ScriptError(
                f"{self.target} makes {steps} steps; a check needs {_LEAST_STEPS}",
                hint="pass arguments that make it train longer, over at least two of its checkpoints",
            )
        if self.stop_after is not None and self.stop_after not in trace.points:
            raise ScriptError(
                f"--stop-after {self.stop_after} was given, and {self.target} makes {steps} steps",
                hint=f"pass a number from 1 to {steps - 1}",
            )

    def _shared(self, stopped: RunRecord) -> Judgement | None:
        """Return the verdict if the second run read what the first one wrote."""
        own = {one.path for one in self.traces[WHOLE].written}
        read: FileRead | None = next((one for one in stopped.files_read if one.path in own), None)
        if read is None:
            return None
        why = f"the run to be stopped read {read.path}, which the undisturbed run wrote: write {RUN_NAME} into the arguments"
        return Judgement(verdict="undecided", why=why)


_ANNOUNCED = {
    WHOLE: "undisturbed run",
    STOPPED: "the same run, stopped after step {step}",
    RESUMED: "started again",
}


def stop_of(trace: RunTrace) -> int:
    """Return where to stop a run: half-way from the checkpoint nearest to its middle to the next one."""
    steps = trace.num_updates
    saves = sorted({one.updates for one in trace.written if one.is_checkpoint and 0 < one.updates < steps})
    if not saves:
        return steps // 2
    last = min(saves, key=lambda save: abs(save - steps // 2))
    following = next((save for save in saves if save > last), steps)
    return min(last + max((following - last) // 2, 1), steps - 1)


def _left_by(written: Sequence[Written]) -> list[str]:
    """Return the files with state that a run has left, recognised by what wrote them or how they begin."""
    paths: dict[str, bool] = {}
    for one in written:
        paths[one.path] = one.is_checkpoint or paths.get(one.path, False)
    return [path for path, saved in paths.items() if os.path.isfile(path) and (saved or _holds_state(path))]


def _holds_state(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            begins = file.read(64)
    except OSError:
        return False
    return begins.startswith(_MAGIC) or begins[8:9] == b"{"  # the second as safetensors
