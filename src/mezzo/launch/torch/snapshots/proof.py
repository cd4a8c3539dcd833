"""Which snapshots may be resumed: a twin resumes a run's first one beside the run, and some updates later both must be in the same state.

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
from typing import IO, Any, NamedTuple

import torch

from mezzo.engine.snapshots.folder import (
    LoadedSnapshot,
    RefusedSnapshot,
    contents_at,
    load_newest,
    none_loaded,
    saved_in,
)
from mezzo.errors import SnapshotError
from mezzo.launch.ranks.meeting import JOIN_S, read_message, write_message
from mezzo.launch.request import Request, ScriptFile, SnapshotRequest, TwinRequest
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
        """Start a twin if it is time for it, and judge a twin that has ended. Called after each update, in the thread of the training."""
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


# --- starting --------------------------------------------------------------------------------------------------------------------

# Choose the snapshot that a run resumes: the newest complete one of this run; in several processes, the newest that all of them have.
#
# A process that is killed while it saves has one snapshot less than the others. So before the script begins, all processes exchange small
# files: first which snapshots they have, and then, for one snapshot after the other, whether they could read it.

_POLL_S = 0.02


class RunStart(NamedTuple):
    """Where a run begins."""

    chosen: LoadedSnapshot | None
    """The snapshot to resume; None to start over."""
    last_number: int
    """The largest snapshot number in any process: the next snapshot has the same number in all."""


def choose_start(request: SnapshotRequest) -> RunStart:
    """Return where a run begins.

    Raises:
        SnapshotError: the run is to be resumed and no snapshot can be, or a process did not answer.
    """
    if request.resume:
        refuse_disproven(Path(request.folder))
    if request.ranks > 1:
        start = _choose_together(request)
    elif request.resume:
        start = RunStart(load_newest(Path(request.folder), _identity_check(request)), 0)
    else:
        return RunStart(None, 0)
    if start.chosen is None and request.resume:
        if not request.may_be_first:
            raise _no_snapshot(request)
        if request.rank == 0:
            print(f"mezzo: no snapshot to resume in {_common_folder(request)} yet: starting over", file=sys.stderr)
    return start


def _choose_together(request: SnapshotRequest) -> RunStart:
    exchange = _Exchange(request)
    here = {(saved.number, saved.updates): saved.path for saved in saved_in(Path(request.folder))}
    everywhere = [{(number, updates) for number, updates in names} for names in exchange("saved", [*here])]
    last = max((number for names in everywhere for number, _ in names), default=0)
    if not request.resume:
        return RunStart(None, last)
    common = sorted(set.intersection(*everywhere), reverse=True)
    check, refused = _identity_check(request), list[RefusedSnapshot]()
    for name in common:
        contents, why = None, ""
        try:
            contents = contents_at(here[name])
            check(contents)
        except SnapshotError as error:
            why = error.message
        reasons = exchange(f"read-{name[0]}", why)
        if not any(reasons):
            return RunStart(LoadedSnapshot(here[name], contents, refused), last)
        rank = next(rank for rank, reason in enumerate(reasons) if reason)
        refused.append(RefusedSnapshot(here[name], f"rank {rank}: {reasons[rank]}"))
    if not common:
        return RunStart(None, last)
    raise none_loaded(refused, "that all processes have")


class _Exchange:
    """An exchange of values between all processes of a run, through files that appear complete or not at all."""

    def __init__(self, request: SnapshotRequest) -> None:
        self._folder, self._rank, self._ranks = Path(request.meeting), request.rank, request.ranks

    def __call__(self, name: str, value: Any) -> list[Any]:
        """Return the values of all processes, by rank."""
        write_message(self._folder / f"{name}-{self._rank}.json", {"value": value})
        end = time.monotonic() + JOIN_S
        values: list[Any] = []
        while len(values) < self._ranks:
            message = read_message(self._folder / f"{name}-{len(values)}.json")
            if message is not None:
                values.append(message["value"])
            elif time.monotonic() > end:
                raise SnapshotError(
                    f"rank {len(values)} did not say within {JOIN_S:g} s which snapshots it has",
                    hint="save into a folder that all machines see, and start every process with the same command",
                )
            else:
                time.sleep(_POLL_S)
        return values


def _identity_check(request: SnapshotRequest) -> Callable[[Any], None]:
    """Return a function that raises an error for the contents of another run's snapshot."""

    def check(contents: Any) -> None:
        if not isinstance(contents, dict) or not isinstance(contents.get("run"), dict) or "script" not in contents:
            raise SnapshotError(
                "it does not contain the state of a script", hint="resume a run of mezzo run --snapshot"
            )
        for name, now in request.identity.items():
            then = contents["run"].get(name)
            if then != now:
                raise SnapshotError(
                    f"it is of a run with {name} {then!r}, and this one has {now!r}",
                    hint="resume with the same script, arguments and policy",
                )

    return check


def _no_snapshot(request: SnapshotRequest) -> SnapshotError:
    if request.ranks > 1:
        return SnapshotError(
            f"the {request.ranks} processes have no snapshot in common in {str(_common_folder(request))!r}",
            hint="resume with as many processes as the run had; the first snapshot is taken once its interval has passed",
        )
    processes = len(list(Path(request.folder).glob("rank-*-of-*")))
    if processes:
        return SnapshotError(
            f"{request.folder!r} holds the snapshots of {processes} processes, and this is one",
            hint=f"start {processes} processes with the launcher, as the run that was stopped",
        )
    return SnapshotError(
        f"there is no snapshot in {request.folder!r}",
        hint="pass --resume the folder of a run with --snapshot; the first one is taken once its interval has passed",
    )


def _common_folder(request: SnapshotRequest) -> Path:
    """Return the folder that contains the folders of all processes."""
    folder = Path(request.folder)
    return folder if request.ranks == 1 else folder.parent
