"""What an interrupted command has finished, so that the same command continues where it stopped. Imports no torch.

A check and a search list their finished parts, because a part may be several runs. A comparison needs no list: each of its runs has a
record, written whole, with the digest of its request, so that a kill at any moment loses at most the runs in progress.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mezzo.launch.request import Request
from mezzo.records import AnyRecord, RunRecord, record_at
from mezzo.records.files import write_whole

LEDGER = "finished.json"


class Finished:
    """The finished parts of a command, by name, in a file of its folder.

    A part counts only if the command's identity is the same: script text, arguments, versions. A part is listed once its record is on disk,
    so that whatever an interruption left unfinished is made again.
    """

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        self._folder, self.identity = folder, dict(identity)
        known = read_object(folder / LEDGER)
        before: dict[str, str] = known.get("identity", {})
        changed = [name for name, value in self.identity.items() if before.get(name) != value]
        self.why_anew = ""
        """Why an earlier command's parts are not used; empty if there are none, or they are used."""
        if known and changed:
            self.why_anew = f"{changed[0]} changed since: {_shown(before.get(changed[0]))} then, {_shown(self.identity[changed[0]])} now"
            known = {}
        self.found = bool(known)
        """Whether an earlier command of the same identity left anything here."""
        self.over = bool(known.get("over", False))
        """Whether that command ended by itself."""
        self.asked: dict[str, str] = dict(known.get("asked", {}))
        """Options of the earlier command that may change, such as the number of seeds."""
        self._parts: dict[str, str] = dict(known.get("parts", {}))
        self.since_s = float(known.get("since_s", time.time()))
        """Unix time at which the command first began."""

    def __len__(self) -> int:
        return len(self._parts)

    def record(self, name: str) -> AnyRecord | None:
        """Return the record of a finished part; None if it is missing."""
        place = self._parts.get(name)
        return None if place is None else record_at(self._folder / place)

    def add(self, name: str, path: Path) -> None:
        """List a part whose record is at ``path``, inside the folder."""
        self._parts[name] = path.relative_to(self._folder).as_posix()
        self.write()

    def begin(self, asked: Mapping[str, str], *, anew: bool) -> None:
        """Record that a command with these options has begun; ``anew`` drops the parts of an earlier one."""
        if anew:
            self._parts, self.since_s = {}, time.time()
        self.over, self.asked = False, dict(asked)
        self.write()

    def end(self) -> None:
        """Record that the command has ended: if repeated, it runs anew, unless it is told to continue."""
        self.over = True
        self.write()

    def forget(self) -> None:
        """Delete the list once the whole command is finished: if repeated, it runs anew."""
        (self._folder / LEDGER).unlink(missing_ok=True)

    def write(self) -> None:
        """Write the list."""
        known = {
            "identity": self.identity,
            "since_s": self.since_s,
            "over": self.over,
            "asked": self.asked,
            "parts": self._parts,
        }
        write_whole(json.dumps(known, indent=1), self._folder / LEDGER)


_NOT_ASKED = {
    "record_path",
    "command",
    "policy_typed",
    "output_to_stderr",
    "rank",
    "variables",
    "digest",
    "earlier_update_s",
    "placement",
    "reports_progress",
    "watches",
    "stop_after_s",
}
"""Fields of a request that determine where, when and for how long it runs, but not what it computes."""


def with_digest(request: Request, identity: Mapping[str, str]) -> Request:
    """Return the request with the digest of what it asks for, by a command with this identity (script text, versions)."""
    asked = {"request": request.model_dump(mode="json", exclude=_NOT_ASKED), "identity": dict(identity)}
    text = json.dumps(asked, sort_keys=True)
    return request.model_copy(update={"digest": hashlib.sha256(text.encode()).hexdigest()})


def finished_run(request: Request) -> RunRecord | None:
    """Return the record of a run of this request that trained to its end; None if it is missing, failed, or was of another request."""
    found = record_at(request.record_path)
    if not isinstance(found, RunRecord) or found.error is not None or not len(found.steps):
        return None
    return found if found.request_sha256 == request.digest else None


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _shown(value: str | None) -> str:
    return "nothing" if not value else value if len(value) <= 40 else f"{value[:12]}..."
