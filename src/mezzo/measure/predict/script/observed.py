"""Tapes that a script's own framework has shown in one real step on this machine: Keras on any backend, and Paddle. Imports no torch."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mezzo.measure.predict.tape import TrainingTape


@dataclass(frozen=True, kw_only=True)
class ObservedTape:
    """What one run of a script has shown."""

    tapes: Sequence[TrainingTape] = ()
    """At the script's own batch and, if its step can be read at another one, at that."""
    num_batches: int = 1
    """Batches of one update."""
    known_batch: bool = False
    no_other_batch: str = ""
    """Why there is no tape at another batch."""
    optimizer: str = ""
    channels_last: bool = False
    backward: Literal["observed", "derived"] = "observed"
    """Whether the operations of the backward pass were seen, or follow from the forward pass."""
    no_memory: str = ""
    """Why the tapes have no blocks of memory; empty if they have."""
    fuses: bool = False
    """Whether the framework compiles the step, so that its kernels are more than one operation."""
    error: str = ""
    """Why there is no tape."""

    def write(self, path: Path) -> None:
        """Write it to a file."""
        path.write_bytes(pickle.dumps(self))

    @classmethod
    def read(cls, path: Path) -> ObservedTape | None:
        """Return what was written to a file; None if nothing was."""
        try:
            found: ObservedTape = pickle.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        return found


def other_size(size: int) -> int:
    """Return half of a batch size; twice the size where half would be one sample, whose tensors need fewer copies."""
    return size // 2 if size > 3 else 2 * size
