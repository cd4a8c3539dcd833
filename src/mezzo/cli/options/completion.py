"""Shell completion: policies, scripts, verdicts. It runs whenever Tab is pressed, so it imports little."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def policy(incomplete: str) -> list[str]:
    """Return the policies that begin with ``incomplete``: presets, other libraries' names for them, policy files."""
    from mezzo.policy import ALIASES, PRESETS
    from mezzo.records import AS_IS

    names = [name for name in (*PRESETS, *ALIASES, AS_IS) if name.startswith(incomplete)]
    return [*names, *_files(incomplete, ".toml")]


def policies(incomplete: str) -> list[str]:
    """Return the list of policies typed before the last comma, once for each policy that completes the last one."""
    before, comma, last = incomplete.rpartition(",")
    listed = before.split(",")
    return [before + comma + name for name in policy(last) if name not in listed]


def verdicts(incomplete: str) -> list[str]:
    """Return the list of verdicts typed before the last comma, once for each verdict that completes the last one."""
    from mezzo.records import FAILING, NOT_EQUIVALENT

    before, comma, last = incomplete.rpartition(",")
    names = [*FAILING, NOT_EQUIVALENT, *(["none"] if not comma else [])]
    return [before + comma + name for name in names if name.startswith(last) and name not in before.split(",")]


def script(incomplete: str) -> list[str]:
    """Return the Python files and folders whose path begins with ``incomplete``."""
    return [*_files(incomplete, ".py")]


def record(incomplete: str) -> list[str]:
    """Return the records and folders whose path begins with ``incomplete``."""
    return [*_files(incomplete, ".json")]


def _files(incomplete: str, suffix: str) -> Iterator[str]:
    folder, slash, start = incomplete.rpartition("/")
    hidden = start.startswith(".")
    try:
        found = sorted(Path(folder + slash or ".").iterdir())
    except OSError:
        return
    for path in found:
        if path.name.startswith(start) and (hidden or not path.name.startswith((".", "__"))):
            if path.is_dir():
                yield f"{folder}{slash}{path.name}/"
            elif path.suffix == suffix:
                yield f"{folder}{slash}{path.name}"
