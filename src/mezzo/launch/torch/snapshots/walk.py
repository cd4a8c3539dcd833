"""What a script can reach as a table of objects, each once, with references between them: written, and read back.

A row is ``[kind, base, parts]``. ``base`` is the number of an object that set-up creates again, at the same place in the walk (the same
attribute of the same object), and that is then changed in place: optimizers and closures hold it. It is -1 for a younger object, which is
created from its parts. A reference is a list with the row's number. Rows come in the order of the frames that lead to them.

What a type of unknown C code holds cannot be read. Such an object, or Mezzo's own, is left as set-up makes it if it
is older than the loop, and refused by name if it is younger.
"""

from __future__ import annotations

import enum
import json
import os
import pickle
import re
import sys
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from mezzo.errors import NotSavable, SnapshotError
from mezzo.launch.torch.snapshots.known_types import (
    ABSENT,
    NOT_A_LEAF,
    Described,
    Parts,
    Ready,
    checksum,
    is_hook,
    read_leaf,
    samplers_of,
    slots_of,
    written_leaf,
)
from mezzo.launch.torch.snapshots.rewriting import CELLS, ITERATOR, OWN_NAMES
from mezzo.launch.torch.snapshots.script_files import OwnFiles
from mezzo.secrets import is_secret, is_unmistakable, secrets_among

Saver: TypeAlias = "Callable[[Walk, Any], Described]"
_DICTS = ("dict", "OrderedDict", "defaultdict", "variables")


class Savers(NamedTuple):
    """What is known of the kinds of objects to save."""

    saver_of: Callable[[type], Saver]
    """Returns what describes objects of a type."""
    is_replaced: Callable[[Any, OwnFiles], bool]
    """Returns whether an object is made anew in a resumed run."""


