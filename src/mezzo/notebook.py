"""Mezzo in Jupyter and IPython: a record shows its page, and ``%%mezzo`` runs a cell as a script.

Records know nothing of reports, so the shell learns how to show them: from ``import mezzo`` if the shell runs already, else from
``%load_ext mezzo``. Neither imports a record or a report before one is shown.
"""

from __future__ import annotations

import ast
import codecs
import hashlib
import html
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezzo.temporary import temporary_folder

if TYPE_CHECKING:
    from mezzo.records import AnyRecord

CELLS_FOLDER = Path("runs") / "cells"
"""Where cells are written, under the notebook's folder: tracebacks and records name these files."""
_FIRST_LINE = "# %%mezzo\n"
"""In place of the magic, so that lines have the numbers that the notebook shows."""
_FRAME = "width:100%; height:640px; border:1px solid #8884; border-radius:6px; resize:vertical; overflow:auto"
_SANDBOX = "allow-scripts allow-popups"
"""Rights of a page inside a notebook: it draws and opens links, and neither reads nor styles the notebook."""
_WIDTH = 110
_KEPT_CHARACTERS = 1 << 16
"""How many of the last characters on a command's standard error are kept, to find an error in."""
_UNKNOWN_NAME = re.compile(r"^NameError: name '(\w+)' is not defined", re.MULTILINE)


def show_records(shell: Any) -> None:
    """Make a shell of IPython show a record as its page or, in a terminal, as its text."""
    for kind, show in {"text/html": as_frame, "text/plain": _print_record}.items():
        shell.display_formatter.formatters[kind].for_type_by_name("mezzo.records.values", "WholeRecord", show)


def show_records_in_running_shell() -> None:
    """Make the IPython shell of this process show records, if it has one."""
    running = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if running is not None:
        show_records(running)


def load(shell: Any) -> None:
    """Add ``%mezzo`` and ``%%mezzo`` to a shell, and make it show records."""
    show_records(shell)
    shell.register_magic_function(run_command, magic_kind="line_cell", magic_name="mezzo")


def as_frame(record: AnyRecord) -> str:
    """Return a record's page as an HTML frame, whose styles and scripts are separate from the notebook's."""
    from mezzo.report.html import render_html

    page, title = html.escape(render_html(record)), html.escape(repr(record))
    return f'<iframe title="{title}" sandbox="{_SANDBOX}" style="{_FRAME}" srcdoc="{page}"></iframe>'


def _print_record(record: AnyRecord, printer: Any, cycle: bool) -> None:
    """Print a record as its command does; inside a list, as one line."""
    printer.text(_as_text(record) if len(printer.stack) == 1 else repr(record))


def _as_text(record: AnyRecord) -> str:
    from rich.console import Console

    from mezzo.report.terminal import render

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
        _refuse_magics(cell)
        end = words.index("--") if "--" in words else len(words)
        words = [*words[:end], str(_written(cell)), *words[end + 1 :]]
    if _gives_a_record(words):
        words.insert(1, "--json")
    with temporary_folder() as folder:
        output = folder / "record.json"
        code, errors = _run(words, output)
        if code and cell is not None:
            _point_out_variables(errors)
        return _read(output, code, name=words[0])


def _gives_a_record(words: list[str]) -> bool:
    """Return whether a command prints one record: all but help, an index of a folder, and a report of several records."""
    if words[0].startswith("-") or {"-h", "--help"} & set(words):
        return False
    if words[0] != "report":
        return True
    shown = [path for path in map(Path, words[1:]) if path.exists()]
    return len(shown) == 1 and (shown[0].is_file() or (shown[0] / "record.json").is_file())


def _refuse_magics(cell: str) -> None:
    """Refuse a cell that only IPython can read.

    Raises:
        EndOfCell: it has magics or shell commands.
    """
    from IPython.core.error import UsageError as EndOfCell
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        ast.parse(cell)
    except SyntaxError as error:
        number = error.lineno or 1
    else:
        return
    try:
        ast.parse(TransformerManager().transform_cell(cell))
    except SyntaxError:
        return  # wrong in IPython, too: the command shows where
    line = cell.splitlines()[number - 1].strip()
    raise EndOfCell(
        f"line {number + 1}, {line!r}, is for IPython, and %%mezzo runs the cell as a plain Python script: move it to another cell"
    )


def _point_out_variables(errors: str) -> None:
    """Print which variable the failed cell expected from the notebook, if it has one of that name."""
    from IPython.core.getipython import get_ipython

    found, shell = _UNKNOWN_NAME.search(errors), get_ipython()
    if found and shell is not None and found[1] in shell.user_ns and found[1] not in shell.user_ns_hidden:
        print(f"mezzo: {found[1]} is a variable of the notebook, and the cell sees none of them: define it in the cell")


def _written(cell: str) -> Path:
    """Write a cell to a file that is named after its text, so that no record ever names another cell's lines."""
    text = _FIRST_LINE + cell
    path = CELLS_FOLDER / f"cell-{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _run(words: list[str], path: Path) -> tuple[int, str]:
    """Run a command, its standard output in the file ``path``; print its standard error, and return its exit code and that text's end."""
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}  # the notebook's own
    # A script finds the modules next to itself, a notebook those in its folder; a cell does both.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "mezzo", *words]
    errors = ""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with (
        path.open("wb") as output,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE
        ) as process,
    ):
        assert process.stderr is not None
        while True:
            try:
                part = os.read(process.stderr.fileno(), 1 << 16)
            except KeyboardInterrupt:  # the command ends its runs and writes its record so far
                process.send_signal(signal.SIGINT)
                continue
            text = decoder.decode(part, final=not part)
            errors = (errors + text)[-_KEPT_CHARACTERS:]
            print(text, end="", flush=True)
            if not part:
                return process.wait(), errors


def _read(output: Path, code: int, *, name: str) -> AnyRecord | None:
    from IPython.core.error import UsageError as EndOfCell  # one line instead of a traceback

    from mezzo.records import read_record

    text = output.read_text(encoding="utf-8", errors="replace")
    if text.startswith("{"):
        if code:
            print(f"mezzo: exit code {code}")
        return read_record(output)
    print(text, end="")
    if code:
        raise EndOfCell(f"mezzo {name} ended with exit code {code} and without a record; the reason is printed above")
    return None
