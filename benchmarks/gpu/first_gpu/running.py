"""Cases in processes, one after another, each measured once, wherever a run was cut."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.shared import ROOT

BUDGET_S = 480.0
"""The time of a stage, and the most that a case may take."""
_LOCK_S = 10.0
_ENDED_WITH_US = 'exec 3<&0; "$@" </dev/null 3<&- & case=$!; { read -r _; kill -KILL 0; } <&3 & wait "$case"'
"""Runs a command, and kills its process group when standard input closes, as it does when the process that holds it dies."""


@dataclass(frozen=True)
class Case:
    """A process to run."""

    name: str
    command: tuple[str, ...]
    """``python`` is this interpreter, ``{out}`` the case's folder, ``{tests}`` the folder with the results of tests."""
    limit_s: float = BUDGET_S
    modules: tuple[str, ...] = ()
    """Packages that must be installed."""
    program: str = ""
    """A program that must be found."""
    resumes: bool = False
    """Whether the command continues where it was cut; others begin again, in an empty folder."""

    def missing(self) -> list[str]:
        found = [name for name in self.modules if importlib.util.find_spec(name) is None]
        return found + ([self.program] if self.program and shutil.which(self.program) is None else [])


@dataclass(frozen=True)
class Stage:
    """Cases that belong together, the most valuable first."""

    name: str
    what: str
    cases: tuple[Case, ...]


class Results:
    """A folder of results that one process at a time works in."""

    def __init__(self, folder: Path) -> None:
        """Open the folder.

        Raises:
            BlockingIOError: another process works in it.
        """
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
        deadline = time.monotonic() + _LOCK_S  # the cases of a process that was killed end within milliseconds
        while True:
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(self.lock)
                    raise
                time.sleep(0.02)

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.lock)

    def of(self, stage: Stage, case: Case) -> dict[str, Any] | None:
        """Return the result of a case, or None if it has not ended yet."""
        path = self.folder / stage.name / f"{case.name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def left(self, stage: Stage) -> list[Case]:
        """Return the cases without a result whose packages and programs are here."""
        return [case for case in stage.cases if self.of(stage, case) is None and not case.missing()]

    def run(self, stage: Stage, until_s: float) -> None:
        """Measure the cases that are left, at most until ``until_s`` on the monotonic clock, and for the stage's budget."""
        until_s = min(until_s, time.monotonic() + BUDGET_S)
        begun = False
        for case in self.left(stage):
            remaining_s = until_s - time.monotonic()
            if remaining_s <= 0:
                return
            if begun and not case.resumes and case.limit_s > remaining_s:
                print(f"{stage.name}/{case.name}: next time, it may take {case.limit_s:.0f} s", flush=True)
                continue
            self._measure(stage, case, remaining_s)
            begun = True

    def _measure(self, stage: Stage, case: Case, remaining_s: float) -> None:
        place = self.folder / stage.name
        files, log = place / case.name, place / f"{case.name}.log"
        if not case.resumes:
            self._set_aside(files, log)
        files.mkdir(parents=True, exist_ok=True)
        words = {"python": sys.executable, "{out}": str(files), "{tests}": str(self.folder / "pytest")}
        command = [words.get(word, word.replace("{out}", str(files))) for word in case.command]
        print(f"{stage.name}/{case.name}: {' '.join(case.command)}", flush=True)
        began, began_s = datetime.now(timezone.utc), time.monotonic()
        code = self._code(command, log, min(case.limit_s, remaining_s))
        took_s = time.monotonic() - began_s
        if code is None and case.limit_s > remaining_s:
            print(f"{stage.name}/{case.name}: cut after {took_s:.0f} s, when the time was over", flush=True)
            return
        status = "ended" if code is not None else f"killed at its limit of {case.limit_s:.0f} s"
        result: dict[str, Any] = {"stage": stage.name, "case": case.name, "status": status, "exit_code": code}
        result |= {"seconds": round(took_s, 1), "began": began.isoformat(timespec="seconds"), "command": command}
        write_json(place / f"{case.name}.json", result)
        print(f"{stage.name}/{case.name}: {status}, exit code {code}, {took_s:.0f} s", flush=True)

    def _code(self, command: Sequence[str], log: Path, limit_s: float) -> int | None:
        """Run a command and return its exit code, or None if it was killed at the limit; nothing that it started is left."""
        with log.open("ab") as file:
            process = subprocess.Popen(
                ["sh", "-c", _ENDED_WITH_US, "sh", *command],
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(self.lock,),  # held until the case has ended, whatever happens to this process
            )
        code: int | None = None
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        return code

    def _set_aside(self, *paths: Path) -> None:
        """Move what a case that was cut has left to ``cut/``: its log may say why."""
        for path in paths:
            if path.exists():
                cut = self.folder / "cut"
                cut.mkdir(exist_ok=True)
                path.rename(cut / f"{path.parent.name}-{path.name}-{len(os.listdir(cut))}")

    def summarize(self, stages: Iterable[Stage]) -> list[tuple[str, ...]]:
        """Write ``summary.tsv``, a row for each case and test, and return its rows."""
        rows: list[tuple[str, ...]] = []
        for stage in stages:
            for case in stage.cases:
                found, missing = self.of(stage, case), case.missing()
                said = "left for the next time" if not missing else f"not run: missing {', '.join(missing)}"
                if found is not None:
                    said = "passed" if found["exit_code"] == 0 else f"failed: {found['status']}, {found['exit_code']}"
                rows.append((f"{stage.name}/{case.name}", said, str(found["seconds"] if found else "")))
        for path in sorted(self.folder.glob("pytest/*/*.json")):
            one = json.loads(path.read_text(encoding="utf-8"))
            rows.append((one["test"], one["outcome"], str(one["seconds"])))
        text = "".join("\t".join(row) + "\n" for row in [("case or test", "outcome", "seconds"), *rows])
        write_whole(self.folder / "summary.tsv", text)
        return rows


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file that is complete or absent, also if this process is killed."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
