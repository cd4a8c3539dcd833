"""The one loop of runs: do what a command's plan wants next, until it wants nothing more. Imports no torch.

A plan is a function of what the command knows. If several runs are possible at once, the next requests of a plan are guessed and run in
advance. A guessed run that is wanted later is ready by then; a run that is never wanted does not count. So the course and the answer
are the same as with one run at a time.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from mezzo.children.signals import stoppable
from mezzo.launch.request import Request
from mezzo.records import AnyRecord, RunRecord, record_at
from mezzo.records.files import write_whole
from mezzo.records.run import RUN_NAME
from mezzo.studies.side_by_side import Engine, LimitS

_WIDEST = 32
"""Most guessed runs at once if the cluster sets no limit."""

Ahead = Callable[[], Iterable[Request]]
"""Yields the requests that will probably follow, the likeliest first."""
Reuse = Callable[[Request], AnyRecord | None]
"""Returns the record of a run that an earlier command finished; None if there is none."""


class Done(NamedTuple):
    """What became of a part of a command."""

    record: AnyRecord | None
    """None if it has none, or does not count."""
    took_s: float
    resumed: bool
    """Whether an interrupted command had finished it."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a plan wants next: a run of the script, or work that takes several runs."""

    do: Callable[[], AnyRecord | None]
    """Runs the script; returns the record, None if there is none or it does not count."""
    learn: Callable[[Done], str] = lambda _: ""
    """Adds the result to what is known; returns it in a few words."""
    name: str = ""
    """The name of its folder, by which an interrupted command lists it."""
    title: str = ""
    """Its name in messages."""
    says: str = ""
    """What to print before it begins."""


class Study:
    """The runs of one command on an engine."""

    def __init__(self, engine: Engine, finished: Finished) -> None:
        """Prepare to run.

        Args:
            engine: executes the runs; it is open.
            finished: what an interrupted command with the same script and versions has finished.
        """
        self.finished = finished
        self._engine = engine
        self._ready: dict[str, AnyRecord] = {}
        """Records of runs that have not been wanted yet, by their path."""
        self.reused: set[str] = set()
        """Names of the folders of wanted runs that an interrupted command had finished."""

    @property
    def at_once(self) -> int:
        """The most runs at once."""
        return self._engine.at_once or _WIDEST

    def record(
        self,
        request: Request,
        *,
        limit_s: LimitS = lambda: None,
        together: Sequence[Request] = (),
        ahead: Ahead = tuple,
        reuse: Reuse = lambda _: None,
        ended: Callable[[Request, AnyRecord], None] = lambda request, record: None,
    ) -> AnyRecord:
        """Return the record of a run, which is executed now unless its record is ready.

        Args:
            request: what to run.
            limit_s: returns the seconds after which a run that begins now is stopped; None for no limit.
            together: what to run as well.
            ahead: yields what will probably be wanted next.
            reuse: finds a run of an earlier command.
            ended: called when a run has ended.

        Raises:
            Stopped: a signal has stopped the command; it carries the record that the run left, if it is a run's.
        """
        with stoppable() as stop:
            request = with_digest(request, self.finished.identity)
            if request.record_path not in self._ready:
                earlier = reuse(request)
                if earlier is not None:
                    self.reused.add(Path(request.record_path).parent.name)
                    return earlier
                others = [with_digest(other, self.finished.identity) for other in (*together, *self._guessed(ahead))]
                missing = [other for other in others if other.record_path not in self._ready and reuse(other) is None]
                for run, record in self._engine([request, *missing], limit_s):
                    self._ready[run.record_path] = record
                    ended(run, record)
            left = record_at(request.record_path) if stop.stopped else None
            stop.check(left if isinstance(left, RunRecord) else None)
        return self._ready.pop(request.record_path)

    def _guessed(self, ahead: Ahead) -> Iterable[Request]:
        return () if self.at_once == 1 else islice(ahead(), self.at_once - 1)


def carry_out(
    plan: Callable[[], Wanted | None], *, study: Study | None = None, say: Callable[[str], None] = lambda _: None
) -> None:
    """Do what a plan wants next, until it wants nothing more.

    Args:
        plan: returns the next part, given what all parts before it have led to.
        study: lists the parts that are finished, so that an interrupted command continues; None where each begins anew.
        say: prints a line.

    Raises:
        Stopped: a signal has stopped the command.
    """
    with stoppable() as stop:
        for number, part in enumerate(iter(plan, None)):
            if number:  # a first run that waits for other processes says in its record that it was stopped
                stop.check()
            began_s = time.monotonic()
            record = None if study is None else study.finished.record(part.name)
            ran = record is None
            if ran:
                if part.says:
                    say(part.says)
                record = part.do()
            resumed = not ran or (study is not None and part.name in study.reused)
            outcome = part.learn(Done(record, time.monotonic() - began_s, resumed))
            if study is not None:
                if ran and record is not None:
                    study.finished.add(part.name)
                say(f"{part.title}: {outcome}" + (f" (from the interrupted {study.finished.what})" if resumed else ""))


