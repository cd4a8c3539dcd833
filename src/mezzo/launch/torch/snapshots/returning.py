"""Return a running script to a snapshot after an alarm: models, optimizers, schedulers and scalers are restored; loop and data continue.

An earlier snapshot does not restore a policy that the run has fallen back from.

Between two batches no graph is open, so the weights can change in place. Variables, loops, random generators and the place in the data
stay as they are: other batches follow than those that led to the alarm, and what the script has printed stays true.
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
from mezzo.launch.torch.snapshots.variables import SETTERS, objects_in
from mezzo.launch.torch.state import Run
from mezzo.records import Alarm, Rewind


def return_to_good(
    run: Run, folder: Path, alarm: Alarm, earlier: list[Rewind], *, together: Agreement | None = None
) -> Rewind | str:
    """Restore the state of the newest good snapshot, changed so that the same does not happen again; or return why not.

    Args:
        run: the script's.
        folder: its snapshots.
        alarm: what went wrong.
        earlier: the returns so far.
        together: exchanges with the other processes, which return to the same snapshot, or none of them returns.
    """
    good = newest_good(folder, before=alarm.since, weights=lambda contents: [*_weights(contents)])
    found: list[Any] = []
    if good is None:
        why = f"there is no snapshot from before update {alarm.since} to return to"
    else:
        found, why = _places(good[1])
    if together is not None and not together.all_equal([0, 0] if good is None or why else [*good[0][:2]]):
        why = why or "another process has no such snapshot, or cannot restore it"
    if good is None or why:
        return why
    saved, contents = good
    for _, kind, here, state in found:
        SETTERS[kind](here, state)
    if contents.get("policy", str(run.current)) == str(
        run.current
    ):  # else the scales are those of a policy it has left
        for scale, state in zip((run.scale, run.inner_scale), contents["scales"], strict=True):
            scale.load_state_dict(state)
    objects = [here for _, _, here, _ in found]
    changes = apply_remedy(
        alarm.kind,
        [one for one in earlier if one.snapshot >= saved.path.name],  # a snapshot saved since has the earlier changes
        optimizers=list(run.optimizers),
        schedulers=[one for one in objects if isinstance(one, LRScheduler)],
        scales=[run.scale, *(one for one in objects if isinstance(one, torch.amp.GradScaler))],
        fall_back=lambda: fall_back(run, alarm.kind),
    )
    if not changes:
        return "there is nothing to change that would help"
    step, snapshot = run.recorder.num_closed, saved.path.name
    return Rewind(alarm=alarm.kind, step=step, snapshot=snapshot, updates=saved.updates, changes=changes)


def _places(contents: Any) -> tuple[list[Any], str]:
    """Return the script's present objects, each with its kind and saved state; or why the state cannot be restored."""
    frames, _ = frames_of_script()
    if [frame.f_code.co_name for frame in frames] != [name for name, _, _ in contents["frames"]]:
        return [], "the loop is not where it was when the snapshot was saved"
    pairs = zip(frames, contents["frames"], strict=True)
    found = [one for frame, (_, _, entries) in pairs for one in objects_in(frame.f_locals, entries)]
    lost = [place for place, _, here, _ in found if here is None]
    return found, f"the script has no {', '.join(lost)} any more, or of another kind" if lost else ""


def _weights(contents: Any) -> Iterator[Any]:
    waiting: list[Mapping[Any, Any]] = [entries for _, _, entries in contents["frames"]]
    while waiting:
        for entry in waiting.pop().values():
            ((kind, state),) = entry.items()
            if kind == "module":
                yield state["state"]
            elif kind in ("items", "attributes"):
                waiting.append(state)
