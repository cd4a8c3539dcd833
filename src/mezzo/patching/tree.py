"""A script's syntax tree with upward links: parents, blocks and scopes, where names are bound, and what imported names stand for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from typing import TypeAlias

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


class SyntaxTree:
    """A module's syntax tree."""

    def __init__(self, text: str) -> None:
        self.module = ast.parse(text)
        self.parent: dict[ast.AST, ast.AST] = {}
        self._blocks: dict[ast.stmt, list[ast.stmt]] = {}
        for node in self.nodes:
            for child in ast.iter_child_nodes(node):
                self.parent[child] = node
            for value in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
                if isinstance(value, list):
                    self._blocks.update((stmt, value) for stmt in value)
        self.imported = dict(_imported(self.module))
        """What each imported name stands for: ``F`` for ``torch.nn.functional``."""
        self.names = {n.id for n in self.nodes if isinstance(n, ast.Name)}
        self.names |= {n.arg for n in self.nodes if isinstance(n, ast.arg)} | set(self.imported)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes above a node, the nearest first."""
        while node in self.parent:
            node = self.parent[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement around a node, or the node itself if it is one."""
        return next(n for n in [node, *self.ancestors(node)] if isinstance(n, ast.stmt))

    def block(self, stmt: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements that contains a statement."""
        return self._blocks[stmt]

    def function(self, node: ast.AST) -> FunctionNode | None:
        """Return the function that a node runs in; None for the module, or a class body."""
        above = (n for n in self.ancestors(node) if isinstance(n, _SCOPES))
        return next((n for n in above if not isinstance(n, ast.ClassDef)), None)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the class that contains a node."""
        return next((n for n in self.ancestors(node) if isinstance(n, ast.ClassDef)), None)

    def loops(self, node: ast.AST) -> list[ast.stmt]:
        """Return the loops around a node inside its function, the innermost first."""
        found: list[ast.stmt] = []
        for above in self.ancestors(node):
            if isinstance(above, _SCOPES):
                break
            if isinstance(above, LOOPS):
                found.append(above)
        return found

    def scopes(self, node: ast.AST) -> list[ast.AST]:
        """Return the functions around a node, the innermost first, and the module."""
        functions = [n for n in self.ancestors(node) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        return [*functions, self.module]

    def bindings(self, target: str, scope: ast.AST) -> list[ast.stmt]:
        """Return the statements of a scope, not of functions in it, that bind a name or an attribute such as ``self.x``."""
        return [n for n in walk_scope(scope) if isinstance(n, ast.stmt) and target in bound_by(n)]

    def dotted(self, node: ast.AST) -> str:
        """Return an expression's full dotted name: ``torch.nn.functional.relu`` for ``F.relu``; empty if it is not a name."""
        if isinstance(node, ast.Name):
            return self.imported.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.dotted(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        return ""

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the module."""
        return list(ast.walk(self.module))

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Every call, in the order of the text."""
        found = [n for n in self.nodes if isinstance(n, ast.Call)]
        return sorted(found, key=lambda call: (call.lineno, call.col_offset))

    def method_calls(self, *names: str) -> list[tuple[ast.Call, ast.expr]]:
        """Return the calls of methods of these names, each with the expression of the object."""
        calls = [(call, call.func) for call in self.calls]
        return [(call, func.value) for call, func in calls if isinstance(func, ast.Attribute) and func.attr in names]

    def free_name(self, *wanted: str) -> str:
        """Return the first of the names that the script does not use, else the last one with an underscore."""
        return next((name for name in wanted if name not in self.names), f"{wanted[-1]}_")


def walk_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run in a scope itself, without those inside its functions and classes."""
    waiting = [*ast.iter_child_nodes(scope)]
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, _SCOPES):
            waiting[:0] = ast.iter_child_nodes(node)


def bound_by(stmt: ast.stmt) -> set[str]:
    """Return the names and attributes that a statement itself binds, as text."""
    targets: list[ast.expr] = []
    if isinstance(stmt, ast.Assign):
        targets = stmt.targets
    elif isinstance(stmt, (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor)):
        targets = [stmt.target]
    elif isinstance(stmt, (ast.With, ast.AsyncWith)):
        targets = [item.optional_vars for item in stmt.items if item.optional_vars is not None]
    inside = () if hasattr(stmt, "body") else ast.walk(stmt)
    named = {node.target.id for node in inside if isinstance(node, ast.NamedExpr)}
    return named | {ast.unparse(part) for target in targets for part in flat(target)}


def flat(target: ast.expr) -> list[ast.expr]:
    """Return the targets of an assignment, with tuples unpacked."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return [part for element in target.elts for part in flat(element)]
    return [target.value] if isinstance(target, ast.Starred) else [target]


def bound_within(stmt: ast.stmt) -> set[str]:
    """Return what a statement and the statements inside it bind."""
    return set().union(*(bound_by(n) for n in ast.walk(stmt) if isinstance(n, ast.stmt)))


def names_in(node: ast.AST) -> set[str]:
    """Return the names that a node reads, and attributes of ``self`` as ``self.x``."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    attributes = [n for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    return (found | {f"{n.value.id}.{n.attr}" for n in attributes if isinstance(n.value, ast.Name)}) - {"self"}


def calls_in(node: ast.AST) -> list[ast.Call]:
    """Return the calls in a node."""
    return [n for n in ast.walk(node) if isinstance(n, ast.Call)]


def keyword_of(call: ast.Call, name: str) -> ast.expr | None:
    """Return the argument that a call passes by this keyword; None if it passes none."""
    return next((k.value for k in call.keywords if k.arg == name), None)


def arguments_of(function: FunctionNode) -> list[ast.arg]:
    """Return the parameters that can be passed by position or by keyword."""
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _imported(module: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (first, first)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