class Walk:
    """The table of everything that was reached so far."""

    def __init__(
        self,
        files: OwnFiles,
        savers: Savers,
        base: Walk | None = None,
        *,
        limit: int = 0,
        keeps: Iterable[str] = (),
        checks: bool = True,
    ) -> None:
        """Begin with an empty table.

        Args:
            files: the script's files.
            savers: the kinds of objects.
            base: the walk when the outermost loop was entered; None for that walk itself.
            limit: how many of its objects still exist.
            keeps: names of iterators of the loops that are open.
            checks: whether to read large arrays, so that those that do not change need not be saved.
        """
        self.files, self.keeps, self.limit = files, frozenset(keeps), limit
        self.savers, self.base, self._checks = savers, base, checks
        self.rows: list[list[Any]] = []
        self.tensors: dict[str, Tensor] = {}
        self.links: list[tuple[int, str]] = []
        """Of each object, where it was found first: the number of the object that leads to it, or -1, and under which name."""
        self._linked: set[tuple[int, str]] = set()
        self.objects: list[Any] = []
        """Of each row, the object, so that no other one gets its id."""
        self.ids: dict[int, int] = {}
        self.checksums: dict[int, int | None] = {}
        self.storages: dict[tuple[str, int], int] = {}
        """Tensors by their memory."""
        self.limits: list[int] = []
        """How many objects the modules and the frames up to each one lead to."""
        self.secrets: SecretTexts = SecretTexts() if base is None else base.secrets
        self.frame_cells: dict[int, tuple[str, str]] = {}
        """Cells of the frames that a resumed run creates by calls."""
        self._opaque: set[int] = set()
        """Objects to leave out, by their ids."""
        self._lasting = True
        """Whether the variables that are walked through live longer than the innermost loop."""
        self.generators: list[types.GeneratorType[Any, Any, Any]] = []
        self._described = 0
        self.now = -1
        """The number of the object that is described."""

    # --- the walk --------------------------------------------------------------------------------------------------------

    def leave_out(self, value: Any) -> None:
        """Do not walk through an object."""
        self._opaque.add(id(value))

    def modules(self) -> None:
        """Walk through the script's modules."""
        named = sorted(self.files.modules.items())
        self.variables({name: module.__dict__ for name, module in named}, "")
        self.limits.append(len(self.objects))

    def frame(self, frame: FrameType, *, lasting: bool = True) -> dict[str, Any]:
        """Walk through the variables of a function; return references to them.

        Args:
            frame: the function's.
            lasting: whether its variables live longer than the innermost loop, and its cells exist before it is called.
        """
        self._lasting = lasting
        held = {} if frame.f_locals is frame.f_globals else dict(frame.f_locals)
        if lasting:
            held |= {f"cell {name}": cell for name, cell in cells_in(frame)}
        found = self.variables(held, frame.f_code.co_name)
        self.limits.append(len(self.objects))
        return found

    def variables(self, variables: Mapping[str, Any], frame: str) -> dict[str, Any]:
        """Walk through variables and all that they lead to; return references to them."""
        self.now = -1
        kept = {n: v for n, v in variables.items() if not n.startswith(OWN_NAMES) or n in self.keeps}
        found = {name: self.ref(value, f"{frame} {name}".strip()) for name, value in kept.items()}
        while self._described < len(self.objects):
            self.now, self._described = self._described, self._described + 1
            value = self.objects[self.now]
            try:
                kind, parts = self._description(value)
                self.rows[self.now][0] = kind
                self.rows[self.now][2] = {name: self.ref(part, name) for name, part in parts.items()}
            except SnapshotError:
                raise
            except Exception as error:
                raise self.refusal(value, f"{type(error).__name__}: {str(error)[:100]}") from error
        return found

    def ref(self, value: Any, name: str) -> Any:
        """Return a value as JSON, or a reference to it; ``name`` is its name in the object that leads to it."""
        number = self.ids.get(id(value))
        if number is not None:
            return [number]
        if type(value) is Ready:
            return value.json
        if type(value) in (str, bytes):
            if self.base is None:
                self.secrets.note(value, name, f"{self.path(self.now)}.{name}")
            elif (secret := self.secrets.written(value)) is not None:
                return secret
        is_own = isinstance(value, (type, types.FunctionType)) and self.files.is_own(value.__module__)
        if not is_own:
            leaf = written_leaf(value)
            if leaf is not NOT_A_LEAF:
                return leaf
            if isinstance(value, enum.Enum):
                named = (
                    type(value).__members__.get(str(value.name)) is value
                )  # a combination of flags has no name of its own
                return ["enum", self.ref(type(value), "class"), value.name if named else None, value.value]
        number = self.ids[id(value)] = len(self.objects)
        base = (
            -1 if self.base is None or self.savers.is_replaced(value, self.files) else self.base.ids.get(id(value), -1)
        )
        self.objects.append(value)
        while (self.now, name) in self._linked:  # such as a variable and an attribute of one function
            name += "'"
        self._linked.add((self.now, name))
        self.links.append((self.now, name))
        self.rows.append(["", base if base < self.limit else -1, None])
        return [number]

    def items(self, values: Iterable[Any], names: Iterable[str] | None = None) -> Ready:
        """Return several values as one part."""
        if names is None:
            return Ready(["items", *(self.ref(one, f"[{n}]") for n, one in enumerate(list(values)))])
        return Ready(["items", *map(self.ref, values, names)])

    def named(self, values: Mapping[str, Any]) -> Ready:
        """Return several values with names as one part."""
        return Ready({name: self.ref(one, name) for name, one in values.items()})

    def data(self, tensor: Tensor) -> Ready:
        """Save a tensor with the object that is described, and return it as a part."""
        self.tensors[f"{self.now}"] = tensor
        return Ready(["data", f"{self.now}"])

    def elements(self, value: Any, copied: Callable[[], Tensor], *, trains: bool = False) -> Parts:
        """Return an array of set-up as parts: not its elements, if they are the same as when the loop was entered.

        Args:
            value: the array or tensor.
            copied: returns its elements.
            trains: whether it will change anyway, so that its checksum is of no use.
        """
        if self.base is None:
            if not trains:
                self.checksums[self.now] = checksum(value) if self._checks else None
            return {}
        before = self.base.checksums.get(self.rows[self.now][1])
        if before is not None and checksum(value) == before:
            return {"checksum": before}
        return {"data": self.data(copied())}

    def path(self, number: int) -> str:
        """Return how the script reaches an object."""
        return path_to(self.links, number).removeprefix("__main__.").replace(".__dict__", "").replace(".[", "[")

    def refusal(self, value: Any, why: str = "") -> NotSavable:
        """Return the error that an object cannot be saved."""
        return NotSavable(
            f"{self.path(self.now)!r} is a {type_name(value)}, which a snapshot cannot save{': ' if why else ''}{why}",
            hint="create it before the training loop, or train with mezzo.Session and its save",
            lasting=self._lasting and ITERATOR not in self.path(self.now),
        )

    # --- what several kinds share ----------------------------------------------------------------------------------------

    @property
    def is_base(self) -> bool:
        """Whether this walk finds the objects of set-up."""
        return self.base is None

    @property
    def is_old(self) -> bool:
        """Whether set-up makes the object that is described."""
        return self.base is None or self.rows[self.now][1] >= 0

    def _description(self, value: Any) -> Described:
        """Return the kind and the parts of an object."""
        kind: Any = type(value)
        if id(value) in self._opaque:
            return "opaque", {}
        if id(value) in self.frame_cells:
            frame, name = self.frame_cells[id(value)]
            return "frame cell", {"frame": frame, "name": name}
        if not self.is_old and kind in (types.FunctionType, types.MethodType) and is_hook(value):
            return self._left_as_set_up(value)
        return self.savers.saver_of(kind)(self, value)

    def unknown(self, value: Any) -> Described:
        """Describe an object of C code: set-up makes it again, if it is still what it was there."""
        try:
            now = zlib.crc32(pickle.dumps(value, 5))
        except Exception:  # whatever a library raises
            now = None
        if self.base is None:
            self.checksums[self.now] = now
        elif not self.is_old or now is None or self.base.checksums.get(self.rows[self.now][1]) != now:
            raise self.refusal(value, "" if now is not None else "its state cannot be read")
        return "opaque", {}

    def unchanged(self, value: Any, why: str = "") -> Described:
        """Describe an object that stays as set-up makes it; ``why`` a younger one cannot be saved."""
        if self.is_old:
            return "opaque", {}
        if type(value).__module__.split(".")[0] == "mezzo":
            return self._left_as_set_up(value)
        raise self.refusal(value, why)

    def _left_as_set_up(self, value: Any) -> Described:
        """A hook that Mezzo or torch sets by itself: a resumed run keeps what is there under its name."""
        parent = self.links[self.now][0]
        if parent < 0 or self.rows[parent][0] not in _DICTS:
            raise self.refusal(value)
        return "left out", {}

    def attributes(self, value: Any) -> Parts:
        """Return an object's class, attributes and slots as parts."""
        parts: Parts = {"class": type(value)}
        held = getattr(value, "__dict__", None)
        if held is value:
            parts["is its own attributes"] = True
        elif type(held) is dict:
            parts["__dict__"] = held
        slots = dict(slots_of(value))
        return parts | ({"slots": self.named(slots)} if slots else {})

    # --- the objects of set-up -------------------------------------------------------------------------------------------

    def places(self) -> dict[str, Any]:
        """Return where each object is and of what type it is, as JSON, for ``matched``."""
        return {"links": self.links, "types": [type_name(one) for one in self.objects]}

    def matched(self, places: Mapping[str, Any]) -> dict[int, Any]:
        """Return the objects that set-up has made again, by their numbers in the run of ``places``."""
        here = {link: number for number, link in reversed(list(enumerate(self.links)))}
        same = dict[int, int]()
        for number, (parent, name) in enumerate(places["links"]):
            above = parent if parent < 0 else same.get(parent)
            found = None if above is None else here.get((above, name))
            if found is not None and type_name(self.objects[found]) == places["types"][number]:
                same[number] = found
        return {number: self.objects[found] for number, found in same.items()}


