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

from mezzo.engine.guardrails.remedies import apply_remedy, newest_good
from mezzo.engine.processes.agreement import Agreement
from mezzo.launch.torch.policy_change import fall_back
from mezzo.launch.torch.snapshots.trained_objects import kind_of, set_state
from mezzo.launch.torch.state import Run
from mezzo.records import Alarm, Rewind


def return_to_good(
    run: Run,
    folder: Path,
    alarm: Alarm,
    earlier: list[Rewind],
    *,
    objects: Mapping[str, Any],
    agreement: Agreement | None = None,
) -> Rewind | str:
    """Restore the newest good snapshot, with a change that keeps the same from happening again; or return why that is impossible.

    Args:
        run: the script's run.
        folder: the folder of its snapshots.
        alarm: what went wrong.
        earlier: the earlier returns.
        objects: the script's models, optimizers, schedulers and scalers, by name.
        agreement: exchanges with the other processes: all return to the same snapshot, or none does.
    """
    good = newest_good(folder, before=alarm.since, weights=lambda contents: [*_weights(contents)])
    if good is None:
        why = f"there is no snapshot from before update {alarm.since} to return to"
    else:
        lost = [name for name, kind, _ in good[1]["trained"] if kind_of(objects.get(name)) != kind]
        why = f"the script no longer has {', '.join(lost)}, or has an object of another kind there" if lost else ""
    if agreement is not None and not agreement.all_equal([0, 0] if good is None or why else [*good[0][:2]]):
        why = why or "another process has no such snapshot, or cannot restore it"
    if good is None or why:
        return why
    saved, contents = good
    for name, kind, state in contents["trained"]:
        set_state(kind, objects[name], state)
    current = str(run.current)
    if contents.get("policy", current) == current:  # else the scales are those of a policy that the run has left
        for scale, state in zip((run.scale, run.inner_scale), contents["scales"], strict=True):
            scale.load_state_dict(state)
    restored = [objects[name] for name, _, _ in contents["trained"]]
    changes = apply_remedy(
        alarm.kind,
        # A snapshot saved after a return has its changes already.
        [rewind for rewind in earlier if rewind.snapshot >= saved.path.name],
        optimizers=list(run.optimizers),
        schedulers=[obj for obj in restored if isinstance(obj, LRScheduler)],
        scales=[run.scale, *(obj for obj in restored if isinstance(obj, torch.amp.GradScaler))],
        fall_back=lambda: fall_back(run, alarm.kind),
    )
    if not changes:
        return "there is nothing to change that would help"
    step, snapshot = run.recorder.num_closed, saved.path.name
    return Rewind(alarm=alarm.kind, step=step, snapshot=snapshot, updates=saved.updates, changes=changes)


def _weights(contents: Any) -> Iterator[Any]:
    return (state["state"] for _, kind, state in contents["trained"] if kind == "module")
