"""Prove a run's first snapshot: a twin resumes it beside the run, and some updates later both must be in the same state.

The twin is a process of its own that works on copies (``mezzo.launch.twin``). If it differs, a second one tells whether the script
repeats itself at all: what two twins have differently proves nothing. A run that could not be proven goes on, and says so; one that was
disproven saves no more, and its snapshots are not resumed.

Cost: the script once more, up to its first updates, on another core; one walk through what the script can reach, and a look at its memory.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import torch

from mezzo.errors import SnapshotError
from mezzo.launch.request import Request
from mezzo.launch.request_parts import ScriptFile, TwinRequest
from mezzo.records import SnapshotProof

UPDATES = 3
"""Updates between the snapshot and the comparison."""
DISPROVEN = "disproven.json"
_SHOWN, _NEVER_S = 5, 1e12
_SPARE = 1.2
"""How much more memory must be free than the run has used: a twin that takes the last of it would end the run."""
_SPARE_BYTES = 2**30


class Proof:
    """The proof of a run's first snapshot, from its beginning to its verdict."""

    def __init__(self, script: ScriptFile, folder: Path) -> None:
        """Begin before the script runs: a twin starts in the same surroundings."""
        self._request, self._folder = Request.of_json(script.request), folder
        self._here, self._environment = os.getcwd(), dict(os.environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._files: tuple[IO[bytes], IO[bytes]] | None = None
        self._began_s = 0.0
        self._own: dict[str, str] | None = None
        self._twins: list[dict[str, str]] = []
        self.written: Path | None = None
        """The snapshot, once it is on the disk."""
        self.verdict: SnapshotProof | None = None
        """None until it is known."""

    @property
    def is_running(self) -> bool:
        """Whether a twin runs, which reads the snapshot."""
        return self._process is not None

    def compare_with(self, digests: Callable[[], dict[str, str]]) -> None:
        """Note the digests of the run's own state, ``UPDATES`` after the snapshot."""
        try:
            self._own = digests()
        except Exception as error:  # of an object of the script: nothing that goes wrong here may reach it
            self._give_up(f"its state cannot be compared: {error}")

    def begin_with(self, written: Path) -> None:
        """Prove the first snapshot that was written; a later one changes nothing."""
        if self.written is None:
            self.written = written

    def follow(self) -> None:
        """Start a twin if it is time for it, and judge one that has ended. Called after each update, in the thread of the training."""
        try:
            if self._process is not None:
                if self._process.poll() is not None:
                    self._judge()
            elif self.written is not None and self._own is not None:
                _check_memory()
                self._began_s = self._began_s or time.monotonic()
                self._start(self.written)
        except (OSError, ValueError) as error:
            self._give_up(f"no second process: {error}")

    def _give_up(self, why: str) -> None:
        self.verdict = SnapshotProof(verdict="unproven", reason=why)
        print(f"mezzo: the snapshots are not proven: {why}", file=sys.stderr)

    def end(self) -> SnapshotProof:
        """Stop a twin that still runs, and return the verdict."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        elif self._process is not None and self.verdict is None:
            self.follow()
        self._close_files()
        return self.verdict or SnapshotProof(verdict="unproven", reason="the run ended first")

    def _start(self, snapshot: Path) -> None:
        answer, output = (tempfile.TemporaryFile(dir=self._folder) for _ in range(2))  # noqa: SIM115  # closed with the verdict
        self._files = answer, output
        assert self._request.snapshots is not None
        folder = self._folder / "twin"
        twin = TwinRequest(snapshot=str(snapshot), answer=answer.fileno())
        snapshots = self._request.snapshots.model_copy(
            update={
                "folder": str(folder),
                "resume": True,
                "may_be_first": False,
                "every_s": _NEVER_S,
                "proves": False,
                "twin": twin,
            }
        )
        request = self._request.model_copy(
            update={
                "record_path": str(folder / "record.json"),
                "snapshots": snapshots,
                "guard": None,
                "metric": None,
                "reports_progress": False,
            }
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mezzo.launch.twin", request.packed()],
            cwd=self._here, env=self._environment, pass_fds=[answer.fileno()],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def _judge(self) -> None:
        assert self._process is not None
        assert self._files is not None
        assert self._own is not None
        answer, output = self._files
        answer.seek(0)
        text = answer.read()
        if not text:
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines() or ["it printed nothing"]
            self._give_up(f"the process that resumed it ended with code {self._process.returncode}: {lines[-1][:300]}")
            return
        self._twins.append(json.loads(text))
        verdict = verdict_of(self._own, self._twins)
        if verdict is not None:
            self.verdict = verdict.model_copy(update={"took_s": time.monotonic() - self._began_s})
        self._process = None
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files or ():
            file.close()
        self._files = None


def verdict_of(own: Mapping[str, str], twins: list[dict[str, str]]) -> SnapshotProof | None:
    """Return the verdict on the digests of a run and of its twins; None if another twin is needed.

    Args:
        own: the run's digests, by name.
        twins: one or two twins'.
    """
    different = _different(own, twins[-1])
    if not different:
        return SnapshotProof(verdict="proven", values=len(own), updates=UPDATES)
    if len(twins) == 1:
        return None
    unrepeatable = set(_different(*twins))
    wrong = [name for name in different if name in _different(own, twins[0]) and name not in unrepeatable]
    names = [_shown(name) for name in (wrong or different)[:_SHOWN]]
    return SnapshotProof(
        verdict="disproven" if wrong else "unrepeatable", values=len(own), updates=UPDATES, names=names
    )


def _shown(name: str) -> str:
    """Return a name as a script would write it."""
    return re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", name)


def _different(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [name for name in [*one, *(name for name in other if name not in one)] if one.get(name) != other.get(name)]


def answer_twin(request: TwinRequest, digests: Callable[[], dict[str, str]]) -> None:
    """Write a twin's digests for the run that started it, and end the process without a further step of the script."""
    try:
        text = json.dumps(digests())
    except Exception as error:  # the script must not catch it and train on
        print(f"mezzo: its state cannot be compared: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    with os.fdopen(request.answer, "wb") as file:
        file.write(text.encode())
    os._exit(0)


def mark_disproven(folder: Path, proof: SnapshotProof) -> None:
    """Keep the snapshots of a folder from being resumed."""
    (folder / DISPROVEN).write_text(json.dumps(proof.names), encoding="utf-8")


def refuse_disproven(folder: Path) -> None:
    """Refuse to resume snapshots that were disproven.

    Raises:
        SnapshotError: they were.
    """
    path = folder / DISPROVEN
    if path.exists():
        names = json.loads(path.read_text(encoding="utf-8"))
        raise SnapshotError(
            f"the run that saved {str(folder)!r} found that a resumed run differs from it, first in {names[0]!r}",
            hint="start over without --resume, and save with mezzo.Session",
        )


def _check_memory() -> None:
    """Refuse a second process that might not fit beside this one.

    Raises:
        OSError: it might not.
    """
    for device in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        used = torch.cuda.max_memory_reserved(device)
        if used and torch.cuda.mem_get_info(device)[0] < used * _SPARE + _SPARE_BYTES:
            raise OSError(f"it needs {used / 2**30:.1f} GiB of GPU {device}, which are not free")
    if sys.platform != "linux":
        raise OSError("only Linux gives a process a file system of its own")
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    free = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        if line.startswith("MemAvailable")
    )
    used = pages * os.sysconf("SC_PAGE_SIZE")
    if free < used * _SPARE:
        raise OSError(f"it needs {used / 2**30:.1f} GiB of memory, which are not free")
