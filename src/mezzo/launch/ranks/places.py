"""Where each process of a hanging run is, from the traceback that it writes when it is asked. Imports no torch.

``faulthandler`` writes it from a signal handler in C, so also of a process that is blocked in native code.
"""

from __future__ import annotations

import faulthandler
import re
import signal
from pathlib import Path
from typing import NamedTuple

from mezzo.launch.request import Request

ASKS = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else None
"""The signal that asks for the traceback."""

_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
_LIBRARIES = re.compile(r"[\\/](?:site-packages|dist-packages|mezzo)[\\/]|[\\/]lib[\\/]python\d|^<")
_WAITS = re.compile(
    r"[\\/]torch[\\/](?:distributed[\\/]|autograd[\\/]graph\.py|nn[\\/]parallel[\\/]distributed\.py|cuda[\\/]|utils[\\/]_foreach)"
)
"""Files of torch in which a process waits for others, or for its device, which may be waiting for others."""


class Place(NamedTuple):
    """Where a script is."""

    where: str
    """The innermost line of the script's own files, as ``train.py:31 in load``."""
    waiting: bool
    """Whether it waits there for other processes."""


def answer_with_place(path: Path) -> None:
    """Have this process write its traceback to ``path`` when it is asked."""
    if ASKS is not None:
        faulthandler.register(ASKS, file=path.open("w"), all_threads=True)


def place_left(request: Request) -> Place:
    """Return the place that the process of a run has left, and delete its file."""
    place = place_in(request.place_file)
    request.place_file.unlink(missing_ok=True)
    return place


def place_in(path: Path) -> Place:
    """Return the place in a traceback; empty if there is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Place("", False)
    main = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)[-1]  # the newest thread is first
    frames = [(m["file"], m["line"], m["function"]) for m in _FRAME.finditer(main)]  # the innermost first
    own = next((n for n, (file, _, _) in enumerate(frames) if not _LIBRARIES.search(file)), None)
    if own is None:
        return Place("", False)
    file, line, function = frames[own]
    inside = "" if function == "<module>" else f" in {function}"
    waiting = any(_WAITS.search(inner) for inner, _, _ in frames[:own])
    return Place(f"{Path(file).name}:{line}{inside}", waiting)
