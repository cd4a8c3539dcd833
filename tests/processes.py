"""Start a command in several processes, as a launcher does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mezzo.launch.ranks.ports import free_port


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
    shared = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    started = [
        subprocess.Popen(
            [sys.executable, *program, *words],
            cwd=folder,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                **(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if launched else {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        printed = [process.communicate(timeout=timeout_s)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [Ended(process.returncode, text) for process, text in zip(started, printed, strict=True)]
