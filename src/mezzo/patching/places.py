"""Where a new object is created in a script: next to the optimizer, and passed through functions as the optimizer is."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mezzo.patching.reading import ScriptFacts, StepCall
from mezzo.patching.text import Editor, first_line, unclear
from mezzo.patching.tree import arguments_of, keyword_of

_DEPTH = 4
"""The most functions that a name is passed through."""


@dataclass(frozen=True)
class Home:
    """The scope in which an optimizer is created, and the statement after which it exists."""

    scope: ast.AST
    """A function or the module; for an attribute of ``self``, the class."""
    after: ast.stmt
    owner: str = ""
    """``self.`` if the optimizer is an attribute; empty otherwise."""
    name: str = ""
    """The optimizer's name in that scope; empty if it has none there."""


class Places:
    """The homes of a script's optimizers, and the names that are passed through its functions."""

    def __init__(self, script: ScriptFacts, editor: Editor, note: Callable[[ast.AST, str, str], None]) -> None:
        self._script, self._tree, self._editor, self._note = script, script.tree, editor, note
        self._passed: set[tuple[ast.AST, str]] = set()

    def home(self, name: str, at: ast.AST, *, depth: int = _DEPTH) -> Home:
        """Return where the optimizer ``name``, as used at a node, is created.

        Raises:
            Unclear: it is created in several places, or nowhere in this file.
        """
        base = re.split(r"[\[(]", name)[0]
        if base.startswith("self."):
            return self._attribute(base, at)
        if "." in base:
            return self._before_loop(at)
        for scope in self._tree.scopes(at):
            bound = self._tree.bindings(base, scope)
            assignments = [s for s in bound if not isinstance(s, (ast.For, ast.AsyncFor))]
            if assignments:
                return Home(scope, self._after(scope, assignments), name=name)
            if bound and isinstance(bound[0], (ast.For, ast.AsyncFor)):
                names = sorted({n.id for n in ast.walk(bound[0].iter) if isinstance(n, ast.Name)})
                iterated = [n for n in names if n in self._script.optimizers or "opt" in n]
                homes = [self.home(n, bound[0], depth=depth) for n in iterated]
                if homes:
                    return last_home(homes)
            if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) and self._parameter(scope, base):
                return self._callers_home(scope, base, depth)
        unclear(
            f"line {at.lineno if isinstance(at, ast.stmt) else '?'} updates {name}, which this file does not create",
            _BY_HAND,
        )

    def _attribute(self, name: str, at: ast.AST) -> Home:
        cls = self._tree.class_of(at)
        inside = [] if cls is None else ast.walk(cls)
        methods = [n for n in inside if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        assignments = [(m, s) for m in methods for s in self._tree.bindings(name, m)]
        if cls is None or not assignments:
            unclear(f"{name} is updated, but its class does not create it", _BY_HAND)
        method = assignments[0][0]
        return Home(cls, self._after(method, [s for m, s in assignments if m is method]), "self.", name)

    def _before_loop(self, at: ast.AST) -> Home:
        """Return the place above the outermost loop of the function, for an attribute of another object."""
        function = self._tree.function(at)
        loops = self._tree.loops(at)
        before: list[ast.stmt] = []
        if loops:
            block = self._tree.block(loops[-1])
            before = block[: block.index(loops[-1])]
        if not before or function is None or isinstance(function, ast.Lambda):
            unclear("the optimizer belongs to an object that another file creates", _BY_HAND)
        return Home(function, before[-1])

    def _after(self, scope: ast.AST, assignments: list[ast.stmt]) -> ast.stmt:
        """Return the statement after which one of ``assignments`` has run on every branch."""
        assignments = [s for s in assignments if not isinstance(s, (ast.With, ast.AsyncWith))] or assignments
        blocks = {id(self._tree.block(s)) for s in assignments}
        if len(blocks) == 1:
            return assignments[-1]
        body: list[ast.stmt] = getattr(scope, "body", [])
        inside = [s for s in body if any(a in ast.walk(s) for a in assignments)]
        return inside[-1]

    def _parameter(self, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
        return any(a.arg == name for a in arguments_of(function))

    def _callers_home(self, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str, depth: int) -> Home:
        homes = []
        for call in self._calls(function):
            argument = self._argument(function, name, call)
            if argument is None or not depth:
                unclear(f"line {call.lineno} calls {function.name}() in a way that hides its {name}", _BY_HAND)
            homes.append(self.home(ast.unparse(argument), self._tree.statement(call), depth=depth - 1))
        if not homes:
            unclear(f"{function.name}() gets its {name} from another file", _BY_HAND)
        return common_home(homes, f"{function.name}() gets its {name} from several places", _BY_HAND)

    def _calls(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.Call]:
        calls = [c for c in self._tree.calls if function in self._script.functions_called(c)]
        callees = {id(c.func) for c in calls}
        mentions = [n for n in self._tree.nodes if isinstance(n, ast.Name) and n.id == function.name]
        loaded = [n for n in mentions if isinstance(n.ctx, ast.Load) and id(n) not in callees]
        passed = [n for n in loaded if not self._is_local(n)]
        if passed:
            unclear(f"line {passed[0].lineno} passes {function.name}() to another function", _BY_HAND)
        return calls

    def _is_local(self, name: ast.Name) -> bool:
        """Return whether a name is a parameter or a variable of a function around it."""
        functions = [s for s in self._tree.scopes(name) if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef))]
        return any(self._parameter(f, name.id) or self._tree.bindings(name.id, f) for f in functions)

    def _argument(self, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str, call: ast.Call) -> ast.expr | None:
        """Return the argument that a call passes for the parameter ``name``; None if that is not clear."""
        by_name = keyword_of(call, name)
        if by_name is not None:
            return by_name
        names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        names = names[1:] if names[:1] == ["self"] else names
        if name not in names:
            return None
        arguments = call.args[: names.index(name) + 1]
        if len(arguments) <= names.index(name) or any(isinstance(a, ast.Starred) for a in arguments):
            return None
        return arguments[-1]

    def check_order(self, home: Home, backward: Iterable[ast.stmt]) -> None:
        """Refuse backward passes that run before the object at ``home`` exists.

        Raises:
            Unclear: names the line.
        """
        for stmt in backward:
            if self._tree.scopes(stmt)[0] is home.scope and stmt.lineno < first_line(home.after):
                unclear(
                    f"line {stmt.lineno} runs a backward pass before line {first_line(home.after)} creates the optimizer",
                    _BY_HAND,
                )

    # --- passing a name on ---------------------------------------------------------------------------------------------------

    def reach(self, name: str, home: Home, at: ast.AST, *, annotation: str) -> str:
        """Return the expression for an object at a node; where needed, pass the object there through functions.

        Args:
            name: the name of the object, without ``self.``.
            home: where it is created.
            at: where it is used.
            annotation: its type, for functions that annotate their parameters.
        """
        steps, function = self._script.steps, self._tree.function(at)
        optimizer = next((s.name for s in steps if self._tree.function(s.stmt) is function), steps[0].name)
        return self._reach(name, home, at, optimizer, annotation, _DEPTH)

    def _reach(self, name: str, home: Home, at: ast.AST, optimizer: str, annotation: str, depth: int) -> str:
        """Do the same, passing it after the parameter ``optimizer``, through at most ``depth`` functions."""
        if home.owner:
            if self._tree.class_of(at) is not home.scope:
                unclear(f"line {getattr(at, 'lineno', '?')} uses an optimizer of another object", _BY_HAND)
            return home.owner + name
        scopes = self._tree.scopes(at)
        if home.scope in scopes:
            return name
        function = scopes[0]
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) or not depth:
            unclear(f"line {getattr(at, 'lineno', '?')} is outside the function that creates the optimizer", _BY_HAND)
        if (function, name) not in self._passed:
            self._passed.add((function, name))
            self._pass_on(function, name, home, optimizer, annotation, depth)
        return name

    def _pass_on(
        self,
        function: ast.FunctionDef | ast.AsyncFunctionDef,
        name: str,
        home: Home,
        optimizer: str,
        annotation: str,
        depth: int,
    ) -> None:
        positional = [*function.args.posonlyargs, *function.args.args]
        found = [a for a in positional if a.arg == optimizer]
        calls = self._calls(function)
        if not found or not calls or positional.index(found[0]) >= len(positional) - len(function.args.defaults):
            unclear(
                f"{function.name}() has no required parameter {optimizer} next to which {name} could be passed",
                _BY_HAND,
            )
        typed = f": {annotation}" if found[0].annotation is not None else ""
        self._editor.append_to(found[0], f", {name}{typed}")
        self._note(
            found[0],
            f"{function.name}() gets {name}",
            f"it is created where {optimizer} is created, and used in this function",
        )
        for call in calls:
            argument = self._argument(function, optimizer, call)
            if argument is None:
                unclear(f"line {call.lineno} calls {function.name}() in a way that hides its {optimizer}", _BY_HAND)
            passed = self._reach(name, home, self._tree.statement(call), ast.unparse(argument), annotation, depth - 1)
            by_name = any(k.value is argument for k in call.keywords)
            self._editor.append_to(argument, f", {name}={passed}" if by_name else f", {passed}")
            self._note(argument, f"passes {name} to {function.name}()", f"next to its {optimizer}")


def common_home(homes: Sequence[Home], refusal: str, by_hand: str) -> Home:
    """Return the last of ``homes``, which must be in one scope.

    Raises:
        Unclear: they are in several scopes; with this reason and instruction.
    """
    if len({(home.scope, home.owner) for home in homes}) > 1:
        unclear(refusal, by_hand)
    return last_home(homes)


def last_home(homes: Sequence[Home]) -> Home:
    """Return the home that comes last in the text."""
    return max(homes, key=lambda home: first_line(home.after))


_BY_HAND = "create one GradScaler next to the optimizer, and pass it to the loop"


def indentation(script: ScriptFacts, stmt: ast.stmt) -> str:
    """Return one level of indentation, as in the code around a statement."""
    text, tree = script.text, script.tree
    above = next((n for n in tree.ancestors(stmt) if isinstance(n, ast.stmt)), None)
    if above is not None:
        return text.indent(stmt).removeprefix(text.indent(above)) or "    "
    for node in ast.walk(tree.module):
        body = getattr(node, "body", None)
        if isinstance(node, ast.stmt) and isinstance(body, list) and body[0].lineno > node.lineno:
            return text.indent(body[0]).removeprefix(text.indent(node))
    return "    "


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
