"""The guard of a session, which returns it to a good snapshot after an alarm.

Several processes exchange alarms about once a second, and all act on an alarm of any of them after the same update.

    loss spike, loss not finite, stuck updates    half the learning rate, in the schedule too
    skip storm                                    a loss scale 16 times smaller; without a scale to change, half the learning rate
    gradients zero                                a loss scale 16 times larger; without a scale to change, the fallback policy
    scale at its floor                            the fallback policy, as the scale was smaller before; without one, as for a skip storm

The second return to the same snapshot keeps that change, and the run falls back to a safer policy (``safer_policy``). Each later
return, or each one if no policy is safer, makes the change once more. The data is not rewound: other batches follow.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mezzo.devices import this_device
from mezzo.engine.alarms import Alarms, UpdateNumbers
from mezzo.engine.processes.agreement import Agreement
from mezzo.engine.randomness import random_states
from mezzo.engine.scaling import DynamicScale
from mezzo.engine.session_errors import PrecisionWarning
from mezzo.engine.snapshots.contents import set_contents
from mezzo.engine.snapshots.folder import SavedSnapshot, contents_at, saved_in
from mezzo.engine.snapshots.resumable import CompleteSnapshot, contents_for_rank, folder_of
from mezzo.engine.state import SessionParts
from mezzo.errors import GuardError, MezzoError, SessionError, SnapshotError
from mezzo.policy import Policy
from mezzo.records import Alarm, AlarmKind, GuardAction, Guardrails, Note, Rewind

_RATE, _SCALE = 0.5, 16.0
_OF_SCALE: tuple[AlarmKind, ...] = ("skip storm", "scale at its floor", "gradients zero")
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""The learning rates that optimizers and schedulers keep in a group."""


class SaferPolicy(NamedTuple):
    """The outcome of a search for a safer policy."""

    changed: bool
    """False if no policy is safer, or the policy cannot change."""
    note: Note


def policy_note(value: str, reason: str) -> Note:
    """Return the note of a change of policy in a record."""
    return Note(what="policy", value=value, reason=reason)


def unchanged_policy(reason: str) -> SaferPolicy:
    """Return that the policy remains, and why."""
    return SaferPolicy(changed=False, note=policy_note("unchanged", reason))


class Remedy(NamedTuple):
    """What changed in a training for the rest of the run."""

    changes: list[Note]
    """Empty if nothing helps."""
    changed_policy: bool = False


def apply_remedy(
    kind: AlarmKind,
    before: Sequence[Rewind],
    *,
    optimizers: Iterable[torch.optim.Optimizer],
    schedulers: Iterable[Any],
    scales: Iterable[Any],
    fall_back: Callable[[], SaferPolicy],
) -> Remedy:
    """Change the training after its return to a snapshot; return the changes.

    Args:
        kind: the alarm.
        before: the earlier returns to this snapshot, or to a later one: the snapshot does not contain their changes.
        optimizers: the training's optimizers.
        schedulers: their schedulers.
        scales: loss scales; only dynamic ones of Mezzo and ``torch.amp.GradScaler`` are changed.
        fall_back: changes the policy to a safer one, if possible.
    """
    policy = fall_back() if len(before) == 1 or kind == "scale at its floor" else None
    fell_back = policy is not None and policy.changed
    if policy is not None and fell_back and kind in _OF_SCALE:
        return Remedy([policy.note], changed_policy=True)
    earlier = sum(rewind.changed_policy for rewind in before)
    changed = _numbers(kind, 1 + len(before) - earlier - fell_back, optimizers, schedulers, scales)
    if not changed and policy is None:  # gradients that are zero without a scale that could be larger
        policy = fall_back()
        fell_back = policy.changed
    if not (changed or fell_back):
        return Remedy([])
    return Remedy([*changed, *([] if policy is None else [policy.note])], changed_policy=fell_back)


def _numbers(
    kind: AlarmKind,
    times: int,
    optimizers: Iterable[torch.optim.Optimizer],
    schedulers: Iterable[Any],
    scales: Iterable[Any],
) -> list[Note]:
    """Change the loss scale or the learning rate ``times`` times."""
    if kind in _OF_SCALE:
        factor = (_SCALE if kind == "gradients zero" else 1 / _SCALE) ** times
        changed = [reason for scale in scales if (reason := _scale(scale, factor, kind)) is not None]
        if changed or kind == "gradients zero":
            return changed
    return [_slower(_RATE**times, kind, optimizers, schedulers)]


