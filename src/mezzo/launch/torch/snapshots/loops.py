"""What rewritten loops call: find where set-up ends, take snapshots at the top of a loop's body, and lead a resumed run back there.

Set-up ends where the outermost loop of the training is entered. What exists then is the *base*: a resumed run makes it again by running
set-up. A snapshot holds what has changed since, and the way from there to the innermost loop that makes updates and can be entered.
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from mezzo.errors import NotSavable, SnapshotError
from mezzo.launch.torch.snapshots.functions import iterator_of
from mezzo.launch.torch.snapshots.kinds import KINDS, SAVERS
from mezzo.launch.torch.snapshots.reachable import apply_settings, changed_since, digests_of, settings_now
from mezzo.launch.torch.snapshots.rewriting import (
    ITERATOR,
    OWN_NAMES,
    FunctionPlace,
    TextSpan,
    WayBack,
    place_of,
    position_of,
    span_of,
)
from mezzo.launch.torch.snapshots.script_files import OwnFiles
from mezzo.launch.torch.snapshots.trained_objects import kind_of, trained_among
from mezzo.launch.torch.snapshots.walk import Restoration, RowParts, Walk, cells_in, walk_through
from mezzo.launch.torch.snapshots.ways import path_between, ways_of

_MOST_WALKS, _MOST_WALKING_S = 20, 5.0
"""How often one loop of set-up may be taken for the training loop, and how long all such walks may take without an optimizer."""
_BEFORE = "call the training from the script itself, and prepare the data in a function or in a script of its own"

LoopName = tuple[str, int]
"""A loop by its file and number."""


class SetUpEnd(NamedTuple):
    """Where set-up ended, and what it had made."""

    base: Walk
    statement: TextSpan
    """The statement before which it ended, in the innermost frame."""
    entry: int
    """How often that had been reached, this time included."""
    frames: list[FrameType]
    """The script's frames, the outermost first."""
    positions: list[TextSpan | None]
    """Where each of them was."""
    settings: dict[str, Any]


