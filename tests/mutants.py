"""Change the source in one small place at a time and see whether a test notices: ``make mutants``.

A mutant that no test kills is a line whose behaviour no assertion depends on. Which tests execute a line is learned once, by a run
under coverage, and kept in ``.mutants/``. Then pytest collects all tests once, and each mutant is a fork of that process: it replaces the
code of one function and runs the tests of the line, quickest first, until one fails. So a mutant costs about two seconds.

    python tests/mutants.py --count 120                              # a sample of the whole source
    python tests/mutants.py --count 20 engine/session.py             # of one file
    python tests/mutants.py --like ../before/.mutants/outcomes.json  # the same mutants as in another state of the source

``--like`` finds a mutant by its function and by the place of the changed expression in it, so code may have moved within its file.

Limits: one change at a time, inside functions; tests marked slow do not count; what runs in a new process, in a compiled kernel or under
Triton is not changed. A mutant gets 25 tests and 40 seconds. Some mutants change nothing that anybody could see (a cache's size, a
message's plural): the score is a bound, and the survivors are the list to read.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "mezzo"
OTHERS = {"gpu", "cuda_build", "frameworks", "project"}
"""Folders of tests that need something else, or run the source in other processes."""
LEFT_OUT = ("gpu", "cpu.py", "native_units.py", "cuda_peaks.py")
"""Names' beginnings of files that need a GPU or a compiler to run."""
KEPT = ROOT / ".mutants"
TESTS_OF_A_MUTANT = 25
LONGEST_S = 40

_SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass
class Mutant:
    """One change of one expression in a function or method."""

    path: str
    function: str
    index: int
    """The place of the change among all that are possible in the function."""
    line: int
    before: str
    after: str
    tests: list[str] = field(default_factory=list)
    outcome: str = ""
    killer: str = ""


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the mutants of an expression, each a copy with one change."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and type(new.ops[0]) in _SWAPPED:
        new.ops[0] = _SWAPPED[type(new.ops[0])]()
        yield new
    elif isinstance(new, ast.BoolOp) or (isinstance(new, ast.BinOp) and type(new.op) in _SWAPPED and not _is_text(new)):
        new.op = _SWAPPED[type(new.op)]()
        yield new
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        yield new.operand
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
        yield ast.Constant(not new.value)
    elif isinstance(new, ast.Constant) and isinstance(new.value, (int, float)):
        yield ast.Constant(new.value + 1)
    elif isinstance(new, ast.IfExp):
        yield new.body
        yield new.orelse


def _is_text(node: ast.AST) -> bool:
    return any(isinstance(n, ast.JoinedStr) or isinstance(getattr(n, "value", None), str) for n in ast.walk(node))


def mutants_of(path: str) -> Iterator[tuple[Mutant, str]]:
    """Yield every mutant of a file with the changed text of the file."""
    text = (SOURCE / path).read_text(encoding="utf-8")
    for name, function in _functions(ast.parse(text).body):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        nodes = [node for statement in body for node in _expressions(statement) if node.lineno == node.end_lineno]
        for index, (node, new) in enumerate((old, new) for old in nodes for new in changed(old)):
            rows = text.splitlines(keepends=True)
            row = rows[node.lineno - 1].encode()
            after = f"({ast.unparse(ast.fix_missing_locations(new))})"
            rows[node.lineno - 1] = (row[: node.col_offset] + after.encode() + row[node.end_col_offset :]).decode()
            before = ast.get_source_segment(text, node) or ""
            yield Mutant(path, name, index, node.lineno, before, after), "".join(rows)


def _functions(body: list[ast.stmt], outer: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield outer + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{outer}{node.name}.")


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that run: no annotations, no messages of errors, no parts of formatted text."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns") or (isinstance(node, ast.Raise) and name == "exc"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.JoinedStr) or not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.expr):
                yield child
            yield from _expressions(child)


def executed() -> dict[str, dict[int, set[str]]]:
    """Return the tests that execute each line, by file; from the kept coverage, or from a new one if there is none."""
    data = KEPT / "coverage"
    if not data.exists():
        KEPT.mkdir(exist_ok=True)
        (KEPT / "settings").write_text(
            f"[run]\ndynamic_context = test_function\nsource = {SOURCE}\ndata_file = {data}\n"
        )
        under_coverage = ["-m", "coverage", "run", f"--rcfile={KEPT / 'settings'}"]
        with (KEPT / "durations").open("w") as log:
            subprocess.run(_pytest(*under_coverage, durations=True), cwd=ROOT, stdout=log, check=False)
    from coverage import CoverageData

    kept = CoverageData(str(data))
    kept.read()
    return {
        str(Path(path).relative_to(SOURCE)): {
            line: {name for name in names if name} for line, names in kept.contexts_by_lineno(path).items()
        }
        for path in kept.measured_files()
    }


def _pytest(*before: str, durations: bool = False) -> list[str]:
    folders = sorted(str(p) for p in (ROOT / "tests").iterdir() if p.is_dir() and p.name not in OTHERS)
    files = sorted(str(p) for p in (ROOT / "tests").glob("test_*.py"))
    told = ["--durations=0", "--durations-min=0.3"] if durations else []
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", *told]
    return [sys.executable, *before, "-m", "pytest", *options, *folders, *files]


def quickest_first() -> tuple[dict[str, str], dict[str, float]]:
    """Return pytest's id of each test function by coverage's name for it, and its seconds, of those that take 0.3 s."""
    places = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                places[f"{path.stem}.{node.name}"] = f"{path.relative_to(ROOT)}::{node.name}"
    text = (KEPT / "durations").read_text(encoding="utf-8") if (KEPT / "durations").exists() else ""
    seconds: dict[str, float] = {}
    for taken, name in re.findall(r"^([0-9.]+)s \w+ +(\S+?::\w+)", text, re.MULTILINE):
        seconds[name] = seconds.get(name, 0.0) + float(taken)
    failed = set(re.findall(r"^(?:FAILED|ERROR) (\S+?::\w+)", text, re.MULTILINE))
    return {short: place for short, place in places.items() if place not in failed}, seconds


