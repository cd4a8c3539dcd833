"""Which framework a script trains in, from its own files.

The framework is found from the imports of the script's own files, which are read and not run. It is PyTorch, unless they import
Keras (on any backend) or PaddlePaddle: torch is also a backend of Keras and a data loader for the others, and TensorFlow
without Keras is often imported only for its data sets or summaries. A framework imported under a computed name is
not found. Imports neither torch nor any other framework.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Literal

Framework = Literal["torch", "keras", "paddle"]

MAX_FILES = 200
"""Most files of a script that are read: a large project imports its framework in one of the first."""

_NAMES_CUDA = re.compile(r"cuda|nccl|pin_memory")


def framework_of(target: str, *, kind: Literal["script", "module"]) -> Framework:
    """Return the framework of a script or of a module (by its dotted name), from its own files' imports."""
    imported = _imported_packages(target, kind=kind)
    others: tuple[Framework, ...] = ("paddle", "keras")
    return next((framework for framework in others if framework in imported), "torch")


def _imported_packages(target: str, *, kind: Literal["script", "module"]) -> set[str]:
    """Return the packages that a script and its own files import; TensorFlow's Keras counts as ``keras``."""
    packages = set()
    for _, tree in _own_files(target, kind):
        for name in _imports_of(tree):
            parts = name.split(".")
            packages.add("keras" if parts[:2] == ["tensorflow", "keras"] else parts[0])
    return packages


def needs(package: str, target: str, *, kind: Literal["script", "module"]) -> Literal["no", "perhaps", "surely"]:
    """Return whether a script imports a package, and whether it would fail without it."""
    trees = [tree for _, tree in _own_files(target, kind)]
    if any(_imports(tree, package, conditionally=False) for tree in trees):
        return "surely"
    return "perhaps" if any(_imports(tree, package, conditionally=True) for tree in trees) else "no"


def own_sources(target: str, *, kind: Literal["script", "module"]) -> Iterator[str]:
    """Yield the text of a script and of the files next to it that it imports."""
    for source, _ in _own_files(target, kind):
        yield source.decode(errors="replace")


def own_trees(target: str, *, kind: Literal["script", "module"]) -> Iterator[ast.AST]:
    """Yield the syntax tree of a script and of the files next to it that it imports."""
    for _, tree in _own_files(target, kind):
        yield tree


def names_cuda(target: str, *, kind: Literal["script", "module"]) -> bool:
    """Return whether a script, or a file next to it that it imports, names CUDA, its communication or its pinned memory."""
    return any(map(_NAMES_CUDA.search, own_sources(target, kind=kind)))


def spec_of(module: str) -> ModuleSpec | None:
    """Return where Python would find a module from this folder, None if nowhere; runs no code of its packages."""
    first, *below = module.split(".")
    if not first or not all(below):
        return None
    sys.path.insert(0, "")
    try:
        spec = importlib.util.find_spec(first)  # a name without a dot has no package to run
        for name in below:
            places = None if spec is None else spec.submodule_search_locations
            spec = None if places is None else PathFinder.find_spec(name, list(places))
        return spec
    except (ImportError, ValueError):
        return None
    finally:
        sys.path.pop(0)


def _source_of(module: str) -> Path | None:
    spec = spec_of(module)
    if spec is not None and spec.submodule_search_locations:
        spec = spec_of(f"{module}.__main__")
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _own_files(target: str, kind: Literal["script", "module"]) -> Iterator[tuple[bytes, ast.AST]]:
    """Yield the script, and the files next to it that it imports, each as source and syntax tree."""
    script = _source_of(target) if kind == "module" else Path(target)
    waiting, seen = [] if script is None else [script], set[Path]()
    folder = Path() if script is None else script.resolve().parent
    while waiting and len(seen) < MAX_FILES:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            source = path.read_bytes()
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError):  # the script's own error, which appears when it runs
            continue
        yield source, tree
        for name in _imports_of(tree):
            waiting += [p for p in _files_of(folder, name.split(".")) if p.is_file()]


def _imports(node: ast.AST, package: str, *, conditionally: bool) -> bool:
    """Return whether code imports a package; with ``conditionally``, also in a function or under a condition."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        relative = isinstance(node, ast.ImportFrom) and node.level > 0
        return not relative and package in (name.partition(".")[0] for name in _imports_of(node))
    if not conditionally and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.If)):
        return False
    inner: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.Try) and any(_catches_import_errors(handler) for handler in node.handlers):
        inner = [*node.orelse, *node.finalbody]
    return any(_imports(part, package, conditionally=conditionally) for part in inner)


def _catches_import_errors(handler: ast.ExceptHandler) -> bool:
    caught = "Exception" if handler.type is None else ast.unparse(handler.type)
    reraises = any(isinstance(inner, ast.Raise) for inner in ast.walk(handler))
    return not reraises and any(name in caught for name in ("ImportError", "ModuleNotFoundError", "Exception"))


def _files_of(folder: Path, parts: list[str]) -> list[Path]:
    """Return the files that a name may be imported from: a module, a package, or a module that defines the name's last part."""
    path = folder.joinpath(*parts)
    module = [path.parent.with_suffix(".py")] if len(parts) > 1 else []  # never a file outside the folder
    return [path.with_suffix(".py"), path / "__init__.py", *module]


def _imports_of(tree: ast.AST) -> Iterator[str]:
    tensorflow = {"tensorflow"}
    """TensorFlow's names in this file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            tensorflow |= {alias.asname for alias in node.names if alias.name == "tensorflow" and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):  # from . import model
            yield from (alias.name for alias in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "keras":
            owner = node.value
            if isinstance(owner, ast.Name) and owner.id in tensorflow:
                yield "tensorflow.keras"
