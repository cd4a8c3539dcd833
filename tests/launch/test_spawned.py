"""Processes that a script starts itself."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data._utils.worker

from helpers_launch import request_for
from helpers_values import record_at
from mezzo import cli
from mezzo.launch.patches import Patches
from mezzo.launch.request import Request
from mezzo.launch.spawned import Recorded, SpawnedProcesses, run_function
from mezzo.records import AuditRecord, RunRecord, Steps, write_record
from paths import SCRIPTS
from record_builders import environment


def request(folder: Path, **fields: Any) -> Request:
    return request_for(folder, fields.pop("target", "train.py"), policy="fp16", **fields)


def record(loss: list[float], **fields: Any) -> RunRecord:
    steps = Steps(loss=loss, skipped=[False] * len(loss))
    known: dict[str, Any] = {"command": [], "script": "train.py", "script_sha256": "", "policy": "fp16"}
    return RunRecord(**known, environment=environment(), steps=steps, **fields)


class Training:
    """Stand in for the training of this process."""


def spawned(folder: Path, *records: RunRecord | None) -> SpawnedProcesses:
    """Return the processes of a script that left these records."""
    found = SpawnedProcesses(request(folder))
    for one in records:
        path = Path(found._next(request(folder)).record_path)
        if one is not None:
            write_record(one, path)
    return found


NEVER = record([], error="it trained nothing", trained_nothing=True, exit_code=7)


def test_processes_that_train_are_ranks(tmp_path: Path) -> None:
    together = spawned(tmp_path, record([1.0]), record([3.0])).merged_with(NEVER)
    assert isinstance(together, RunRecord)
    assert (together.steps.loss, together.error, together.exit_code) == ([2.0], None, 0)
    assert [rank.final_loss for rank in together.ranks] == [1.0, 3.0]
    assert list(tmp_path.iterdir()) == []  # one record


def test_what_a_script_may_do_beside_starting_processes_is_no_matter_of_words(tmp_path: Path) -> None:
    words = "train.py ended without a training step: it never called backward()"
    failed = record([], error=words, exit_code=7)  # as a script may say itself
    together = spawned(tmp_path, record([1.0]), record([3.0])).merged_with(failed)
    assert isinstance(together, RunRecord)
    assert (together.error, together.exit_code) == (words, 7)


def test_a_script_that_trains_itself_is_rank_0(tmp_path: Path) -> None:
    together = spawned(tmp_path, record([3.0])).merged_with(record([1.0]))
    assert isinstance(together, RunRecord)
    assert [rank.final_loss for rank in together.ranks] == [1.0, 3.0]


@pytest.mark.parametrize("records", [(), (None,), (None, NEVER)])
def test_processes_that_do_not_train_change_nothing(records: tuple[RunRecord | None, ...], tmp_path: Path) -> None:
    own = record([1.0])
    assert spawned(tmp_path, *records).merged_with(own) is own


def test_the_error_that_the_script_raises_names_the_process(tmp_path: Path) -> None:
    raised = record([], error="ProcessRaisedException: Process 1 terminated", exit_code=1)
    together = spawned(tmp_path, record([1.0]), record([1.0], exit_code=1)).merged_with(raised)
    assert isinstance(together, RunRecord)
    assert (together.error, together.exit_code) == (raised.error, 1)
    assert [rank.exit_code for rank in together.ranks] == [0, 1]


def target() -> None:
    """Stand in for a script's function."""


@pytest.mark.parametrize(
    ("what", "recorded"), [(target, True), (torch.utils.data._utils.worker._worker_loop, False), (None, False)]
)
def test_only_functions_that_may_train_are_recorded(
    what: Any, recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", lambda process: started.append(process._target))
    patches = Patches()
    SpawnedProcesses(request(tmp_path)).install(patches, Training())  # type: ignore[arg-type]
    try:
        multiprocessing.get_context("spawn").Process(target=what).start()
    finally:
        patches.undo()
    assert isinstance(started[0], Recorded) is recorded


OWN, OTHER = {"LOCAL_RANK": "1"}, {"PATH": "/bin"}
COMMANDS = [
    # command, environment: the arguments of the script that is started again; None for another command
    ([sys.executable, "-u", "train.py", "--epochs", "3"], OWN, ("--epochs", "3")),
    ([sys.executable, os.path.abspath("train.py")], OWN, ()),
    ([sys.executable, "train.py"], OTHER, None),  # a search that runs the script again, not a rank
    ([sys.executable, "train.py"], None, None),
    ([sys.executable, "other.py", "train.py"], OWN, None),
    (["bash", "train.py"], OWN, None),
    ("python train.py", OWN, None),
]


@pytest.mark.parametrize(("command", "variables", "arguments"), COMMANDS)
def test_a_script_started_again_with_a_rank_runs_under_the_policy(
    command: Any, variables: Any, arguments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(subprocess.Popen, "__init__", lambda process, args, **rest: opened.append(args))
    monkeypatch.setattr(subprocess.Popen, "__del__", lambda process: None)
    patches = Patches()
    SpawnedProcesses(request(tmp_path)).install(patches, Training())  # type: ignore[arg-type]
    try:
        subprocess.Popen(command, env=variables)
    finally:
        patches.undo()
    if arguments is None:
        assert opened == [command]
        return
    assert opened[0][1:3] == ["-m", "mezzo.launch.child"]
    again = Request.unpacked(opened[0][3])
    assert (again.target, again.arguments, again.rank) == (os.path.abspath("train.py"), arguments, 1)


@pytest.mark.slow
def test_both_processes_train_under_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mp.spawn of torch starts Python's "spawn"; the next test forks."""
    monkeypatch.setenv("MEETING", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["run", "--policy", "fp16", "--out", str(tmp_path / "out"), str(SCRIPTS / "spawns.py"), "mp.spawn"]
    assert cli.main(words) == 0
    found = record_at(tmp_path / "out" / "record.json", RunRecord)
    assert found.error is None
    assert found.effective.flops_by_format.keys() == {"fp16"}
    assert [(rank.num_steps, rank.final_scale) for rank in found.ranks] == [(6, 65536.0)] * 2
    assert found.ranks[0].weights == found.ranks[1].weights != ""
    assert found.findings == []


@pytest.mark.slow
def test_an_audit_sees_the_processes_that_a_script_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEETING", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cli.main(["audit", "--out", str(tmp_path / "out"), str(SCRIPTS / "spawns.py"), "fork"]) == 0
    found = record_at(tmp_path / "out" / "record.json", AuditRecord)
    # 8 samples, 16 inputs, 4 outputs: the product and the weight's gradient, 2 FLOPs for each element
    assert found.flops_by_format == {"fp32": 2 * 2 * 8 * 16 * 4}
    assert len(found.run.steps) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU stands in only where there is no CUDA device")
def test_a_process_that_a_script_starts_has_the_stand_in_for_cuda_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text('torch.zeros(1, device="cuda")', encoding="utf-8")
    made: list[torch.Tensor] = []
    assert run_function(request(tmp_path, target=str(script)), lambda: made.append(torch.zeros(1).cuda())) == 0
    assert made[0].device.type == "cpu"
