"""The outcome of patching: a patch with its reasons, or a refusal with instructions to patch by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias

from mezzo.records.values import Reason

Kind: TypeAlias = Literal[
    "plain",
    "accumulation",
    "clipping",
    "gan",
    "own_amp",
    "lightning",
    "fabric",
    "accelerate",
    "transformers",
    "keras",
    "paddle_fit",
    "compiled",
]
Style: TypeAlias = Literal["auto", "torch.amp", "mezzo"]
Written: TypeAlias = Literal["torch.amp", "mezzo", "framework", "paddle.amp"]
"""The interface that a patched script calls; ``framework``: an argument of the library that trains."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A change to a script that turns on a policy, as a unified diff."""

    path: Path
    """The file to change: the script, or another of the user's files next to it that has the training loop."""
    source: str
    patched: str
    diff: str
    """Unified, with file names ``a/...`` and ``b/...``, for ``git apply`` and ``patch -p1``."""
    kind: Kind
    style: Written
    reasons: Sequence[Reason] = field(default_factory=list)
    """What was changed, on which line, and why; also what was left alone, and why."""
    encoding: str = "utf-8"
    """The file's encoding, which ``write`` and ``write_diff`` keep."""

    def write(self, path: Path) -> None:
        """Write the patched text with the encoding and line endings of the source."""
        path.write_bytes(self.patched.encode(self.encoding))

    def write_diff(self, path: Path) -> None:
        """Write the diff with the bytes of the source, so that it applies."""
        path.write_bytes(self.diff.encode(self.encoding.removesuffix("-sig")))


@dataclass(frozen=True, kw_only=True)
class Refused:
    """No patch: the reason, and instructions to patch by hand."""

    reason: str
    by_hand: str
    already: bool = False
    """Whether the script already does what the patch would add."""
    only_in_style: bool = False
    """Whether another style of patch may do what this one cannot."""


class Unclear(Exception):
    """A script that cannot be patched without guessing, or needs no patch."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.reason)
        self.refused = refused


def unclear(reason: str, by_hand: str, *, already: bool = False, only_in_style: bool = False) -> NoReturn:
    """Give up the patch, with the reason and the instructions.

    Raises:
        Unclear: always.
    """
    raise Unclear(Refused(reason=reason, by_hand=by_hand, already=already, only_in_style=only_in_style))