class Loops:
    """The loops of a running script."""

    EMPTY = object()
    """What a loop that is entered again takes for the item of its first turn."""

    def __init__(
        self,
        files: OwnFiles,
        *,
        trains: Callable[[], bool],
        instead: Callable[[], bool],
        save: Callable[[dict[str, Any], dict[str, Any], str, dict[str, Any]], None],
        refuse: Callable[[SnapshotError], None],
        arrived: Callable[[], None],
    ) -> None:
        """Begin before the script runs.

        Args:
            files: the script's files.
            trains: returns whether the script has an optimizer.
            instead: called before a snapshot is taken; returns whether it did something else.
            save: called with a snapshot's tree and tensors, its loop, and the trained objects in it.
            refuse: called if no loop around an update can be entered again.
            arrived: called when a resumed run is where it was stopped.
        """
        self._files, self._trains, self._instead = files, trains, instead
        self._save, self._refuse, self._on_arrival = save, refuse, arrived
        self.due = False
        """Whether a loop is to call ``hook`` at its next turn."""
        self.wanted = False
        """Whether a snapshot is to be taken then."""
        self._compare: Callable[[Callable[[], dict[str, str]]], None] | None = None
        self._saved_in: LoopName = "", 0
        self.can_save = False
        """Whether a snapshot has been taken."""
        self.entering = ""
        """The frame whose function is about to be called on the way back."""
        self._around: list[LoopName] = []
        self._problems: dict[LoopName, SnapshotError] = {}
        self._entries: Counter[LoopName] = Counter()
        self._end: SetUpEnd | None = None
        self._frozen = False
        self._resumed: dict[str, Any] | None = None
        self._tensors: dict[str, Any] = {}
        self._restoration: Restoration | None = None
        self._variables: dict[str, dict[str, Any]] = {}
        self._base_passed = 0
        self._walked_s = 0.0
        self._no_end: SnapshotError = NotSavable("the training runs inside a generator", hint=_BEFORE)
        """Why set-up has no end."""

    # --- the first run ---------------------------------------------------------------------------------------------------

    def begin(self, number: int, path: str, iterable: Iterable[Any]) -> Iterator[Any]:
        """Return a loop's iterator; where no loop is around it, set-up may end here."""
        iterator = iterator_of(iterable)
        if not self._frozen and self._resumed is None:
            self._may_end_setup((path, number), sys._getframe(1))
        return iterator

    def _may_end_setup(self, loop: LoopName, frame: FrameType) -> None:
        own = self._files.own_frames(frame)
        for one in own:
            around = self._files.sources[one.f_code.co_filename].loops_around(one)
            if any((one is not frame or number != loop[1]) for number in around):
                return
        self._entries[loop] += 1
        if self._entries[loop] > _MOST_WALKS or any(one.f_code.co_flags & inspect.CO_GENERATOR for one in own):
            return
        self._end, trains = None, self._trains()
        if not trains and self._walked_s > _MOST_WALKING_S:
            self._no_end = NotSavable("set-up has many loops over much data before the optimizer exists", hint=_BEFORE)
            return
        began_s = time.perf_counter()
        try:
            base = walk_through(self._files, SAVERS, own, checks=trains)
        except SnapshotError as error:
            self._no_end = error
        else:
            statement = span_of(self._files.sources[loop[0]].loops[loop[1]])
            self._end = _set_up_end(base, statement, self._entries[loop], own)
        finally:
            self._walked_s += time.perf_counter() - began_s

    def want(self, frame: FrameType | None) -> None:
        """Take a snapshot at the next turn of a loop around ``frame``, which has just made an update."""
        self._around = [
            (one.f_code.co_filename, number)
            for one in self._files.own_frames(frame)
            for number in self._files.sources[one.f_code.co_filename].loops_around(one)
        ]
        self.want_soon()
        if not self._around:
            self._refuse(
                NotSavable(
                    "the update is in no loop of the script",
                    hint="write the training loop in the script, or use mezzo.Session",
                )
            )

    def want_soon(self) -> None:
        """Take a snapshot at the next turn of a loop around the last update for which one was wanted."""
        self.wanted = any(one not in self._problems for one in self._around)
        self.due = self.wanted or self._compare is not None

    def compare(self, compare: Callable[[Callable[[], dict[str, str]]], None]) -> None:
        """Call ``compare`` with a function that digests the script's state, at the next turn where the last snapshot was taken."""
        self._compare, self.due = compare, True

    def hook(self, number: int, path: str) -> None:
        """Do what is due in this loop: give digests, or take a snapshot if it is around the update, and can be entered again."""
        loop = (path, number)
        if self._compare is not None and loop == self._saved_in:
            compare, self._compare, self.due = self._compare, None, self.wanted
            compare(self.digests)
        if self.wanted and loop in self._around and loop not in self._problems:
            self.wanted, self.due = False, self._compare is not None
            self._take(loop, sys._getframe(1))

    def _take(self, loop: LoopName, frame: FrameType) -> None:
        self._variables.clear()
        if self._instead():
            return
        try:
            tree, tensors, objects = self._snapshot(loop, frame)
        except SnapshotError as error:
            self._problems[loop] = error
            if not (isinstance(error, NotSavable) and error.lasting):
                self.want_soon()
            if not self.wanted:
                self._refuse(error)
        except Exception as error:  # nothing that goes wrong here may reach the script
            self._problems[loop] = NotSavable(
                f"{type(error).__name__}: {error}", hint="report this as a fault of Mezzo"
            )
            self._refuse(self._problems[loop])
        else:
            self.can_save, self._saved_in = True, loop
            line = self._files.sources[loop[0]].loops[loop[1]].lineno
            self._save(tree, tensors, f"{Path(loop[0]).name}:{line}", objects)

    def digests(self) -> dict[str, str]:
        """Return digests of all that the script can reach now."""
        frames = self._files.own_frames(sys._getframe(1))
        named = [
            (f"{name}.".removeprefix("__main__."), module.__dict__) for name, module in self._files.modules.items()
        ]
        named += [(f"{one.f_code.co_name}() ", one.f_locals) for one in frames if one.f_locals is not one.f_globals]
        return digests_of([(name, _of_script(held)) for name, held in named])

    def objects(self) -> dict[str, Any]:
        """Return the models, optimizers, schedulers and scalers that the script can reach now, by name."""
        own = self._files.own_frames(sys._getframe(1))
        return {} if self._end is None else _trained(walk_through(self._files, SAVERS, own))

    def _snapshot(self, loop: LoopName, frame: FrameType) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        end = self._end
        if end is None:
            raise self._no_end
        self._refuse_threads()
        stack = self._files.frames(frame)
        path = path_between(self._files, stack, end.frames, end.positions, end.statement, loop)
        own, common = path.frames, path.common
        ways = ways_of(self._files, path)
        keeps = {
            f"{ITERATOR}{number}"
            for one in own
            for number in self._files.sources[one.f_code.co_filename].loops_around(one)
        }
        walk = Walk(self._files, SAVERS, end.base, limit=end.base.limits[common], keeps=keeps)
        for number, one in enumerate(own[common:], common):
            for name, cell in cells_in(one):
                walk.frame_cells[id(cell)] = (str(number), name)
        walk.modules()
        variables = list[dict[str, Any]]()
        for number, one in enumerate(own):
            variables.append(walk.frame(one, lasting=number < common))
            self._refuse_early_cells(walk, number)
        generators = [self._generator_way(walk, one) for one in walk.generators]
        self._frozen = True
        tree = {
            "ways": [*ways, *generators],
            "places": end.base.places(),
            "base": [path.base, end.entry if common == len(end.frames) and path.base == end.statement else 1],
            "variables": variables,
            "ends": walk.limits[1:],
            "rows": walk.rows,
            "settings": changed_since(end.settings),
            "loop": [self._files.name_of(loop[0]), loop[1]],
        }
        return tree, walk.tensors, _trained(walk)

    def _refuse_early_cells(self, walk: Walk, frame: int) -> None:
        for kind, _, parts in walk.rows[walk.limits[-2] if frame else 0 :]:
            if kind == "frame cell" and int(parts["frame"]) > frame:
                raise NotSavable(
                    f"a function over the variable {parts['name']!r} of an inner function is kept outside it",
                    hint="keep its value instead",
                )

    def _refuse_threads(self) -> None:
        for thread, frame in sys._current_frames().items():
            one: FrameType | None = frame
            while thread != threading.get_ident() and one is not None:
                if self._files.has(one):
                    raise NotSavable(
                        f"a thread runs {one.f_code.co_name} at {Path(one.f_code.co_filename).name}:{one.f_lineno} at the same time",
                        hint="save with mezzo.Session, or run the script without --snapshot",
                        lasting=True,
                    )
                one = one.f_back

    def _generator_way(self, walk: Walk, generator: Any) -> WayBack:
        code = generator.gi_code
        at = position_of(code, generator.gi_frame.f_lasti)
        if at is None:
            raise walk.refusal(generator, "its position is not known")
        place = place_of(code)
        return WayBack(self._files.name_of(code.co_filename), place, generator_frame(place), at)

    # --- a resumed run ---------------------------------------------------------------------------------------------------

    def resume(self, tree: dict[str, Any], tensors: dict[str, Any]) -> None:
        """Lead the script, which has not begun, to the place of a snapshot."""
        self._resumed, self._tensors, self._frozen = tree, tensors, True

    @property
    def is_arriving(self) -> bool:
        """Whether a resumed run has not reached its place yet."""
        return self._resumed is not None

    def save_no_more(self) -> None:
        """Let this loop save no snapshot."""
        self.can_save = False

    def base(self, frame: str) -> bool:
        """Restore the objects of set-up, if it ends here; return whether it does."""
        tree = self._resumed
        if tree is None or self._restoration is not None:
            return False
        self._base_passed += 1
        statement, entry = tree["base"]
        if self._base_passed != entry:
            return False
        number, own = int(frame), self._files.own_frames(sys._getframe(1))
        walk = walk_through(self._files, SAVERS, own)
        self._end = _set_up_end(walk, TextSpan(*statement), entry, own)
        self._restoration = Restoration(
            self._files,
            tree["rows"],
            self._tensors,
            places=tree["places"],
            here=walk,
            kinds=KINDS,
            move_generator=self._move_generator,
        )
        self._restoration.fill(0, tree["ends"][number])
        self._variables[frame] = self._restoration.values(tree["variables"][number])
        return True

    def enter(self, frame: str, cells: Any) -> bool:
        """Restore what only the variables of a function lead to, if it is called on the way back; return whether it is."""
        if self.entering != frame:
            return False
        self.entering = ""
        restoration, tree = self._restoration, self._resumed
        if frame in self._variables:  # a generator's
            return True
        assert restoration is not None
        assert tree is not None
        number = int(frame)
        if cells is not None:
            for name, cell in zip(cells.__code__.co_freevars, cells.__closure__, strict=True):
                restoration.frame_cells[frame, name] = cell
        restoration.fill(tree["ends"][number - 1], tree["ends"][number])
        self._variables[frame] = restoration.values(tree["variables"][number])
        return True

    def variables(self, frame: str) -> dict[str, Any]:
        """Return the saved variables of a function on the way."""
        return self._variables[frame]

    def again(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield an empty item, and then a saved iterator's items; ``iter`` would let some iterators begin anew."""
        yield self.EMPTY
        while True:
            try:
                item = next(iterator)
            except StopIteration:
                return
            yield item

    def arrive(self) -> None:
        """Give everything its saved state once more, now that all is where it was, and go on."""
        tree, restoration = self._resumed, self._restoration
        assert tree is not None
        assert restoration is not None
        restoration.fill(0, tree["ends"][-1], again=True)
        apply_settings(tree["settings"])
        self._saved_in = self._files.path_of(tree["loop"][0]), tree["loop"][1]
        self._resumed, self._restoration, self._tensors = None, None, {}
        self._on_arrival()

    def _move_generator(self, generator: Any, state: RowParts) -> None:
        frame = generator_frame(FunctionPlace(*state["place"]))
        self._variables[frame], self.entering = state["variables"], frame
        next(generator)


def _set_up_end(base: Walk, statement: TextSpan, entry: int, frames: list[FrameType]) -> SetUpEnd:
    positions = [position_of(one.f_code, one.f_lasti) for one in frames]
    return SetUpEnd(base, statement, entry, frames, positions, settings_now())


def _of_script(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that the script has written itself."""
    hidden = {name for name in variables if name.startswith(("__", *OWN_NAMES)) and not name.startswith(ITERATOR)}
    return {name: value for name, value in variables.items() if name not in hidden}


def _trained(walk: Walk) -> dict[str, Any]:
    return trained_among((walk.path(number), one) for number, one in enumerate(walk.objects) if kind_of(one))


def generator_frame(place: FunctionPlace) -> str:
    """Return the name of a generator's frame."""
    return f"generator {place.name}:{place.line}"


def way_from_json(row: list[Any]) -> WayBack:
    """Return a way from its JSON."""
    file, place, frame, to, base, (count, names), calls = row
    ends_at = None if base is None else TextSpan(*base)
    return WayBack(file, FunctionPlace(*place), frame, TextSpan(*to), ends_at, (count, tuple(names)), calls)