def _scale(scale: Any, factor: float, kind: AlarmKind) -> Note | None:
    tensor = getattr(scale, "_scale", None)
    if isinstance(scale, DynamicScale):
        state = scale.state_dict()
        value = min(max(state["scale"] * factor, scale.min_scale), scale.max_scale)
        scale.load_state_dict({**state, "scale": value})
    elif isinstance(tensor, torch.Tensor) and isinstance(scale, torch.amp.GradScaler):
        tensor.mul_(factor)
    else:
        return None
    why = (
        "gradients were zero: a larger scale lifts them into the format"
        if factor > 1
        else f"{kind}: gradients overflowed"
    )
    return Note(what="loss scale", value=f"x {factor:g}", reason=why)


def _slower(
    factor: float, kind: AlarmKind, optimizers: Iterable[torch.optim.Optimizer], schedulers: Iterable[Any]
) -> Note:
    rates: list[float] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name in _RATES:
                if name in group:
                    group[name] = group[name] * factor
            rates.append(float(group["lr"]))
    for scheduler in schedulers:
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]
    shown = ", ".join(f"{rate:.3g}" for rate in dict.fromkeys(rates))
    return Note(
        what="learning rate", value=f"x {factor:g}, now {shown}", reason=f"{kind}: smaller steps from the same weights"
    )


# The policy to continue under if a smaller learning rate or another loss scale did not help: the next safer one, for the whole model.
#
#     FP16 whose gradients left its range    BF16, which has FP32's range, unless the device would have to emulate it; then FP32
#     any other alarm, and BF16              FP32
#
# The guard does not know which modules left the format: once one gradient overflows, so do all before it. ``mezzo fallback`` finds them.
OF_RANGE: tuple[AlarmKind, ...] = ("skip storm", "scale at its floor", "gradients zero", "loss not finite")
"""Alarms that gradients or activations beyond the range of FP16 cause."""
_WITH_MORE_RANGE = {"fp16": "bf16", "fp16-master": "bf16-master"}
_KEPT = ("arithmetic", "op_lists", "lower", "fp32", "widest", "fp32_modules")
_KEPT_IN_FP32 = ("reduce", "gather", "world", "reduce_order")


def safer_policy(policy: Policy, kind: AlarmKind, device_type: str) -> tuple[Policy, str] | str:
    """Return the policy to continue under after an alarm, and the reason; or why there is none.

    Args:
        policy: the policy of the run so far.
        kind: the alarm.
        device_type: the device type that the run trains on.
    """
    if not policy.lowers:
        return f"{policy!s} lowers nothing, so there is no safer policy"
    if policy.in_layers:
        return f"layers were converted to {policy.compute.upper()} when the run began, and stay in it"
    if policy.casting == "model" and not policy.master_weights:
        return f"under {policy.name} the weights themselves are in 16 bits, and remain so"
    if policy.reduce == "fp16":
        return "gradients are summed over processes in FP16 (reduce=fp16), which needs the loss scale"
    if policy.gather not in ("auto", "fp32"):
        return f"weights are gathered over processes in {policy.gather.upper()} (gather={policy.gather}), which a run cannot change"
    wider = _wider(policy, device_type) if kind in OF_RANGE else None
    if wider is not None:
        return wider, f"{kind}: values left the range of FP16; BF16 has the range of FP32"
    why = f"{kind}: with {policy.compute.upper()} ruled out, the same alarm again has another cause"
    return Policy.parse("fp32").replace(**{name: getattr(policy, name) for name in _KEPT_IN_FP32}), why


def _wider(policy: Policy, device_type: str) -> Policy | None:
    name = _WITH_MORE_RANGE.get(policy.name) if policy.compute == "fp16" else None
    if name is None:
        return None
    fields = {name: getattr(policy, name) for name in (*_KEPT, *_KEPT_IN_FP32)}
    device = this_device(device_type)
    try:
        wider = Policy.parse(name).replace(**fields)
        arithmetic = wider.arithmetic_on(device)[0]
        slower = arithmetic == "emulated" and policy.arithmetic_on(device)[0] == "native"
    except MezzoError:  # the device has no BF16, or a field belongs to FP16
        return None
    return None if slower else wider


def newest_good(
    folder: Path,
    *,
    before: int,
    weights: Callable[[Any], Any],
    read: Callable[[SavedSnapshot], Any] = lambda saved: contents_at(saved.path),
) -> tuple[SavedSnapshot, Any] | None:
    """Return the newest snapshot of fewer than ``before`` updates with finite weights, and its contents; None if there is none.

    Snapshots saved after it are deleted: they belong to the faulty part of the run, and would be loaded as the newest.

    Args:
        folder: the folder of the snapshots.
        before: the first update of the evidence, counting skipped ones.
        weights: returns the part of a snapshot's contents that must be finite.
        read: returns the contents, or raises ``SnapshotError``.
    """
    after: list[SavedSnapshot] = []
    for saved in saved_in(folder):
        if saved.updates < before and not saved.calls:
            try:
                contents = read(saved)
            except SnapshotError:
                continue
            if _finite(weights(contents)):
                for later in after:
                    later.path.unlink(missing_ok=True)
                return saved, contents
        after.append(saved)
    return None


