"""Choose the snapshot that a run resumes: the newest complete one of this run; in several processes, the newest that all of them have.

A process that is killed while it saves has one snapshot less than the others. So before the script begins, all processes exchange small
files: first which snapshots they have, and then, for one snapshot after the other, whether they could read it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from mezzo.engine.snapshots.folder import Chosen, RefusedSnapshot, contents_at, load_newest, none_loaded, saved_in
from mezzo.errors import SnapshotError
from mezzo.launch.ranks.meeting import JOIN_S, read_message, write_message
from mezzo.launch.request_parts import SnapshotRequest
from mezzo.launch.torch.snapshots.proof import refuse_disproven

_POLL_S = 0.02


class RunStart(NamedTuple):
    """Where a run begins."""

    chosen: Chosen | None
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
            return RunStart(Chosen(here[name], contents, refused), last)
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
