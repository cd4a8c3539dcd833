"""Take snapshots of a script between two batches, and restore one in a script that was started anew.

A resumed script runs from its first line. Passes over loaders that were finished are shortened to their first batch, so that the loop
counts as it did; meanwhile its output is hidden and its calls of ``torch.save`` write nothing. The pass that was open begins with its
saved generators and leaves out the batches that were delivered. Before its next batch every variable, model, optimizer, scheduler,
scaler and random generator is set to its saved value. From there on it is the run that was stopped.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mezzo.engine.gradients import trained_leaves
from mezzo.engine.processes.agreement import EVERY_S, Agreement, are_several
from mezzo.engine.snapshots.background import Copies, Saving
from mezzo.engine.snapshots.folder import Folder
from mezzo.engine.snapshots.randomness import random_states, set_random_states
from mezzo.engine.snapshots.structure import take_apart
from mezzo.errors import SnapshotError
from mezzo.launch.patches import Patches
from mezzo.launch.request_parts import SnapshotRequest
from mezzo.launch.torch.guarding import ScriptGuard
from mezzo.launch.torch.policy_change import change_policy
from mezzo.launch.torch.snapshots.counters import count_of, enumerations, loop_values, set_count
from mezzo.launch.torch.snapshots.passes import LoaderPass, Passes, asked_by_a_for_loop, frames_of_script
from mezzo.launch.torch.snapshots.returning import return_to_good
from mezzo.launch.torch.snapshots.starting import start_of
from mezzo.launch.torch.snapshots.variables import ScriptState, is_below, script_folder, set_variables
from mezzo.launch.torch.state import Run
from mezzo.policy import Policy
from mezzo.records import Reason, SnapshotsTaken

_KEEP = 3


class ScriptSnapshots:
    """The snapshots of a run, and the one that it resumes."""

    def __init__(self, run: Run, asked: SnapshotRequest) -> None:
        """Read the snapshot to resume, if one was asked for, and lock the folder.

        Raises:
            SnapshotError: no snapshot can be loaded, or the folder cannot be used.
        """
        self._run, self._asked = run, asked
        self._resumed, last_number = start_of(asked)
        self._folder = Folder(Path(asked.folder).absolute())
        self._folder.begin_after(last_number)
        self._together = Agreement(every_s=min(EVERY_S, asked.every_s / 2)) if asked.ranks > 1 else None
        at = None if self._resumed is None else self._resumed.contents["pass"]
        self._passes = Passes(self._between, at, begins=self._hide_output)
        self._copies, self._last_s = Copies(), time.monotonic()
        self._saving: Saving | None = None
        self._patches = Patches()
        self._out: Any = None
        self._nowhere: Any = None
        self._updates_at: dict[tuple[str, int], int] = {}
        """The number of updates when a pass was first asked for a batch."""
        self._notice = self._trains = False
        self._process = os.getpid()
        self.taken = SnapshotsTaken(folder=asked.folder, every_s=asked.every_s)

    def install(self) -> None:
        """Follow the script's loops until ``close``."""
        self._passes.install(self._patches)
        self._defer_sigterm()
        if self._resumed is None:
            return
        where = self._resumed.path
        print(f"mezzo: resuming from {where}; finished passes are shortened, and not shown", file=sys.stderr)
        for one in self._resumed.refused:
            print(f"mezzo: not {one.path.name}: {one.why}", file=sys.stderr)
            self._record_problem(one.path.name, "not loaded", one.why)
        self._patches.around(torch, "save", self._not_while_bringing)

    def close(self) -> SnapshotsTaken:
        """Wait for the last save, undo what ``install`` did, and return what was taken."""
        self._show_output()
        self._patches.undo()
        self._settle()
        return self.taken

    @property
    def not_reached(self) -> SnapshotError | None:
        """The error of a script that ended before it reached the place where the run to resume was stopped."""
        if self._passes.arrived:
            return None
        return _not_resumable("the script ended before it reached the place where that run was stopped")

    # --- between two batches ---------------------------------------------------------------------------------------------

    def _between(self, this: LoaderPass, iterator: Any) -> None:
        if os.getpid() != self._process:
            return
        if not self._passes.arrived:
            if self._passes.is_target(this):
                self._arrive(iterator)
            return
        before = self._updates_at.setdefault((this.place, this.number), self._run.num_updates)
        trained = self._run.num_updates != before
        if self._run.guard is not None and self._run.guard.pending is not None and (trained or self._together is None):
            self._return(self._run.guard)
            # Saved now, a copy of that snapshot would count as progress: the second return would begin with the mildest remedy again.
            self._last_s = time.monotonic()
            return
        if not trained and (self._together is not None or not self._notice):
            return
        self._trains = True
        if self._is_due():
            self._last_s = time.monotonic()
            try:
                self._save(this, iterator)
            except SnapshotError as error:  # the training goes on, and the record says what it lacks
                self._problem("save", error.message)
            if self._notice:
                self._settle()
                self._end(signal.SIGTERM, None)

    def _is_due(self) -> bool:
        """Return whether to save now; several processes agree on it, and all end if one was asked to."""
        due = self._notice or time.monotonic() - self._last_s >= self._asked.every_s
        if self._together is None:
            return due
        updates = self._run.num_updates
        if updates < self._together.next:
            return False
        if not are_several():
            self._problem("save", "no snapshot: the script's processes form no group, so they cannot save together")
            return False
        due, self._notice = map(bool, self._together.exchange(updates, [due, self._notice]))
        return due

    def _return(self, guard: ScriptGuard) -> None:
        """Return to the newest good snapshot because of an alarm, or have the guard end the script."""
        self._settle()
        self._run.close_update()  # the open update is one of those that went wrong
        alarm = guard.pending
        assert alarm is not None
        found = return_to_good(self._run, self._folder.path, alarm, guard.noticed.rewinds, together=self._together)
        if isinstance(found, str):
            guard.end(f"{alarm.kind}: {alarm.evidence}; {found}")
        else:
            guard.returned(found)

    def _save(self, this: LoaderPass, iterator: Any) -> None:
        self._settle()
        frames, library = frames_of_script()
        self._refuse_loop(this, frames, library)
        counts = [count_of(one) for one in enumerations(iterator)]
        found = ScriptState(is_below(script_folder()))
        states = [[frame.f_code.co_name, loop_values(frame), found.frame(frame.f_locals)] for frame in frames]
        self._note(found)
        run = self._run
        updates = run.num_updates + (self.taken.resumed_updates or 0)
        contents = {
            "run": self._asked.identity,
            "pass": {"place": this.place, "number": this.number, "delivered": this.delivered, "began": this.began},
            "counts": counts,
            "frames": states,
            "policy": str(run.current),
            "scales": [run.scale.state_dict(), run.inner_scale.state_dict()],
            "updates": updates,
            "random": random_states(),
        }
        tree, tensors = take_apart(contents)
        path = self._folder.next_path(updates=updates, calls=0)
        self._saving = Saving(path, tree, self._copies.of(tensors), lambda: self._folder.prune(_KEEP))

    def _refuse_loop(self, this: LoaderPass, frames: list[Any], library: str) -> None:
        why = ""
        if library or not frames:
            why = f"the loop runs in {library or 'code that is not the script'}; use the checkpoints of that library"
        elif not asked_by_a_for_loop(frames[-1]):
            why = "the script takes batches by next() in a loop of its own, whose count a resumed run would begin anew"
        elif self._passes.others_open(this):
            why = "two loaders are read in turns, and only one of them can be brought back to its place"
        if why:
            raise SnapshotError(
                f"no snapshot: {why}", hint="train in `for batch in loader:`, or use mezzo.Session and its save"
            )

    def _note(self, found: ScriptState) -> None:
        """Record what a snapshot contains, and which parts of the training it lacks."""
        objects = found.objects.values()
        ids = set(map(id, objects))
        held = {id(p) for one in objects if isinstance(one, torch.nn.Module) for p in one.parameters()}
        left_out = [Reason(what=path, value="not saved", reason=why) for path, why in found.left_out.items()]
        for optimizer in self._run.optimizers:
            name = type(optimizer).__name__
            if id(optimizer) not in ids and optimizer.state:
                left_out.append(Reason(what=name, value="not saved", reason="no variable of the script leads to it"))
            elif any(id(p) not in held for p in trained_leaves(optimizer)):
                why = "no module in a variable has all of its parameters"
                left_out.append(Reason(what=f"parameters of {name}", value="perhaps not saved", reason=why))
        names = [f"{path}: {type(value).__name__}" for path, value in found.objects.items()]
        self.taken = self.taken.model_copy(update={"found": names, "left_out": left_out})

    def _settle(self) -> None:
        """Wait for the save in progress, and count it."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            path = saving.wait()
        except SnapshotError as error:
            self._problem("save", error.message)
        else:
            self.taken = self.taken.model_copy(update={"saved": self.taken.saved + 1, "last": path.name})

    def _problem(self, what: str, why: str) -> None:
        if all(one.reason != why for one in self.taken.problems):
            print(f"mezzo: {why}", file=sys.stderr)
            self._record_problem(what, "failed", why)

    def _record_problem(self, what: str, value: str, why: str) -> None:
        problems = [*self.taken.problems, Reason(what=what, value=value, reason=why)]
        self.taken = self.taken.model_copy(update={"problems": problems})

    # --- resuming --------------------------------------------------------------------------------------------------------

    def _arrive(self, iterator: Any) -> None:
        """Restore the saved state."""
        assert self._resumed is not None
        contents, run = self._resumed.contents, self._run
        frames, _ = frames_of_script()
        counting, counts = enumerations(iterator), contents["counts"]
        names = [frame.f_code.co_name for frame in frames]
        if names != [name for name, _, _ in contents["frames"]] or len(counting) != len(counts):
            raise _not_resumable("the loop is not where it was in the script")
        for frame, (_, around, entries) in zip(frames, contents["frames"], strict=True):
            now = loop_values(frame)
            if now != around:
                why = "the script continues a checkpoint of its own, or its loops follow results"
                raise _not_resumable(f"the loops around are at {now}, and were at {around}: {why}")
            lost = set_variables(frame, entries)
            if lost:
                raise _not_resumable(f"the script has no {', '.join(lost)} any more, or of another kind")
        for one, count in zip(counting, counts, strict=True):
            set_count(one, count)
        self._restart_record(contents["updates"])
        if contents.get("policy", str(run.current)) != str(run.current):
            why = "the run that is resumed had fallen back to it; see its record"
            change_policy(run, Policy.parse(contents["policy"]), why)
            print(f"mezzo: guard: policy {contents['policy']}: {why}", file=sys.stderr)
        for scale, state in zip((run.scale, run.inner_scale), contents["scales"], strict=True):
            scale.load_state_dict(state)
        self._passes.arrived = True
        self._show_output()
        self._last_s = time.monotonic()
        set_random_states(contents["random"])

    def _restart_record(self, updates: int) -> None:
        """Forget the steps of shortened passes: the record begins with the first step of the resumed run itself."""
        run = self._run
        run.close_update()
        run.recorder = run.recorder.anew()
        if run.guard is not None:
            run.guard.restart()
        self.taken = self.taken.model_copy(
            update={"resumed_from": str(self._resumed.path), "resumed_updates": updates}  # type: ignore[union-attr]
        )

    def _hide_output(self) -> None:
        if self._out is None and not self._passes.arrived:
            self._nowhere = io.TextIOWrapper(open(os.devnull, "wb"), encoding="utf-8")  # noqa: SIM115
            self._out, sys.stdout = sys.stdout, self._nowhere

    def _show_output(self) -> None:
        if self._out is None:
            return
        if sys.stdout is self._nowhere:
            sys.stdout = self._out
        self._nowhere.close()
        self._out = None

    def _not_while_bringing(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        if self._passes.arrived:
            original(*args, **kwargs)

    def _defer_sigterm(self) -> None:
        """End after the next batch and a snapshot instead of at once; ``LAST_WORD`` still ends the script."""
        self._end: Any = signal.getsignal(signal.SIGTERM)
        if not callable(self._end):
            return

        def note(number: int, frame: Any) -> None:
            if not self._trains or os.getpid() != self._process:
                self._end(number, frame)
            self._notice = True

        signal.signal(signal.SIGTERM, note)
        self._patches.on_undo(lambda: signal.signal(signal.SIGTERM, self._end))


def _not_resumable(why: str) -> SnapshotError:
    return SnapshotError(
        f"the run cannot be resumed: {why}",
        hint="resume with the script as it was; to begin anew, leave --resume out",
    )
