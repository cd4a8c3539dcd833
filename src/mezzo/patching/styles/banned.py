"""Binary cross entropy on probabilities, which CUDA's autocast refuses: such a loss stays outside autocast, on FP32 inputs.

Probabilities near 0 and 1 have no 16-bit neighbours, so torch demands the loss on logits instead; but a patch does not change the model.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from mezzo.patching.outcome import unclear
from mezzo.patching.reading import ScriptFacts
from mezzo.patching.regions import Region, Regions
from mezzo.patching.tree import bound_within, names_in

_CLASS, _FUNCTION = "torch.nn.BCELoss", "torch.nn.functional.binary_cross_entropy"


class Banned:
    """The calls of a script that autocast refuses."""

    def __init__(self, script: ScriptFacts) -> None:
        self._script = script
        self._criteria = {name for name, call in script.assigned_calls if script.tree.dotted(call.func) == _CLASS}

    def calls_in(self, node: ast.AST) -> list[ast.Call]:
        """Return the calls in a node that compute such a loss, directly or in a function of this file."""
        return [n for n in ast.walk(node) if isinstance(n, ast.Call) and self._computes(n, depth=3)]

    def _computes(self, call: ast.Call, *, depth: int) -> bool:
        if ast.unparse(call.func) in self._criteria or self._script.tree.dotted(call.func) == _FUNCTION:
            return True
        called = self._script.functions_called(call) if depth else []
        inner = (n for function in called for n in ast.walk(function) if isinstance(n, ast.Call))
        return any(self._computes(n, depth=depth - 1) for n in inner)

    def why_not(self, node: ast.AST) -> str:
        """Return why a statement cannot be put under autocast; empty if it can."""
        found = self.calls_in(node)
        why = "computes binary cross entropy on probabilities, which CUDA's autocast refuses"
        return f"line {found[0].lineno} {why}" if found else ""

    def leave_out(self, regions: Regions) -> Iterator[ast.expr]:
        """End regions before such a loss; yield its arguments that are computed under autocast, for a cast to FP32.

        Raises:
            Unclear: the loss and the model are called in one expression.
        """
        kept = []
        for region in regions.plain:
            block = self._script.tree.block(region.first)
            inside = block[block.index(region.first) : block.index(region.last) + 1]
            number = next((n for n, stmt in enumerate(inside) if self.calls_in(stmt)), None)
            if number is None:
                kept.append(region)
                continue
            before, after = inside[:number], inside[number:]
            bound = set().union(*map(bound_within, before))
            for stmt in after:
                yield from self._arguments(stmt, bound)
            if before:
                kept.append(Region(before[0], before[-1], cache=region.cache))
        for hoisted in regions.hoisted:
            self._refuse(hoisted.backward.loss)
        regions.plain = kept

    def _arguments(self, stmt: ast.stmt, bound: set[str]) -> Iterator[ast.expr]:
        calls = self.calls_in(stmt)
        outside = [n for n in ast.walk(stmt) if isinstance(n, ast.Call) and n not in calls]
        if any(self._script.runs_forward(n, functional=False) for n in outside) or hasattr(stmt, "body"):
            self._refuse(stmt)
            unclear(f"line {stmt.lineno} calls a model after a loss that torch.autocast refuses", _BY_HAND)
        for call in calls:
            for argument in (*call.args, *(k.value for k in call.keywords)):
                if names_in(argument) & bound:
                    if not isinstance(argument, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
                        self._refuse(stmt)
                    yield argument

    def _refuse(self, node: ast.AST) -> None:
        found = self.calls_in(node)
        if found:
            unclear(
                f"line {found[0].lineno} uses binary cross entropy on probabilities, which torch.autocast refuses on CUDA: "
                "probabilities near 0 and 1 have no 16-bit neighbours",
                _BY_HAND,
            )


_BY_HAND = "use BCEWithLogitsLoss and drop the sigmoid, or compute this loss on .float() inputs outside autocast"
