"""Take snapshots of a script between two batches, and restore one in a script that was started again.

A resumed script runs from its first line. Passes over loaders that were finished are shortened to their first batch, so that the loop
counts as before; until then its output is hidden and its calls of ``torch.save`` write nothing. The pass that was open begins with its
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
from mezzo.launch.torch.snapshots.passes import LoaderPass, Passes, frames_of_script, in_for_statement
from mezzo.launch.torch.snapshots.returning import return_to_good
from mezzo.launch.torch.snapshots.starting import choose_start
from mezzo.launch.torch.snapshots.variables import ScriptState, is_below, missing_text, script_folder, set_variables
from mezzo.launch.torch.state import Run
from mezzo.policy import Policy
from mezzo.records import Reason, SnapshotsTaken

_KEEP = 3


class ScriptSnapshots:
    """The snapshots of a run, and the one that it resumes."""

    def __init__(self, run: Run, request: SnapshotRequest) -> None:
        """Read the snapshot to resume, if one is requested, and lock the folder.

        Raises:
            SnapshotError: no snapshot can be loaded, or the folder cannot be used.
        """
        self._run, self._request = run, request
        self._resumed, last_number = choose_start(request)
        self._folder = Folder(Path(request.folder).absolute())
        self._folder.begin_after(last_number)
        self._agreement = Agreement(every_s=min(EVERY_S, request.every_s / 2)) if request.ranks > 1 else None
        open_pass = None if self._resumed is None else self._resumed.contents["pass"]
        self._passes = Passes(self._between, open_pass, begins=self._hide_output)
        self._copies, self._last_s = Copies(), time.monotonic()
        self._saving: Saving | None = None
        self._patches = Patches()
        self._stdout: Any = None
        self._devnull: Any = None
        self._updates_at: dict[tuple[str, int], int] = {}
        """The number of updates when the first batch of a pass was requested."""
        self._sigterm_received = self._trains = False
        self._process = os.getpid()
        self.taken = SnapshotsTaken(folder=request.folder, every_s=request.every_s)

    def install(self) -> None:
        """Watch the script's loops until ``close``."""
        self._passes.install(self._patches)
        self._defer_sigterm()
        if self._resumed is None:
            return
        where = self._resumed.path
        print(f"mezzo: resuming from {where}; finished passes are shortened, and not shown", file=sys.stderr)
        for refused in self._resumed.refused:
            print(f"mezzo: not {refused.path.name}: {refused.why}", file=sys.stderr)
            self._record_problem(refused.path.name, "not loaded", refused.why)
        self._patches.around(torch, "save", self._save_if_caught_up)

    def close(self) -> SnapshotsTaken:
        """Wait for the last save, undo what ``install`` did, and return what was taken."""
        self._show_output()
        self._patches.undo()
        self._finish_saving()
        return self.taken

    @property
    def not_reached(self) -> SnapshotError | None:
        """The error of a script that ended before it reached the place where the run to resume was stopped; None if it got there."""
        if self._passes.caught_up:
            return None
        return _not_resumable("the script ended before it reached the place where that run was stopped")

    # --- between two batches ---------------------------------------------------------------------------------------------

    def _between(self, loader_pass: LoaderPass, iterator: Any) -> None:
        if os.getpid() != self._process:
            return
        if not self._passes.caught_up:
            if self._passes.is_target(loader_pass):
                self._restore(iterator)
            return
        before = self._updates_at.setdefault((loader_pass.place, loader_pass.number), self._run.num_updates)
        trained = self._run.num_updates != before
        if self._run.guard is not None and self._run.guard.pending is not None and (trained or self._agreement is None):
            self._return_to_snapshot(self._run.guard)
            # A snapshot saved now would be a copy of that one, but count as progress: a second return would begin with the mildest remedy.
            self._last_s = time.monotonic()
            return
        if not trained and (self._agreement is not None or not self._sigterm_received):
            return
        self._trains = True
        if self._is_due():
            self._last_s = time.monotonic()
            try:
                self._save(loader_pass, iterator)
            except SnapshotError as error:  # the training continues, and the record says what it lacks
                self._report_problem("save", error.message)
            if self._sigterm_received:
                self._finish_saving()
                self._end(signal.SIGTERM, None)

    def _is_due(self) -> bool:
        """Return whether to save now; several processes agree on it, and all end if one received SIGTERM."""
        due = self._sigterm_received or time.monotonic() - self._last_s >= self._request.every_s
        if self._agreement is None:
            return due
        updates = self._run.num_updates
        if updates < self._agreement.next:
            return False
        if not are_several():
            self._report_problem(
                "save", "no snapshot: the script's processes form no group, so they cannot save together"
            )
            return False
        due, self._sigterm_received = map(bool, self._agreement.exchange(updates, [due, self._sigterm_received]))
        return due

    def _return_to_snapshot(self, guard: ScriptGuard) -> None:
        """Return to the newest good snapshot because of an alarm, or have the guard end the script."""
        self._finish_saving()
        self._run.close_update()  # the open update is one of those that went wrong
        alarm = guard.pending
        assert alarm is not None
        rewinds = guard.noticed.rewinds
        outcome = return_to_good(self._run, self._folder.path, alarm, rewinds, agreement=self._agreement)
        if isinstance(outcome, str):
            guard.end(f"{alarm.kind}: {alarm.evidence}; {outcome}")
        else:
            guard.returned(outcome)

    def _save(self, loader_pass: LoaderPass, iterator: Any) -> None:
        self._finish_saving()
        frames, library = frames_of_script()
        self._refuse_loop(loader_pass, frames, library)
        counts = [count_of(enumeration) for enumeration in enumerations(iterator)]
        state = ScriptState(is_below(script_folder()))
        states = [[frame.f_code.co_name, loop_values(frame), state.frame(frame.f_locals)] for frame in frames]
        self._note_contents(state)
        run = self._run
        updates = run.num_updates + (self.taken.resumed_updates or 0)
        contents = {
            "run": self._request.identity,
            "pass": {
                "place": loader_pass.place,
                "number": loader_pass.number,
                "delivered": loader_pass.delivered,
                "began": loader_pass.began,
            },
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

    def _refuse_loop(self, loader_pass: LoaderPass, frames: list[Any], library: str) -> None:
        why = ""
        if library or not frames:
            why = f"the loop runs in {library or 'code that is not the script'}; use the checkpoints of that library"
        elif not in_for_statement(frames[-1]):
            why = "the script takes batches by next() in a loop of its own, whose count a resumed run would start again"
        elif self._passes.others_open(loader_pass):
            why = "two loaders are read alternately, and only one of them can be moved to its position"
        if why:
            raise SnapshotError(
                f"no snapshot: {why}", hint="train in `for batch in loader:`, or use mezzo.Session and its save"
            )

    def _note_contents(self, state: ScriptState) -> None:
        """Record what a snapshot contains, and which parts of the training it lacks."""
        objects = state.objects.values()
        ids = set(map(id, objects))
        saved = {id(p) for obj in objects if isinstance(obj, torch.nn.Module) for p in obj.parameters()}
        left_out = [Reason(what=path, value="not saved", reason=why) for path, why in state.left_out.items()]
        for optimizer in self._run.optimizers:
            name = type(optimizer).__name__
            if id(optimizer) not in ids and optimizer.state:
                left_out.append(Reason(what=name, value="not saved", reason="no variable of the script leads to it"))
            elif any(id(p) not in saved for p in trained_leaves(optimizer)):
                why = "no module in a variable has all of its parameters"
                left_out.append(Reason(what=f"parameters of {name}", value="perhaps not saved", reason=why))
        names = [f"{path}: {type(obj).__name__}" for path, obj in state.objects.items()]
        self.taken = self.taken.model_copy(update={"found": names, "left_out": left_out})

    def _finish_saving(self) -> None:
        """Wait for the save in progress, and count it."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            path = saving.wait()
        except SnapshotError as error:
            self._report_problem("save", error.message)
        else:
            self.taken = self.taken.model_copy(update={"saved": self.taken.saved + 1, "last": path.name})

    def _report_problem(self, what: str, why: str) -> None:
        if all(problem.reason != why for problem in self.taken.problems):
            print(f"mezzo: {why}", file=sys.stderr)
            self._record_problem(what, "failed", why)

    def _record_problem(self, what: str, value: str, why: str) -> None:
        problems = [*self.taken.problems, Reason(what=what, value=value, reason=why)]
        self.taken = self.taken.model_copy(update={"problems": problems})

    # --- resuming --------------------------------------------------------------------------------------------------------

    def _restore(self, iterator: Any) -> None:
        """Restore the saved state."""
        assert self._resumed is not None
        contents, run = self._resumed.contents, self._run
        frames, _ = frames_of_script()
        counting, counts = enumerations(iterator), contents["counts"]
        names = [frame.f_code.co_name for frame in frames]
        if names != [name for name, _, _ in contents["frames"]] or len(counting) != len(counts):
            raise _not_resumable("the loop is not where it was in the script")
        for frame, (_, then, entries) in zip(frames, contents["frames"], strict=True):
            now = loop_values(frame)
            if now != then:
                why = "the script continues a checkpoint of its own, or its loops depend on results"
                raise _not_resumable(f"the enclosing loops are at {now}, and were at {then}: {why}")
            lost = set_variables(frame, entries)
            if lost:
                raise _not_resumable(missing_text(lost))
        for enumeration, count in zip(counting, counts, strict=True):
            set_count(enumeration, count)
        self._restart_record(contents["updates"])
        if contents.get("policy", str(run.current)) != str(run.current):
            why = "the run that is resumed had fallen back to it; see its record"
            change_policy(run, Policy.parse(contents["policy"]), why)
            print(f"mezzo: guard: policy {contents['policy']}: {why}", file=sys.stderr)
        for scale, state in zip((run.scale, run.inner_scale), contents["scales"], strict=True):
            scale.load_state_dict(state)
        self._passes.caught_up = True
        self._show_output()
        self._last_s = time.monotonic()
        set_random_states(contents["random"])

    def _restart_record(self, updates: int) -> None:
        """Forget the steps of shortened passes: the record begins with the first step of the resumed run itself."""
        run = self._run
        run.close_update()
        run.losses.forget()
        run.recorder = run.recorder.replacement()
        if run.guard is not None:
            run.guard.restart()
        self.taken = self.taken.model_copy(
            update={"resumed_from": str(self._resumed.path), "resumed_updates": updates}  # type: ignore[union-attr]
        )

    def _hide_output(self) -> None:
        if self._stdout is None and not self._passes.caught_up:
            self._devnull = io.TextIOWrapper(open(os.devnull, "wb"), encoding="utf-8")  # noqa: SIM115
            self._stdout, sys.stdout = sys.stdout, self._devnull

    def _show_output(self) -> None:
        if self._stdout is None:
            return
        if sys.stdout is self._devnull:
            sys.stdout = self._stdout
        self._devnull.close()
        self._stdout = None

    def _save_if_caught_up(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        if self._passes.caught_up:
            original(*args, **kwargs)

    def _defer_sigterm(self) -> None:
        """End after the next batch and a snapshot instead of immediately; ``LAST_WORD`` still ends the script."""
        self._end: Any = signal.getsignal(signal.SIGTERM)
        if not callable(self._end):
            return

        def defer(number: int, frame: Any) -> None:
            if not self._trains or os.getpid() != self._process:
                self._end(number, frame)
            self._sigterm_received = True

        signal.signal(signal.SIGTERM, defer)
        self._patches.on_undo(lambda: signal.signal(signal.SIGTERM, self._end))


def _not_resumable(why: str) -> SnapshotError:
    return SnapshotError(
        f"the run cannot be resumed: {why}",
        hint="resume with the script as it was; to start over, leave --resume out",
    )
