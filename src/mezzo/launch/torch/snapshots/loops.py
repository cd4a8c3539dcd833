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

from mezzo.engine.snapshots.randomness import random_states, set_random_states
from mezzo.errors import NotSavable, SnapshotError
from mezzo.launch.torch.snapshots.iterators import iterator_of
from mezzo.launch.torch.snapshots.library_settings import apply_settings, changed_since, settings_now
from mezzo.launch.torch.snapshots.reachable import digests_of
from mezzo.launch.torch.snapshots.restore import Restoration
from mezzo.launch.torch.snapshots.rewriting import CELLS, ITERATOR, OWN_NAMES, Way
from mezzo.launch.torch.snapshots.samplers import begin_samplers
from mezzo.launch.torch.snapshots.script_files import OwnFiles
from mezzo.launch.torch.snapshots.source import FunctionPlace, TextSpan, place_of, position_of
from mezzo.launch.torch.snapshots.trained_objects import kind_of, trained_among
from mezzo.launch.torch.snapshots.walk import Base, Walk, base_of
from mezzo.launch.torch.snapshots.ways import path_between, ways_of

_MOST_WALKS, _MOST_WALKING_S = 20, 5.0
"""How often one loop of set-up may be taken for that of the training, and how long all such walks may take without an optimizer."""
_BEFORE = "call the training from the script itself, and prepare the data in a function or in a script of its own"

LoopName = tuple[str, int]
"""A loop by its file and number."""


