"""Start a command in several processes, as a launcher does, and end a process group that trained."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from filelock import FileLock

from mezzo.launch.ranks.leading import free_port
from paths import SCRIPTS

if TYPE_CHECKING:
    import pytest


class Ended(NamedTuple):
    """One process that has ended."""

    code: int
    printed: str


def in_processes(
    words: Sequence[str],
    *,
    program: Sequence[str] = ("-m", "mezzo"),
    size: int = 2,
    launched: bool = True,
    folder: Path | None = None,
    timeout_s: float = 200.0,
) -> list[Ended]:
    """Run ``python`` on ``program`` with ``words`` in ``size`` processes; return how each ended.

    They have torchrun's variables if ``launched``. All are killed after ``timeout_s``.
    """
    if program[0].endswith(".py"):
        program = [str(SCRIPTS / "as_rank.py"), *program]
    started = [
        subprocess.Popen(
            [sys.executable, *program, *words],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for env in environments(size, launched=launched)
    ]
    try:
        printed = [process.communicate(timeout=timeout_s)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [Ended(process.returncode, text) for process, text in zip(started, printed, strict=True)]


def environments(size: int, *, launched: bool) -> list[dict[str, str]]:
    """Return the environment of each process, with torchrun's variables if ``launched``."""
    common = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not launched:
        return [common] * size
    common |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def leave_process_group() -> None:
    """Destroy the process group after gloo's threads have freed their last exchange.

    They need the interpreter for that: the group's end would wait for them, and a process that ends meanwhile is aborted (see
    ``scripts/as_rank.py``).
    """
    time.sleep(0.2)
    dist.destroy_process_group()


def left_by_ranks(
    script: str, size: int, factory: pytest.TempPathFactory, worker_id: str, *, timeout_s: float = 240
) -> list[dict[str, Any]]:
    """Return what ``size`` processes of a script left, ``RANK.pt`` in a folder; all workers of a test run share them."""
    base = factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / Path(script).stem
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            words = [sys.executable, "-W", "error", script]
            started = [
                subprocess.Popen([*words, str(rank), str(folder)], stderr=subprocess.PIPE, text=True)
                for rank in range(size)
            ]
            try:
                said = [process.communicate(timeout=timeout_s)[1] for process in started]
            finally:
                for process in started:
                    process.kill()
            assert [process.returncode for process in started] == [0] * size, said
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]
