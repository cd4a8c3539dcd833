"""The models, optimizers, schedulers and scalers of a script, and their states: what a return to a snapshot after an alarm restores.

A return leaves loop and data as they are, and the policy, if the run has fallen back since the snapshot. Between two batches no graph is
open, so the weights can change in place. Variables, random generators and the position in the data stay: other batches follow than those
that led to the alarm, and the script's earlier output stays true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mezzo.engine.processes.agreement import Agreement
from mezzo.engine.session_guard import (
    SaferPolicy,
    apply_remedy,
    newest_good,
    policy_note,
    safer_policy,
    unchanged_policy,
)
from mezzo.engine.snapshots.contents import keep_formats
from mezzo.engine.snapshots.structure import placed, placed_model, placed_optimizer
from mezzo.launch.torch.script_objects import find_existing
from mezzo.launch.torch.state import TorchRun
from mezzo.records import Alarm, AlarmKind, Rewind


def kind_of(value: Any) -> str:
    """Return the kind of an object that training changes; empty for any other value."""
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, Optimizer):
        return "optimizer"
    return "stateful" if isinstance(value, (LRScheduler, torch.amp.GradScaler)) else ""


def trained_among(objects: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    """Return the trained objects among others, by their names; of modules, those that are part of no other."""
    found = {name: value for name, value in objects if kind_of(value)}
    inner = {
        id(part)
        for value in found.values()
        if isinstance(value, nn.Module)
        for part in value.modules()
        if part is not value
    }
    return {name: value for name, value in found.items() if id(value) not in inner}


def states_of(objects: Mapping[str, Any]) -> list[list[Any]]:
    """Return the name, the kind and the state of each object."""
    return [[name, kind_of(value), _STATES[kind_of(value)](value)] for name, value in objects.items()]


def set_state(kind: str, value: Any, state: Any) -> None:
    """Give an object its saved state."""
    _SETTERS[kind](value, state)


def _module_state(module: nn.Module) -> dict[str, Any]:
    state = module.state_dict()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in state}
    return {"state": dict(state), "buffers": buffers, "gradients": gradients}


def _set_module(module: nn.Module, state: Mapping[str, Any]) -> None:
    module.load_state_dict(placed_model(state["state"], module))
    for name, buffer in module.named_buffers():
        if name in state["buffers"] and buffer.shape == state["buffers"][name].shape:
            buffer.copy_(state["buffers"][name])
    for name, parameter in module.named_parameters():
        gradient = placed(state["gradients"].get(name), parameter)
        parameter.grad = None if gradient is None else gradient.to(parameter.device)


def _set_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    state = placed_optimizer(state, optimizer)
    optimizer.load_state_dict(state)
    keep_formats(optimizer, state)


_STATES: dict[str, Callable[[Any], Any]] = {
    "module": _module_state,
    "optimizer": lambda optimizer: optimizer.state_dict(),
    "stateful": lambda obj: obj.state_dict(),
}
_SETTERS: dict[str, Callable[[Any, Any], Any]] = {
    "module": _set_module,
    "optimizer": _set_optimizer,
    "stateful": lambda obj, state: obj.load_state_dict(state),
}


def return_to_good(
    run: TorchRun,
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
    current = str(run.precision.present)
    if contents.get("policy", current) == current:  # else the scales belong to a policy that the run has left
        for scale, state in zip((run.precision.scale, run.precision.inner_scale), contents["scales"], strict=True):
            scale.load_state_dict(state)
    restored = [objects[name] for name, _, _ in contents["trained"]]
    changes, changed_policy = apply_remedy(
        alarm.kind,
        # A snapshot saved after a return has its changes already.
        [rewind for rewind in earlier if rewind.snapshot >= saved.path.name],
        optimizers=list(run.objects.optimizers),
        schedulers=[obj for obj in restored if isinstance(obj, LRScheduler)],
        scales=[run.precision.scale, *(obj for obj in restored if isinstance(obj, torch.amp.GradScaler))],
        fall_back=lambda: fall_back(run, alarm.kind),
    )
    if not changes:
        return "there is nothing to change that would help"
    step, snapshot = run.update.recorder.num_closed, saved.path.name
    return Rewind(
        alarm=alarm.kind,
        step=step,
        snapshot=snapshot,
        updates=saved.updates,
        changes=changes,
        changed_policy=changed_policy,
    )


def _weights(contents: Any) -> Iterator[Any]:
    return (state["state"] for _, kind, state in contents["trained"] if kind == "module")


# The next call of a model begins its region under the new policy, and the next backward pass has its loss scale. Two effects of the old
# policy remain: the modules that it kept in FP32 stay in FP32, and the script's GradScalers stay off.


def fall_back(run: TorchRun, kind: AlarmKind) -> SaferPolicy:
    """Change a run's policy to the next safer one after an alarm, if there is one; return the result, with the reason."""
    now = run.precision.present
    obstacle = "the precision is the script's own" if now is None else _obstacle(run)
    if not obstacle and now is not None:
        safer = safer_policy(now, kind, run.precision.device_type or "cpu")
        if not isinstance(safer, str):
            policy, why = safer
            run.change_policy(policy, why)
            return SaferPolicy(changed=True, note=policy_note(f"{policy!s}, before {now!s}", why))
        obstacle = safer
    return unchanged_policy(obstacle)


def _obstacle(run: TorchRun) -> str:
    """Return why a run cannot change its policy now; empty if it can."""
    if torch.is_autocast_enabled(run.precision.device_type or "cpu"):
        return "the loop runs in an autocast region that the script opened around it"
    if find_existing(torch.cuda.CUDAGraph)[0]:
        return "the script replays CUDA graphs, which keep the policy that they were captured under"
    return ""
