"""Which framework a script trains in, from its own files.

The framework is found from the imports of the script's own files, which are read and not run. It is PyTorch, unless they import
Keras (on any backend) or PaddlePaddle: torch is also a backend of Keras and a data loader for the others, and TensorFlow
without Keras is often imported only for its data sets or summaries. A framework imported under a computed name is
not found. Imports neither torch nor any other framework.
"""

from __future__ import annotations

from typing import Literal

from mezzo.children.script_text import Kind, imports_of, own_trees

Framework = Literal["torch", "keras", "paddle"]


def framework_of(target: str, *, kind: Kind) -> Framework:
    """Return the framework of a script or of a module (by its dotted name), from its own files' imports."""
    imported = _imported_packages(target, kind=kind)
    others: tuple[Framework, ...] = ("paddle", "keras")
    return next((framework for framework in others if framework in imported), "torch")


def _imported_packages(target: str, *, kind: Kind) -> set[str]:
    """Return the packages that a script and its own files import; TensorFlow's Keras counts as ``keras``."""
    packages = set()
    for tree in own_trees(target, kind=kind):
        for name in imports_of(tree):
            parts = name.split(".")
            packages.add("keras" if parts[:2] == ["tensorflow", "keras"] else parts[0])
    return packages
