"""Passes over a script's DataLoaders: numbered, and shortened in a resumed run until it reaches the place where the last one stopped.

The moment between two batches, when the loop asks for the next, is the boundary of a step: the body of the loop is over, whatever it
does and in whatever order. That is where a snapshot is taken or restored.
"""

from __future__ import annotations

import dis
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from mezzo.engine.snapshots.position import generators_of, skip_batches
from mezzo.engine.snapshots.randomness import random_states, set_random_states
from mezzo.errors import SnapshotError
from mezzo.launch.patches import Patches
from mezzo.launch.torch.snapshots.variables import is_own_file, script_folder


@dataclass(eq=False)
class LoaderPass:
    """One pass over a loader."""

    place: str
    """The lines of the script that began it."""
    number: int
    """Its number among the passes begun there, from 0. Validation in the middle of a pass does not change it."""
    began: dict[str, Any]
    """The random generators when it began."""
    delivered: int = 0
    over: bool = False


class Passes:
    """The passes of a run."""

    def __init__(
        self, between: Callable[[LoaderPass, Any], None], resume: dict[str, Any] | None, *, begins: Callable[[], None]
    ) -> None:
        """Create an empty list of passes.

        Args:
            between: called between two batches, with the pass and its iterator.
            begins: called when a pass begins.
            resume: place, number, batches and generators of the pass that was open in the run to resume.
        """
        self._between, self._resume, self._begins = between, resume, begins
        self._known: WeakKeyDictionary[Any, LoaderPass] = WeakKeyDictionary()
        self._begun: Counter[str] = Counter()
        self.arrived = resume is None
        """Whether the state of the run to resume was restored, or there is none."""

    def install(self, patches: Patches) -> None:
        """Number the passes over all loaders until ``patches`` are undone."""
        patches.around(DataLoader, "__iter__", self._beginning)
        patches.around(_BaseDataLoaderIter, "__next__", self._delivering)

    def is_target(self, this: LoaderPass) -> bool:
        """Return whether this is the pass that was open in the run to resume."""
        resume = self._resume
        return resume is not None and (this.place, this.number) == (resume["place"], resume["number"])

    def others_open(self, this: LoaderPass) -> bool:
        """Return whether another pass is in the middle of its loader."""
        return any(p is not this and p.delivered and not p.over for p in self._known.values())

    def _beginning(self, original: Callable[..., Any], loader: Any) -> Any:
        self._begins()
        generators = generators_of(loader)
        resume, place = self._resume, place_in_script()
        number = self._begun[place]
        self._begun[place] += 1
        if not self.arrived and resume is not None and (place, number) == (resume["place"], resume["number"]):
            began = resume["began"]
            set_random_states(began)
            if len(generators) != len(began["generators"]):
                raise _other_loader("it has another number of generators")
            for generator, state in zip(generators, began["generators"], strict=True):
                generator.set_state(state)
        else:
            began = {**random_states(), "generators": [generator.get_state() for generator in generators]}
        iterator = original(loader)
        self._known[iterator] = LoaderPass(place, number, began)
        return iterator

    def _delivering(self, original: Callable[..., Any], iterator: Any) -> Any:
        this = self._known.get(iterator)
        if this is None:
            return original(iterator)
        if not self.arrived:
            self._bring(this, iterator, original)
        if this.over:
            raise StopIteration
        self._between(this, iterator)
        try:
            batch = original(iterator)
        except StopIteration:
            this.over = True
            raise
        this.delivered += 1
        return batch

    def _bring(self, this: LoaderPass, iterator: Any, original: Callable[..., Any]) -> None:
        """Shorten a pass that the run to resume had finished; leave out the delivered batches of the one that was open."""
        resume = self._resume
        assert resume is not None
        if not self.is_target(this):
            this.over = this.delivered > 0
            return
        this.delivered = skip_batches(iterator, resume["delivered"], following=original)
        if this.delivered < resume["delivered"]:
            raise _other_loader(f"it ended after {this.delivered} batches of {resume['delivered']}")


def _other_loader(why: str) -> SnapshotError:
    return SnapshotError(
        f"the DataLoader is not the one of the run to resume: {why}",
        hint="resume with the same script, the same arguments and the same data",
    )


def place_in_script() -> str:
    """Return the lines of the script, from the outermost to the innermost, that are running."""
    return " > ".join(f"{Path(f.f_code.co_filename).name}:{f.f_lineno}" for f in frames_of_script()[0])


def asked_by_a_for_loop(frame: Any) -> bool:
    """Return whether the script's frame asks for the next batch in a ``for`` statement, and not by ``next``."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in ("FOR_ITER", "FOR_ITER_LIST", "FOR_ITER_GEN")


def frames_of_script() -> tuple[list[Any], str]:
    """Return the script's frames from the outermost to the loop, and the library whose code runs the loop; empty for none."""
    folder = script_folder()
    frames, libraries = [], []
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        name = str(frame.f_globals.get("__name__", ""))
        if name == "runpy":
            break
        if is_own_file(frame.f_code.co_filename, folder):
            frames.append(frame)
        elif name.split(".")[0] not in ("mezzo", "torch", "tqdm", "rich", "contextlib", "functools"):
            libraries.append(name)
    return frames[::-1], libraries[0] if libraries else ""
