"""Processes that tests on a GPU wait for: a command takes seconds to start, so all of a session's run beside each other.

A test module names its processes in ``plan``. On CUDA the first test that asks for any starts all that the session's tests may ask
for; on a CPU, which has no cores to spare, a process starts when a test asks for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from paths import ROOT

HERE = Path(__file__).parent
NEEDS_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = pytest.param("cuda", marks=NEEDS_A_GPU)
LIMIT_S = 150


@dataclass(frozen=True)
class Job:
    """A process to start: ``python`` with ``words``, in which ``{device}``, ``{out}`` and ``{here}`` are filled in."""

    words: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    printed: str
    errors: str
    out: Path
    wall_s: float

    def well(self) -> Ended:
        """Return it if it ended with code 0."""
        assert self.code == 0, f"exit code {self.code}\n{self.printed[-1500:]}\n{self.errors[-3000:]}"
        return self

    @property
    def record(self) -> dict[str, Any]:
        """The record that a command left."""
        found: dict[str, Any] = json.loads((self.well().out / "record.json").read_text(encoding="utf-8"))
        return found

    @property
    def said(self) -> list[dict[str, Any]]:
        """The JSON objects that the script printed, each a line."""
        return [json.loads(line) for line in self.printed.splitlines() if line.startswith("{")]


Ask = Callable[[str, str], Ended]
_planned: dict[str, dict[str, Job]] = {}


def plan(module: str, **jobs: Job) -> None:
    """Name the processes of a test module."""
    _planned[module] = jobs


def mezzo(command: str, *words: str, variables: dict[str, str] | None = None) -> Job:
    """Return a command of Mezzo with its options, script and the script's arguments."""
    return Job(("-m", "mezzo", command, "--out", "{out}", *words), variables or {})


class Jobs:
    """The processes of a session, by module, name and device."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._pool = ThreadPoolExecutor(max(1, min(10, (os.cpu_count() or 1) - 4)))
        self._futures: dict[tuple[str, str, str], Future[Ended]] = {}
        self._processes: list[subprocess.Popen[str]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-jobs-", ignore_cleanup_errors=True)

    def of(self, module: str, name: str, device: str) -> Ended:
        """Return a process of ``module`` once it has ended."""
        key = (module, name, device)
        if key not in self._futures:
            wanted = [(m, n) for m in self._modules for n in _planned.get(m, {})] if device == "cuda" else []
            for one in [(module, name), *wanted]:
                if (*one, device) not in self._futures:
                    self._futures[(*one, device)] = self._pool.submit(self._run, *one, device)
        return self._futures[key].result()

    def _run(self, module: str, name: str, device: str) -> Ended:
        job = _planned[module][name]
        out = Path(self._folder.name, f"{module}-{name}-{device}".replace(" ", "-").replace(":", "-"))
        filled = {"{device}": device, "{out}": str(out), "{here}": str(HERE)}
        words = [_filled(word, filled) for word in job.words]
        paths = [str(ROOT / "src"), str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        began_s = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=self._folder.name,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **job.variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        try:
            printed, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            printed, errors = process.communicate()
            errors += f"\nended after {LIMIT_S} s"
        return Ended(process.returncode, printed, errors, out, time.perf_counter() - began_s)

    def end(self) -> None:
        """End what still runs."""
        for future in self._futures.values():
            future.cancel()
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        self._pool.shutdown()
        self._folder.cleanup()


def _filled(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word
