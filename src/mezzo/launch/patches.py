"""Replace attributes of other packages, as soon as they are imported, and restore every one of them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Patches:
    """A list of replaced attributes; ``undo`` restores them in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Set ``owner.name`` to ``new`` until ``undo``."""
        defined = name in vars(owner)
        old = vars(owner)[name] if defined else getattr(owner, name)
        setattr(owner, name, new)
        # Some of torch's settings are computed attributes: setting them does not put them into the owner's ``__dict__``.
        inherited = not defined and name in vars(owner)
        self._undo.append(lambda: delattr(owner, name) if inherited else setattr(owner, name, old))

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Set ``owner.name`` to ``make(owner.name)`` until ``undo``."""
        self.replace(owner, name, make(getattr(owner, name)))

    def around(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Make ``owner.name`` run ``call(original, ...)`` with its arguments until ``undo``.

        For functions that run often use ``wrap``, which costs one Python call less.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        self.replace(owner, name, called)

    def on_undo(self, action: Callable[[], Any]) -> None:
        """Run ``action`` at ``undo``."""
        self._undo.append(action)

    def undo(self) -> None:
        """Restore everything, the last replacement first."""
        while self._undo:
            self._undo.pop()()


# A script chooses Keras' backend before it imports Keras (``os.environ["KERAS_BACKEND"] = "torch"``), and TensorFlow's devices before
# it uses them. So Mezzo must import neither before the script does, nor any library that the script may never need.


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
