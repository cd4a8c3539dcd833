"""Planted bottlenecks are named, and healthy trainings raise no alarm, in real trainings of about a second."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from mezzo.launch.patches import Patches
from mezzo.launch.torch import training
from mezzo.launch.torch.watching import ScriptWaits
from mezzo.measure.bottleneck import Loader
from mezzo.records import Bottleneck
from paths import SCRIPTS

PLANTED = SCRIPTS / "bottlenecks" / "planted.py"
FAST = {"computing_dataset": "input", "tiny_layers": "host", "sleep": "waiting", "healthy_products": "arithmetic"}
OTHERS = {
    "slow_dataset": "input",
    "slow_workers": "input",
    "loop_in_python": "host",
    "elementwise": "bandwidth",
    "large_optimizer": "bandwidth",
    "lock": "waiting",
    "healthy_convolutions": "arithmetic",
    "healthy_loader": "arithmetic",
    "healthy_workers": "arithmetic",
    "healthy_adam": "arithmetic",
}


def watched(name: str, monkeypatch: pytest.MonkeyPatch, *, seconds: float = 0.8) -> Bottleneck:
    """Run one training in this process, on one thread, and return what held it back."""
    monkeypatch.setattr(sys, "argv", [str(PLANTED), name, str(seconds)])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with training(None, seed=None, observe=None) as run:
            runpy.run_path(str(PLANTED), run_name="__main__")
            run.close_update()
        found = run.bottleneck()
    finally:
        torch.set_num_threads(threads)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "limit"), [*FAST.items(), *(pytest.param(*o, marks=pytest.mark.slow) for o in OTHERS.items())]
)
def test_planted_bottlenecks_are_named(name: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = watched(name, monkeypatch)
    assert found.limit == limit, found
    assert (found.line != "") == (limit == "waiting")


@pytest.mark.slow
def test_communication_of_two_processes_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "mezzo", "watch"]
    place = tmp_path / "out"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = ["--out", str(place), str(PLANTED), "communication", "0.5"]
    subprocess.run([*command, *arguments], env=environment, cwd=tmp_path, timeout=300, check=True, capture_output=True)
    record = json.loads((place / "record.json").read_text(encoding="utf-8"))
    assert record["bottleneck"]["limit"] == "communication", record["bottleneck"]


def test_a_loader_is_timed_and_everything_is_restored() -> None:
    before = DataLoader.__iter__, torch.distributed.barrier
    waits, patches = ScriptWaits(), Patches()
    waits.install(patches)
    try:
        batches = len(list(DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=2)))
        assert waits.loader == Loader(num_workers=0, pin_memory=False, persistent_workers=False)  # though it is gone
        kept = DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=2, num_workers=1)
        next(iter(kept))
        assert waits.loader == Loader(num_workers=1, pin_memory=False, persistent_workers=False)
    finally:
        patches.undo()
    assert batches == 3
    assert len(waits.input) == (1 + 4) + (1 + 1)  # __iter__ and each __next__, the last of which ends the epoch
    assert (DataLoader.__iter__, torch.distributed.barrier) == before
