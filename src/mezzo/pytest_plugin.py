"""A pytest plugin: ``pytest --mezzo`` runs the tests that compare a training across policies, and skips them otherwise.

pytest loads this file in every run, so it imports nothing of Mezzo until a test compares.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mezzo.records import CompareRecord

_FIXTURE, _FLAG = "mezzo_compare", "--mezzo"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--mezzo``."""
    group = parser.getgroup("mezzo", "mixed precision")
    group.addoption(_FLAG, action="store_true", help=f"Run the tests that train under several policies ({_FIXTURE}).")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests that compare unless ``--mezzo`` was typed."""
    if config.getoption(_FLAG):
        return
    for item in items:
        if _FIXTURE in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason=f"trains under several policies; type pytest {_FLAG}"))


@pytest.fixture
def mezzo_compare(tmp_path: Path) -> Callable[..., CompareRecord]:
    """Return a function that compares a training across policies, as ``mezzo compare`` does, and fails the test by its verdicts.

    The training is the path of a script, with its arguments, or a function of a test's file that trains and takes no arguments. Both
    run in processes of their own. ``policies``, ``seeds``, ``margin``, ``metric`` and ``fail_on`` are the command's options. The record
    is returned; its file and its page are in the test's ``tmp_path``.
    """

    def compare(
        training: str | Path | Callable[[], Any],
        arguments: Sequence[str] = (),
        *,
        policies: str = "fp32,bf16",
        seeds: int = 3,
        margin: float = 0.02,
        metric: str | None = None,
        fail_on: str = "not_equivalent",
    ) -> CompareRecord:
        __tracebackhide__ = True
        script = training if isinstance(training, (str, Path)) else _script_of(training, tmp_path)
        folder = tmp_path / "mezzo"
        options = ["--policies", policies, "--seeds", str(seeds), "--margin", str(margin), "--fail-on", fail_on]
        options += ["--gpus", "none", "--out", str(folder), *(["--metric", metric] if metric else [])]
        command = [sys.executable, "-m", "mezzo", "compare", *options, str(script), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False)
        from mezzo.records import CompareRecord, record_at
        from mezzo.report.terminal import text_of

        record = record_at(folder / "record.json")
        if not isinstance(record, CompareRecord):
            pytest.fail(f"mezzo compare made no record (exit code {done.returncode}):\n{done.stderr}", pytrace=False)
        if done.returncode:
            pytest.fail(f"{text_of(record)}\n\n{done.stderr}", pytrace=False)
        return record

    return compare


def _script_of(function: Callable[[], Any], folder: Path) -> Path:
    """Write a script that calls a function of a file.

    Raises:
        UsageError: the function is no function of a file's top level, or has to be given arguments.
    """
    from mezzo.errors import UsageError

    name, file = getattr(function, "__qualname__", ""), inspect.getsourcefile(function)
    needed = [
        one.name
        for one in inspect.signature(function).parameters.values()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if file is None or not name.isidentifier() or needed:
        why = f"it needs {', '.join(needed)}" if needed else "another process cannot import it"
        raise UsageError(
            f"mezzo_compare was given {name or function!r}, and {why}; allowed: a script, or a function of a file without arguments",
            hint="move the training into a function at the top of the file, which takes no arguments",
        )
    script = folder / f"{name}.py"
    script.write_text(
        "import importlib.util\nimport sys\n\n"
        f"path = {str(Path(file).absolute())!r}\nsys.path.insert(0, {str(Path(file).absolute().parent)!r})\n"
        f"spec = importlib.util.spec_from_file_location({Path(file).stem!r}, path)\n"
        f"module = importlib.util.module_from_spec(spec)\nsys.modules[{Path(file).stem!r}] = module\n"
        f"spec.loader.exec_module(module)\nmodule.{name}()\n",
        encoding="utf-8",
    )
    return script
