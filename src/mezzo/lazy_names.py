"""Names that a package imports on first use, so that it costs nothing to import.

The package states its imports for type checkers: ``from module import name as name`` below ``if TYPE_CHECKING``. They are read from there.
"""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil


@functools.cache
def modules_by_name(package: str) -> dict[str, str]:
    """Return the module of each public name of a package; read on first use, from an archive as well."""
    source = pkgutil.get_data(package, "__init__.py") or b""
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names if alias.asname}


def value_of(package: str, name: str) -> object:
    """Return a public name of a package.

    Raises:
        AttributeError: the package has no such name.
    """
    modules = modules_by_name(package)
    if name == "__all__":  # asked for by `from package import *`
        return sorted(modules)
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(modules))}")
    return getattr(importlib.import_module(modules[name]), name)
