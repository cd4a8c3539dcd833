"""Name the modules of a script by their paths in the model: ``body``, and ``body.0`` inside it. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable
from typing import Any, Protocol

SCRIPT = "(script)"
"""Stands for a module's name in code outside any module."""


def covered(name: str, kept: Iterable[str]) -> bool:
    """Return whether ``name`` is one of ``kept`` or lies inside one."""
    return any(name == other or name.startswith(f"{other}.") for other in kept)


def outermost(names: Iterable[str]) -> tuple[str, ...]:
    """Return ``names`` sorted, each once, without those that lie inside another."""
    unique = sorted(set(names))
    return tuple(name for name in unique if not covered(name, [other for other in unique if other != name]))


def free_title(name: str, taken: Container[str]) -> str:
    """Return a name, with a number if it is taken: ``Linear``, ``Linear#2``."""
    numbered = (f"{name}#{number}" for number in itertools.count(2))
    return next(title for title in itertools.chain([name], numbered) if title not in taken)


class NamedTree(Protocol):
    """The modules inside a model, as a framework knows them."""

    def title(self, root: Any) -> str:
        """Return the name of a model."""

    def modules(self, root: Any) -> Iterable[tuple[str, Any]]:
        """Return every module with its path, which is empty for ``root`` and for wrappers around it."""

    def parameters(self, module: Any) -> Iterable[tuple[str, Any]]:
        """Return the parameters of ``module`` itself, not of modules inside it, with their names."""


class Names:
    """The paths of modules and parameters.

    Roots are the modules called from outside any module. With one root that has children, paths begin below it, as ``fp32_modules``
    patterns do; with several, they begin with the root's class. A root without children, such as a loss, is named by its class.
    """

    no_path = "a weight outside any module"
    """Stands for the path of a parameter that is in no root."""

    def __init__(self, roots: Iterable[Any], tree: NamedTree) -> None:
        self._tree = tree
        self._modules: dict[int, str] = {}
        self._parameters: dict[int, str] = {}
        self._patterns: dict[int, str] = {}
        self._weights: dict[int, str] = {}
        self.roots = list(dict.fromkeys(roots))
        inner = {id(child) for root in self.roots for _, child in tree.modules(root) if child is not root}
        self.outermost = [root for root in self.roots if id(root) not in inner]
        models = [root for root in self.outermost if any(child is not root for _, child in tree.modules(root))]
        for root in self.outermost:
            title = free_title(tree.title(root), set(self._modules.values()))
            self._add(root, title, prefix="" if models == [root] else f"{title}.")

    def of(self, module: Any | None) -> str:
        """Return the path of ``module``, or its class if it is in no root."""
        if module is None:
            return SCRIPT
        return self._modules.get(id(module)) or type(module).__name__

    def pattern(self, module: Any | None) -> str:
        """Return the name of ``module`` in ``fp32_modules``; empty for the model itself and for code outside any module."""
        return "" if module is None else self._patterns.get(id(module), "")

    def patterns(self) -> list[str]:
        """Return the names that patterns may match, the first model's first."""
        return list(dict.fromkeys(filter(None, self._patterns.values())))

    def of_parameter(self, identity: int) -> str:
        """Return the path of the module with the parameter of this identity."""
        return self._parameters.get(identity, SCRIPT)

    def parameter(self, parameter: Any) -> str:
        """Return the path of a parameter."""
        return self._weights.get(id(parameter), self.no_path)

    def _add(self, root: Any, title: str, *, prefix: str) -> None:
        for bare, module in self._tree.modules(root):
            name = f"{prefix}{bare}" if bare else title
            self._modules.setdefault(id(module), name)
            self._patterns.setdefault(id(module), bare)
            for local_name, parameter in self._tree.parameters(module):
                self._parameters.setdefault(id(parameter), name)
                self._weights.setdefault(id(parameter), f"{name}.{local_name}" if bare else local_name)