def drawn(asked: argparse.Namespace) -> list[Mutant]:
    """Return the mutants to try, with their tests."""
    lines, (places, seconds) = executed(), quickest_first()
    if asked.like:
        keys = {(m["path"], m["function"], m["index"], m["after"]) for m in json.loads(Path(asked.like).read_text())}
    chosen = asked.paths or sorted({key[0] for key in keys} if asked.like else lines)
    found = []
    for path in chosen:
        if (SOURCE / path).exists() and not Path(path).name.startswith(LEFT_OUT):
            known = (mutant for mutant, _ in mutants_of(path) if lines.get(path, {}).get(mutant.line))
            found += [m for m in known if not asked.like or (m.path, m.function, m.index, m.after) in keys]
    if not asked.like:
        found = random.Random(asked.seed).sample(found, min(asked.count, len(found)))
    for mutant in found:
        names = {".".join(name.split(".")[-2:]) for name in lines[mutant.path][mutant.line]}
        tests = sorted({places[name] for name in names & places.keys()})
        own = Path(mutant.path).stem
        tests.sort(key=lambda test: (seconds.get(test, 0.0) > 2, own not in test, seconds.get(test, 0.0)))
        mutant.tests = tests[:TESTS_OF_A_MUTANT]
    return found


# --- inside pytest: one collection, a fork for each mutant --------------------------------------------------------------


class _Outcome:
    """Whether a test of this process has failed."""

    failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.failed


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Try every mutant of the plan instead of running the tests."""
    plan = [Mutant(**row) for row in json.loads((KEPT / "plan.json").read_text(encoding="utf-8"))]
    gc.unfreeze()  # objects that tests/conftest.py has frozen are not listed
    live: dict[tuple[str, str], list[types.FunctionType]] = {}
    for thing in gc.get_objects():
        if type(thing) is types.FunctionType and thing.__code__.co_filename.startswith(str(SOURCE)):
            live.setdefault((thing.__code__.co_filename, thing.__qualname__), []).append(thing)
    items: dict[str, list[pytest.Item]] = {}
    for item in session.items:
        items.setdefault(item.nodeid.split("[")[0], []).append(item)
    for mutant in plan:
        text = next(t for m, t in mutants_of(mutant.path) if (m.function, m.index) == (mutant.function, mutant.index))
        functions = live.get((str(SOURCE / mutant.path), mutant.function), [])
        tests = [item for name in mutant.tests for item in items.get(name, [])]
        code = _code_of(compile(text, str(SOURCE / mutant.path), "exec"), mutant.function)
        functions = [f for f in functions if code and f.__code__.co_firstlineno == code.co_firstlineno]
        mutant.outcome, mutant.killer = _tried(functions, code, tests) if functions and tests else ("not tried", "")
        if mutant.outcome != "killed":
            where = f"{mutant.path}:{mutant.line}"
            os.write(2, f"{mutant.outcome}: {where}: {mutant.before} -> {mutant.after}\n".encode())
    (KEPT / "outcomes.json").write_text(json.dumps([asdict(mutant) for mutant in plan], indent=1), encoding="utf-8")
    return True


def _code_of(code: types.CodeType, name: str) -> types.CodeType | None:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return next((c for c in inner if c.co_qualname == name), None) or next(
        (found for c in inner if name.startswith(f"{c.co_qualname}.") and (found := _code_of(c, name))), None
    )


def _tried(functions: list[types.FunctionType], code: Any, tests: list[pytest.Item]) -> tuple[str, str]:
    """Return ``killed`` and by which test, ``survived``, or ``too slow``: an endless loop, or a machine too busy to say."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        status = 0
        try:
            for function in functions:
                function.__code__ = code
            outcome = _Outcome()
            tests[0].config.pluginmanager.register(outcome)
            for item, following in zip(tests, [*tests[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if outcome.failed:
                    os.write(writing, item.nodeid.encode())
                    status = 1
                    break
        except BaseException:  # a mutant may raise anything, pytest's own exits too
            status = 1
        os._exit(status)
    os.close(writing)
    until, ended = time.monotonic() + LONGEST_S, (0, 0)
    while not ended[0] and time.monotonic() < until:
        time.sleep(0.02)
        ended = os.waitpid(child, os.WNOHANG)
    if not ended[0]:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    killer = os.read(reading, 4096).decode() if ended[1] else ""
    os.close(reading)
    return ("too slow" if not ended[0] else "killed" if ended[1] else "survived"), killer


def main() -> int:
    """Print each mutant that survives, then the score by package."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", help="files below src/mezzo; default: all")
    parser.add_argument("--count", type=int, default=120, help="mutants to try, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--like", metavar="FILE", help="try the mutants of this outcomes.json instead")
    mutants = drawn(parser.parse_args())
    (KEPT / "plan.json").write_text(json.dumps([asdict(mutant) for mutant in mutants]), encoding="utf-8")
    known = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
    }
    command = [*_pytest(), "-p", "mutants"]
    subprocess.run(command, cwd=ROOT, env=known, stdout=subprocess.DEVNULL, check=False)
    score = Counter((m["path"].split("/")[0], m["outcome"]) for m in json.loads((KEPT / "outcomes.json").read_text()))
    for (package, outcome), count in sorted(score.items()):
        print(f"{package}: {count} {outcome}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
