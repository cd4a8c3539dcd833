"""Where to put the calls around an optimizer's update: before gradients are read, and once after the last update."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mezzo.patching.outcome import unclear
from mezzo.patching.reading import ScriptFacts, StepCall


@dataclass(frozen=True)
class Read:
    """A statement that reads gradients before an update, so that they must be unscaled first."""

    stmt: ast.stmt
    step: StepCall
    over: ast.For | None
    """The loop over several optimizers that contains the update."""


class ScriptUpdates:
    """The updates of a script, in the order in which they run."""

    def __init__(self, script: ScriptFacts) -> None:
        self._script, self._tree = script, script.tree

    def loop_over_optimizers(self, step: StepCall) -> ast.For | None:
        """Return the ``for optimizer in optimizers:`` around an update."""
        loops = [loop for loop in self._tree.loops(step.stmt) if isinstance(loop, ast.For)]
        return next((loop for loop in loops if step.name in ast.unparse(loop.target)), None)

    def holder(self, step: StepCall) -> ast.stmt:
        """Return the statement that updates: the call's own, or the loop over optimizers around it."""
        return self.loop_over_optimizers(step) or step.stmt

    def last_ones(self) -> list[ast.stmt]:
        """Return the statements after which the loss scale is to be updated: once in each pass through a loop, after its last update."""
        found: list[ast.stmt] = []
        for container, holders in self._by_container().items():
            names = [s.name for s in self._script.steps if self.holder(s) in holders]
            # If one optimizer steps twice, GradScaler needs an update in between.
            step_twice = len(set(names)) < len(names)
            found += holders if step_twice else self._last_of(_body(container), holders)
        return list(dict.fromkeys(found))

    def _by_container(self) -> dict[ast.AST, list[ast.stmt]]:
        groups: dict[ast.AST, list[ast.stmt]] = {}
        for step in self._script.steps:
            holder = self.holder(step)
            loops = self._tree.loops(holder)
            container = loops[0] if loops else self._tree.function(holder) or self._tree.module
            groups.setdefault(container, []).append(holder)
        return groups

    def _last_of(self, block: Sequence[ast.stmt], holders: Sequence[ast.stmt]) -> list[ast.stmt]:
        with_updates = [s for s in block if any(h is n for n in ast.walk(s) for h in holders)]
        if any(s in holders for s in with_updates):
            return [with_updates[-1]]
        found: list[ast.stmt] = []
        for stmt in with_updates:
            handlers = [h.body for h in getattr(stmt, "handlers", [])]
            for inner in (_body(stmt), getattr(stmt, "orelse", []), getattr(stmt, "finalbody", []), *handlers):
                found += self._last_of(inner, holders)
        return found

    def reads(self, backward_calls: Iterable[ast.Call]) -> list[Read]:
        """Return the first statement before each update that reads its gradients.

        Raises:
            Unclear: gradients are clipped in passes without an update.
        """
        backward = {id(call) for call in backward_calls}
        found: list[Read] = []
        for step in self._script.steps:
            over = self.loop_over_optimizers(step)
            stmt = self._read_before(over or step.stmt, backward)
            if stmt is not None and (stmt, step.name) not in [(r.stmt, r.step.name) for r in found]:
                found.append(Read(stmt, step, over))
        return found

    def _read_before(self, holder: ast.stmt, backward: set[int]) -> ast.stmt | None:
        here, same_pass = holder, True
        earliest: ast.stmt | None = None
        while True:
            block = self._tree.block(here)
            for stmt in reversed(block[: block.index(here)]):
                if any(id(n) in backward for n in ast.walk(stmt)):
                    return earliest
                if not self._script.reads_gradients(stmt) or isinstance(stmt, (ast.FunctionDef, ast.ClassDef)):
                    continue
                if not same_pass and any(isinstance(n, ast.Call) and self._script.is_clip(n) for n in ast.walk(stmt)):
                    unclear(
                        f"line {stmt.lineno} clips the gradients in passes without an update, in which they cannot be unscaled",
                        "clip only before the update, in the same block, after scaler.unscale_(optimizer)",
                    )
                if same_pass:
                    earliest = self._inner(stmt)
            above = self._tree.parent[here]
            if not isinstance(above, (ast.If, ast.With, ast.AsyncWith, ast.Try)):
                return earliest
            same_pass = same_pass and isinstance(above, (ast.With, ast.AsyncWith))
            here = above

    def _inner(self, stmt: ast.stmt) -> ast.stmt:
        """Return the first statement inside an ``if`` that reads gradients, or the statement itself."""
        if isinstance(stmt, ast.If) and not stmt.orelse:
            reading = [s for s in stmt.body if self._script.reads_gradients(s)]
            if reading:
                return self._inner(reading[0])
        return stmt

    def schedules_after(self, update: ast.stmt) -> list[ast.Expr]:
        """Return the statements after an update, in its block, that step a schedule."""
        # A schedule whose step takes a metric follows the metric, not the updates.
        calls = {id(call) for call in self._script.schedule_steps if not (call.args or call.keywords)}
        after = [s for s in self._tree.block(update) if isinstance(s, ast.Expr) and s.lineno > update.lineno]
        return [stmt for stmt in after if id(stmt.value) in calls]


def _body(node: ast.AST) -> list[ast.stmt]:
    body = getattr(node, "body", [])
    return body if isinstance(body, list) else []
