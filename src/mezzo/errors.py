"""The errors that Mezzo raises.

    MezzoError                      exit 1
      UsageError                    exit 2   an argument of the command line cannot be used
        PolicyError                 exit 2   a policy text, file or field is wrong
      UnsupportedFormatError        exit 3   this device can neither compute in the format nor emulate it
        NoKernelError               exit 3   CUDA has no kernel of an operation in the format
      SessionError                  exit 4   the calls of a step were made in the wrong order
      ScaleFloorError               exit 5   the loss scale reached its floor and still overflows
      NonFiniteLossError            exit 6   the loss was not finite before the first update
      ScriptError                   exit 7   the script never trained, or cannot be observed
      RecordError                   exit 8   a record cannot be read or was written by a newer Mezzo
      SnapshotError                 exit 9   a snapshot cannot be written or read
        NotSavable                  exit 9   a script's loop holds something that a snapshot cannot
      GuardError                    exit 10  a guard ended the training because of an alarm
      ContractError                 exit 11  a tensor is stored in another format than a contract expects

Every error says what was passed, what is allowed and what to do: the message has the first two, the hint the third.
The command line prints both, without a traceback, and exits with the class's code.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable

HOW_TO_UPDATE = "update Mezzo: in its clone, git pull and pip install .; from an index, pip install --upgrade mezzo"
"""The hint where something was written by a newer Mezzo."""


class MezzoError(Exception):
    """A mistake that the person at the keyboard can correct."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}"

    def __reduce__(self) -> tuple[Callable[[], MezzoError], tuple[()]]:
        # Pickling would otherwise call the class without its hint, as in a worker process.
        return functools.partial(type(self), self.message, hint=self.hint), ()


class UsageError(MezzoError, ValueError):
    """A command line that cannot be used."""

    exit_code = 2


class PolicyError(UsageError):
    """A policy text, file or field that cannot be used."""


class UnsupportedFormatError(MezzoError, ValueError):
    """A number format that the device can neither compute in nor emulate."""

    exit_code = 3


class NoKernelError(UnsupportedFormatError, NotImplementedError):
    """An operation that CUDA does not compute in a 16-bit format, in torch's words; a NotImplementedError, as torch's own."""


class SessionError(MezzoError, RuntimeError):
    """Calls of a training step that would give a wrong update."""

    exit_code = 4


class ScaleFloorError(MezzoError, ArithmeticError):
    """The loss scale is at its floor, and gradients still overflow."""

    exit_code = 5


class NonFiniteLossError(MezzoError, ArithmeticError):
    """The loss is not finite before the first update."""

    exit_code = 6


class ScriptError(MezzoError, RuntimeError):
    """A training script that never trained, or that cannot be observed."""

    exit_code = 7


class RecordError(MezzoError, ValueError):
    """A record that cannot be read."""

    exit_code = 8


class SnapshotError(MezzoError, RuntimeError):
    """A snapshot that cannot be written or read."""

    exit_code = 9


class NotSavable(SnapshotError):
    """Something that a script's loop can reach cannot be saved, or the loop cannot be entered again."""

    def __init__(self, message: str, *, hint: str, lasting: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.lasting = lasting
        """Whether it will be so in the loops around as well."""


class GuardError(MezzoError, RuntimeError):
    """A guard ended the training because of an alarm."""

    exit_code = 10


class ContractError(MezzoError, ValueError):
    """A tensor is stored in another format than a contract expects."""

    exit_code = 11


def nearest(name: str, allowed: Iterable[str], *, listed: Iterable[str] | None = None) -> str:
    """Return ``allowed`` as text for a message, the names nearest to ``name`` first.

    ``listed`` shortens a long list: only its names are printed, but all of ``allowed`` are searched for near ones.
    """
    names = list(dict.fromkeys(allowed))
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    written = ", ".join(names if listed is None else listed)
    return f"did you mean {' or '.join(close)}? Allowed: {written}" if close else f"allowed: {written}"
