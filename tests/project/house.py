"""Draw the house: ``python tests/project/house.py [REVISION]`` prints the rooms of every hall and the arrows between them.

A hall is a folder of src/mezzo. Its rooms are its files, and each wing (a folder inside it) as one room. An arrow is one room that
imports another of the same hall, also inside functions, but not for type checkers; floors are the longest way along arrows.
"""

from __future__ import annotations

import ast
import subprocess
import sys

from test_laws import imports_of, module_of

Arrows = set[tuple[str, str]]


def sources_of(revision: str) -> dict[str, str]:
    """Return the source files of a revision by their paths under src/mezzo."""
    listed = _git("ls-tree", "-r", "--name-only", revision, "src/mezzo").split()
    return {
        path.removeprefix("src/mezzo/"): _git("show", f"{revision}:{path}") for path in listed if path.endswith(".py")
    }


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def rooms_of(hall: str, sources: dict[str, str]) -> set[str]:
    """Return the files and wings of a hall."""
    return {path.split("/")[1].removesuffix(".py") for path in sources if path.startswith(f"{hall}/")} - {"__init__"}


def arrows_of(hall: str, sources: dict[str, str]) -> Arrows:
    """Return which room of a hall imports which other one."""
    modules, rooms = {module_of(path) for path in sources}, rooms_of(hall, sources)
    found: Arrows = set()
    for path, source in sources.items():
        room = path.split("/")[1].removesuffix(".py") if path.startswith(f"{hall}/") else "__init__"
        if room == "__init__":
            continue
        for one in imports_of(source, path, modules):
            _, target_hall, target, *_ = [*one.target.split("."), "", ""]
            if one.kind != "type" and target_hall == hall and target in rooms - {room}:
                found.add((room, target))
    return found


def floors_of(rooms: set[str], arrows: Arrows) -> int:
    """Return the rooms on the longest way along arrows; an arrow that closes a ring counts for nothing."""
    known: dict[str, int] = {}
    ordered = sorted(arrows)  # in a ring, the arrow that is followed last counts for nothing

    def height(room: str, passed: tuple[str, ...]) -> int:
        if room not in known:
            known[room] = 1 + max(
                (height(b, (*passed, b)) for a, b in ordered if a == room and b not in passed), default=0
            )
        return known[room]

    return max((height(room, (room,)) for room in sorted(rooms)), default=0)


def main(revision: str) -> None:
    """Print the size of a revision, and every hall of it."""
    sources = sources_of(revision)
    statements = sum(isinstance(node, ast.stmt) for text in sources.values() for node in ast.walk(ast.parse(text)))
    print(f"src: {len(sources)} files, {statements} statements")
    for hall in sorted({path.split("/")[0] for path in sources if "/" in path}):
        rooms, arrows = rooms_of(hall, sources), arrows_of(hall, sources)
        wings = {path.split("/")[1] for path in sources if path.startswith(f"{hall}/") and path.count("/") > 1}
        print(
            f"{hall}: {len(rooms)} rooms ({len(wings)} wings), {len(arrows)} arrows, {floors_of(rooms, arrows)} floors"
        )
        for room in sorted(rooms):
            targets = sorted(b for a, b in arrows if a == room)
            print(f"    {room}{'/' if room in wings else ''}{' -> ' if targets else ''}{', '.join(targets)}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "HEAD")
