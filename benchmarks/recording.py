"""Record a terminal session as a picture: real commands, run now, with their output; part of ``make readme``.

The output of a command is shown from its headline to a named section; the picture marks every cut with dots.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURE = "docs/images/session.svg"
WIDTH = 96
LARGEST_BYTES = 60_000


class Shown(NamedTuple):
    """A command, and the part of its output to show."""

    command: str
    begins: str
    """Words of the first line."""
    until: str
    """The heading of the first section that is left out."""


SESSION = [
    Shown("mezzo doctor", begins="computes natively", until="TF32"),
    Shown(
        "mezzo compare --policies fp32,fp16 examples/digits.py --epochs 4", begins=" like ", until="Memory of a step"
    ),
    Shown(
        "mezzo diagnose --policy fp16 tests/scripts/fragile.py", begins="under fp16", until="What the operation read"
    ),
]
"""The commands of the picture. Policies that are emulated here claim no speed, so that no time of a busy machine is shown as a gain."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def printed(command: str, folder: Path) -> str:
    """Run a command as typed, in ``folder``, and return its standard output, with colours."""
    program, *words = shlex.split(command)
    assert program == "mezzo"
    environment = {**os.environ, "COLUMNS": str(WIDTH), "FORCE_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mezzo", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.stdout


def part(output: str, shown: Shown) -> list[str]:
    """Return the lines of an output that are shown.

    Raises:
        SystemExit: the output has no such part.
    """
    lines = output.splitlines()
    plain = [_ANSI.sub("", line).strip() for line in lines]
    first = next((n for n, line in enumerate(plain) if shown.begins in line), None)
    last = next((n for n, line in enumerate(plain) if first is not None and n > first and line == shown.until), None)
    if first is None or last is None:
        raise SystemExit(f"{shown.command} printed no part from {shown.begins!r} to {shown.until!r}:\n{output}")
    kept = lines[first:last]
    while not _ANSI.sub("", kept[-1]).strip():
        kept.pop()
    return [*(["..."] if any(plain[:first]) else []), *kept, "..."]


def drawn(parts: list[tuple[str, list[str]]]) -> str:
    """Return commands and their lines as an SVG that needs nothing from outside."""
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True, color_system="truecolor")
    for number, (command, lines) in enumerate(parts):
        if number:
            console.print()
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        for line in lines:
            console.print(Text.from_ansi(line.rstrip()), soft_wrap=True)
    template = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.S)  # fonts of another site
    return console.export_svg(title="mezzo", code_format=template, unique_id="mezzo")


def record_session(picture: Path = ROOT / PICTURE) -> None:
    """Run the commands of the session and write the picture.

    Raises:
        SystemExit: the picture would be larger than a page can bear.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in ("examples", "tests"):  # the commands' records stay out of the repository
            (Path(folder) / name).symlink_to(ROOT / name)
        parts = [(shown.command, part(printed(shown.command, Path(folder)), shown)) for shown in SESSION]
    text = drawn(parts)
    if len(text.encode()) > LARGEST_BYTES:
        raise SystemExit(
            f"the picture has {len(text.encode())} bytes; allowed: {LARGEST_BYTES}. Show less of an output"
        )
    picture.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    record_session()
