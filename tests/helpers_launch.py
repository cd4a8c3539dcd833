"""What the launcher's tests share: run a script of ``tests/scripts`` in this process, under a policy or by itself."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from mezzo.launch.torch import switched
from mezzo.policy import Policy
from mezzo.records import Effective, Memory, Steps

SCRIPTS = Path(__file__).parent / "scripts"
PLAIN = "plain python"
AS_IS = "as-is"


@dataclass(frozen=True)
class Ran:
    """Hold what a script printed, and what was recorded of it (nothing under plain python)."""

    values: dict[str, Any]
    """What the script printed by ``report(name=value)``: one JSON object a line, later names replace earlier ones."""
    printed: str
    steps: Steps
    effective: Effective
    memory: Memory

    @property
    def losses(self) -> list[float]:
        """Return the losses that the script itself read off."""
        return list(self.values["losses"])

    @property
    def reasons(self) -> list[str]:
        """Return what was left alone, as one line each."""
        return [f"{r.what} {r.value}: {r.reason}" for r in self.effective.left_alone]


def ran(name: str, policy: str, *arguments: str, seed: int | None = None) -> Ran:
    """Run ``tests/scripts/<name>.py`` under ``policy`` (or ``PLAIN``, or ``AS_IS``) with its arguments."""
    path = str(SCRIPTS / f"{name}.py")
    output = io.StringIO()
    steps, effective, memory = Steps(), Effective(), Memory()
    with _as_script(path, arguments), contextlib.redirect_stdout(output):
        if policy == PLAIN:
            runpy.run_path(path, run_name="__main__")
        else:
            chosen = None if policy == AS_IS else Policy.parse(policy)
            with switched(chosen, seed=seed) as (run, look):
                runpy.run_path(path, run_name="__main__")
            steps, effective, memory = run.recorder.steps(), look.effective(), look.memory()
    return Ran(read_values(output.getvalue()), output.getvalue(), steps, effective, memory)


def read_values(printed: str) -> dict[str, Any]:
    """Return what ``report`` printed."""
    values: dict[str, Any] = {}
    for line in printed.splitlines():
        if line.startswith("{"):
            values.update(json.loads(line))
    return values


@contextlib.contextmanager
def _as_script(path: str, arguments: Sequence[str]) -> Iterator[None]:
    folder = str(Path(path).parent)
    with mock.patch.object(sys, "argv", [path, *arguments]), mock.patch.object(sys, "path", [folder, *sys.path]):
        yield
