"""Change the source in one small place at a time and see whether a test notices: ``make mutants``.

A mutant that no test kills is a line whose behaviour no assertion depends on. Each mutant is tried with the tests that execute
its line, quickest first, so one costs seconds; which those are is learned once, by a run under coverage, and kept in ``.mutants/``.

    python tests/mutants.py --count 120                      # a sample of engine/, observe/ and measure/
    python tests/mutants.py --count 20 engine/session.py     # of one file

Limits: one change at a time; tests marked slow do not count; code that runs in a child process, in a compiled kernel or under
Triton is not seen by coverage, and its lines are left out. Some mutants change nothing that anybody could see (a cache's size, a
message's plural): the score is a bound, and the survivors are the list to read.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "mezzo"
ROOMS = ("engine", "observe", "measure")
LEFT_OUT = ("gpu", "cpu.py", "native_units.py", "cuda_peaks.py")
"""Names' beginnings of files that need a GPU or a compiler to run."""
KEPT = ROOT / ".mutants"
TESTS_OF_A_MUTANT = 100
LONGEST_S = 300

_COMPARISONS: dict[type, type] = {
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
}
_ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    """One change of one expression."""

    path: str
    line: int
    before: str
    after: str
    text: str
    """The whole file with the change."""


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the mutants of an expression, each a copy with one change."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and type(new.ops[0]) in _COMPARISONS:
        new.ops[0] = _COMPARISONS[type(new.ops[0])]()
        yield new
    elif isinstance(new, ast.BoolOp):
        new.op = ast.And() if isinstance(new.op, ast.Or) else ast.Or()
        yield new
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        yield new.operand
    elif isinstance(new, ast.BinOp) and type(new.op) in _ARITHMETIC and not _is_text(new):
        new.op = _ARITHMETIC[type(new.op)]()
        yield new
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
        yield ast.Constant(not new.value)
    elif isinstance(new, ast.Constant) and isinstance(new.value, (int, float)):
        yield ast.Constant(new.value + 1)
    elif isinstance(new, ast.IfExp):
        yield new.body
        yield new.orelse


def _is_text(node: ast.AST) -> bool:
    return any(isinstance(n, ast.JoinedStr) or isinstance(getattr(n, "value", None), str) for n in ast.walk(node))


def mutants_of(path: str, text: str, lines: set[int]) -> list[Mutant]:
    """Return every mutant of a file in the lines that tests execute."""
    found = []
    for node in _expressions(ast.parse(text)):
        if node.lineno not in lines or node.lineno != node.end_lineno:
            continue
        before = ast.get_source_segment(text, node) or ""
        for new in changed(node):
            rows = text.splitlines(keepends=True)
            row = rows[node.lineno - 1].encode()
            after = f"({ast.unparse(ast.fix_missing_locations(new))})"
            rows[node.lineno - 1] = (row[: node.col_offset] + after.encode() + row[node.end_col_offset :]).decode()
            found.append(Mutant(path, node.lineno, before, after, "".join(rows)))
    return found


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that run: no annotations, no messages of errors, no parts of formatted text."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns") or (isinstance(node, ast.Raise) and field == "exc"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.JoinedStr) or not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.expr):
                yield child
            yield from _expressions(child)


def executed(chosen: list[Path]) -> dict[str, dict[int, set[str]]]:
    """Return the tests that execute each line, by file; from the kept coverage, or from a new one if there is none."""
    data = KEPT / "coverage"
    if not data.exists():
        KEPT.mkdir(exist_ok=True)
        settings = KEPT / "settings"
        settings.write_text(f"[run]\ndynamic_context = test_function\nsource = {SOURCE}\ndata_file = {data}\n")
        tests = [str(ROOT / "tests" / room) for room in ROOMS]
        command = [
            sys.executable,
            "-m",
            "coverage",
            "run",
            f"--rcfile={settings}",
            "-m",
            "pytest",
            "-q",
            "-m",
            "not slow",
        ]
        subprocess.run([*command, "-p", "no:cacheprovider", *tests], cwd=ROOT, check=False)
    from coverage import CoverageData

    kept = CoverageData(str(data))
    kept.read()
    found: dict[str, dict[int, set[str]]] = {}
    for path in chosen:
        by_line = kept.contexts_by_lineno(str(path))
        found[str(path.relative_to(SOURCE))] = {
            n: {c for c in names if c} for n, names in by_line.items() if any(names)
        }
    return found


def places_of_tests() -> dict[str, str]:
    """Return pytest's id of each test function, by coverage's name for it."""
    places = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                places[f"{path.stem}.{node.name}"] = f"{path.relative_to(ROOT)}::{node.name}"
    return places


def outcome_of(mutant: Mutant, tests: list[str]) -> str:
    """Return ``killed``, ``survived`` or ``too slow``: an endless loop, or a machine too busy to say."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        shutil.copytree(SOURCE, Path(folder) / "mezzo", ignore=shutil.ignore_patterns("__pycache__"))
        (Path(folder) / "mezzo" / mutant.path).write_text(mutant.text, encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, timeout=LONGEST_S, check=False
            )
        except subprocess.TimeoutExpired:
            return "too slow"
        return "killed" if done.returncode else "survived"


def main() -> int:
    """Print each mutant that survives, then the score by room."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", help="files below src/mezzo; default: all of " + ", ".join(ROOMS))
    parser.add_argument("--count", type=int, default=120, help="mutants to try, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    asked = parser.parse_args()

    every = [p for room in ROOMS for p in sorted((SOURCE / room).rglob("*.py")) if not p.name.startswith(LEFT_OUT)]
    chosen = [SOURCE / path for path in asked.paths] or every
    lines, places = executed(chosen), places_of_tests()
    mutants = []
    for path in chosen:
        name = str(path.relative_to(SOURCE))
        mutants += mutants_of(name, path.read_text(encoding="utf-8"), set(lines[name]))
    drawn = random.Random(asked.seed).sample(mutants, min(asked.count, len(mutants)))

    def chosen_tests(mutant: Mutant) -> list[str]:
        names = sorted(lines[mutant.path][mutant.line])
        known = [places[short] for name in names if (short := ".".join(name.split(".")[-2:])) in places]
        own = Path(mutant.path).stem
        return sorted(known, key=lambda place: own not in place)[:TESTS_OF_A_MUTANT]

    score: dict[str, Counter[str]] = defaultdict(Counter)
    with ThreadPoolExecutor(asked.jobs) as pool:
        for mutant, outcome in zip(drawn, pool.map(lambda m: outcome_of(m, chosen_tests(m)), drawn), strict=True):
            score[mutant.path.split("/")[0]][outcome] += 1
            if outcome != "killed":
                print(f"{outcome}: {mutant.path}:{mutant.line}: {mutant.before} -> {mutant.after}", flush=True)
    print(json.dumps(dict(sorted(score.items()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