class SetUpEnd(NamedTuple):
    """Where set-up ended, and what it had made."""

    base: Base
    loop: LoopName
    entry: int
    """How often the loop had been entered, this time included."""
    frames: list[FrameType]
    positions: list[TextSpan | None]
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
        own = [one for one in self._files.frames(frame) if self._files.has(one)]
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
            walk, limits = walk_through(self._files, own, checks=trains)
        except SnapshotError as error:
            self._no_end = error
            return
        finally:
            self._walked_s += time.perf_counter() - began_s
        positions = [position_of(one.f_code, one.f_lasti) for one in own]
        self._end = SetUpEnd(base_of(walk, limits), loop, self._entries[loop], own, positions, settings_now())

    def want(self, frame: FrameType | None) -> None:
        """Take a snapshot at the next turn of a loop around ``frame``, which has just made an update."""
        self._around = [
            (one.f_code.co_filename, number)
            for one in self._files.frames(frame)
            if self._files.has(one)
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
        frames = [one for one in self._files.frames(sys._getframe(1)) if self._files.has(one)]
        named = [
            (f"{name}.".removeprefix("__main__."), module.__dict__) for name, module in self._files.modules.items()
        ]
        named += [(f"{one.f_code.co_name}() ", one.f_locals) for one in frames if one.f_locals is not one.f_globals]
        return digests_of([(name, _of_script(held)) for name, held in named])

    def objects(self) -> dict[str, Any]:
        """Return the models, optimizers, schedulers and scalers that the script can reach now, by name."""
        end = self._end
        own = [one for one in self._files.frames(sys._getframe(1)) if self._files.has(one)]
        return {} if end is None else _trained(walk_through(self._files, own)[0])

    def _snapshot(self, loop: LoopName, frame: FrameType) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        end = self._end
        if end is None:
            raise self._no_end
        self._refuse_threads()
        stack = self._files.frames(frame)
        path = path_between(self._files, stack, end.frames, end.positions, end.loop, loop)
        own, common = path.frames, path.common
        limit = end.base.limits[common]
        ways = ways_of(self._files, path)
        keeps = {
            f"{ITERATOR}{number}"
            for one in own
            for number in self._files.sources[one.f_code.co_filename].loops_around(one)
        }
        walk = Walk(self._files, end.base, limit=limit, keeps=keeps)
        for number, one in enumerate(own[common:], common):
            for name, cell in cells_in(one):
                walk.frame_cells[id(cell)] = (str(number), name)
        walk.modules()
        variables, ends = list[dict[str, Any]](), list[int]()
        for number, one in enumerate(own):
            walk.lasting = number < common
            held = {} if one.f_locals is one.f_globals else dict(one.f_locals)
            cells = {f"cell {name}": cell for name, cell in cells_in(one)} if number < common else {}
            variables.append(walk.variables(held | cells, f"{one.f_code.co_name}"))
            ends.append(len(walk.rows))
            self._refuse_early_cells(walk, number, ends[-2] if number else 0)
        generators = [self._generator_way(walk, one) for one in walk.generators]
        self._frozen = True
        tree = {
            "ways": [way_as_json(way) for way in [*ways, *generators]],
            "base": {
                "entry": end.entry if path.base_is_loop else 1,
                "links": [list(link) for link in end.base.links],
                "types": [type_name(one) for one in end.base.objects],
                "limits": end.base.limits,
                "loop": [self._files.name_of(end.loop[0]), end.loop[1]],
                "path": [list(position or ()) for position in end.positions],
            },
            "variables": variables,
            "ends": ends,
            "rows": walk.rows,
            "random": random_states(),
            "settings": changed_since(end.settings),
            "loop": [self._files.name_of(loop[0]), loop[1]],
        }
        return tree, walk.tensors, _trained(walk)

    def _refuse_early_cells(self, walk: Walk, frame: int, begin: int) -> None:
        for row in walk.rows[begin:]:
            if row[0] == "frame cell" and int(row[2][0]) > frame:
                raise NotSavable(
                    f"a function over the variable {row[2][1]!r} of an inner function is kept outside it",
                    hint="keep its value instead",
                )

    def _refuse_threads(self) -> None:
        for thread, frame in sys._current_frames().items():
            one: FrameType | None = frame
            while thread != threading.get_ident() and one is not None:
                if self._files.has(one):
                    error = NotSavable(
                        f"a thread runs {one.f_code.co_name} at {Path(one.f_code.co_filename).name}:{one.f_lineno} at the same time",
                        hint="save with mezzo.Session, or run the script without --snapshot",
                    )
                    error.lasting = True
                    raise error
                one = one.f_back

    def _generator_way(self, walk: Walk, generator: Any) -> Way:
        code = generator.gi_code
        at = position_of(code, generator.gi_frame.f_lasti)
        if at is None:
            raise walk.refusal(generator, "its position is not known")
        place = place_of(code)
        return Way(self._files.name_of(code.co_filename), place, generator_frame(place), at)

    # --- a resumed run ---------------------------------------------------------------------------------------------------

    def resume(self, tree: dict[str, Any], tensors: dict[str, Any]) -> None:
        """Lead the script, which has not begun, to the place of a snapshot."""
        self._resumed, self._tensors, self._frozen = tree, tensors, True

    @property
    def is_arriving(self) -> bool:
        """Whether a resumed run has not reached its place yet."""
        return self._resumed is not None

    def base(self, frame: str) -> bool:
        """Restore the objects of set-up, if it ends here; return whether it does."""
        tree = self._resumed
        if tree is None or self._restoration is not None:
            return False
        self._base_passed += 1
        if self._base_passed != tree["base"]["entry"]:
            return False
        number = int(frame)
        own = [one for one in self._files.frames(sys._getframe(1)) if self._files.has(one)]
        walk, _ = walk_through(self._files, own)
        present = _matched(walk, tree["base"])
        self._end = self._same_end(walk, present, tree["base"], own)
        self._restoration = Restoration(self._files, tree["rows"], self._tensors, present, self._lost)
        self._restoration.checksums, self._restoration.secrets = self._end.base.checksums, walk.secrets
        self._restoration.begin_generator = self._begin_generator
        self._restoration.begin_samplers = lambda loader, saved: begin_samplers(self._files, loader, saved)
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
        """Yield an empty item, and then those of a saved iterator; ``iter`` would let some iterators begin anew."""
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
        set_random_states(tree["random"])
        apply_settings(tree["settings"])
        self._saved_in = self._files.path_of(tree["loop"][0]), tree["loop"][1]
        self._resumed, self._restoration, self._tensors = None, None, {}
        self._on_arrival()

    def _begin_generator(self, make: Callable[[], Any], state: dict[str, Any], variables: dict[str, Any]) -> Any:
        frame = generator_frame(FunctionPlace(*state["place"]))
        generator = make()
        self._variables[frame], self.entering = variables, frame
        next(generator)
        return generator

    def _same_end(self, walk: Walk, present: dict[int, Any], base: dict[str, Any], own: list[FrameType]) -> SetUpEnd:
        """Return the end of set-up with the numbers of the first run, for the next snapshots."""
        objects = [present.get(number) for number in range(len(base["links"]))]
        here = {number: walk.ids[id(one)] for number, one in present.items()}
        ids = {id(one): number for number, one in present.items()}
        checksums = {number: walk.checksums.get(there) for number, there in here.items()}
        back = {there: number for number, there in here.items()}
        storages = {place: back[there] for place, there in walk.storages.items() if there in back}
        links = [(parent, name) for parent, name in base["links"]]
        same = Base(objects, links, ids, checksums, base["limits"], storages, walk.secrets)
        positions = [TextSpan(*row) if row else None for row in base["path"]]
        frames = own[: len(positions)]
        loop = (self._files.path_of(base["loop"][0]), base["loop"][1])
        return SetUpEnd(same, loop, base["entry"], frames, positions, settings_now())

    def _lost(self, number: int) -> SnapshotError:
        assert self._resumed is not None
        parts, links = list[str](), self._resumed["base"]["links"]
        kind = self._resumed["base"]["types"][number]
        while number >= 0:
            number, name = links[number]
            parts.append(name)
        return SnapshotError(
            f"set-up did not make {'.'.join(reversed(parts))!r} again, a {kind}",
            hint="resume with the script, the arguments and the files as they were",
        )


def _of_script(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that the script has written itself."""
    hidden = {name for name in variables if name.startswith(("__", *OWN_NAMES)) and not name.startswith(ITERATOR)}
    return {name: value for name, value in variables.items() if name not in hidden}


def _trained(walk: Walk) -> dict[str, Any]:
    return trained_among((walk.path(number), one) for number, one in enumerate(walk.objects) if kind_of(one))


def walk_through(files: OwnFiles, frames: list[FrameType], *, checks: bool = True) -> tuple[Walk, list[int]]:
    """Return a walk through the script's modules and frames, and how many objects each step led to."""
    walk = Walk(files, checks=checks)
    walk.modules()
    limits = [len(walk.objects)]
    for frame in frames:
        held = {} if frame.f_locals is frame.f_globals else dict(frame.f_locals)
        walk.variables(held | {f"cell {name}": cell for name, cell in cells_in(frame)}, frame.f_code.co_name)
        limits.append(len(walk.objects))
    return walk, limits


def cells_in(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a function that inner functions use, as cells."""
    cells = frame.f_locals.get(CELLS) if frame.f_locals is not frame.f_globals else None
    if cells is not None:
        yield from zip(cells.__code__.co_freevars, cells.__closure__, strict=True)


def _matched(walk: Walk, base: dict[str, Any]) -> dict[int, Any]:
    """Return the objects that set-up has made again, by their numbers in the first run."""
    here = {link: number for number, link in reversed(list(enumerate(walk.links)))}
    same, present = dict[int, int](), dict[int, Any]()
    for number, (parent, name) in enumerate(base["links"]):
        above = parent if parent < 0 else same.get(parent)
        found = None if above is None else here.get((above, name))
        if found is not None and type_name(walk.objects[found]) == base["types"][number]:
            same[number], present[number] = found, walk.objects[found]
    return present


def type_name(value: Any) -> str:
    """Return the name of an object's type."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def generator_frame(place: FunctionPlace) -> str:
    """Return the name of a generator's frame."""
    return f"generator {place.name}:{place.line}"


def way_as_json(way: Way) -> list[Any]:
    """Return a way as JSON."""
    return [
        way.file,
        list(way.place),
        way.frame,
        list(way.to),
        None if way.base is None else list(way.base),
        [way.arguments[0], list(way.arguments[1])],
        way.calls,
    ]


def way_from_json(row: list[Any]) -> Way:
    """Return a way from ``way_as_json``."""
    file, place, frame, to, base, (count, names), calls = row
    return Way(
        file,
        FunctionPlace(*place),
        frame,
        TextSpan(*to),
        None if base is None else TextSpan(*base),
        (count, tuple(names)),
        calls,
    )
