"""Take snapshots of a script at the top of a loop, and lead a script that was started again back there.

The first one is taken after the first update, so that a script that cannot be resumed is refused before it has trained for long, and one
more after each interval. A resumed run executes the script from its first line to the end of its set-up, enters the loops at the saved
place, and is from there on the run that was stopped: ``loops`` says how. Nothing that it has trained runs again.
"""

from __future__ import annotations

import builtins
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from mezzo.engine.processes.agreement import EXCHANGE_EVERY_S, Agreement, are_several, save_is_due
from mezzo.engine.randomness import random_states, set_random_states
from mezzo.engine.snapshots.background import Copies, Saving
from mezzo.engine.snapshots.folder import Folder, saved_in
from mezzo.engine.snapshots.structure import take_apart
from mezzo.errors import SnapshotError
from mezzo.launch.patches import Patches
from mezzo.launch.request import ScriptFile, SnapshotRequest
from mezzo.launch.torch.snapshots.files import SET_UP, FileJournal
from mezzo.launch.torch.snapshots.functions import install_passes
from mezzo.launch.torch.snapshots.kinds import SAVERS
from mezzo.launch.torch.snapshots.loops import Loops, way_from_json
from mezzo.launch.torch.snapshots.proof import UPDATES, Proof, answer_twin, choose_start, mark_disproven
from mezzo.launch.torch.snapshots.rewriting import RUNTIME
from mezzo.launch.torch.snapshots.script_files import Finder, OwnFiles
from mezzo.launch.torch.snapshots.trained_objects import return_to_good, states_of
from mezzo.launch.torch.snapshots.walk import sampler_states
from mezzo.launch.torch.state import TorchRun
from mezzo.observe.settings import StopScript
from mezzo.policy import Policy
from mezzo.records import Note, SnapshotProof, SnapshotsTaken

_KEEP = 3
_TRIED = (3, 11)
"""The version of Python that was tried; older ones do not tell where an instruction is."""