def _finite(tree: Any) -> bool:
    tensors = [tensor for tensor in tree_leaves(tree) if isinstance(tensor, Tensor) and tensor.is_floating_point()]
    # Healthy models have masks of -infinity: only NaN and +infinity are signs of a fault.
    return not any(bool((tensor.isnan() | (tensor == math.inf)).any()) for tensor in tensors)


MOST_REWINDS = 3
"""The most times that a training run returns to a snapshot."""
_ACTIONS = ("note", "stop", "rewind")
_KEEPS_POLICY = unchanged_policy("a session's weights and optimizers are built for its policy")


class SessionGuard:
    """The alarms of one session, and its reactions."""

    def __init__(self, session: SessionParts, action: GuardAction) -> None:
        """Create the guard.

        Raises:
            SessionError: ``action`` is not one of the actions.
        """
        if action not in _ACTIONS:
            raise SessionError(f"guard={action!r}; allowed: {', '.join(_ACTIONS)}, or None", hint='pass guard="stop"')
        self._session, self._action = session, action
        self._alarms = Alarms(session.policy.min_scale if session.policy.loss_scale == "dynamic" else None)
        self._arrivals = Arrivals(session.device, columns=4)
        self._loss: Tensor | None = None
        self.noticed = Guardrails(action=action)
        several, group = session.processes.several, session.processes.group
        self._agreement = Agreement(within=group) if several and action != "note" else None
        self._unshared: Alarm | None = None
        """An alarm of this process that the others have not received yet."""

    def backward(self, loss: Tensor, share: float) -> None:
        """Add a micro-batch's loss to the window's."""
        part = loss.detach() if share == 1.0 else loss.detach() * share
        self._loss = part if self._loss is None else self._loss + part

    def updated(self, skipped: Tensor | bool) -> None:
        """Inspect a finished update.

        Raises:
            GuardError: an alarm ends the training.
        """
        session = self._session
        scale = session.scales[0].on_device() if session.scales[0].skips_overflows else None
        loss, self._loss = self._loss, None
        self._arrivals.add(session.state.progress.updates_closed, [loss, session.state.progress.norm, skipped, scale])
        arrived = [
            UpdateNumbers(number, seen_loss, norm, bool(flag), seen_scale)
            for number, (seen_loss, norm, flag, seen_scale) in self._arrivals.arrived()
        ]
        for alarm in self._alarms.inspect(arrived):
            self._note(alarm)
            if self._agreement is not None:
                self._unshared = self._unshared or alarm
                continue
            self._act(alarm)
            if self._action == "rewind":  # the other updates were made before the return
                break
        if self._agreement is not None and session.state.progress.updates_closed >= self._agreement.next:
            self._agree(self._agreement)

    def _agree(self, agreement: Agreement) -> None:
        """Act on an alarm of any process in all of them, after the same update."""
        unshared, self._unshared = self._unshared, None
        reported = agreement.any_of(
            self._session.state.progress.updates_closed, None if unshared is None else unshared.model_dump()
        )
        if reported is None:
            return
        rank, alarm = reported[0], Alarm.model_validate(reported[1])
        if unshared is None:
            alarm = alarm.model_copy(update={"evidence": f"rank {rank}: {alarm.evidence}"})
            self._note(alarm)
        self._act(alarm)

    def _note(self, alarm: Alarm) -> None:
        self.noticed = self.noticed.model_copy(update={"alarms": [*self.noticed.alarms, alarm]})
        warnings.warn(f"guard: {_text(alarm)}", PrecisionWarning, stacklevel=5)

    def _act(self, alarm: Alarm) -> None:
        text = _text(alarm)
        if self._action == "stop":
            raise self._stopped(text)
        if self._action == "rewind":
            self._rewind(alarm, text)

    def _stopped(self, why: str) -> GuardError:
        self.noticed = self.noticed.model_copy(update={"stopped": why})
        return GuardError(
            f"the training was stopped by its guard: {why}",
            hint="run the script under mezzo diagnose; docs/guardrails.md says what each alarm means",
        )

    def _rewind(self, alarm: Alarm, text: str) -> None:
        session, times = self._session, len(self.noticed.rewinds) + 1
        if times > MOST_REWINDS:
            raise self._stopped(f"{text}, after {MOST_REWINDS} returns to a snapshot")
        snapshots = session.state.snapshots
        if snapshots.saving is not None:
            snapshots.saving.wait()
        good, agreement = self._newest_good(alarm), self._agreement
        if agreement is not None and not agreement.all_equal([0, 0] if good is None else [*good[0][:2]]):
            raise self._stopped(f"{text}; the processes have no snapshot in common to return to")
        if good is None:
            raise self._stopped(f"{text}; there is no snapshot from before update {alarm.since} to return to")
        saved, contents = good
        position, random = session.state.position.as_it_is(), random_states()
        in_all = (lambda here: here) if agreement is None else agreement.in_all
        set_contents(session, {**contents, "random": random}, in_all=in_all)
        snapshots.count_from_now()  # a snapshot saved now would copy that one, and would count as progress
        session.state.position.set_back(position)  # the data is not rewound: other batches follow
        changes, _ = apply_remedy(
            alarm.kind,
            [earlier for earlier in self.noticed.rewinds if earlier.snapshot >= saved.path.name],
            optimizers=session.optimizers,
            schedulers=session.schedulers,
            scales=session.scales,
            fall_back=lambda: _KEEPS_POLICY,
        )
        if not changes:
            raise self._stopped(f"{text}; there is nothing to change that would help")
        rewind = Rewind(
            alarm=alarm.kind, step=alarm.step, snapshot=saved.path.name, updates=saved.updates, changes=changes
        )
        self.noticed = self.noticed.model_copy(update={"rewinds": [*self.noticed.rewinds, rewind]})
        self._alarms.forget()
        self._arrivals.forget()
        if agreement is not None:
            agreement.restart()

    def _newest_good(self, alarm: Alarm) -> tuple[SavedSnapshot, Any] | None:
        folder, agreement = self._session.state.snapshots.folder, self._agreement
        if folder is None:
            return None
        rank, size = (0, 1) if agreement is None else (agreement.rank, agreement.size)
        folders = [folder.path] if size == 1 else [folder_of(folder.path.parent, n, size) for n in range(size)]

        def read(saved: SavedSnapshot) -> Any:
            paths = [place / saved.path.name for place in folders]
            return contents_for_rank(CompleteSnapshot(saved.number, paths), rank, size)

        return newest_good(folder.path, before=alarm.since, weights=lambda c: c["session"]["models"], read=read)


