"""The words of the project: docstrings, comments, messages, help and pages in plain English.

Each rule is a function from a text to what breaks it; the last table shows that each finds something.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

import mezzo

SOURCE = Path(mezzo.__file__).parent
ROOT = SOURCE.parent.parent
SOURCES = {path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    if "zh-CN" not in path.as_posix()
}

ORDERS = re.compile(
    r"(Add|Ask|Be|Begin|Build|Call|Choose|Collect|Compare|Count|Do|Find|Get|Give|Go|Hand|Have|Hear|Hold|"
    r"Hook|Keep|Know|Leave|Let|Listen|Load|Look|Make|Mark|Measure|Name|Note|Patch|Prepare|Put|Read|Record|"
    r"Refuse|Remember|Remove|Report|Restore|Return|Round|Run|Save|Say|See|Set|Show|Stand|Stop|Take|Tell|Trace|Verify|"
    r"Wait|Wrap|Write)\b"
)
TRANSLATED = re.compile(
    r"\b(that|those) of\b|take(s|n)? down|took down|(gives?|gave|given) itself up|look(s|ed)? closely", re.IGNORECASE
)
LONGEST_SENTENCE_WORDS = 30


def orders_to_classes(source: str) -> list[str]:
    """Return the docstrings of classes and properties that begin with an imperative, each with its line."""
    found = [(node.lineno, ast.get_docstring(node) or "") for node in ast.walk(ast.parse(source)) if _is_thing(node)]
    return [f"{line}: {text.splitlines()[0]}" for line, text in found if ORDERS.match(text)]


def _is_thing(node: ast.AST) -> TypeGuard[ast.ClassDef | ast.FunctionDef]:
    """Tell classes and properties, which are things, from functions, which do something."""
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return isinstance(node, ast.ClassDef) or any(ast.unparse(d).endswith("property") for d in decorators)


def translated_phrases(source: str) -> list[str]:
    """Return the phrases of docstrings, comments and messages that read as translated, each with its line."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts = [(t.start[0], t.string) for t in tokens if t.type in (tokenize.STRING, tokenize.COMMENT)]
    return [f"{line}: {phrase}" for line, text in texts for phrase in phrases_of(text)]


def phrases_of(text: str) -> list[str]:
    """Return the phrases of a text that read as translated."""
    return [found.group() for found in TRANSLATED.finditer(" ".join(text.split()))]


def long_sentences(source: str) -> list[str]:
    """Return the beginnings of the sentences of messages and of commands' help that are too long, each with its line."""
    found = []
    for line, text in _messages(ast.parse(source)):
        for sentence in re.split(r"(?<=[.!?])\s|\n", text):
            words = re.findall(r"\S*\w\S*", sentence)
            if len(words) > LONGEST_SENTENCE_WORDS and re.search(r"[.,:;]", sentence):  # else a list of names
                found.append(f"{line}: {' '.join(words[:5])}")
    return found


def _messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the texts that are not docstrings, unless a command's, with a word for each formatted value."""
    silent: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            silent |= {id(node.body[0].value)} if text and isinstance(node.body[0], ast.Expr) else set()
            if text and isinstance(node, ast.FunctionDef) and re.search("typer|Script", ast.dump(node.args)):
                yield from ((node.lineno, " ".join(paragraph.split())) for paragraph in text.split("\n\n"))
        elif isinstance(node, ast.JoinedStr):
            silent |= {id(value) for value in node.values}
            yield node.lineno, "".join(str(v.value) if isinstance(v, ast.Constant) else "X" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield node.lineno, node.value


@pytest.mark.parametrize("rule", [orders_to_classes, translated_phrases, long_sentences])
def test_the_source_follows_the_rule(rule: Callable[[str], list[str]]) -> None:
    found = {path: rule(source) for path, source in SOURCES.items()}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_no_phrase_of_a_page_reads_as_translated() -> None:
    found = {path: phrases_of(text) for path, text in PAGES.items()}
    assert {path: phrases for path, phrases in found.items() if phrases} == {}, "repeat the noun"


LONG = "word, " * 31
CASES: list[tuple[Callable[[str], list[str]], str, list[str]]] = [
    (orders_to_classes, 'class A:\n  """Hold a step."""\nclass B:\n  """A holder of steps."""\n', ["1: Hold a step."]),
    (orders_to_classes, 'def f():\n  """Record a step."""\nclass A:\n  x = 1\n', []),
    (orders_to_classes, 'class A:\n  @property\n  def x(self):\n    """Return it."""\n', ["3: Return it."]),
    (orders_to_classes, 'class A:\n  class B:\n    """Tell what\n\n    it is."""\n', ["2: Tell what"]),
    (orders_to_classes, 'class A:\n  """Names of steps."""\nclass B:\n  """Name: a step."""\n', ["3: Name: a step."]),
    (translated_phrases, "x = 1  # takes down a step\n", ["1: takes down"]),
    (translated_phrases, 'def f():\n  """A thing that gives\n  itself up."""\n', ["2: gives itself up"]),
    (translated_phrases, "print(f'{x} was taken down, look closely')\n", ["1: taken down", "1: look closely"]),
    (translated_phrases, "x = 'its norm and that of others'  # those of\n", ["1: that of", "1: those of"]),
    (translated_phrases, "take_down = down.take(down)\nx = 'take it down'\n", []),
    (long_sentences, f"raise E('{LONG}')\n", ["1: word, word, word, word, word,"]),
    (long_sentences, f"x = f'{LONG[:-12]}{{y}} {{z}} of'\n", ["1: word, word, word, word, word,"]),
    (long_sentences, f"x = '{LONG[:60]}. {LONG[:120]}'\n", []),
    (long_sentences, f"def f():\n  '''{LONG}'''\nx = '{LONG.replace(',', '')}'\n", []),
    (
        long_sentences,
        f"def f(x: typer.Option()):\n  '''A\n\n  {LONG[:90]}\n  {LONG[90:]}'''\n",
        ["1: word, word, word, word, word,"],
    ),
]


@pytest.mark.parametrize(("rule", "source", "found"), CASES)
def test_a_breach_is_found(rule: Callable[[str], list[str]], source: str, found: list[str]) -> None:
    assert rule(source) == found
