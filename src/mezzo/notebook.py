"""Mezzo in Jupyter and IPython: a record shows its page, and ``%%mezzo`` runs a cell as a script.

Records know nothing of reports, so it is the shell that is told how to show them: by ``import mezzo`` if it runs by then, else by
``%load_ext mezzo``. Neither imports a record or a report before one is shown.
"""

from __future__ import annotations

import codecs
import hashlib
import html
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mezzo.records import AnyRecord

CELLS = Path("runs") / "cells"
"""Where cells are written, under the notebook's folder: tracebacks and records name these files."""
_FIRST_LINE = "# %%mezzo\n"
"""In the place of the magic, so that lines have the numbers that the notebook shows."""
_FRAME = "width:100%; height:640px; border:1px solid #8884; border-radius:6px; resize:vertical; overflow:auto"
_SANDBOX = "allow-scripts allow-popups"
"""Rights of a page inside a notebook: it draws and opens links, and neither reads nor styles the notebook."""
_WIDTH = 110


def show_records(shell: Any) -> None:
    """Make a shell of IPython show a record as its page or, in a terminal, as its text."""
    for kind, show in {"text/html": as_frame, "text/plain": _print_record}.items():
        shell.display_formatter.formatters[kind].for_type_by_name("mezzo.records.values", "WholeRecord", show)


def show_records_in_running_shell() -> None:
    """Do so in the shell of this process, if it has one."""
    running = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if running is not None:
        show_records(running)


def load(shell: Any) -> None:
    """Add ``%mezzo`` and ``%%mezzo`` to a shell, and make it show records."""
    show_records(shell)
    shell.register_magic_function(run_command, magic_kind="line_cell", magic_name="mezzo")


def as_frame(record: AnyRecord) -> str:
    """Return a record's page as an element of a notebook, with styles and scripts of its own."""
    from mezzo.report.html import render_html

    page, title = html.escape(render_html(record)), html.escape(repr(record))
    return f'<iframe title="{title}" sandbox="{_SANDBOX}" style="{_FRAME}" srcdoc="{page}"></iframe>'


def _print_record(record: AnyRecord, printer: Any, cycle: bool) -> None:
    """Print a record as its command does; inside a list, as one line."""
    printer.text(_as_text(record) if len(printer.stack) == 1 else repr(record))


def _as_text(record: AnyRecord) -> str:
    from rich.console import Console

    from mezzo.report.text import render

    printed = io.StringIO()
    render(record, Console(file=printed, width=shutil.get_terminal_size((_WIDTH, 0)).columns, highlight=False))
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def run_command(line: str, cell: str | None = None) -> AnyRecord | None:
    """Run a command of Mezzo, and return its record, which the notebook shows.

    ``%%mezzo compare --policies fp32,bf16`` runs the rest of the cell as a script, in a process of its own: it sees none of the
    notebook's variables. The cell is kept in ``runs/cells``. Arguments of the script follow a lone ``--``.

    ``%mezzo compare train.py`` runs a file.
    """
    words = shlex.split(line)
    if not words:
        from IPython.core.error import UsageError as EndOfCell

        raise EndOfCell("name a command: %%mezzo compare --policies fp32,bf16, or %mezzo --help")
    if cell is not None:
        end = words.index("--") if "--" in words else len(words)
        words = [*words[:end], str(_written(cell)), *words[end + 1 :]]
    if not words[0].startswith("-") and not {"-h", "--help"} & set(words):
        words.insert(1, "--json")
    with tempfile.TemporaryDirectory(prefix="mezzo-") as folder:
        answer = Path(folder) / "record.json"
        code = _run(words, answer)
        return _read(answer, code, name=words[0])


def _written(cell: str) -> Path:
    """Write a cell to a file that is named after its text, so that no record ever names another cell's lines."""
    text = _FIRST_LINE + cell
    path = CELLS / f"cell-{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _run(words: list[str], answer: Path) -> int:
    """Run a command, its standard output in the file ``answer``, the rest printed as it comes; return its exit code."""
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}  # the notebook's own
    # A script finds the modules beside itself, a notebook those in its folder; a cell is both.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "mezzo", *words]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with (
        answer.open("wb") as output,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE
        ) as process,
    ):
        assert process.stderr is not None
        while True:
            try:
                part = os.read(process.stderr.fileno(), 1 << 16)
            except KeyboardInterrupt:  # the command ends its runs and writes what it has
                process.send_signal(signal.SIGINT)
                continue
            print(decoder.decode(part, final=not part), end="", flush=True)
            if not part:
                return process.wait()


def _read(answer: Path, code: int, *, name: str) -> AnyRecord | None:
    from IPython.core.error import UsageError as EndOfCell  # one line instead of a traceback

    from mezzo.records import read_record

    text = answer.read_text(encoding="utf-8", errors="replace")
    if text.startswith("{"):
        if code:
            print(f"mezzo: exit code {code}")
        return read_record(answer)
    print(text, end="")
    if code:
        raise EndOfCell(f"mezzo {name} ended with exit code {code} and without a record; why is printed above")
    return None
