"""The size of the source, and the modules and imports of each package: ``python tests/project/packages.py [REVISION]``.

A package is a folder of src/mezzo. Its modules are its files and its subpackages. Imports are counted between modules of one package,
also inside functions, but not for type checkers; levels are the modules on the longest chain of imports.
"""

from __future__ import annotations

import ast
import subprocess
import sys

from test_laws import imports_of, module_of

Imports = set[tuple[str, str]]


def sources_of(revision: str) -> dict[str, str]:
    """Return the source files of a revision by their paths under src/mezzo."""
    listed = _git("ls-tree", "-r", "--name-only", revision, "src/mezzo").split()
    return {
        path.removeprefix("src/mezzo/"): _git("show", f"{revision}:{path}") for path in listed if path.endswith(".py")
    }


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def modules_of(package: str, sources: dict[str, str]) -> set[str]:
    """Return the files and subpackages of a package."""
    return {path.split("/")[1].removesuffix(".py") for path in sources if path.startswith(f"{package}/")} - {"__init__"}


def inner_imports_of(package: str, sources: dict[str, str]) -> Imports:
    """Return which module of a package imports which other."""
    modules, names = {module_of(path) for path in sources}, modules_of(package, sources)
    found: Imports = set()
    for path, source in sources.items():
        name = path.split("/")[1].removesuffix(".py") if path.startswith(f"{package}/") else "__init__"
        if name == "__init__":
            continue
        for one in imports_of(source, path, modules):
            _, target_package, target, *_ = [*one.target.split("."), "", ""]
            if one.kind != "type" and target_package == package and target in names - {name}:
                found.add((name, target))
    return found


def levels_of(names: set[str], imports: Imports) -> int:
    """Return the modules on the longest chain of imports; an import that closes a circle counts for nothing."""
    known: dict[str, int] = {}
    ordered = sorted(imports)  # in a circle, the import that is followed last counts for nothing

    def level(name: str, passed: tuple[str, ...]) -> int:
        if name not in known:
            known[name] = 1 + max(
                (level(b, (*passed, b)) for a, b in ordered if a == name and b not in passed), default=0
            )
        return known[name]

    return max((level(name, (name,)) for name in sorted(names)), default=0)


def main(revision: str) -> None:
    """Print the size of a revision, and each of its packages."""
    sources = sources_of(revision)
    statements = sum(isinstance(node, ast.stmt) for text in sources.values() for node in ast.walk(ast.parse(text)))
    print(f"src: {len(sources)} files, {statements} statements")
    for package in sorted({path.split("/")[0] for path in sources if "/" in path}):
        names, imports = modules_of(package, sources), inner_imports_of(package, sources)
        subpackages = {path.split("/")[1] for path in sources if path.startswith(f"{package}/") and path.count("/") > 1}
        print(
            f"{package}: {len(names)} modules ({len(subpackages)} subpackages), {len(imports)} imports, {levels_of(names, imports)} levels"
        )
        for name in sorted(names):
            targets = sorted(b for a, b in imports if a == name)
            print(f"    {name}{'/' if name in subpackages else ''}{' -> ' if targets else ''}{', '.join(targets)}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "HEAD")
