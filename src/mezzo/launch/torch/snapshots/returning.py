"""Return a running script to a snapshot after an alarm: models, optimizers, schedulers and scalers are restored; loop and data continue.

A snapshot does not restore a policy that the run has fallen back from since.

Between two batches no graph is open, so the weights can change in place. Variables, loops, random generators and the position in the data
stay as they are: other batches follow than those that led to the alarm, and the script's earlier output stays true.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from mezzo.engine.guardrails.good_snapshots import newest_good
from mezzo.engine.guardrails.remedies import apply_remedy
from mezzo.engine.processes.agreement import Agreement
from mezzo.launch.torch.policy_change import fall_back
from mezzo.launch.torch.snapshots.passes import frames_of_script
from mezzo.launch.torch.snapshots.variables import SETTERS, missing_text, objects_in
from mezzo.launch.torch.state import Run
from mezzo.records import Alarm, Rewind


def return_to_good(
    run: Run, folder: Path, alarm: Alarm, earlier: list[Rewind], *, agreement: Agreement | None = None
) -> Rewind | str:
    """Restore the newest good snapshot, with a change that keeps the same from happening again; or return why that is impossible.

    Args:
        run: the script's run.
        folder: the folder of its snapshots.
        alarm: what went wrong.
        earlier: the earlier returns.
        agreement: exchanges with the other processes: all return to the same snapshot, or none does.
    """
    good = newest_good(folder, before=alarm.since, weights=lambda contents: [*_weights(contents)])
    saved_objects: list[Any] = []
    if good is None:
        why = f"there is no snapshot from before update {alarm.since} to return to"
    else:
        saved_objects, why = _saved_objects(good[1])
    if agreement is not None and not agreement.all_equal([0, 0] if good is None or why else [*good[0][:2]]):
        why = why or "another process has no such snapshot, or cannot restore it"
    if good is None or why:
        return why
    saved, contents = good
    for _, kind, present, state in saved_objects:
        SETTERS[kind](present, state)
    current = str(run.current)
    if contents.get("policy", current) == current:  # else the scales are those of a policy that the run has left
        for scale, state in zip((run.scale, run.inner_scale), contents["scales"], strict=True):
            scale.load_state_dict(state)
    objects = [present for _, _, present, _ in saved_objects]
    changes = apply_remedy(
        alarm.kind,
        # A snapshot saved after a return has its changes already.
        [rewind for rewind in earlier if rewind.snapshot >= saved.path.name],
        optimizers=list(run.optimizers),
        schedulers=[obj for obj in objects if isinstance(obj, LRScheduler)],
        scales=[run.scale, *(obj for obj in objects if isinstance(obj, torch.amp.GradScaler))],
        fall_back=lambda: fall_back(run, alarm.kind),
    )
    if not changes:
        return "there is nothing to change that would help"
    step, snapshot = run.recorder.num_closed, saved.path.name
    return Rewind(alarm=alarm.kind, step=step, snapshot=snapshot, updates=saved.updates, changes=changes)


def _saved_objects(contents: Any) -> tuple[list[Any], str]:
    """Return the saved objects: path, kind, the script's present object, saved state; and why they cannot be restored, if so."""
    frames, _ = frames_of_script()
    if [frame.f_code.co_name for frame in frames] != [name for name, _, _ in contents["frames"]]:
        return [], "the loop is not where it was when the snapshot was saved"
    pairs = zip(frames, contents["frames"], strict=True)
    found = [saved for frame, (_, _, entries) in pairs for saved in objects_in(frame.f_locals, entries)]
    lost = [path for path, _, present, _ in found if present is None]
    return found, missing_text(lost) if lost else ""


def _weights(contents: Any) -> Iterator[Any]:
    waiting: list[Mapping[Any, Any]] = [entries for _, _, entries in contents["frames"]]
    while waiting:
        for entry in waiting.pop().values():
            ((kind, state),) = entry.items()
            if kind == "module":
                yield state["state"]
            elif kind in ("items", "attributes"):
                waiting.append(state)