class ScriptSnapshots:
    """The snapshots of a run, and the snapshot that it resumes."""

    def __init__(self, run: TorchRun, request: SnapshotRequest, script: ScriptFile) -> None:
        """Read the snapshot to resume, if one is requested, and lock the folder.

        Raises:
            SnapshotError: no snapshot can be loaded, the folder cannot be used, or this Python was not tried.
        """
        if sys.version_info[:2] != _TRIED:
            raise SnapshotError(
                f"--snapshot was not tried with Python {sys.version_info[0]}.{sys.version_info[1]}; allowed: 3.{_TRIED[1]}",
                hint="run the script with that version, or save with mezzo.Session",
            )
        self._run, self._request = run, request
        self._resumed, last_number = choose_start(request)
        self._folder = Folder(Path(request.folder).absolute())
        self._folder.begin_after(last_number)
        self._agreement = Agreement(every_s=min(EXCHANGE_EVERY_S, request.every_s / 2)) if request.ranks > 1 else None
        tree = None if self._resumed is None else self._resumed.contents["script"]
        self._files = OwnFiles(script.folder, [] if tree is None else [way_from_json(way) for way in tree["ways"]])
        self._loops = Loops(
            self._files,
            trains=lambda: bool(run.objects.optimizers),
            instead=self._returns,
            save=self._save,
            refuse=self._refused,
            arrived=self._arrived,
        )
        runs = Path(request.folder).absolute().parent
        self._journal = FileJournal(
            Path(request.folder).absolute(),
            without=[runs if request.ranks == 1 else runs.parent],
            report=self._report_problem,
        )
        self._copies, self._last_s = Copies(), float("-inf")
        self._saving: Saving | None = None
        proves = request.proves and self._resumed is None and request.ranks == 1
        self._proof = Proof(script, self._folder.path) if proves else None
        self._until_comparison: int | None = None
        """Updates until this run's state is compared with its twin's."""
        self._patches = Patches()
        self._sigterm_received = False
        self._process = os.getpid()
        self.refused: SnapshotError | None = None
        """Why the script cannot be resumed; it was stopped because of that."""
        self.taken = SnapshotsTaken(folder=request.folder, every_s=request.every_s)

    def install(self) -> None:
        """Watch the script's updates and loops until ``close``."""
        patches = self._patches
        setattr(builtins, RUNTIME, self._loops)
        patches.on_undo(lambda: delattr(builtins, RUNTIME))
        finder = Finder(self._files)
        sys.meta_path.insert(0, finder)
        patches.on_undo(lambda: sys.meta_path.remove(finder))
        install_passes(patches, lambda loader: sampler_states(self._files, SAVERS, loader))
        patches.on_undo(register_optimizer_step_post_hook(torch.compiler.disable(lambda *_: self._updated())).remove)
        patches.around(torch.Tensor, "backward", self._after_backward)
        self._defer_sigterm()
        if self._resumed is not None:
            contents = self._resumed.contents
            print(f"mezzo: resuming from {self._resumed.path}", file=sys.stderr)
            for refused in self._resumed.refused:
                print(f"mezzo: not {refused.path.name}: {refused.why}", file=sys.stderr)
                self._record_problem(refused.path.name, "not loaded", refused.why)
            self._journal.roll_back(contents["number"])
            self._journal.begin_set_up()
            self._loops.resume(contents["script"], contents["tensors"])
        elif (
            self._request.resume
        ):  # starting over: a run that was killed before its first snapshot may have written files
            self._journal.roll_back(0)
        self._journal.install(patches)

    def run_file(self, script: ScriptFile) -> dict[str, Any]:
        """Run the script's file and return its global variables."""
        return self._files.run_as_main(script.path, package=script.package)

    def close(self) -> SnapshotsTaken:
        """Wait for the last save, undo what ``install`` did, and return what was taken."""
        if self._loops.is_arriving:
            self._journal.roll_back(SET_UP)
        self._patches.undo()
        self._finish_saving()
        if self._resumed is None and self.taken.resumed_from is None and not self.taken.saved:
            self._journal.drop_before(SET_UP)  # only a run that was killed is undone
        if self._proof is not None:
            proof = self._proof.end()
            if self.taken.saved:
                self._note_proof(proof)
        return self.taken

    @property
    def not_reached(self) -> SnapshotError | None:
        """The error of a script that ended before it reached the place where the run to resume was stopped; None if it got there."""
        if self.refused is not None or not self._loops.is_arriving:
            return self.refused
        return SnapshotError(
            "the run cannot be resumed: the script ended before it reached the place where that run was stopped",
            hint="resume with the script as it was; to start over, leave --resume out",
        )

    # --- after an update -------------------------------------------------------------------------------------------------

    def _after_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not self._run.objects.optimizers:  # the script updates its weights by hand
            self._updated()
        return result

    def _updated(self) -> None:
        if self._loops.is_arriving or os.getpid() != self._process:
            return
        if threading.current_thread() is not threading.main_thread():
            return
        self._prove()
        guard = self._run.guard
        if self._loops.wanted or (
            guard is not None and guard.pending is not None
        ):  # another loop may be around this update
            self._loops.want(sys._getframe(1))
        elif self._is_due():
            self._last_s = time.monotonic()
            self._loops.want(sys._getframe(1))

    def _prove(self) -> None:
        """Compare this run with its twin, if it is time for it."""
        if self._until_comparison is not None:
            self._until_comparison -= 1
            if self._until_comparison == 0:
                self._until_comparison, twin = None, self._request.twin
                if twin is not None:
                    self._loops.compare(lambda digests: answer_twin(twin, digests))
                elif self._proof is not None:
                    self._loops.compare(self._proof.compare_with)
        if self._proof is not None:
            self._proof.follow()
            if self._proof.verdict is not None:
                self._note_proof(self._proof.end())

    def _note_proof(self, proof: SnapshotProof) -> None:
        self._proof, self.taken = None, self.taken.model_copy(update={"proof": proof})
        if proof.verdict == "disproven":
            mark_disproven(self._folder.path, proof)
            self._loops.save_no_more()
            print(
                f"mezzo: no more snapshots: a run that resumed the first one differs in {', '.join(proof.names)}",
                file=sys.stderr,
            )

    def _is_due(self) -> bool:
        """Return whether to save now; several processes agree on it, and all end if one received SIGTERM."""
        every_s, updates = self._request.every_s, self._run.update.num_updates
        if self._agreement is not None and updates >= self._agreement.next and not are_several():
            self._report_problem(
                "save", "no snapshot: the script's processes form no group, so they cannot save together"
            )
            return False
        due = time.monotonic() - self._last_s >= every_s and not self._is_disproven
        is_writing = every_s > 0 and self._saving is not None and self._saving.is_running
        asked = self._sigterm_received
        saves, ends = save_is_due(self._agreement, updates, due=due, is_writing=is_writing, asked=asked)
        self._sigterm_received |= ends  # it may have come in between
        return saves

    @property
    def _is_disproven(self) -> bool:
        return self.taken.proof is not None and self.taken.proof.verdict == "disproven"

    def _returns(self) -> bool:
        """Return to the newest good snapshot, if an alarm asks for it, or have the guard end the script; or wait for a better moment."""
        if self._run.dropped_updates.waits:  # for an update: which pass overflowed is not saved
            self._loops.want_soon()
            return True
        guard = self._run.guard
        if guard is None or guard.pending is None:
            return False
        self._finish_saving()
        self._run.close_update()  # the open update is one of those that went wrong
        outcome = return_to_good(
            self._run,
            self._folder.path,
            guard.pending,
            guard.noticed.rewinds,
            objects=self._loops.objects(),
            agreement=self._agreement,
        )
        if isinstance(outcome, str):
            guard.end(f"{guard.pending.kind}: {guard.pending.evidence}; {outcome}")
        else:
            guard.returned(outcome)
        # A snapshot saved now would be a copy of that one, but count as progress: a second return would begin with the mildest remedy.
        self._last_s = time.monotonic()
        return True

    # --- saving ----------------------------------------------------------------------------------------------------------

    def _save(self, tree: dict[str, Any], tensors: dict[str, Any], where: str, objects: dict[str, Any]) -> None:
        """Write a snapshot in the background; what keeps it from being written is reported, and the training continues."""
        try:
            self._finish_saving()
            run = self._run
            updates = run.update.num_updates + (self.taken.resumed_updates or 0)
            path = self._folder.next_path(updates=updates, calls=0)
            number = int(path.name.split("-")[0])
            trained = states_of(objects) if run.guard is not None else []
            contents = {
                "run": self._request.identity,
                "number": number,
                "files": self._journal.begin(number),
                "policy": str(run.precision.present),
                "device": None if run.precision.device_type is None else str(run.update.recorder.clock.device),
                "scales": run.scale_states(),
                "drops": run.dropped_updates.drops,
                "schedules": _since_steps(run, objects),
                "updates": updates,
                "trained": trained,
                "random": random_states(),
                "tensors": dict(tensors),
            }
            written, found = take_apart(contents)
            written["script"] = tree  # JSON already
            copies = self._copies.of(found)
            self._saving = Saving(path, written, copies, lambda: self._written(path))
        except SnapshotError as error:
            self._report_problem("save", error.message)
        if not self.taken.loop:
            self._say_where(where)
            if self._proof is not None:
                self._until_comparison = UPDATES
        self.taken = self.taken.model_copy(update={"loop": where, "found": sorted(objects)})
        if self._sigterm_received:
            self._finish_saving()
            self._end(signal.SIGTERM, None)

    def _say_where(self, where: str) -> None:
        """Say which loop will be entered again, and that nothing proves it if the run has several processes."""
        speaks = self._request.proves and self._request.rank == 0
        if speaks:
            print(f"mezzo: snapshots are taken at {where}: a resumed run enters this loop again", file=sys.stderr)
        if self._request.proves and self._request.ranks > 1 and self.taken.resumed_from is None:
            why = "several processes are not resumed beside themselves"
            self._note_proof(SnapshotProof(verdict="unproven", reason=why))
            if speaks:
                print(f"mezzo: the snapshots are not proven: {why}", file=sys.stderr)

    def _written(self, path: Path) -> None:
        """Delete what the new snapshot replaces, or let it be proven if it is the first."""
        if self._proof is not None:
            self._proof.begin_with(path)
        if self._proof is not None and self._proof.is_running:
            return
        self._folder.prune(_KEEP)
        kept = saved_in(self._folder.path)
        if kept:
            self._journal.drop_before(kept[-1].number)

    def _refused(self, error: SnapshotError) -> None:
        """End a script that cannot be resumed; if it could before, it goes on, and its record says what it lacks."""
        if self._sigterm_received:
            self._end(signal.SIGTERM, None)
        if self.taken.saved or self._saving is not None or self.taken.resumed_from is not None:
            self._report_problem("save", error.message)
            return
        self.refused = SnapshotError(
            f"--snapshot cannot resume this script: {error.message}", hint=error.hint or "leave --snapshot out"
        )
        raise StopScript

    def _finish_saving(self) -> None:
        """Wait for the save in progress, and count it."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            path = saving.wait()
        except SnapshotError as error:
            self._record_problem("save", "failed", error.message)  # it has been printed
        else:
            self.taken = self.taken.model_copy(update={"saved": self.taken.saved + 1, "last": path.name})

    def _report_problem(self, what: str, why: str) -> None:
        if self._record_problem(what, "failed", why):
            print(f"mezzo: {why}", file=sys.stderr)

    def _record_problem(self, what: str, value: str, why: str) -> bool:
        """Record a problem; return whether it is a new one."""
        if any(problem.reason == why for problem in self.taken.problems):
            return False
        problems = [*self.taken.problems, Note(what=what, value=value, reason=why)]
        self.taken = self.taken.model_copy(update={"problems": problems})
        return True

    # --- resuming --------------------------------------------------------------------------------------------------------

    def _arrived(self) -> None:
        """Go on as the run that was stopped."""
        assert self._resumed is not None
        contents, run = self._resumed.contents, self._run
        set_random_states(contents["random"])
        self._journal.end_set_up(contents["number"], contents["files"])
        run.close_update()
        run.start_over()
        if run.guard is not None:
            run.guard.restart()
        self.taken = self.taken.model_copy(
            update={"resumed_from": str(self._resumed.path), "resumed_updates": contents["updates"]}
        )
        if contents["device"] is not None:  # else the first call of a model would begin with a new scale
            run.begin_on(torch.device(contents["device"]))
        if contents["policy"] != str(run.precision.present):
            why = "the run that is resumed had fallen back to it; see its record"
            run.change_policy(Policy.parse(contents["policy"]), why)
            print(f"mezzo: guard: policy {contents['policy']}: {why}", file=sys.stderr)
        for scale, state in zip((run.precision.scale, run.precision.inner_scale), contents["scales"], strict=True):
            scale.load_state_dict(state)
        run.dropped_updates.resume(drops=contents["drops"])
        if contents["schedules"]:
            for name, scheduler in self._loops.objects().items():
                if name in contents["schedules"]:
                    run.schedules.begin_after(scheduler, tuple(contents["schedules"][name]))
        self._last_s = time.monotonic()
        self._resumed = None
        if self._request.twin is not None:
            self._until_comparison = UPDATES

    def _defer_sigterm(self) -> None:
        """End after the next turn of the loop and a snapshot instead of immediately; ``LAST_WORD`` still ends the script."""
        self._end: Any = signal.getsignal(signal.SIGTERM)
        if not callable(self._end):
            return

        def defer(number: int, frame: Any) -> None:
            if not self._loops.can_save or os.getpid() != self._process:
                self._end(number, frame)
            self._sigterm_received = True
            if self._agreement is None:
                self._loops.want_soon()

        signal.signal(signal.SIGTERM, defer)
        self._patches.on_undo(lambda: signal.signal(signal.SIGTERM, self._end))


def _since_steps(run: TorchRun, objects: dict[str, Any]) -> dict[str, list[int]]:
    """Return each scheduler's updates since its last step, and how many of them were skipped."""
    found = {name: run.schedules.since_step(one) for name, one in objects.items() if isinstance(one, LRScheduler)}
    return {name: list(since) for name, since in found.items() if since is not None}
