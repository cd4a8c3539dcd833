"""Tests that cannot fail: a test without an assertion, or with one that holds whatever the code does."""

from __future__ import annotations

import ast
from collections.abc import Iterable

import pytest

from paths import TESTS

SOURCES = {path.relative_to(TESTS).as_posix(): path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")}
CHECKS = {"raises", "warns", "fail", "assert_close", "assert_allclose", "assert_array_equal"}
COMPILES = {"test_every_python_can_read_the_source"}
"""Tests that end with an error of Python's where they fail."""


def without_assertion(sources: dict[str, str]) -> list[str]:
    """Return the tests that neither assert nor use a function that does, directly or through others."""
    functions = [
        (path, node)
        for path, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    ]
    uses = {
        id(node): {_last(name) for name in ast.walk(node) if isinstance(name, ast.Name | ast.Attribute)}
        for _, node in functions
    }
    asserting, grown = set(CHECKS), True
    while grown:
        more = {n.name for _, n in functions if _asserts(n) or uses[id(n)] & asserting}
        grown, asserting = not more <= asserting, asserting | more
    tests = [(path, node) for path, node in functions if path.split("/")[-1].startswith("test_") and _is_test(node)]
    return [f"{path}: {node.name}" for path, node in tests if not (_asserts(node) or uses[id(node)] & asserting)]


def of_any_outcome(source: str) -> list[str]:
    """Return the assertions that accept several numbers, or that are of a constant or a tuple."""
    tests = [(node.lineno, node.test) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
    return [f"{line}: {ast.unparse(test)}" for line, test in tests if _accepts_all(test)]


def _accepts_all(test: ast.expr) -> bool:
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.In):
        choices = getattr(test.comparators[0], "elts", ())
        return len(choices) > 1 and all(isinstance(getattr(c, "value", None), int | float) for c in choices)
    return isinstance(test, ast.Constant | ast.Tuple) or (
        isinstance(test, ast.BoolOp) and any(map(_accepts_all, test.values))
    )


def _asserts(node: ast.FunctionDef) -> bool:
    return any(isinstance(inner, ast.Assert) for inner in ast.walk(node))


def _is_test(node: ast.FunctionDef) -> bool:
    return node.name.startswith("test_") and "self" not in [a.arg for a in node.args.args] and node.name not in COMPILES


def _last(name: ast.Name | ast.Attribute) -> str:
    return name.id if isinstance(name, ast.Name) else name.attr


def test_every_test_can_fail() -> None:
    assert without_assertion(SOURCES) == []
    assert {path: found for path, source in SOURCES.items() if (found := of_any_outcome(source))} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def test_a(): f()\n", ["test_x.py: test_a"]),
        ("def test_a(): f()\ndef f():\n  g()\ndef g():\n  assert x\n", []),
        ("def test_a():\n  with pytest.raises(ValueError): f()\n", []),
    ],
)
def test_a_test_without_an_assertion_is_found(source: str, found: Iterable[str]) -> None:
    assert without_assertion({"test_x.py": source}) == found


@pytest.mark.parametrize(
    ("assertion", "is_found"),
    [
        ("a in (1, 2)", True),
        ("True", True),
        ("(a == 1, 'message')", True),
        ("a == 1 or True", True),
        ("a in ('x', 'y')", False),
    ],
)
def test_an_assertion_of_any_outcome_is_found(assertion: str, is_found: bool) -> None:
    assert of_any_outcome(f"assert {assertion}\n") == ([f"1: {assertion}"] if is_found else [])
