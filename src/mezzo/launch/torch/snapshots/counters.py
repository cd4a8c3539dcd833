"""Counters that run along with a loader's batches: ``enumerate``, and the variables of the enclosing loops.

A resumed pass leaves out the batches that were delivered, which ``enumerate`` does not notice. Its count is a field of a C object, which
Python can only read (``__reduce__``); so the count is written to memory, once its address has been confirmed.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import gc
import inspect
import itertools
import sys
import traceback
import types
from pathlib import Path
from typing import Any

from mezzo.errors import SnapshotError

_WRAPPERS = (zip, map, filter, reversed, *(kind for kind in vars(itertools).values() if isinstance(kind, type)))
_COUNT_AT = object.__basicsize__
"""The first field of an ``enumerate`` object: a Py_ssize_t."""


def enumerations(iterator: Any) -> list[Any]:
    """Return the ``enumerate`` objects through which a loop gets the batches of ``iterator``.

    Raises:
        SnapshotError: it gets them through ``zip``, ``islice`` or the like, whose state cannot be set.
    """
    running = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    inner = [iterator]
    if any(frame.f_code.co_flags & inspect.CO_GENERATOR for frame in running):  # tqdm, perhaps; a walk over all objects
        inner += [obj for obj in gc.get_objects() if isinstance(obj, types.GeneratorType) and obj.gi_frame in running]
    found = []
    users = gc.get_referrers(*inner)
    users += gc.get_referrers(*(user for user in users if type(user) is tuple))  # zip and map keep a tuple
    for user in users:
        if isinstance(user, enumerate) and any(user.__reduce__()[1][0] is source for source in inner):
            found.append(user)
        elif isinstance(user, _WRAPPERS):
            raise SnapshotError(
                f"no snapshot: the loop gets its batches through {type(user).__name__}, which a resumed run cannot continue",
                hint="write `for batch in loader:` or `for number, batch in enumerate(loader):`",
            )
    return found


def count_of(enumeration: Any) -> int:
    """Return the number that an ``enumerate`` object yields next."""
    count: int = enumeration.__reduce__()[1][1]
    return count


def set_count(enumeration: Any, count: int) -> None:
    """Let an ``enumerate`` object continue with ``count``.

    Raises:
        SnapshotError: this Python stores it elsewhere.
    """
    if sys.implementation.name == "cpython":
        field = ctypes.c_ssize_t.from_address(id(enumeration) + _COUNT_AT)
        if field.value == count_of(enumeration):
            field.value = count
            if count_of(enumeration) == count:
                return
    raise SnapshotError(
        "the run cannot be resumed: this Python does not let enumerate() continue",
        hint="count in a variable of the script instead",
    )


def loop_values(frame: Any) -> dict[str, Any]:
    """Return the variables of the ``for`` statements around a frame's current line, if they are numbers or strings.

    The loop over the loader itself is left out: its variable is still the last batch's.
    """
    names = _loop_names(frame.f_code.co_filename, frame.f_lineno)
    values = {name: frame.f_locals.get(name) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, (int, str))}


@functools.cache
def _loop_names(file: str, line: int) -> tuple[str, ...]:
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()
    loops = [n for n in ast.walk(tree) if isinstance(n, ast.For) and n.lineno < line <= (n.end_lineno or 0)]
    names = (name.id for loop in loops for name in ast.walk(loop.target) if isinstance(name, ast.Name))
    return tuple(dict.fromkeys(names))
