"""The libraries that a script imports first, where the runs of a command can share that import. Imports neither torch nor a library.

A library is listed if its import reads nothing but environment variables with the listed beginnings, and needs longer than a short run.
A script that imports something of its own before it, or names such a variable, imports it in each run.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from mezzo.launch.frameworks import MAX_FILES, spec_of

_READS = {"sklearn": r"SCIPY_|SKLEARN_|JOBLIB_|LOKY_", "scipy": r"SCIPY_"}
"""The beginnings of the environment variables that each library, or one that it needs, reads when it is imported."""


def shared_libraries(target: str, *, kind: Literal["script", "module"]) -> list[str]:
    """Return the modules of listed and installed libraries that a script imports before it runs anything of its own."""
    files = list(files_to_search(target, kind=kind))
    try:
        tree = ast.parse(files[0].read_bytes())
    except (OSError, SyntaxError, ValueError):  # the script's own error, which appears when it runs
        return []
    texts = [text for file in files if (text := _text_of(file))]
    names = dict.fromkeys(_first_imports(tree, files[0].resolve().parent))
    return [name for name in names if (library := name.partition(".")[0]) in _READS and _may_share(library, texts)]


def files_to_search(target: str, *, kind: Literal["script", "module"]) -> Iterator[Path]:
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
