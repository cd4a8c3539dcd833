"""Where each process of a hanging run is, from the traceback that it writes when a signal asks for it. Imports no torch.

``faulthandler`` writes the traceback from a signal handler in C, so that even a process blocked in native code answers.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

from mezzo.launch.request import Request

POSITION_SIGNAL = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else None
"""The signal that asks for the traceback."""

_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
_OURS = str(Path(__file__).parents[2]) + os.sep
_LIBRARIES = re.compile(rf"^{re.escape(_OURS)}|[\\/](?:site-packages|dist-packages)[\\/]|[\\/]lib[\\/]python\d|^<")
_WAITING = re.compile(
    r"[\\/]torch[\\/](?:distributed[\\/]|autograd[\\/]graph\.py|nn[\\/]parallel[\\/]distributed\.py|cuda[\\/]|utils[\\/]_foreach)"
)
"""Files of torch in which a process waits for others, or for its device, which may itself wait for others."""

_WRITTEN_S, _LOOKS_EVERY_S = 10.0, 0.1
"""Time for a process to write its traceback: milliseconds, but for one that is starved or stuck."""


class ScriptPosition(NamedTuple):
    """Where a script is."""

    where: str
    """The innermost line in the script's own files, such as ``train.py:31 in load``."""
    waiting: bool
    """Whether the script waits there for other processes."""


def write_position_on_signal(path: Path) -> None:
    """Write this process's traceback to ``path`` whenever it receives ``POSITION_SIGNAL``; the file exists once the handler does."""
    if POSITION_SIGNAL is not None:
        unready = path.with_name(f"{path.name}.part")
        faulthandler.register(POSITION_SIGNAL, file=unready.open("w"), all_threads=True)
        unready.replace(path)  # only now: a signal without a handler would end the process


def wait_for_position(path: Path) -> None:
    """Wait until a signalled process has written its traceback: its main thread comes last, so until the file grows no more."""
    end_s, seen_bytes = time.monotonic() + _WRITTEN_S, 0
    while time.monotonic() < end_s and path.exists():
        size_bytes = path.stat().st_size
        if 0 < size_bytes == seen_bytes:
            return
        seen_bytes = size_bytes
        time.sleep(_LOOKS_EVERY_S)


def take_position(request: Request) -> ScriptPosition:
    """Return the position that a run's process has reported, and delete its file."""
    position = position_in(request.position_file)
    request.position_file.unlink(missing_ok=True)
    return position


def position_in(path: Path) -> ScriptPosition:
    """Return the position in a file with a traceback; an empty one if there is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ScriptPosition("", False)
    main = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)[-1]  # the newest thread is first
    frames = [(m["file"], m["line"], m["function"]) for m in _FRAME.finditer(main)]  # the innermost first
    innermost = next((n for n, (file, _, _) in enumerate(frames) if not _LIBRARIES.search(file)), None)
    if innermost is None:
        return ScriptPosition("", False)
    file, line, function = frames[innermost]
    inside = "" if function == "<module>" else f" in {function}"
    waiting = any(_WAITING.search(inner) for inner, _, _ in frames[:innermost])
    return ScriptPosition(f"{Path(file).name}:{line}{inside}", waiting)
