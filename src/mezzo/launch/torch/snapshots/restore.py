"""Create the objects of a snapshot, and give those that set-up has made again their saved states, in place.

First every row gets its object: an existing one, or an empty new one. Then the states follow, so that cycles need no order: dicts and sets
after what their keys consist of, and iterators and passes over loaders last, because they look into other objects.
"""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from mezzo.errors import SnapshotError
from mezzo.launch.torch.snapshots.known_types import ABSENT, samplers_of
from mezzo.launch.torch.snapshots.leaves import read_leaf
from mezzo.launch.torch.snapshots.script_files import OwnFiles
from mezzo.launch.torch.snapshots.walk import Savers, Walk, path_to


class Restoration:
    """The objects of a snapshot, as far as they have been created."""

    def __init__(
        self,
        files: OwnFiles,
        rows: Sequence[Any],
        tensors: Mapping[str, Tensor],
        *,
        places: Mapping[str, Any],
        here: Walk,
        kinds: Mapping[str, Kind],
        move_generator: Callable[[Any, State], None] = lambda generator, state: None,
    ) -> None:
        """Begin with the objects that set-up has made.

        Args:
            files: the script's files.
            rows: the table that ``Walk`` wrote.
            tensors: its tensors.
            places: where the objects of set-up were in the first run, as ``Walk.places`` returned it.
            here: the walk through those of this run.
            kinds: by the names that rows have.
            move_generator: moves a new generator to its place.
        """
        self.files, self.tensors, self.move_generator = files, tensors, move_generator
        self._rows, self._places, self._here, self._kinds = rows, places, here, kinds
        self._present = here.matched(places)
        self._objects: dict[int, Any] = {}
        self.storages: dict[str, Any] = {}
        """The memory of young tensors, by its name in the snapshot."""
        self.frame_cells: dict[tuple[str, str], Any] = {}
        """Variables of the frames that were created by calls, by frame and name."""

    def value(self, ref: Any) -> Any:
        """Return the value of a reference, or of another part."""
        if isinstance(ref, str):
            return sys.intern(ref) if ref.isidentifier() else ref  # as the names and texts of code are
        if isinstance(ref, dict):
            return self.values(ref)
        if not isinstance(ref, list):
            return ref
        if len(ref) == 1 and isinstance(ref[0], int):
            return self._object(ref[0])
        if ref[0] == "items":
            return [self.value(one) for one in ref[1:]]
        if ref[0] == "data":
            return self.tensors[ref[1]]
        if ref[0] == "enum":
            members = self.value(ref[1])
            return members(self.value(ref[3])) if ref[2] is None else members[ref[2]]
        return self._here.secrets.read(ref) if ref[0] == "secret" else read_leaf(ref)

    def values(self, refs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of several references."""
        return {name: self.value(ref) for name, ref in refs.items()}

    def kept(self, ref: Any, present: Any) -> Any:
        """Return the value of a reference; of a hook that was left out, what is present."""
        if isinstance(ref, list) and len(ref) == 1 and self._rows[ref[0]][0] == "left out":
            return present if present is not None else ABSENT
        return self.value(ref)

    def fill(self, begin: int, end: int, *, again: bool = False) -> None:
        """Create the objects of some rows, and give them their states; ``again`` without those that only move forward."""
        turns: dict[Turn, list[int]] = {turn: [] for turn in Turn}
        for number in range(begin, end):
            self._object(number)
            kind = self._kinds[self._rows[number][0]]
            if kind.fill is not None:
                turns[kind.turn].append(number)
        turns[Turn.LAST] = (
            [] if again else turns[Turn.LAST][::-1]
        )  # an enumeration comes before the pass that it counts
        for number in (one for numbers in turns.values() for one in numbers):
            name, base, parts = self._rows[number]
            if not again and base >= 0 and "checksum" in parts:
                self._refuse_other_data(number, parts["checksum"])
            fill = self._kinds[name].fill
            assert fill is not None
            fill(self._objects[number], State(self, name, parts))

    def _refuse_other_data(self, number: int, saved: int) -> None:
        """Raise if a large array that was not saved, because the loop had not changed it, is another one now."""
        if self._here.checksums.get(self._here.ids[id(self._objects[number])]) != saved:
            raise self._lost(self._rows[number][1])

    def _object(self, number: int) -> Any:
        if number not in self._objects:
            name, base, parts = self._rows[number]
            if base >= 0 and base not in self._present:
                raise self._lost(base)
            make = self._kinds[name].make
            self._objects[number] = self._present[base] if base >= 0 else make(State(self, name, parts))
        return self._objects[number]

    def set_samplers(self, loader: Any, saved: dict[str, Any] | None) -> None:
        """Give a loader's samplers the state of ``sampler_states`` that a pass began with."""
        if saved is None:
            return
        tree, here = json.loads(saved["tree"]), _walked_samplers(self.files, self._here.savers, loader)
        rows, places = tree["rows"], tree["places"]
        own = Restoration(self.files, rows, saved["tensors"], places=places, here=here, kinds=self._kinds)
        own.fill(0, len(rows))

    def _lost(self, base: int) -> SnapshotError:
        return SnapshotError(
            f"set-up did not make {path_to(self._places['links'], base)!r} again, a {self._places['types'][base]}",
            hint="resume with the script, the arguments and the files as they were",
        )


class State:
    """The parts of one row; each is restored when it is asked for."""

    def __init__(self, restoration: Restoration, kind: str, parts: Mapping[str, Any]) -> None:
        self.restoration: Restoration = restoration
        self.kind, self.parts = kind, parts

    def __contains__(self, name: str) -> bool:
        return name in self.parts

    def __getitem__(self, name: str) -> Any:
        return self.restoration.value(self.parts[name])

    def get(self, name: str, default: Any = None) -> Any:
        """Return a part, or the default if there is none."""
        return self[name] if name in self.parts else default

    def type(self, *parents: Any, part: str = "class") -> Any:
        """Return the class that a part names; a forged file must not have any other function called."""
        cls = self[part]
        if not (isinstance(cls, type) and any(issubclass(cls, parent) for parent in parents)):
            raise SnapshotError(
                f"a class of the snapshot is no {parents[0].__name__}", hint="resume from a file that Mezzo wrote"
            )
        return cls


class Turn(enum.Enum):
    """When objects of a kind are filled."""

    EARLY, LATE, AFTER, LAST = range(4)


def nothing(state: State) -> None:
    """Create an object that only set-up makes: there is none."""


class Kind(NamedTuple):
    """How objects of one kind are restored."""

    make: Callable[[State], Any] = nothing
    fill: Callable[[Any, State], Any] | None = None
    turn: Turn = Turn.EARLY


def sampler_states(files: OwnFiles, savers: Savers, loader: Any) -> dict[str, Any] | None:
    """Return the state of a loader's own samplers, which its order follows from, as JSON and tensors; None if all are torch's."""
    if not samplers_of(loader):
        return None
    base = _walked_samplers(files, savers, loader)
    now = _walked_samplers(files, savers, loader, base)
    tree = json.dumps({"rows": now.rows, "places": base.places()})
    return {"tree": tree, "tensors": {name: one.detach().clone() for name, one in now.tensors.items()}}


def _walked_samplers(files: OwnFiles, savers: Savers, loader: Any, base: Walk | None = None) -> Walk:
    walk = Walk(files, savers, base, limit=0 if base is None else len(base.objects))
    walk.leave_out(getattr(loader, "dataset", None))
    walk.variables(samplers_of(loader), "")
    return walk
