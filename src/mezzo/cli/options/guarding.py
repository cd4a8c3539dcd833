"""``--guard``: what to do when training goes wrong, and which command to suggest then."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mezzo.cli.words import with_value
from mezzo.errors import UsageError

if TYPE_CHECKING:
    from mezzo.cli.script import Script
    from mezzo.launch.request import GuardRequest
    from mezzo.records import AlarmKind

USUAL_REWINDS = 3
_LEAVES_FORMATS = ("fp32", "tf32", "as-is")


def check_guard(text: str | None, *, snapshots: bool) -> None:
    """Refuse an unknown action, and a rewind without snapshots."""
    if text is None:
        return
    match = re.fullmatch(r"note|stop|rewind(:[1-9]\d?)?", text)
    if match is None:
        raise UsageError(
            f"--guard {text!r}; allowed: note, stop, rewind, and rewind:TIMES with 1 to 99",
            hint=f"type: {with_value('--guard', 'stop')}",
        )
    if text.startswith("rewind") and not snapshots:
        raise UsageError(
            f"--guard {text} without --snapshot; allowed: --guard {text} --snapshot DURATION",
            hint=f"type: {with_value('--guard', text, '--snapshot', '5m')}",
        )


def guard_request(script: Script, text: str | None, *, policy: str) -> GuardRequest | None:
    """Return the request for the run's guard; None if there is no guard for the script's framework and none was requested.

    Args:
        script: the script, as it was typed.
        text: the value of ``--guard``.
        policy: the policy as typed.
    """
    from mezzo.launch.request import GuardRequest

    if text is None and script.framework != "torch":
        return None
    script.check_supported("--guard")
    action, _, times = (text or "note").partition(":")
    rewinds = int(times or USUAL_REWINDS) if action == "rewind" else 0
    return GuardRequest.model_validate({"action": action, "rewinds": rewinds, "commands": _commands(script, policy)})


def _commands(script: Script, policy: str) -> dict[AlarmKind, str]:
    from mezzo.policy import canonical

    typed, policy = script.retyped, canonical(policy)
    diagnose = typed.under("diagnose", policy=policy)
    judged = "fp16" if policy in _LEAVES_FORMATS else policy
    lost = typed.under("ranges", policy=judged)
    if policy in _LEAVES_FORMATS:  # precision cannot be the cause of a spike
        spike = typed.under("run", policy=policy, snapshot="1m", guard="rewind")
    else:
        spike = typed.under("compare", policies=f"fp32,{policy}")
    return {
        "loss not finite": diagnose,
        "skip storm": diagnose,
        "scale at its floor": diagnose,
        "loss spike": spike,
        "gradients zero": lost,
        "stuck updates": lost,
    }
