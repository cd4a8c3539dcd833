"""A patch under construction: the script, the policy, the edits and their reasons."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field

from mezzo.formats import FORMATS
from mezzo.patching.places import Places, indentation
from mezzo.patching.reading import Backward, ScriptFacts
from mezzo.patching.regions import Region, Regions
from mezzo.patching.text import Editor, Text, first_line, last_line, unclear
from mezzo.patching.tree import walk_scope
from mezzo.policy import PRESETS, Policy
from mezzo.records.values import Note

Opening = Callable[[ast.stmt], str]
"""Returns the context manager to enter at a statement."""


@dataclass
class PatchJob:
    """A script and its changes."""

    script: ScriptFacts
    policy: Policy
    editor: Editor = field(init=False)
    places: Places = field(init=False)
    reasons: list[Note] = field(default_factory=list)
    covered: list[tuple[int, int]] = field(default_factory=list)
    """First and last lines that were put under autocast."""

    def __post_init__(self) -> None:
        self.editor = Editor(self.script.text)
        self.places = Places(self.script, self.editor, self.note)

    @property
    def text(self) -> Text:
        """The script's text."""
        return self.script.text

    @property
    def preset(self) -> str:
        """The policy's preset, if the policy differs from it at most in arithmetic and op lists; empty otherwise."""
        plain = self.policy.replace(arithmetic="auto", op_lists="portable")
        return self.policy.name if plain == PRESETS[self.policy.name] else ""

    @property
    def dtype(self) -> str:
        """The source text of torch's dtype for the compute format."""
        return f"{self.library}.{FORMATS[self.policy.compute].dtype_name}"

    @property
    def library(self) -> str:
        """The name under which the script imports its library: torch or paddle."""
        return self.name_of(self.script.library.package)

    def name_of(self, module: str) -> str:
        """Return the name under which the script imports a module, or will: ``th`` after ``import torch as th``."""
        names = [name for name, stands_for in self.script.tree.imported.items() if stands_for == module]
        return names[0] if names else module

    def note(self, where: ast.AST | str, change: str, why: str) -> None:
        """Record a change, or something that was left alone, and why."""
        what = where if isinstance(where, str) else f"line {getattr(where, 'lineno', '?')}"
        self.reasons.append(Note(what=what, value=change, reason=why))

    def imports(self, module: str) -> None:
        """Import a module at the top of the script, unless it is already imported there."""
        top = [n for n in walk_scope(self.script.tree.module) if isinstance(n, ast.Import)]
        if any(a.name == module or (a.name.startswith(f"{module}.") and not a.asname) for n in top for a in n.names):
            return
        block = [s for s in self.script.tree.module.body if isinstance(s, (ast.Import, ast.ImportFrom))]
        after = [s for s in block if not (isinstance(s, ast.ImportFrom) and s.module == "__future__")]
        related = [s for s in after if self.script.library.package in _roots(s)]
        if related:
            self.editor.line_before(related[0], f"import {module}")
        elif block:
            self.editor.line_after(block[-1], f"import {module}")
        else:
            unclear("the script has no import at its top level", f"import {module} there")
        self.note("imports", f"import {module}", "the patch calls it")

    def after_imports(self, package: str, *lines: str) -> None:
        """Insert lines, with a blank one above, after the imports that follow the first of ``package``."""
        body = self.script.tree.module.body
        number = next((n for n, s in enumerate(body) if package in _roots(s)), None)
        if number is None:
            unclear(
                f"the script imports {package} inside a function or under a condition", f"write: {'; '.join(lines)}"
            )
        while number + 1 < len(body) and isinstance(body[number + 1], (ast.Import, ast.ImportFrom)):
            number += 1
        self.editor.line_after(body[number], "", *lines)

    def autocast(self, regions: Regions, opening: Opening) -> dict[Backward, str]:
        """Put regions under autocast; return the names of losses that were moved into statements of their own."""
        names: dict[Backward, str] = {}
        continued = {id(h.region): h for h in regions.hoisted if h.region is not None}
        for region in regions.plain:
            unit = indentation(self.script, region.first)
            hoisted = continued.get(id(region))
            self.editor.wrap(region.first, region.last, self._header(region, opening), unit=unit)
            self.covered.append((first_line(region.first), last_line(region.last)))
            if hoisted is not None:
                names[hoisted.backward] = self._loss_name()
                self.editor.line_after(region.last, unit + self._assigned(hoisted.backward))
            self.note(
                _lines(region),
                "under autocast",
                "the forward pass and the loss; the backward pass stays outside, as the library recommends",
            )
        for hoisted in regions.hoisted:
            if hoisted.region is None:
                stmt = hoisted.backward.stmt
                unit = indentation(self.script, stmt)
                names[hoisted.backward] = self._loss_name()
                self.editor.line_before(stmt, f"with {opening(stmt)}:", unit + self._assigned(hoisted.backward))
                self.note(stmt, "its loss under autocast", "the backward pass must be outside, so the loss gets a name")
        return names

    def _header(self, region: Region, opening: Opening) -> str:
        context = opening(region.first)
        if not region.cache and context.endswith(")") and "autocast(" in context and not context.endswith("()"):
            context = f"{context[:-1]}, cache_enabled=False)"
            why = "a part of it runs without gradients, and autocast would reuse that part's casts of the weights, which carry none"
            self.note(_lines(region), "cache_enabled=False", why)
        return f"with {context}:"

    def _loss_name(self) -> str:
        return self.script.tree.free_name("loss", "training_loss", "total_loss")

    def _assigned(self, backward: Backward) -> str:
        written = self.text.of(backward.loss)
        return f"{self._loss_name()} = ({written})" if "\n" in written else f"{self._loss_name()} = {written}"

    def is_covered(self, node: ast.stmt) -> bool:
        """Return whether a statement is under the patch's autocast, or overlaps with such statements."""
        return any(first <= last_line(node) and first_line(node) <= last for first, last in self.covered)


def _roots(stmt: ast.stmt) -> set[str]:
    """Return the packages that a statement imports from; none if it is no import."""
    if isinstance(stmt, ast.Import):
        return {alias.name.split(".")[0] for alias in stmt.names}
    return {(stmt.module or "").split(".")[0]} if isinstance(stmt, ast.ImportFrom) else set()


def _lines(region: Region) -> str:
    first, last = first_line(region.first), last_line(region.last)
    return f"line {first}" if first == last else f"lines {first} to {last}"
