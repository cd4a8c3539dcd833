"""What tests of predictions share: scripts traced in forks of this process, which has imported torch already."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import IO
from unittest import mock

from mezzo.children.fork_server import Starter
from mezzo.measure.predict.script import process as script_process
from mezzo.measure.predict.script import tapes


@contextlib.contextmanager
def traced_in_forks() -> Iterator[None]:
    """Trace scripts in forks of this process instead of a new one, whose imports take longer than what it traces."""
    not_begun = mock.patch.object(Starter, "begin", return_value=False)
    with mock.patch.object(tapes, "Guarded", _Fork), not_begun:
        yield


class _Fork:
    """A fork of this process in place of the program that records tapes."""

    def __init__(self, words: list[str], *, stdout: IO[bytes], stderr: int, env: dict[str, str]) -> None:
        assert words[1:3] == ["-m", "mezzo.measure.predict.script.process"]
        with warnings.catch_warnings():  # from Python 3.12 on, of threads beside this one
            warnings.simplefilter("ignore", DeprecationWarning)
            self._child = os.fork()
        if self._child == 0:
            _become(words[3:], env, stdout.fileno())

    def wait(self, timeout: float | None = None) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])


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
