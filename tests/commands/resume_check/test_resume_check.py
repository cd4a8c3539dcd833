"""A script that resumes all of its state, and the same with one part left out: each is named, and nothing else is."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from helpers_launch import children_in_this_process
from mezzo.children.signals import EndedBySignal
from mezzo.commands.resume_check.judgement import Judgement
from mezzo.commands.resume_check.runs import ResumeCheck, checkpoints_of, stop_of
from mezzo.errors import ScriptError
from mezzo.launch.patches import Patches
from mezzo.launch.request import Request
from mezzo.launch.runner import shared_imports
from mezzo.launch.torch.traced import FilesWritten, StateTrace
from mezzo.measure.state_trace import Point, RunTrace, WrittenFile
from mezzo.policy import Policy
from mezzo.records import RunRecord
from paths import SCRIPTS


def _killed(trace: StateTrace) -> None:
    raise EndedBySignal(signal.SIGKILL)


@contextmanager
def _in_this_process(work: Path) -> Iterator[None]:
    """Run the children here, each begun in the folder of the command, and killed by an exception."""
    with (
        children_in_this_process(before_each=lambda: os.chdir(work)),
        mock.patch.object(StateTrace, "_stop", _killed),
        mock.patch.dict(os.environ),
    ):
        yield


def checked(
    folder: Path,
    *arguments: str,
    script: str = "resume_faults",
    resume_with: tuple[str, ...] = (),
    children: Callable[[Path], AbstractContextManager[None]] = _in_this_process,
    **settings: object,
) -> Judgement | None:
    work = folder / "work"
    work.mkdir()
    shutil.copy(SCRIPTS / f"{script}.py", work / "train.py")

    def request(policy: Policy | None, *, folder: Path, **asked: object) -> Request:
        return Request(
            target="train.py",
            kind="script",
            policy=policy,
            record_path=str(folder / "record.json"),
            command=("mezzo",),
            **asked,  # type: ignore[arg-type]
        )

    with contextlib.chdir(work):
        check = ResumeCheck(
            folder=folder / "out",
            target="train.py",
            arguments=arguments,
            resume_with=resume_with,
            make_request=request,
            say=lambda text: None,
            **settings,  # type: ignore[arg-type]
        )
        with children(work):
            found = check.run()
    assert sorted(path.name for path in work.iterdir()) == ["train.py"]  # the user's folder is as it was
    return found


PLANTED = {
    "optimizer": ["optimizer"],
    "scheduler": ["scheduler"],
    "scaler": ["GradScaler"],
    "random": ["random generators"],
    "place": ["data position"],
    "buffers": ["buffers"],
    "step": ["step counter"],
    "average": ["copy of the weights"],
    "shadow": ["copy of the weights"],
    "head": ["weights"],
}


@pytest.mark.parametrize(
    "lacks", [*list(PLANTED)[:4], *(pytest.param(name, marks=pytest.mark.slow) for name in list(PLANTED)[4:])]
)
def test_what_is_missing_is_named_and_nothing_else(tmp_path: Path, lacks: str) -> None:
    found = checked(tmp_path, "--without", lacks)
    assert found is not None
    assert found.verdict == "differs", found.why
    assert found.resumed_at == 10
    assert [one.state for one in found.missing] == PLANTED[lacks], found.missing


@pytest.mark.parametrize(
    ("lacks", "verdict"),
    [("resume", "does_not_resume"), ("checkpoint", "no_checkpoint"), ("argument", "does_not_resume")],
)
def test_scripts_that_do_not_resume(tmp_path: Path, lacks: str, verdict: str) -> None:
    found = checked(tmp_path, "--without", lacks)
    assert found is not None
    assert (found.verdict, found.missing) == (verdict, [])


@pytest.mark.parametrize(
    ("arguments", "resume_with", "resumed_at"),
    [
        (("--save", "steps"), (), 10),
        (("--save", "epochs"), (), 8),
        (("--without", "argument"), ("--resume", "last.pt"), 10),
        (("--output", "saved/{run}"), (), 10),
    ],
)
def test_right_scripts_raise_no_alarm(
    tmp_path: Path, arguments: tuple[str, ...], resume_with: tuple[str, ...], resumed_at: int
) -> None:
    if "{run}" in arguments[-1]:
        arguments = (*arguments[:-1], str(tmp_path / arguments[-1]))
    found = checked(tmp_path, *arguments, resume_with=resume_with)
    assert found is not None
    assert (found.verdict, found.missing, found.first_difference) == ("exact", [], None), found
    assert found.resumed_at == resumed_at
    assert found.why.startswith(f"resumed after step {resumed_at}")


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "resumed_at"), [(("--save", "epochs"), 8), (("--save", "sigterm"), 13)])
def test_processes_that_are_really_stopped(tmp_path: Path, arguments: tuple[str, ...], resumed_at: int) -> None:
    found = checked(tmp_path, *arguments, children=lambda work: shared_imports())
    assert found is not None
    assert (found.verdict, found.missing, found.resumed_at) == ("exact", [], resumed_at), found


def test_a_step_after_the_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="--stop-after 24 was given, and train"):
        checked(tmp_path, stop_after=24)


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "states"), [((), ["data order"]), (("--seedable",), [])])
def test_accelerates_checkpoints_in_the_middle_of_an_epoch(
    tmp_path: Path, arguments: tuple[str, ...], states: list[str]
) -> None:
    pytest.importorskip("accelerate")
    found = checked(tmp_path, *arguments, script="resume_accelerate", children=lambda work: shared_imports())
    assert found is not None
    assert (found.verdict, found.resumed_at) == ("differs" if states else "exact", 6), found
    assert [one.state for one in found.missing] == states


def _write_state(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"PK\x03\x04")


FOLDERS: list[tuple[list[tuple[str, int]], list[str]]] = [
    # the files with the update after which each was written; the checkpoints
    ([("last.pt", 5), ("last.pt", 10)], ["last.pt"]),
    ([("model.pt", 5), ("optimizer.pt", 5)], ["model.pt", "optimizer.pt"]),  # where the script runs
    ([("ckpt/model.safetensors", 6), ("ckpt/optimizer.bin", 6), ("ckpt/random_states_0.pkl", 6)], ["ckpt"]),
    ([("ckpt/step5.pt", 5), ("ckpt/step10.pt", 10)], ["ckpt/step5.pt", "ckpt/step10.pt"]),
    ([("dcp/5/.metadata", 5), ("dcp/5/__0_0.distcp", 5), ("dcp/10/.metadata", 10), ("dcp/10/__0_0.distcp", 10)], ["dcp/5", "dcp/10"]),
]  # fmt: skip


@pytest.mark.parametrize(("files", "checkpoints"), FOLDERS)
def test_a_folder_is_one_checkpoint(tmp_path: Path, files: list[tuple[str, int]], checkpoints: list[str]) -> None:
    for name, _ in files:
        _write_state(tmp_path / name)
    (tmp_path / "ckpt").mkdir(exist_ok=True)
    (tmp_path / "ckpt" / "where.json").write_text("[0, 6]")
    written = [WrittenFile(path=str(tmp_path / name), updates=n, is_checkpoint=False) for name, n in files]
    written.append(WrittenFile(path=str(tmp_path / "ckpt" / "where.json"), updates=6, is_checkpoint=False))
    found = checkpoints_of(written, work=str(tmp_path))
    assert [os.path.relpath(path, tmp_path) for path in found] == checkpoints


@pytest.mark.parametrize("kind", [str, Path, Path.open])
def test_the_whole_path_of_a_file_is_recorded(tmp_path: Path, kind: Callable[..., object]) -> None:
    path, found = tmp_path / "ckpt" / "model.pt", []
    path.parent.mkdir()
    patches = Patches()
    with contextlib.ExitStack() as undone:
        undone.callback(patches.undo)
        FilesWritten(lambda path, is_checkpoint: found.append((path, is_checkpoint))).install(patches)
        if kind is Path.open:
            with path.open("wb") as file:
                torch.save({}, file)
        else:
            torch.save({}, kind(path))
    assert (str(path), True) in found
    assert {name for name, _ in found} == {str(path)}


def test_a_script_whose_graph_replays_its_steps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunRecord, "replays", "100 replays")
    with pytest.raises(ScriptError, match=r"train\.py trains by 100 replays of a CUDA graph, whose state"):
        checked(tmp_path)


def test_a_script_that_fails_by_itself_has_no_verdict(tmp_path: Path) -> None:
    assert checked(tmp_path, "--no-such-option") is None


@pytest.mark.parametrize(
    ("saves", "steps", "stop"),
    [
        ((), 24, 12),
        ((5, 10, 15, 20), 24, 12),
        ((8, 16, 24), 24, 12),
        ((24,), 24, 12),
        (range(1, 25), 24, 13),
        ((23,), 24, 23),
    ],
)
def test_the_stop_lies_between_two_checkpoints(saves: tuple[int, ...], steps: int, stop: int) -> None:
    written = [WrittenFile(path="a", updates=n, is_checkpoint=True) for n in saves]
    assert stop_of(RunTrace(written=written, end=Point(updates=steps))) == stop


@pytest.mark.parametrize(
    ("lacks", "states"),
    [
        ("nothing", []),
        ("scheduler", ["scheduler"]),
        ("average", ["copy of the weights"]),
        ("random", ["random generators"]),
        ("seed", ["random generators"]),
    ],
)
def test_a_function_that_saves_after_each_epoch(tmp_path: Path, lacks: str, states: list[str]) -> None:
    found = checked(tmp_path, "--without", lacks, script="resume_epochs")
    assert found is not None
    assert (found.verdict, found.resumed_at) == ("differs" if states else "exact", 10)
    assert [one.state for one in found.missing] == states, found.missing
    if states == ["random generators"]:
        assert sorted(found.missing[0].name.split(", ")) == ["python", "torch"]
