"""The statements that compute a loss: those that a patch puts under autocast.

From each backward pass, the statements that its loss depends on are followed upwards, through its block and the blocks around it, to the
statement that binds the loss. Other backward passes and updates end a region, because autocast must be off in them. In each region, the
statements before the first call of a model stay outside: they only fetch data.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mezzo.patching.reading import Backward, ScriptFacts
from mezzo.patching.text import unclear
from mezzo.patching.tree import arguments_of, bound_within, calls_in, keyword_of, names_in

_MOVING = {
    "to",
    "cuda",
    "cpu",
    "view",
    "reshape",
    "unsqueeze",
    "squeeze",
    "long",
    "float",
    "double",
    "next",
    "iter",
    "zip",
    "enumerate",
    "len",
    "int",
    "str",
    "range",
    "append",
    "get_batch",
    "Variable",
    "Tensor",
    "FloatTensor",
    "LongTensor",
    "tensor",
    "from_numpy",
    "as_tensor",
    "randn",
    "rand",
    "randint",
    "zeros",
    "ones",
    "full",
    "normal",
    "uniform",
    "items",
    "size",
    "type",
    "requires_grad_",
    "detach",
    "permute",
    "contiguous",
    "transpose",
    "zero_grad",
    "train",
    "eval",
    "print",
    "format",
    "fill_",
    "clone",
    "type_as",
    "expand",
    "repeat",
    "sample",
}
"""Functions that fetch or move data."""


@dataclass(frozen=True)
class Region:
    """Consecutive statements of one block to put under autocast."""

    first: ast.stmt
    last: ast.stmt
    cache: bool = True
    """Whether autocast may cache casts of weights: it must not if gradients are off in a part of the region."""


@dataclass(frozen=True)
class Hoisted:
    """A backward pass whose loss is computed in its own expression, which becomes a statement before it."""

    backward: Backward
    region: Region | None
    """The region directly before it, which the new statement joins; None if there is none."""


class Regions:
    """The regions of a script's training code."""

    def __init__(self, script: ScriptFacts, backwards: Iterable[Backward]) -> None:
        self._script, self._tree = script, script.tree
        self._members: dict[int, tuple[list[ast.stmt], set[int]]] = {}
        self._hoisted: list[Backward] = []
        for backward in backwards:
            self._collect(backward)
        self._hoisting = {b.stmt for b in self._hoisted}
        self.plain = self._ranges()
        self.hoisted = [self._hoist(backward) for backward in self._hoisted]

    def end_before(self, stops: Callable[[ast.stmt], object]) -> list[tuple[list[ast.stmt], list[ast.stmt]]]:
        """End regions before their first statement that ``stops`` names; return what each of these keeps, and what it loses."""
        kept, ended = [], []
        for region in self.plain:
            block = self._tree.block(region.first)
            inside = block[block.index(region.first) : block.index(region.last) + 1]
            number = next((n for n, stmt in enumerate(inside) if stops(stmt)), len(inside))
            if number < len(inside):
                ended.append((inside[:number], inside[number:]))
            if number:
                kept.append(Region(inside[0], inside[number - 1], cache=region.cache))
        self.plain = kept
        return ended

    def _collect(self, backward: Backward) -> None:
        computes = self._computes(backward.loss)
        if computes:
            self._hoisted.append(backward)
        self._follow(backward.stmt, backward.loss, found=computes)

    def _computes(self, loss: ast.expr) -> bool:
        """Return whether a loss's own expression computes more than a sum or a mean of names."""
        if self._script.runs_forward(loss):
            return True
        simple = (
            "mean",
            "sum",
            "backward",
            "squeeze",
            "to",
            "scale",
            "item",
            "values",
            "stack",
            "cat",
            "float",
            "div",
            "get",
        )
        return any(
            self._tree.dotted(c.func).rpartition(".")[2] not in simple and not _on_a_call(c) for c in calls_in(loss)
        )

    def _follow(self, stmt: ast.stmt, loss: ast.expr, *, found: bool, depth: int = 3) -> None:
        """Collect the statements above ``stmt`` that ``loss`` depends on, through the blocks around it."""
        wanted = names_in(loss)
        here: ast.AST = stmt
        while isinstance(here, ast.stmt):
            block = self._tree.block(here)
            members = self._members.setdefault(id(block), (block, set()))[1]
            needed, bound = self._slice(block, block.index(here), wanted, members)
            if found or bound:
                return
            wanted = needed
            above = self._tree.parent[here]
            if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._follow_callers(above, loss, stmt, depth)
                return
            if isinstance(above, (ast.For, ast.AsyncFor)):
                wanted = wanted | names_in(above.iter)
            here = above if isinstance(above, ast.stmt) else self._tree.parent.get(above, above)
        unclear(
            f"line {stmt.lineno} differentiates {ast.unparse(loss)}, and no statement before it computes that",
            "put the forward pass and the loss under autocast, and the backward pass outside it",
        )

    def _slice(self, block: list[ast.stmt], end: int, wanted: set[str], members: set[int]) -> tuple[set[str], bool]:
        """Add the statements before ``end`` that ``wanted`` depends on; return the names needed, and whether ``wanted`` was bound."""
        needed, bound = set(wanted), False
        for number in range(end - 1, -1, -1):
            binds = bound_within(block[number])
            if binds & needed and not self.is_boundary(block[number]):
                bound = bound or (bool(binds & wanted) and not self._begins_sum(block[number]))
                members.add(number)
                needed |= names_in(block[number]) - set(self._tree.imported)
        return needed, bound

    def _begins_sum(self, stmt: ast.stmt) -> bool:
        """Return whether a statement assigns a constant, such as the zero that losses are added to."""
        return isinstance(stmt, ast.Assign) and isinstance(stmt.value, ast.Constant)

    def _follow_callers(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef, loss: ast.expr, stmt: ast.stmt, depth: int
    ) -> None:
        """Follow a loss that is a function's parameter to the calls of the function."""
        names = [a.arg for a in arguments_of(function) if a.arg != "self"]
        position = next((n for n, name in enumerate(names) if name in names_in(loss)), None)
        calls = [c for c in self._tree.calls if function in self._script.functions_called(c)]
        if position is None or not calls or not depth:
            unclear(
                f"line {stmt.lineno} differentiates {ast.unparse(loss)}, which {function.name}() does not compute",
                "put the forward pass and the loss under autocast where they are computed",
            )
        for call in calls:
            by_name = keyword_of(call, names[position])
            arguments = [by_name] if by_name is not None else call.args[position : position + 1]
            if not arguments or self._computes(arguments[0]):
                unclear(
                    f"line {call.lineno} computes a loss in the call of {function.name}()",
                    "assign the loss to a name first, so that this statement can be put under autocast",
                )
            self._follow(self._tree.statement(call), arguments[0], found=False, depth=depth - 1)

    def is_boundary(self, stmt: ast.stmt) -> bool:
        """Return whether a statement runs a backward pass or an update, in which autocast must be off."""
        inside = set(map(id, ast.walk(stmt)))
        calls = [*(b.call for b in self._script.backwards), *(s.call for s in self._script.steps)]
        return any(id(call) in inside for call in calls)

    def _ranges(self) -> list[Region]:
        regions = []
        for block, members in self._members.values():
            run: list[int] = []
            for number, stmt in enumerate(block):
                if self.is_boundary(stmt):
                    hoists = stmt in self._hoisting
                    reach = [number - 1] if hoists and run and run[-1] < number - 1 else []
                    regions += self._range(block, run + reach, to_loss=not hoists)
                    run = []
                elif number in members:
                    run.append(number)
            regions += self._range(block, run, to_loss=True)
        return regions

    def _range(self, block: list[ast.stmt], run: list[int], *, to_loss: bool) -> list[Region]:
        """Return the region of a run of members, from the first that runs a model to the last.

        With ``to_loss``, and without a model, from the first that does more than fetch data.
        """
        forward = [n for n in run if self._script.runs_forward(block[n])]
        if not forward and to_loss:
            forward = [n for n in run if not self._only_moves(block[n])]
        if not forward:
            return []
        first, last = forward[0], run[-1]
        while first < last and self._without_gradients(block[first]):  # validation, which has its own region and cache
            first = next((n for n in forward if n > first), last)
        inside = block[first : last + 1]
        mixed = any(self._without_gradients(s) for stmt in inside for s in ast.walk(stmt) if isinstance(s, ast.stmt))
        return [Region(block[first], block[last], cache=not mixed)]

    def _without_gradients(self, stmt: ast.stmt) -> bool:
        return self._script.grads_off(stmt) and self._script.runs_forward(stmt)

    def _only_moves(self, stmt: ast.stmt) -> bool:
        names = [c.func.attr if isinstance(c.func, ast.Attribute) else ast.unparse(c.func) for c in calls_in(stmt)]
        return all(name in _MOVING for name in names) and not isinstance(stmt, ast.AugAssign)

    def _hoist(self, backward: Backward) -> Hoisted:
        block = self._tree.block(backward.stmt)
        number = block.index(backward.stmt)
        before = [r for r in self.plain if r.last in block and block.index(r.last) == number - 1]
        return Hoisted(backward, before[0] if before else None)


def _on_a_call(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and not isinstance(call.func.value, (ast.Name, ast.Attribute))
