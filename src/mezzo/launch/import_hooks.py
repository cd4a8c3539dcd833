"""Run an action as soon as any code has imported a package.

A script chooses Keras' backend before it imports Keras (``os.environ["KERAS_BACKEND"] = "torch"``), and TensorFlow's devices before
it uses them. So Mezzo must import neither before the script does, nor any library that the script may never need.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from mezzo.launch.patches import Patches


def after_import(name: str, action: Callable[[], None], patches: Patches) -> None:
    """Call ``action`` once the package ``name`` has been imported: now if it already has, never after ``patches`` are undone."""
    if name in sys.modules:
        action()
        return
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    patches.on_undo(lambda: sys.meta_path.remove(finder))


class _Finder(MetaPathFinder):
    """A finder of one package, which runs the action once the package has been loaded."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name, self._action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the package, with its loader wrapped."""
        if fullname != self._name:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]  # another may wait for the same package
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._action)
        return spec


class _Loader(Loader):
    """A loader that wraps another, then runs the action."""

    def __init__(self, loader: Any, action: Callable[[], None]) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Let the other loader create the module."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, then the action, once."""
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._action()
