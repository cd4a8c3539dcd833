"""Stand-ins for packages that scripts import and that can no longer be installed: NVIDIA's Apex."""

from __future__ import annotations

import importlib.util
import shlex
from typing import TYPE_CHECKING

from mezzo.errors import UsageError

if TYPE_CHECKING:
    from mezzo.launch.request import StandIn
    from mezzo.launch.targets import Target
    from mezzo.policy import Policy

_RUNS = "mezzo.compat.apex"


def stand_in_for(target: Target, *, policy: Policy | None) -> StandIn | None:
    """Return the stand-in for a script that may need Apex, if Apex is not installed; None for any other script.

    Raises:
        UsageError: the script is to keep its own precision, and Apex's loss scale would be mistaken for part of the loss.
    """
    from mezzo.launch.frameworks import needs
    from mezzo.launch.request import WITHOUT_AMP, StandIn
    from mezzo.records import Reason

    need = needs("apex", target.name, kind="module" if target.module else "script")
    if need == "no" or _is_installed("apex"):
        return None
    if policy is None and need == "perhaps":  # it may run without Apex
        return None
    if policy is None:
        alone = shlex.join(["python", "-m", _RUNS, *(["-m"] if target.module else []), target.name, *target.arguments])
        instead = target._replace(typed=_under_fp16(target)).instead(target.name, module=target.module)
        raise UsageError(
            f"{target.name} imports apex, which is not installed; Mezzo can run it only under a policy that replaces apex.amp",
            hint=f"type: {instead}, or, without a record: {alone}",
        )
    why = f"apex is not installed: {_RUNS} stands in for it, and the policy replaces apex.amp"
    return StandIn(module=_RUNS, options=(WITHOUT_AMP,), reason=Reason(what="apex.amp", value="off", reason=why))


def _is_installed(name: str) -> bool:
    """Return whether a package can be imported; a mere folder of that name, such as a cloned repository, has no origin."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def _under_fp16(target: Target) -> list[str]:
    from mezzo.records import AS_IS

    words = [word.replace(AS_IS, "fp16") for word in target.typed]
    return words if words != list(target.typed) else [*words, "--policy", "fp16"]
