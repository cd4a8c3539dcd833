"""The expression for the type of the device that a script trains on, from the names that are visible where it is inserted."""

from __future__ import annotations

import ast
import re
from collections import Counter

from mezzo.patching.reading import ScriptFacts
from mezzo.patching.tree import arguments_of, keyword_of, names_in

_MAKERS = ("torch.device", "torch.accelerator.current_accelerator", "torch.get_default_device")


class DeviceType:
    """Finds the device that a script moves its model and data to."""

    def __init__(self, script: ScriptFacts) -> None:
        self._script, self._tree = script, script.tree
        self._kinds = self._assigned()
        self._used = self._moved_to()
        self._shared: tuple[str, ast.AST] | None = None

    def share(self, name: str, scope: ast.AST) -> str:
        """Use the variable ``name`` of ``scope`` for the model's device from now on; return the name."""
        self._shared = (name, scope)
        return name

    def at(self, node: ast.AST, *, line: int | None = None) -> str:
        """Return the expression for ``device_type``: the script's own device variable, or its model's device.

        Args:
            node: where the expression will be.
            line: the last line on which its names may be bound; None for the node's.
        """
        for autocast in self._script.autocasts[:1]:
            by_name = re.match(r"torch\.(cuda|cpu)\.", self._tree.dotted(autocast.func))
            if by_name:
                return f'"{by_name[1]}"'
            argument = autocast.args[0] if autocast.args else keyword_of(autocast, "device_type")
            if argument is not None and all(self._visible(name, node, line) for name in names_in(argument)):
                return self._script.text.of(argument)
        for name, _ in self._used.most_common():
            if self._visible(name, node, line):
                return self._type_of(name)
        if self._moves_to_cuda():
            return '"cuda"'
        if self._shared is not None and self._shared[1] in self._tree.scopes(node):
            return self._shared[0]
        models = [m for m in self._with_parameters() if self._visible(m, node, line)]
        if models:
            return f"next({models[0]}.parameters()).device.type"
        return "torch.get_default_device().type"

    def _type_of(self, name: str) -> str:
        kind = self._kinds.get(name) or self._kinds.get(name.rpartition(".")[2], "")
        return {"device": f"{name}.type", "type": name}.get(kind, f"torch.device({name}).type")

    def _assigned(self) -> dict[str, str]:
        """Return the kind of each name's value: a torch device, or the name of a type without an index."""
        kinds: dict[str, str] = {}
        for node in self._tree.nodes:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            kind = self._kind(node.value)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                name = ast.unparse(target)
                kinds[name] = kind if kinds.get(name, kind) == kind else "unknown"
        return {name: kind for name, kind in kinds.items() if kind}

    def _kind(self, value: ast.expr) -> str:
        if isinstance(value, ast.IfExp):
            kinds = {self._kind(value.body), self._kind(value.orelse)}
            return kinds.pop() if len(kinds) == 1 else ""
        if isinstance(value, ast.Call):
            return "device" if self._tree.dotted(value.func) in _MAKERS else ""
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return "type" if re.fullmatch(r"[a-z]+", value.value) else ""
        return ""

    def _moved_to(self) -> Counter[str]:
        """Count the names of devices: arguments of ``x.to(device)`` and ``device=``."""
        used: Counter[str] = Counter()
        for call in self._tree.calls:
            arguments = [keyword_of(call, "device")]
            if isinstance(call.func, ast.Attribute) and call.func.attr == "to":
                arguments += call.args[:1]
            names = [ast.unparse(a) for a in arguments if isinstance(a, (ast.Name, ast.Attribute))]
            used.update(n for n in names if n in self._kinds or re.search(r"(^|[._])(device|dev)$", n))
        return used

    def _moves_to_cuda(self) -> bool:
        """Return whether something is moved to CUDA unconditionally."""
        calls = [call for call, _ in self._tree.method_calls("cuda")]
        return any(not any(isinstance(a, (ast.If, ast.IfExp)) for a in self._tree.ancestors(c)) for c in calls)

    def _with_parameters(self) -> list[str]:
        names = [ast.unparse(owner) for _, owner in self._tree.method_calls("parameters")]
        return [*dict.fromkeys(n for n in names if re.fullmatch(r"[A-Za-z_][\w.]*", n))]

    def _visible(self, name: str, node: ast.AST, line: int | None) -> bool:
        """Return whether a name is bound when a node runs: by an import, by an earlier statement or as a parameter."""
        base = name.split(".")[0]
        if base == "self":
            cls = self._tree.class_of(node)
            attributes = [] if cls is None else [n for n in ast.walk(cls) if isinstance(n, ast.Attribute)]
            return any(name in ast.unparse(n) for n in attributes)
        if base in self._tree.imported:
            return True
        last: int = getattr(node, "lineno", 0) if line is None else line
        for scope in self._tree.scopes(node):
            parameters = arguments_of(scope) if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) else []
            if any(a.arg == base for a in parameters):
                return True
            innermost = scope is self._tree.scopes(node)[0]
            if any(not innermost or s.lineno <= last for s in self._tree.bindings(base, scope)):
                return True
        return False
