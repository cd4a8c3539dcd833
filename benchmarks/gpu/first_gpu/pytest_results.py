"""Run tests with one file of results each: ``python -m benchmarks.gpu.first_gpu.pytest_results FOLDER [pytest's arguments]``.

A test's result and its traceback are on disk when it ends, and a test that has a result is not run again. If pytest's process dies in a
test, or the GPU no longer answers after one, the tests that are left run in another process. This file is also the plugin that does it.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.contest.cases import LOST
from benchmarks.gpu.first_gpu.running import write_json, write_whole

TEST_LIMIT_S = 300
"""After this time a test's process prints where each of its threads is, and ends."""
_BEGUN = ".begun"


def main(argv: Sequence[str]) -> int:
    """Run the tests that have no result; return 1 if one of the selected tests failed, now or before."""
    folder, words = Path(argv[0]), list(argv[1:])
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "benchmarks.gpu.first_gpu.pytest_results",
        "--results",
        str(folder),
    ]
    # Other packages on the machine may warn: unlike in CI, warnings are not errors here.
    options += ["-o", "filterwarnings=default", "--continue-on-collection-errors"]
    for path in folder.glob(f"*/*{_BEGUN}"):  # a test that was cut begins again
        path.unlink()
    while True:
        code = subprocess.call([sys.executable, "-m", "pytest", *options, *words])
        died = [path for path in folder.glob(f"*/*{_BEGUN}") if not path.with_suffix(".json").exists()]
        for path in died:
            test = path.read_text(encoding="utf-8")
            why = f"the process ended in this test, with exit code {code}"
            write_json(path.with_suffix(".json"), {"test": test, "outcome": "died", "seconds": 0, "why": why})
        if not died and code != LOST:
            break
    nothing_failed = code in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
    failed = [one["test"] for one in _results(folder) if one["outcome"] not in ("passed", "skipped")]
    return int(not nothing_failed or any(test.startswith(tuple(words)) for test in failed))


def _results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*/*.json")]


def path_of(folder: Path, test: str) -> Path:
    """Return the path of a test's result: readable, and different for each test."""
    file, _, name = test.partition("::")
    digest = hashlib.sha256(test.encode()).hexdigest()[:6]
    return folder / Path(file).stem / f"{re.sub(r'[^A-Za-z0-9_=+-]+', '-', name)[:120]}-{digest}.json"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option with the folder of results."""
    parser.addoption("--results", type=Path, required=True, help="folder of the tests' results")


def pytest_configure(config: pytest.Config) -> None:
    """Register what writes the results."""
    config.pluginmanager.register(_Writer(config.getoption("--results")))


class _Writer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reports: list[pytest.TestReport] = []
        self.began_s = 0.0

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = [item for item in items if path_of(self.folder, item.nodeid).exists()]
        items[:] = [item for item in items if item not in done]
        config.hook.pytest_deselected(items=done)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        path = path_of(self.folder, nodeid)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path.with_suffix(_BEGUN), nodeid)
        self.reports, self.began_s = [], time.monotonic()
        self.stacks = path.with_suffix(".log").open("w", encoding="utf-8")
        faulthandler.dump_traceback_later(TEST_LIMIT_S, exit=True, file=self.stacks)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.stacks.close()
        path = path_of(self.folder, nodeid)
        worst = next((one for one in self.reports if one.failed), next((o for o in self.reports if o.skipped), None))
        outcome = "passed" if worst is None else worst.outcome
        parts = [f"{nodeid}: {outcome}"]
        for one in self.reports:
            parts += [one.longreprtext, *(f"--- {title} ---\n{text}" for title, text in one.sections)]
        write_whole(path.with_suffix(".log"), "\n".join(part for part in parts if part) + "\n")
        why = next(reversed(worst.longreprtext.splitlines()), "") if worst is not None else ""
        took_s = round(time.monotonic() - self.began_s, 2)
        write_json(path, {"test": nodeid, "outcome": outcome, "seconds": took_s, "why": why})
        path.with_suffix(_BEGUN).unlink()
        if outcome == "failed" and _gpu_is_lost():
            os._exit(LOST)


def _gpu_is_lost() -> bool:
    """Return whether this process has used a GPU that no longer answers: each later test would fail."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    from benchmarks.gpu.contest.worker import lost

    return lost()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
