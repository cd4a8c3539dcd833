"""A fix as its script writes it: a policy, on the command line or in code, or a line and its place. Imports no framework."""

from __future__ import annotations

from typing import Literal, NamedTuple

from mezzo.commands.diagnose.offers import LinePlace, Offer
from mezzo.frameworks import keras, paddle
from mezzo.policy import Policy
from mezzo.records import DiagnoseRecord

TrainingStyle = Literal["loop", "session", "own_amp", "lightning", "fabric", "accelerate", "transformers", "function"]
"""The code that trains: a loop that calls torch, a loop with a ``mezzo.Session`` or with its own autocast or GradScaler, a library, or a
function passed to ``mezzo.diagnose``."""

_SESSION = 'mezzo.Session(model, optimizer, policy="{policy}")'
_IN_CODE: dict[TrainingStyle, str] = {
    "lightning": 'Trainer(plugins=mezzo.compat.lightning.MezzoPrecision("{policy}"))',
    "fabric": 'Fabric(plugins=mezzo.compat.lightning.MezzoFabricPrecision("{policy}"))',
    "accelerate": 'mezzo.compat.accelerate.MezzoAccelerator(policy="{policy}")',
    "transformers": 'mezzo.compat.transformers.MezzoTrainer(..., policy="{policy}")',
}
"""How to pass a policy to a library that trains."""
_SCALER: dict[TrainingStyle, str] = {
    "lightning": "pass it on: Trainer(plugins=MixedPrecision('16-mixed', 'cuda', scaler=scaler))",
    "fabric": "pass it on: Fabric(plugins=MixedPrecision('16-mixed', scaler=scaler))",
    "accelerate": "Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale={scale})]), which creates the scaler",
    "transformers": "TrainingArguments cannot pass it: type mezzo run --policy fp16:init_scale={scale}",
}
"""How to set the initial loss scale of a library's scaler."""
_BF16: dict[TrainingStyle, str] = {
    "lightning": 'Trainer(precision="bf16-mixed")',
    "fabric": 'Fabric(precision="bf16-mixed")',
    "accelerate": 'Accelerator(mixed_precision="bf16")',
    "transformers": "TrainingArguments(bf16=True)",
}
"""The argument that turns on BF16 autocast in a library."""


class WrittenFix(NamedTuple):
    """A fix in a script's own terms."""

    line: str = ""
    where: str = ""
    policy: str = ""
    """The policy to type, if the fix is one."""


def applies(offer: Offer, own: Policy | None, library: str) -> bool:
    """Return whether a script of ``library`` that trains under ``own`` can apply the fix: Keras keeps no single operation in FP32."""
    return library != "keras" or own is None or offer.policy is None or offer.policy.fp32 == own.fp32


def written(offer: Offer, record: DiagnoseRecord, own: Policy | None, caller: TrainingStyle) -> WrittenFix:
    """Return a fix as the script of ``record`` writes it.

    Args:
        offer: the fix.
        record: the fault.
        own: the policy that the script trains under; None for its own precision.
        caller: the code that trains.
    """
    at = f"at {record.line}" if record.line else "in the script"
    library, line, scale = record.run.library, offer.line, offer.changes.loss_scale
    if library == "keras":
        parts = keras.script_lines(own, offer.policy, scale=scale, kept=offer.kept_beyond(own))
        if parts:
            return WrittenFix(
                "; ".join(part.line for part in parts), offer.where or "; ".join(part.where for part in parts)
            )
        if line is not None:
            where = keras.AT_OPTIMIZER if line.place == "step" else at
            return WrittenFix(line.keras, offer.where or where)
    if line is not None:
        text = line.paddle if library == "paddle" else line.torch
        return WrittenFix(text, offer.where or _place(line.place, scale, record, caller) or at)
    if offer.policy is None:
        return WrittenFix()
    policy = str(offer.policy)
    changes = paddle.script_lines(record.run.policy, offer.policy) if library == "paddle" else ""
    text = f'policy = "{policy}"'
    where = _of_policy(policy, record, caller, changes=changes)
    return WrittenFix(f"{changes}  # {text}" if changes else text, offer.where or where, policy)


def _place(place: LinePlace, scale: float | None, record: DiagnoseRecord, caller: TrainingStyle) -> str:
    """Return where a line belongs; empty at the line of the fault."""
    if place == "scaler":
        if caller in _SCALER and scale is not None:
            return _SCALER[caller].format(scale=scale)
        return "where the script creates its GradScaler" if record.own_scaler else "before the training loop"
    return {
        "forward": f"in the forward of {record.module or 'the model'}, around its operations",
        "autocast": _BF16.get(caller, "in place of the script's own autocast, and without its GradScaler"),
        "step": "between loss.backward() and optimizer.step()",
        "batch": "where the script reads a batch",
    }.get(place, "")


def _of_policy(policy: str, record: DiagnoseRecord, caller: TrainingStyle, *, changes: str) -> str:
    """Return how to pass a policy: on the command line, or in code, in Paddle by ``changes``."""
    typed = f"on the command line: --policy {policy}"
    in_session = f"in code: {_SESSION.format(policy=policy)}"
    if record.session_policy:
        return f"{in_session}; or on the command line, in its place: --policy {policy}"
    if record.run.library == "paddle":
        return f"{typed}; in code: the line before #, where the script turns on mixed precision" if changes else typed
    if caller == "function":
        return in_session
    inside = _IN_CODE.get(caller, _SESSION).format(policy=policy)
    removed = ", without the script's autocast and GradScaler" if caller == "own_amp" else ""
    return f"{typed}; in code: {inside}{removed}"