def _text(alarm: Alarm) -> str:
    return f"{alarm.kind}, update {alarm.step}: {alarm.evidence}"


# On a CPU they are available at once. On a CUDA device a buffer collects 32 updates; it is copied to pinned memory, and read after an event
# shows that the copy has arrived. Other devices have no such event, so nothing is copied.
_ROWS = 32

WatchedNumbers = tuple[int, tuple[float | None, ...]]
"""The number of a row, and its values; None for a value that was not added."""


class Arrivals:
    """Rows of numbers, in order."""

    def __init__(self, device: torch.device, columns: int) -> None:
        self._device = device
        self._ready: list[WatchedNumbers] = []
        self._open: list[tuple[int, list[bool]]] = []
        self._sent: tuple[list[tuple[int, list[bool]]], Tensor, torch.cuda.Event] | None = None
        self._rows = torch.zeros(_ROWS, columns, device=device) if device.type == "cuda" else None
        self._cells = [] if self._rows is None else [row.unbind() for row in self._rows.unbind()]

    def add(self, number: int, values: Sequence[Tensor | float | None]) -> None:
        """Add a row, without waiting for the device."""
        if self._device.type == "cpu":
            self._ready.append((number, tuple(None if value is None else float(value) for value in values)))
            return
        if self._rows is None:
            return
        for cell, value in zip(self._cells[len(self._open)], values, strict=True):
            if isinstance(value, Tensor):
                cell.copy_(value.detach())
            elif value is not None:
                cell.fill_(value)
        self._open.append((number, [value is not None for value in values]))
        if len(self._open) == _ROWS:
            self._send(self._rows)

    def _send(self, rows: Tensor) -> None:
        self._receive()
        if self._sent is not None:  # the last copy has not arrived: the host runs far ahead, so these rows are dropped
            self._open = []
            return
        pinned = torch.empty(rows.shape, pin_memory=True).copy_(rows, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._sent, self._open = (self._open, pinned, event), []

    def _receive(self) -> None:
        if self._sent is None or not self._sent[2].query():
            return
        (sent, pinned, _), self._sent = self._sent, None
        for (number, has), values in zip(sent, pinned.tolist(), strict=True):
            self._ready.append((number, tuple(v if known else None for v, known in zip(values, has, strict=True))))

    def arrived(self) -> Iterator[WatchedNumbers]:
        """Yield the rows that have arrived since the last call."""
        self._receive()
        ready, self._ready = self._ready, []
        yield from ready

    def forget(self) -> None:
        """Drop all rows that were not read yet."""
        self._ready, self._open, self._sent = [], [], None
