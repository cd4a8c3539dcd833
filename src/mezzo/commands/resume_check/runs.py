"""Run a script to its end, run it again and stop it, start it once more, and compare. Imports no torch.

Each of the two trainings has its own files: in a copy of the folder, or where ``{run}`` in the arguments puts them.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mezzo.children.signals import stoppable
from mezzo.commands.resume_check.judgement import Judgement, Runs, judged
from mezzo.errors import ScriptError
from mezzo.launch.request import Request, TraceRequest
from mezzo.launch.runner import run_child
from mezzo.measure.state_trace import RunTrace, WrittenFile, read_trace
from mezzo.records import RunRecord
from mezzo.records.run import RUN_NAME
from mezzo.studies.loop import Wanted, carry_out, named_arguments

WHOLE, STOPPED, RESUMED = "whole", "stopped", "resumed"
_LEAST_STEPS = 4
_TIMES_LONGER, _LEAST_LIMIT_S = 5.0, 120.0
"""A later run may take this many times as long as the first one."""
_OTHER_SEED = 1
"""Seed of the global generators when a run is started again: a script that sets none gets another seed, as under python."""
_MAGIC = (b"PK\x03\x04", b"\x80", b"\x93NUMPY", b"\x89HDF", b"SQLite format 3")
"""First bytes of files that contain arrays or objects: zip (torch, NumPy), pickle, NumPy, HDF5, SQLite."""


@dataclass(kw_only=True)
class ResumeCheck:
    """A check in progress."""

    folder: Path
    target: str
    arguments: Sequence[str]
    """The script's arguments."""
    resume_with: Sequence[str]
    """Further arguments when the script is started again."""
    make_request: Callable[..., Request]
    say: Callable[[str], None]
    stop_after: int | None = None
    """The step after which to stop; None for the middle of the run, between two checkpoints if it writes any."""
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
            ScriptError: the script makes too few steps, or its steps cannot be traced.
            Stopped: a signal has stopped the command.
        """
        for name in (WHOLE, STOPPED, RESUMED):  # the script would resume from an earlier check's files
            shutil.rmtree(self.folder / name, ignore_errors=True)
        carry_out(self._next, say=self.say)
        whole, trace = self.records[WHOLE], self.traces[WHOLE]
        if whole.exit_code:
            return None
        resumed = self.records.get(RESUMED)
        if resumed is None:
            read, instead = self._read_of_whole(), f"write {RUN_NAME} into the arguments"
            why = f"the run to be stopped read {read}, which the undisturbed run wrote: {instead}"
            return Judgement(verdict="undecided", why=why)
        assert self.stopped_after is not None
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

    def _next(self) -> Wanted | None:
        """Return the next run: undisturbed, stopped, resumed; None after the last, or if there is nothing to compare."""
        if WHOLE not in self.records:
            return self._part(WHOLE, "undisturbed run")
        whole = self.records[WHOLE]
        if whole.exit_code:
            return None
        if STOPPED not in self.records:
            self._check(self.traces[WHOLE], whole)
            self.stopped_after = self.stop_after or stop_of(self.traces[WHOLE])
            return self._part(STOPPED, f"the same run, stopped after step {self.stopped_after}")
        if RESUMED in self.records:
            return None
        exit_code = self.records[STOPPED].exit_code
        self.stopped_by = "SIGKILL" if exit_code == 128 + 9 else "SIGTERM, which it handles"
        work = self._work_folder(STOPPED) or str(self._here)
        self.checkpoints = checkpoints_of(self.traces[STOPPED].written, work=work)
        return None if self._read_of_whole() else self._part(RESUMED, "started again")

    def _part(self, name: str, says: str) -> Wanted:
        return Wanted(says=says, do=lambda: self._run(name))

    def _run(self, name: str) -> RunRecord:
        training = WHOLE if name == WHOLE else STOPPED
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        further = self.resume_with if name == RESUMED else ()
        limit_s = None
        if name != WHOLE:
            limit_s = max(_TIMES_LONGER * self.records[WHOLE].duration_s, _LEAST_LIMIT_S) + self.notice_s
        request = self.make_request(
            None,
            folder=folder.absolute(),
            arguments=named_arguments([*self.arguments, *further], training),
            seed=0,
            compared_since_s=self._since_s,
            work_folder=self._work_folder(training),
            trace=TraceRequest(
                path=str((folder / "trace.jsonl").absolute()),
                stop_after=self.stopped_after if name == STOPPED else None,
                notice_s=self.notice_s,
                first_seed=_OTHER_SEED if name == RESUMED else None,
            ),
        )
        with stoppable() as stop:
            run = run_child(request, output=folder / "output.log", limit_s=limit_s)
            stop.check()
        self.records[name] = run
        self.traces[name] = read_trace(folder / "trace.jsonl")
        return run

    def _work_folder(self, training: str) -> str | None:
        if not self._copies:
            return None
        copy = (self.folder / training / "work").absolute()
        if not copy.exists():
            copy_folder(self._here, copy, without=self.folder)
        return str(copy)

    def _check(self, trace: RunTrace, whole: RunRecord) -> None:
        steps = trace.num_updates
        if whole.replays:
            raise ScriptError(
                f"{self.target} trains by {whole.replays} of a CUDA graph, whose state cannot be traced",
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

    def _read_of_whole(self) -> str:
        """Return a file that the first run wrote and the second one read; empty if there is none."""
        written = {file.path for file in self.traces[WHOLE].written}
        return next((file.path for file in self.records[STOPPED].files_read if file.path in written), "")


def stop_of(trace: RunTrace) -> int:
    """Return where to stop a run: halfway between the checkpoint nearest to its middle and the next one."""
    steps = trace.num_updates
    saves = sorted({file.updates for file in trace.written if file.is_checkpoint and 0 < file.updates < steps})
    if not saves:
        return steps // 2
    last = min(saves, key=lambda save: abs(save - steps // 2))
    following = next((save for save in saves if save > last), steps)
    return min(last + max((following - last) // 2, 1), steps - 1)


def checkpoints_of(written: Sequence[WrittenFile], *, work: str) -> list[str]:
    """Return the checkpoints that a run has left: files with state, or the folder of several that were written after the same update.

    Args:
        written: the files that the run wrote. Those with state are recognised by what wrote them, or by their first bytes.
        work: the folder in which the script ran, which is no checkpoint.
    """
    last: dict[str, WrittenFile] = {}
    for file in written:
        saved = file.is_checkpoint or (file.path in last and last[file.path].is_checkpoint)
        last[file.path] = file.model_copy(update={"is_checkpoint": saved})
    left = [f for f in last.values() if os.path.isfile(f.path) and (f.is_checkpoint or _contains_state(f.path))]
    together = Counter((os.path.dirname(file.path), file.updates) for file in left)
    found: dict[str, None] = {}
    for file in left:
        folder = os.path.dirname(file.path)
        is_part = together[folder, file.updates] > 1 and os.path.realpath(folder) != os.path.realpath(work)
        found[folder if is_part else file.path] = None
    return list(found)


def _contains_state(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            head = file.read(64)
    except OSError:
        return False
    return head.startswith(_MAGIC) or head[8:9] == b"{"  # safetensors: JSON after eight bytes for its length


MOST_BYTES = 2 * 10**9
_LEFT_OUT = ("runs", "wandb", "mlruns", "__pycache__", "node_modules", "site-packages")


def copy_folder(source: Path, place: Path, *, without: Path) -> Path:
    """Copy a folder to ``place`` and return ``place``; hidden folders, environments, results of runs and ``without`` are left out.

    Links to folders stay links: their targets are not copied.

    Raises:
        ScriptError: there is too much to copy.
    """
    files, total = [], 0
    for file in _files(source, without.resolve()):
        total += file.stat().st_size
        files.append(file)
        if total > MOST_BYTES:
            raise ScriptError(
                f"{source} has more than {MOST_BYTES / 1e9:g} GB, and the script would run in copies of it",
                hint="write {run} into the script's arguments where they name the folder of its checkpoints, "
                "as in --output {run}: then nothing is copied",
            )
    for file in files:
        target = place / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.is_symlink():
            target.symlink_to(file.resolve())
        else:
            shutil.copy2(file, target)
    place.mkdir(parents=True, exist_ok=True)
    return place


def _files(source: Path, without: Path) -> Iterator[Path]:
    """Yield the files in a folder, and the links to folders."""
    for folder, inner, names in os.walk(source):
        here = Path(folder)
        links = [name for name in inner if (here / name).is_symlink()]
        inner[:] = [name for name in inner if name not in links and not _is_skipped(here / name, without)]
        yield from (here / name for name in links)
        yield from (here / name for name in names if (here / name).is_file())


def _is_skipped(folder: Path, without: Path) -> bool:
    name = folder.name
    return name.startswith(".") or name in _LEFT_OUT or (folder / "pyvenv.cfg").exists() or folder.resolve() == without
