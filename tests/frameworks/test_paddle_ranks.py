"""Commands on Paddle scripts in two gloo processes, started by Paddle's own launcher and by ``paddle.distributed.spawn``."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from paddle_runs import paddle, ran

from helpers_values import record_at
from mezzo import records
from mezzo.errors import ScriptError

SCRIPT = str(Path(__file__).parent / "scripts" / "paddle_ranks.py")
DIST = paddle.distributed


def launched(words: Sequence[str], folder: Path, *, processes: int = 2, codes: Sequence[int] = (0,)) -> str:
    """Run a command in processes of Paddle's launcher; return what it printed."""
    mezzo = folder / "mezzo"
    mezzo.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mezzo "$@"\n')
    mezzo.chmod(0o755)
    launcher = ["-m", "paddle.distributed.launch", "--log_dir", "log", "--nproc_per_node", str(processes), str(mezzo)]
    ended = subprocess.run(
        [sys.executable, *launcher, *words], cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )
    assert ended.returncode in codes, ended.stdout + ended.stderr
    return ended.stdout


def assert_one_run_of_two(run: records.RunRecord) -> None:
    """Assert that both processes skipped the update that overflowed in one, and have the same weights."""
    assert [(r.rank, r.num_steps, r.skipped_steps, r.final_scale) for r in run.ranks] == [
        (0, 10, [5], 32768.0),
        (1, 10, [5], 32768.0),
    ]
    assert run.steps.loss[-1] == pytest.approx(sum(r.final_loss or 0.0 for r in run.ranks) / 2)


def test_an_overflow_in_one_process_skips_the_update_in_both(tmp_path: Path) -> None:
    printed = launched(["run", "--policy", "fp16", "--out", "out", SCRIPT, "4"], tmp_path)
    run = record_at(tmp_path / "out" / "record.json", records.RunRecord)
    assert_one_run_of_two(run)
    assert run.ranks[0].weights == run.ranks[1].weights != ""
    assert "python -m paddle.distributed.launch --nproc_per_node 2 mezzo compare" in printed


@pytest.mark.slow
def test_an_audit_has_one_record(tmp_path: Path) -> None:
    launched(["audit", "--policy", "fp16", "--out", "out", SCRIPT, "-1"], tmp_path)
    record = record_at(tmp_path / "out" / "record.json", records.AuditRecord)
    assert [r.rank for r in record.run.ranks] == [0, 1]


@pytest.mark.slow
def test_a_comparison_runs_in_step(tmp_path: Path) -> None:
    launched(["compare", "--policies", "fp32,fp16", "--seeds", "2", "--out", "out", SCRIPT, "-1"], tmp_path)
    record = record_at(tmp_path / "out" / "record.json", records.CompareRecord)
    assert [len(run.ranks) for run in record.runs] == [2] * 4
    assert all(run.ranks[0].weights == run.ranks[1].weights != "" for run in record.runs)


@pytest.mark.slow
def test_a_diagnosis_finds_what_one_process_makes(tmp_path: Path) -> None:
    """Only process 1 multiplies its loss by infinity. The process that ends last with a finding is killed by the launcher."""
    launched(["diagnose", "--out", "out", SCRIPT, "4"], tmp_path, codes=(1, 256 - signal.SIGTERM))
    record = record_at(tmp_path / "out" / "record.json", records.DiagnoseRecord)
    assert (record.verdict, record.op, record.phase, record.step) == ("invalid_operation", "multiply", "forward", 5)
    assert record.detail == "multiply() is given a number that is not finite"
    assert record.line is not None
    assert record.line.endswith("paddle_ranks.py:24")
    assert [note.value for note in record.notes] == ["the process of rank 1"]


@pytest.mark.slow
def test_ranges_and_fallback_count_both_processes(tmp_path: Path) -> None:
    launched(["ranges", "--out", "ranges", SCRIPT, "-1"], tmp_path)
    record = record_at(tmp_path / "ranges" / "record.json", records.RangesRecord)
    assert [r.rank for r in record.run.ranks] == [0, 1]
    launched(["fallback", "--policy", "fp16", "--out", "fallback", SCRIPT, "-1"], tmp_path)
    found = record_at(tmp_path / "fallback" / "record.json", records.FallbackRecord)
    assert found.verdict == "not needed"


@pytest.mark.slow
def test_processes_that_the_script_spawns_are_ranks(tmp_path: Path) -> None:
    words = ["run", "--policy", "fp16", "--out", "out", SCRIPT, "spawn"]
    subprocess.run([sys.executable, "-m", "mezzo", *words], cwd=tmp_path, capture_output=True, timeout=280, check=True)
    run = record_at(tmp_path / "out" / "record.json", records.RunRecord)
    assert_one_run_of_two(run)


SPLITS = {
    "shard_tensor": lambda: DIST.shard_tensor(paddle.ones([2]), None, []),
    "shard_layer": lambda: DIST.shard_layer(paddle.nn.Linear(2, 2), None),
    "shard_optimizer": lambda: DIST.shard_optimizer(None),
    "parallelize": lambda: DIST.parallelize(paddle.nn.Linear(2, 2)),
    "group_sharded_parallel": lambda: DIST.sharding.group_sharded_parallel(None, None, "os"),
}


@pytest.mark.parametrize("name", SPLITS)
def test_what_splits_a_model_is_refused_under_a_loss_scale(name: str) -> None:
    with pytest.raises(ScriptError, match=f"{name} splits the model under a policy with a loss scale"):
        ran(SPLITS[name], "fp16")


@pytest.mark.parametrize("size", [1, 2])
def test_fleet_is_refused_if_its_strategy_splits(size: int) -> None:
    groups = mock.Mock()
    for kind in ("model", "pipe", "sharding", "sep"):
        getattr(groups, f"get_{kind}_parallel_world_size").return_value = size if kind == "pipe" else 1
    with (
        mock.patch.object(DIST.fleet, "get_hybrid_communicate_group", return_value=groups),
        mock.patch.object(DIST.fleet, "distributed_model", return_value="model") as original,
    ):
        original.__name__ = "distributed_model"
        if size == 1:
            assert ran(lambda: DIST.fleet.distributed_model(None), "fp16").value == "model"
        else:
            with pytest.raises(ScriptError, match=r"fleet.distributed_model splits the model"):
                ran(lambda: DIST.fleet.distributed_model(None), "fp16")
