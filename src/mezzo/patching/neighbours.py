"""The file next to a script that contains its training loop, if the script itself has none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from mezzo.patching.outcome import Unclear, unclear
from mezzo.patching.reading import ScriptFacts
from mezzo.patching.styles import frameworks, paddle_fit
from mezzo.patching.text import Text

_MOST_FILES = 100


def neighbour_with_loop(path: Path) -> Path | None:
    """Return the one imported file next to a script that trains; None if there is none.

    Raises:
        Unclear: several files train.
    """
    folder, waiting, seen = path.absolute().parent, [path.absolute()], set[Path]()
    with_loop: list[Path] = []
    while waiting and len(seen) < _MOST_FILES:
        here = waiting.pop(0)
        if here in seen:
            continue
        seen.add(here)
        try:
            script = ScriptFacts(Text.read(here))
        except (Unclear, SyntaxError, ValueError):
            continue
        trains = script.backwards or frameworks.trainer_of(script) is not None or paddle_fit.preparations(script)
        if here != path.absolute() and trains:
            with_loop.append(here)
        waiting += [file for name in _imported(script.tree.module) for file in _files(folder, here.parent, name)]
    if len(with_loop) > 1:
        names = ", ".join(file.name for file in with_loop)
        unclear(f"several files next to {path.name} have training loops: {names}", "pass the one to patch")
    return with_loop[0] if with_loop else None


def _imported(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield base
            yield from (f"{base}.{alias.name}".strip(".") for alias in node.names)


def _files(script_folder: Path, folder: Path, name: str) -> list[Path]:
    parts = [part for part in name.split(".") if part]
    places = [place.joinpath(*parts) for place in (script_folder, folder) if parts]
    return [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
