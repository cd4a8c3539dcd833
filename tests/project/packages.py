"""The size of the source, and the modules and imports of each package: ``python tests/project/packages.py [REVISION [COMMIT...]]``.

A package is a folder of src/mezzo. Its modules are its files and its subpackages. Imports are counted between modules of one package,
also inside functions, but not for type checkers; levels are the modules on the longest chain of imports. For each COMMIT: the files of
the source that it changed, and how many files hold that code in REVISION.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter

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


def _subject(commit: str) -> str:
    return _git("log", "-1", "--format=%s", commit).strip()


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


def files_now(commit: str, sources: dict[str, str]) -> tuple[int, int]:
    """Return how many files a commit changed, and in how many files of ``sources`` most of the code of each lies."""
    homes: dict[str, set[str]] = {}
    for path, text in sources.items():
        for name in _defined(text):
            homes.setdefault(name, set()).add(path)
    changed = _git("show", "--name-only", "--format=", "--diff-filter=AM", commit, "--", "src").split()
    changed = [path for path in changed if path.endswith(".py")]
    now = set()
    for path in changed:
        votes: Counter[str] = Counter()
        for name in _defined(_git("show", f"{commit}:{path}")):
            for home in homes.get(name, ()):
                votes[home] += 1 / len(homes[name])  # a name with many homes says little
        now |= {home for home, _ in votes.most_common(1)}
    return len(changed), len(now)


def _defined(text: str) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def main(revision: str, *commits: str) -> None:
    """Print the size of a revision, each of its packages, and where the code of ``commits`` lies in it."""
    sources = sources_of(revision)
    statements = sum(isinstance(node, ast.stmt) for text in sources.values() for node in ast.walk(ast.parse(text)))
    print(f"src: {len(sources)} files, {statements} statements")
    for commit in commits:
        print(commit, "changed {} files, which are {} now:".format(*files_now(commit, sources)), _subject(commit))
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
    main(*sys.argv[1:] or ["HEAD"])
