"""Accelerate and Fabric in two processes under a policy, against one process on the same data."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import pytest
import torch

from mezzo import SessionError
from mezzo.compat.driven import Driven
from paths import SCRIPTS


def weights(library: str, size: int) -> list[float]:
    """Return the sum of the weights' magnitudes after a training in ``size`` processes, of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, str(SCRIPTS / "trainer_ranks.py"), library]
    started = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                **(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        printed = [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * size, printed
    return [float(m[1]) for text in printed for m in re.finditer(r"RANK \d+ weights (\S+)", text)]


@pytest.mark.slow
@pytest.mark.parametrize("library", ["accelerate", "fabric"])
def test_two_processes_train_as_one_and_skip_the_same_updates(library: str) -> None:
    first, second = weights(library, 2)
    assert first == second
    assert first == pytest.approx(weights(library, 1)[0], rel=1e-6)


def test_what_the_library_does_not_keep_together_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(SessionError, match="training in 2 processes with policy fp16-master, which casts weights"):
        _ = Driven("fp16-master").session
    flat = torch.nn.Linear(2, 2)
    flat.weight._is_flat_param = True  # as FullyShardedDataParallel marks its own
    driven = Driven("fp16")
    driven.add(flat)
    with pytest.raises(SessionError, match="training in 2 processes with sharded parameters"):
        _ = driven.session