# --- What ran already ------------------------------------------------------------------------------------------------------------

# A check and a search list their finished parts, because a part may be several runs. A comparison needs no list: each of its runs has a
# record, written atomically, with the digest of its request, so that a kill at any moment loses at most the runs in progress.

_LONGEST = 80
BUDGET_GRACE_S = 30.0
"""Time that a run may take beyond a command's budget before it is killed: the estimate may have been too low."""
LEDGER = "finished.json"


class Finished:
    """The finished parts of a command, by name, in a file of its folder.

    A part counts only if the command's identity is the same: script text, arguments, versions. A part is listed only once its record is
    on disk, so that everything that an interruption left unfinished runs again.
    """

    def __init__(self, folder: Path, identity: Mapping[str, str], *, what: str = "command") -> None:
        """Read the list in a folder; ``what`` names the command's work in messages."""
        self._folder, self.identity, self.what = folder, dict(identity), what
        ledger = read_object(folder / LEDGER)
        before: dict[str, str] = ledger.get("identity", {})
        changed = [name for name, value in self.identity.items() if before.get(name) != value]
        self.why_restart = ""
        """Why an earlier command's parts are not used; empty if there are none, or they are used."""
        if ledger and changed:
            name = changed[0]
            self.why_restart = (
                f"{name} changed since: {_shown(before.get(name))} then, {_shown(self.identity[name])} now"
            )
            ledger = {}
        self.found = bool(ledger)
        """Whether an earlier command with the same identity left anything here."""
        self.over = bool(ledger.get("over", False))
        """Whether that command ended by itself."""
        self.options: dict[str, str] = dict(ledger.get("asked", {}))
        """Options of the earlier command that may change, such as the number of seeds."""
        self._parts: dict[str, str] = dict(ledger.get("parts", {}))
        self.since_s = float(ledger.get("since_s", time.time()))
        """Unix time at which the command first began."""

    def __len__(self) -> int:
        return len(self._parts)

    def record(self, name: str) -> AnyRecord | None:
        """Return the record of a finished part; None if it is missing."""
        path = self._parts.get(name)
        return None if path is None else record_at(self._folder / path)

    def add(self, name: str) -> None:
        """List a part whose record is in its own folder, of that name."""
        self._parts[name] = f"{name}/record.json"
        self.write()

    def begin(self, options: Mapping[str, str], *, restart: bool) -> None:
        """Record that a command with these options has begun; ``restart`` drops the parts of an earlier one."""
        if restart:
            self._parts, self.since_s = {}, time.time()
        self.over, self.options = False, dict(options)
        self.write()

    def end(self) -> None:
        """Record that the command has ended: if repeated, it starts from the beginning, unless it is to continue."""
        self.over = True
        self.write()

    def forget(self) -> None:
        """Delete the list once the whole command is finished: if repeated, it starts from the beginning."""
        (self._folder / LEDGER).unlink(missing_ok=True)

    def write(self) -> None:
        """Write the list."""
        ledger = {
            "identity": self.identity,
            "since_s": self.since_s,
            "over": self.over,
            "asked": self.options,
            "parts": self._parts,
        }
        write_whole(json.dumps(ledger, indent=1), self._folder / LEDGER)


_NOT_COMPUTED = {
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
"""Fields of a request that determine where, when and for how long a script runs, but not what it computes."""


def with_digest(request: Request, identity: Mapping[str, str]) -> Request:
    """Return the request with a digest of what it computes, in a command with this identity (script text, versions)."""
    computed = {"request": request.model_dump(mode="json", exclude=_NOT_COMPUTED), "identity": dict(identity)}
    text = json.dumps(computed, sort_keys=True)
    return request.model_copy(update={"digest": hashlib.sha256(text.encode()).hexdigest()})


def finished_run(request: Request) -> RunRecord | None:
    """Return the record of a run of this request that trained to its end; None if it is missing, failed, or had another request."""
    run = record_at(request.record_path)
    if not isinstance(run, RunRecord) or run.error is not None or not len(run.steps):
        return None
    return run if run.request_sha256 == request.digest else None


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _shown(value: str | None) -> str:
    return "nothing" if not value else value if len(value) <= 40 else f"{value[:12]}..."


def folder_name(policy: str) -> str:
    """Return a policy's text as part of a folder's name, in characters that every file system allows.

    A long text is cut, and gets a digest of the whole at its end.
    """
    plain = re.sub(r"[^\w.,=+-]", "_", policy)
    if len(plain) <= _LONGEST:
        return plain
    return f"{plain[: _LONGEST - 9]}-{hashlib.sha256(policy.encode()).hexdigest()[:8]}"


def run_name(policy: str, seed: int) -> str:
    """Return the name of a run, which is also the name of its folder."""
    return f"{folder_name(policy)}-seed{seed}"


def named_arguments(arguments: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the script's arguments with the run's name in place of ``{run}``."""
    return tuple(argument.replace(RUN_NAME, name) for argument in arguments)
