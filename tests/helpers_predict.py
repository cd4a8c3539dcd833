"""What tests of predictions share: scripts traced in forks of this process, which has imported torch already."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from unittest import mock

from mezzo.measure.predict.script import process as script_process
from mezzo.measure.predict.script import tape_server, tapes


@contextlib.contextmanager
def traced_in_forks() -> Iterator[None]:
    """Trace scripts in forks of this process instead of a new one, whose imports take longer than what it traces."""
    without_server = mock.patch.object(tapes, "current_server", return_value=None)
    not_started = mock.patch.object(tape_server.TapeServer, "start")
    with mock.patch.object(tapes, "_run", _in_a_fork), without_server, not_started:
        yield


def _in_a_fork(words: list[str], environment: dict[str, str], deadline_s: float | None) -> tuple[str, int]:
    """Return what ``script_process`` prints for ``words``, and its exit code."""
    assert words[1:3] == ["-m", "mezzo.measure.predict.script.process"]
    with tempfile.TemporaryFile() as printed:
        with warnings.catch_warnings():  # from Python 3.12 on, of threads beside this one
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            _become(words[3:], environment, printed.fileno())
        _, status = os.waitpid(child, 0)
        printed.seek(0)
        return printed.read().decode(), os.waitstatus_to_exitcode(status)


def _become(words: list[str], environment: dict[str, str], output: int) -> None:
    code = 1
    try:
        faulthandler.disable()  # it is pytest's, and a script may die of a signal
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(output, number)
            setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment)
        warnings.resetwarnings()
        script_process.main(words)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