def walk_through(files: OwnFiles, savers: Savers, frames: Iterable[FrameType], *, checks: bool = True) -> Walk:
    """Return a walk through the script's modules and frames, for the objects of set-up."""
    walk = Walk(files, savers, checks=checks)
    walk.modules()
    for frame in frames:
        walk.frame(frame)
    walk.rows.clear()  # only a snapshot's are written
    return walk


def cells_in(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a function that inner functions use, as cells."""
    cells = frame.f_locals.get(CELLS) if frame.f_locals is not frame.f_globals else None
    if cells is not None:
        yield from zip(cells.__code__.co_freevars, cells.__closure__, strict=True)


def path_to(links: list[Any], number: int) -> str:
    """Return the names by which an object is reached."""
    parts = list[str]()
    while number >= 0:
        number, name = links[number]
        parts.append(name)
    return ".".join(reversed(parts))


def type_name(value: Any) -> str:
    """Return the name of an object's type."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


# First every row gets its object: an existing one, or an empty new one. Then the states follow, so that cycles need no order: dicts and
# sets after what their keys consist of, and iterators and passes over loaders last, because they look into other objects.


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
        kinds: Mapping[str, ObjectKind],
        move_generator: Callable[[Any, RowParts], None] = lambda generator, state: None,
    ) -> None:
        """Begin with the objects that set-up has made.

        Args:
            files: the script's files.
            rows: the table that ``Walk`` wrote.
            tensors: its tensors.
            places: where the objects of set-up were in the first run, as ``Walk.places`` returned it.
            here: the walk through this run's objects.
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
            fill(self._objects[number], RowParts(self, name, parts))

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
            self._objects[number] = self._present[base] if base >= 0 else make(RowParts(self, name, parts))
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


class RowParts:
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


def nothing(state: RowParts) -> None:
    """Create an object that only set-up makes: there is none."""


class ObjectKind(NamedTuple):
    """How objects of one kind are restored."""

    make: Callable[[RowParts], Any] = nothing
    fill: Callable[[Any, RowParts], Any] | None = None
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


class SecretTexts:
    """The secrets that set-up has, and where each is found: a snapshot names the place, and a resumed run takes the secret from there.

    They come from the script's arguments and the environment, and from what set-up keeps under the name of a secret, also as part
    of a longer text (``f"Bearer {key}"``). Numbers, and secrets that only the loop makes, are saved as they are: the file is its owner's.
    """

    def __init__(self) -> None:
        """Begin with the script's arguments and the environment."""
        self._places: dict[str, str] = {}
        for place, value in secrets_among(sys.argv[1:], os.environ).items():
            if is_unmistakable(value) or not place.startswith("$"):  # any variable may have a short word for a value
                self._places.setdefault(value, place)
        self._inside: re.Pattern[str] | None = None

    def note(self, value: Any, name: str, place: str) -> None:
        """Note what set-up keeps under a name, if that is the name of a secret."""
        if type(value) is str and is_secret(name, value):
            self._places.setdefault(value, place)
            self._inside = None

    def written(self, value: str | bytes) -> list[Any] | None:
        """Return a text with places instead of its secrets, as JSON; None if there is no secret in it."""
        if not self._places:
            return None
        text = value if isinstance(value, str) else value.decode("latin-1")
        if text in self._places:
            return ["secret", type(value).__name__, "", self._places[text], ""]
        if self._inside is None:
            long = sorted(filter(is_unmistakable, self._places), key=len, reverse=True)
            self._inside = re.compile("|".join(map(re.escape, long)) or "(?!)")
        parts = self._inside.split(text)
        if len(parts) == 1:
            return None
        found = [self._places[one] for one in self._inside.findall(text)]
        mixed = [one for pair in zip(parts, [*found, ""], strict=True) for one in pair]
        return ["secret", type(value).__name__, *mixed[:-1]]

    def read(self, written: list[Any]) -> str | bytes:
        """Return the text again.

        Raises:
            SnapshotError: set-up has no secret at one of its places.
        """
        values = {place: value for value, place in self._places.items()}
        _, kind, *parts = written
        for place in parts[1::2]:
            if place not in values:
                raise SnapshotError(
                    f"the secret {place!r} is not there; a snapshot does not keep it",
                    hint="resume with the arguments and environment variables of the run",
                )
        text = "".join(values[part] if number % 2 else part for number, part in enumerate(parts))
        return text if kind == "str" else text.encode("latin-1")
