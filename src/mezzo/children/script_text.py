"""What the text of a script says before it runs: its own files, what they import and name. Imports no package.

A library is imported once for all runs of a command if its import reads nothing but environment variables with the listed beginnings, and
needs longer than a short run. A script that imports something of its own before it, or names such a variable, imports it in each run.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["script", "module"]

MAX_FILES = 200
"""Most files of a script that are read: a large project imports its framework in one of the first."""

_NAMES_CUDA = re.compile(r"cuda|nccl|pin_memory")
_READS = {"sklearn": r"SCIPY_|SKLEARN_|JOBLIB_|LOKY_", "scipy": r"SCIPY_"}
"""The beginnings of the environment variables that each library or its dependencies read on import."""


def needs(package: str, target: str, *, kind: Kind) -> Literal["no", "perhaps", "surely"]:
    """Return whether a script imports a package, and whether it would fail without it."""
    trees = [tree for _, tree in own_files(target, kind)]
    if any(_imports(tree, package, conditionally=False) for tree in trees):
        return "surely"
    return "perhaps" if any(_imports(tree, package, conditionally=True) for tree in trees) else "no"


def own_sources(target: str, *, kind: Kind) -> Iterator[str]:
    """Yield the text of a script and of the files next to it that it imports."""
    for source, _ in own_files(target, kind):
        yield source.decode(errors="replace")


def own_trees(target: str, *, kind: Kind) -> Iterator[ast.AST]:
    """Yield the syntax tree of a script and of the files next to it that it imports."""
    for _, tree in own_files(target, kind):
        yield tree


def names_cuda(target: str, *, kind: Kind) -> bool:
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


def own_files(target: str, kind: Kind) -> Iterator[tuple[bytes, ast.AST]]:
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
        for name in imports_of(tree):
            waiting += [p for p in _files_of(folder, name.split(".")) if p.is_file()]


def _imports(node: ast.AST, package: str, *, conditionally: bool) -> bool:
    """Return whether code imports a package; with ``conditionally``, also in a function or under a condition."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        relative = isinstance(node, ast.ImportFrom) and node.level > 0
        return not relative and package in (name.partition(".")[0] for name in imports_of(node))
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


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that code imports, or reads as attributes of imported modules: ``np.random``."""
    modules: dict[str, str] = {}
    """The imported modules by their names in this file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):  # from . import model
            yield from (alias.name for alias in node.names)
    read = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    yield from dict.fromkeys(f"{modules[name]}.{node.attr}" for node in read if (name := node.value.id) in modules)  # type: ignore[attr-defined]


def shared_libraries(target: str, *, kind: Kind) -> list[str]:
    """Return the modules of listed and installed libraries that a script imports before it runs anything of its own."""
    files = list(files_to_search(target, kind=kind))
    try:
        tree = ast.parse(files[0].read_bytes())
    except (OSError, SyntaxError, ValueError):  # the script's own error, which appears when it runs
        return []
    texts = [text for file in files if (text := _text_of(file))]
    names = dict.fromkeys(_first_imports(tree, files[0].resolve().parent))
    return [name for name in names if (library := name.partition(".")[0]) in _READS and _may_share(library, texts)]


def files_to_search(target: str, *, kind: Kind) -> Iterator[Path]:
    """Yield the file of a script or of a module, and the Python files next to it."""
    script = Path(target)
    if kind == "module":
        spec = spec_of(target)
        script = Path(spec.origin if spec is not None and spec.origin is not None else "")
    yield script
    yield from sorted(script.resolve().parent.glob("*.py"))[:MAX_FILES]


def _text_of(file: Path) -> bytes:
    with contextlib.suppress(OSError):
        return file.read_bytes()
    return b""


def _may_share(library: str, texts: list[bytes]) -> bool:
    variable = re.compile(_READS[library].encode())
    return importlib.util.find_spec(library) is not None and not any(map(variable.search, texts))


def _first_imports(tree: ast.Module, folder: Path) -> Iterator[str]:
    """Yield the modules that a script imports before its first statement of another kind, and before a module of its own."""
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # the script's docstring
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names = [node.module]
        else:
            return
        if any(os.path.exists(folder / name.partition(".")[0]) or _is_file(folder, name) for name in names):
            return
        yield from names


def _is_file(folder: Path, name: str) -> bool:
    return folder.joinpath(name.partition(".")[0]).with_suffix(".py").is_file()
