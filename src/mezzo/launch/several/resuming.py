"""What an interrupted command has finished, so that the same command goes on where it stopped. Imports no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mezzo.errors import RecordError
from mezzo.records import AnyRecord, read_record
from mezzo.records.files import write_whole

LEDGER = "finished.json"


class Finished:
    """The finished parts of a command, by name, in a file of its folder.

    A part counts only if the command is the same: script text, arguments, versions. A part is listed once its record is on disk, so that
    what an interruption left half-way is made again.
    """

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        self._folder, self._identity = folder, dict(identity)
        known = _read(folder / LEDGER)
        before: dict[str, str] = known.get("identity", {})
        changed = [name for name, value in self._identity.items() if before.get(name) != value]
        self.why_anew = ""
        """Why parts that an earlier command left are not used; empty if there are none, or they are used."""
        if known and changed:
            self.why_anew = f"{changed[0]} changed since: {_shown(before.get(changed[0]))} then, {_shown(self._identity[changed[0]])} now"
            known = {}
        self._parts: dict[str, str] = dict(known.get("parts", {}))
        self.since_s = float(known.get("since_s", time.time()))
        """Unix time at which the command first began."""

    def __len__(self) -> int:
        return len(self._parts)

    def record(self, name: str) -> AnyRecord | None:
        """Return the record of a finished part; None if it is missing."""
        place = self._parts.get(name)
        if place is None:
            return None
        try:
            return read_record(self._folder / place)
        except RecordError:
            return None

    def add(self, name: str, path: Path) -> None:
        """List a part whose record is at ``path``, inside the folder."""
        self._parts[name] = path.relative_to(self._folder).as_posix()
        self.write()

    def forget(self) -> None:
        """Delete the list, once the whole command is finished: repeated, it runs anew."""
        (self._folder / LEDGER).unlink(missing_ok=True)

    def write(self) -> None:
        """Write the list."""
        text = json.dumps({"identity": self._identity, "since_s": self.since_s, "parts": self._parts}, indent=1)
        write_whole(text, self._folder / LEDGER)


def _read(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _shown(value: str | None) -> str:
    return "nothing" if not value else value if len(value) <= 40 else f"{value[:12]}..."
