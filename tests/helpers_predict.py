"""What tests of predictions share: scripts traced in forks of this process, which has imported torch already."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any
from unittest import mock

import torch
from torch import nn

from mezzo.children.fork_server import Starter
from mezzo.measure.predict.script import process as script_process
from mezzo.measure.predict.script import tapes
from mezzo.measure.predict.script.process import record_script
from mezzo.measure.predict.script.tapes import ScriptTape, TapeRequest
from mezzo.measure.predict.tape import TrainingTape
from mezzo.measure.predict.tape_memory import bytes_by_kind
from mezzo.measure.predict.training import record_training
from mezzo.policy import Policy


@contextlib.contextmanager
def traced_in_forks() -> Iterator[None]:
    """Trace scripts in forks of this process instead of a new one, whose imports take longer than what it traces."""
    not_begun = mock.patch.object(Starter, "begin", return_value=False)
    with mock.patch.object(tapes, "Guarded", _Fork), not_begun:
        yield


def recorded(folder: Path, text: str, *, arguments: Sequence[str] = (), policy: str = "fp32", **how: Any) -> ScriptTape:
    """Return what is recorded of a script with this text, in this process."""
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return record_script(TapeRequest(script=str(path), arguments=arguments, policy=policy, **how))


def tape_of(made: ScriptTape) -> TrainingTape:
    """Return the tape of a script that could be traced."""
    assert made.error == ""
    assert made.tape is not None
    return made.tape


def taped(folder: Path, text: str, **how: Any) -> TrainingTape:
    """Return the tape of a script with this text."""
    return tape_of(recorded(folder, text, **how))


def kept_bytes(tape: TrainingTape) -> dict[str, int]:
    """Return the bytes of each kind before the last backward pass."""
    return bytes_by_kind(tape, until=tape.backward_starts[-1] - 1)


def trained_tape(build: Callable[[], nn.Module], *shape: int, policy: str = "fp32", **how: Any) -> TrainingTape:
    """Return the tape of a model whose loss is the sum of its outputs for inputs of this shape."""
    known: dict[str, Any] = {
        "inputs": lambda n: {"x": torch.empty(n, *shape)},
        "loss": lambda model, inputs: (model(inputs["x"]).float().sum(), None),
        "batch": 4,
        "optimizer": partial(torch.optim.SGD, lr=0.1),
    } | how
    return record_training(build, known.pop("inputs"), known.pop("loss"), policy=Policy.parse(policy), **known)


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
