"""Examples under torchrun with DistributedDataParallel, and compiled by torch.compile, beside the same training without Mezzo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forked_processes import in_fork, in_forks
from mezzo.records import RunRecord, read_record
from paths import ROOT

pytestmark = pytest.mark.slow
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
CIFAR = ("examples/cifar_resnet.py", "--epochs", "1", "--max-steps", "2", "--batch-size", "8")
MNIST = ("examples/mnist_cnn.py", "--epochs", "1", "--max-steps", "6", "--batch-size", "32")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    printed_by("examples/small_data.py", str(folder))
    return folder


def printed_by(*words: str) -> str:
    """Run Python with ``words`` in the project's folder and return what it printed."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def last_loss(printed: str) -> float:
    """Return the loss that the script printed last."""
    return float(re.findall(r"^epoch \d+  loss ([0-9.]+)", printed, re.M)[-1])


def run_record(out: Path) -> RunRecord:
    """Return the record of a run."""
    record = read_record(out / "record.json")
    assert isinstance(record, RunRecord)
    return record


def test_an_example_trains_with_ddp_under_torchrun(data: Path, tmp_path: Path) -> None:
    arguments = (*CIFAR, "--data", str(data / "cifar-10-batches-bin"))
    plain = "".join(rank.printed for rank in in_forks(arguments[1:], program=arguments[:1], folder=ROOT))
    under = printed_by(*TORCHRUN, "-m", "mezzo", "run", "--policy", "fp16", "--out", str(tmp_path / "out"), *arguments)
    assert last_loss(under) == pytest.approx(last_loss(plain), rel=0.02)
    record = run_record(tmp_path / "out")
    assert [(rank.rank, rank.num_steps, rank.skipped_steps) for rank in record.ranks] == [(0, 2, []), (1, 2, [])]
    assert len({rank.final_scale for rank in record.ranks}) == 1
    assert len({rank.final_loss for rank in record.ranks}) == 2  # each on its own half of the data
    assert record.effective.share_by_format == {"fp16": 1.0}


def test_an_example_trains_compiled_by_inductor(data: Path, tmp_path: Path) -> None:
    arguments = (*MNIST, "--data", str(data / "mnist"))
    losses = {}
    for name, options in {"eager": (), "compiled": ("--compile",)}.items():
        words = ["run", "--policy", "bf16", *options, "--out", str(tmp_path / name), *arguments]
        losses[name] = last_loss(in_fork(words, folder=ROOT).printed)
    assert losses["compiled"] == pytest.approx(losses["eager"], rel=0.02)
    compiled, eager = run_record(tmp_path / "compiled"), run_record(tmp_path / "eager")
    assert len(compiled.steps) == len(eager.steps) == 6
    changes = [{one.what for one in record.explanation} & {"torch.compile"} for record in (compiled, eager)]
    assert changes == [{"torch.compile"}, set()]
