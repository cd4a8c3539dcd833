"""What the tests of patches share: the patch of a script's text, or its refusal."""

from __future__ import annotations

from pathlib import Path

from mezzo.patching import Patch, PatchStyle, Refused, make_patch
from mezzo.policy import Policy


def outcome_of(source: str, policy: str, folder: Path, style: PatchStyle = "auto") -> Patch | Refused:
    """Return what becomes of a script with this text."""
    path = folder / "script.py"
    path.write_bytes(source.encode())
    return make_patch(path, policy=Policy.parse(policy), style=style)


def patch_of(source: str, policy: str, folder: Path, style: PatchStyle = "auto") -> Patch:
    """Return the patch of a script with this text."""
    outcome = outcome_of(source, policy, folder, style)
    assert isinstance(outcome, Patch), outcome
    return outcome


def refusal_of(source: str, policy: str, folder: Path, style: PatchStyle = "auto") -> Refused:
    """Return why a script with this text is not patched."""
    outcome = outcome_of(source, policy, folder, style)
    assert isinstance(outcome, Refused), outcome.diff
    return outcome


def added(patch: Patch) -> list[str]:
    """Return the lines that a patch adds."""
    return [line[1:] for line in patch.diff.splitlines() if line[:1] == "+" and line[:3] != "+++"]
