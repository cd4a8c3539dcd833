"""Passes over a script's DataLoaders: numbered, and shortened in a resumed run until it reaches the place where the last one stopped.

The moment between two batches, when the loop requests the next one, is the boundary of a step: the body of the loop is over, whatever it
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
    """The running lines of the script when it began."""
    number: int
    """Its number among the passes begun there, from 0. Validation in the middle of a pass does not change it."""
    began: dict[str, Any]
    """The states of the random generators when it began."""
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
            resume: place, number, batches and generators of the pass that was open in the run to resume; None to resume none.
        """
        self._between, self._resume, self._begins = between, resume, begins
        self._known: WeakKeyDictionary[Any, LoaderPass] = WeakKeyDictionary()
        self._begun: Counter[str] = Counter()
        self.caught_up = resume is None
        """Whether the state of the run to resume has been restored, or there is none."""

    def install(self, patches: Patches) -> None:
        """Number the passes over all loaders until ``patches`` are undone."""
        patches.around(DataLoader, "__iter__", self._begin_pass)
        patches.around(_BaseDataLoaderIter, "__next__", self._deliver)

    def is_target(self, loader_pass: LoaderPass) -> bool:
        """Return whether this is the pass that was open in the run to resume."""
        resume = self._resume
        return resume is not None and (loader_pass.place, loader_pass.number) == (resume["place"], resume["number"])

    def others_open(self, loader_pass: LoaderPass) -> bool:
        """Return whether another pass is in the middle of its loader."""
        return any(p is not loader_pass and p.delivered and not p.over for p in self._known.values())

    def _begin_pass(self, original: Callable[..., Any], loader: Any) -> Any:
        self._begins()
        generators = generators_of(loader)
        resume, place = self._resume, place_in_script()
        number = self._begun[place]
        self._begun[place] += 1
        if not self.caught_up and resume is not None and (place, number) == (resume["place"], resume["number"]):
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

    def _deliver(self, original: Callable[..., Any], iterator: Any) -> Any:
        loader_pass = self._known.get(iterator)
        if loader_pass is None:
            return original(iterator)
        if not self.caught_up:
            self._skip_ahead(loader_pass, iterator, original)
        if loader_pass.over:
            raise StopIteration
        self._between(loader_pass, iterator)
        try:
            batch = original(iterator)
        except StopIteration:
            loader_pass.over = True
            raise
        loader_pass.delivered += 1
        return batch

    def _skip_ahead(self, loader_pass: LoaderPass, iterator: Any, original: Callable[..., Any]) -> None:
        """Shorten a pass that the run to resume had finished; leave out the delivered batches of the one that was open."""
        resume = self._resume
        assert resume is not None
        if not self.is_target(loader_pass):
            loader_pass.over = loader_pass.delivered > 0
            return
        loader_pass.delivered = skip_batches(iterator, resume["delivered"], following=original)
        if loader_pass.delivered < resume["delivered"]:
            raise _other_loader(f"it ended after {loader_pass.delivered} batches of {resume['delivered']}")


def _other_loader(why: str) -> SnapshotError:
    return SnapshotError(
        f"the DataLoader is not the one of the run to resume: {why}",
        hint="resume with the same script, the same arguments and the same data",
    )


def place_in_script() -> str:
    """Return the running lines of the script, from the outermost to the innermost."""
    return " > ".join(f"{Path(f.f_code.co_filename).name}:{f.f_lineno}" for f in frames_of_script()[0])


def in_for_statement(frame: Any) -> bool:
    """Return whether a frame of the script is requesting its next batch in a ``for`` statement, and not by ``next``."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in ("FOR_ITER", "FOR_ITER_LIST", "FOR_ITER_GEN")


def frames_of_script() -> tuple[list[Any], str]:
    """Return the script's frames from the outermost to the loop, and the library whose code runs the loop; empty without one."""
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
