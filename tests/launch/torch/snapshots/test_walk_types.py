"""Every type of Python, NumPy and torch as a variable of an unmodified script: saved exactly or refused by name, wherever it stands."""

from __future__ import annotations

import collections
import io
import random
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mezzo.engine.snapshots import container
from mezzo.engine.snapshots.structure import put_together, take_apart
from mezzo.errors import NotSavable
from mezzo.launch.torch.snapshots.kinds import KINDS, SAVERS
from mezzo.launch.torch.snapshots.script_files import OwnFiles
from mezzo.launch.torch.snapshots.walk import Restoration, Walk
from snapshot_types import PLACES, REFUSED, SAVED, Colour, Settings, described

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning"
)  # torch's, of its own types

ALL: dict[str, Callable[[], Any]] = SAVED | {name: make for name, (make, _) in REFUSED.items()}
NOT_SAVED = {
    "array.array", "generator", "memoryview", "mapping proxy", "lambda", "defaultdict of a lambda", "subclass of ndarray", "record array",
    "record", "array of long texts", "RandomState over PCG64", "sparse", "sparse CSR", "meta", "nested", "quantized", "conjugate",
    "negative view", "4 bits",
}  # fmt: skip
"""What is refused by name if the loop makes it."""


def walked(value: Any, files: OwnFiles, base: Walk | None = None) -> tuple[Walk, dict[str, Any]]:
    walk = Walk(files, SAVERS, base, limit=0 if base is None else len(base.objects))
    return walk, walk.variables({"value": value}, "train")


class Life:
    """A run that is killed after set-up has made one value, and the loop another, or changed it."""

    def __init__(self, at_set_up: Any, folder: Path) -> None:
        self.files, self.folder, self.value = OwnFiles(str(folder), []), folder, at_set_up
        self.base = walked(at_set_up, self.files)[0]

    def resumed(self, value: Any, again: Any) -> Any:
        """Return ``value`` after a resume, in which set-up makes ``again``."""
        walk, variables = walked(value, self.files, self.base)
        tree, tensors = take_apart({"tensors": walk.tensors})
        container.write(self.folder / "file", tree | {"rows": walk.rows, "variables": variables}, tensors)
        tree, tensors = container.read(self.folder / "file")[:2]
        rows, variables = tree.pop("rows"), tree.pop("variables")
        contents = put_together(tree, tensors)
        here = walked(again, self.files)[0]
        restoration = Restoration(
            self.files, rows, contents["tensors"], places=self.base.places(), here=here, kinds=KINDS
        )
        restoration.fill(0, len(rows))
        restoration.fill(0, len(rows), again=True)
        return restoration.value(variables["value"])


def seen(value: Any) -> Any:
    """Return what ``described`` returns, also of the types that the library refuses."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        return "objects", value.shape, [seen(one) for one in value.flat]
    if isinstance(value, (types.FunctionType, type, types.ModuleType)) or value is np.ma.masked or value is Colour.RED:
        return id(value)
    if isinstance(value, (torch.optim.Optimizer, torch.nn.Module)):
        return type(value), seen(value.state_dict())
    if isinstance(value, io.BytesIO):
        return value.getvalue(), value.tell()
    if isinstance(value, weakref.ref):
        return id(value())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return type(value), [seen(one) for one in value], getattr(value, "__dict__", None)
    if isinstance(value, dict):
        return type(value), [(seen(key), seen(one)) for key, one in value.items()]
    if isinstance(value, (types.SimpleNamespace, Settings)):
        return type(value), seen(vars(value))
    if hasattr(value, "__next__"):
        return repr(value.__reduce__())
    stateless = type(value) in (random.SystemRandom, type(threading.Lock()))
    if stateless or (isinstance(value, torch.Tensor) and value.is_meta):
        return type(value)
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        return value.layout, seen(value.to_dense())
    return described(value)


def saved_or_refused(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except NotSavable as refusal:
        return refusal


@pytest.mark.parametrize("name", ALL)
def test_what_a_loop_makes_comes_back_the_same_or_is_refused_by_name(name: str, tmp_path: Path) -> None:
    for at, place in PLACES.items():
        try:
            value = place(ALL[name]())
        except TypeError:  # it cannot stand in a set
            continue
        now = saved_or_refused(lambda value=value: Life(None, tmp_path).resumed(value, None))  # type: ignore[misc]

        if name in NOT_SAVED:
            assert isinstance(now, NotSavable), at
            assert now.message.startswith("'train value"), at
        else:
            assert seen(now) == seen(value), at


UNREADABLE = {"memoryview", "mapping proxy", "generator", "lambda", "defaultdict of a lambda", "meta", "nested"}


@pytest.mark.parametrize("name", [name for name in ALL if name not in UNREADABLE])
def test_what_set_up_makes_stays(name: str, tmp_path: Path) -> None:
    value, again = [ALL[name]()], [ALL[name]()]
    now = saved_or_refused(lambda: Life(value, tmp_path).resumed(value, again))

    if not (isinstance(now, NotSavable) and name in NOT_SAVED):
        assert seen(now) == seen(value)


def overlapping() -> Any:
    base = np.arange(6)
    return [base, base[2:], base[::-1], base.reshape(2, 3).T, torch.from_numpy(np.ones(2)).numpy()]


def change_array(values: Any) -> None:
    values[0][3] = 70


def change_masked(value: Any) -> None:
    value[0] = np.ma.masked
    value[2] = 9


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1, [2]], lambda v: v[1].append(3)),
    "dict": (lambda: {"a": 1}, lambda v: v.update(b=2)),
    "dict with tuples for keys": (lambda: {(1, n): [n] for n in range(4)}, lambda v: v[1, 2].append(9)),
    "dict with objects for keys": (lambda: {Settings(n): n for n in range(3)}, lambda v: v.update({Settings(5): 5})),
    "set": (lambda: {1}, lambda v: v.add(2)),
    "set of tuples": (lambda: {(1, n) for n in range(9)}, lambda v: v.discard((1, 3))),
    "deque": (lambda: deque([1], maxlen=2), lambda v: v.extend([2, 3])),
    "OrderedDict": (lambda: collections.OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
    "Counter": (lambda: collections.Counter("ab"), lambda v: v.update("b")),
    "defaultdict": (lambda: collections.defaultdict(list), lambda v: v["a"].append(1)),
    "bytearray": (lambda: bytearray(b"ab"), lambda v: v.extend(b"c")),
    "SimpleNamespace": (lambda: types.SimpleNamespace(a=1), lambda v: setattr(v, "b", 2)),
    "dataclass": (Settings, lambda v: setattr(v, "a", 2)),
    "BytesIO": (io.BytesIO, lambda v: v.write(b"abc")),
    "count": (lambda: iter([1, 2, 3]), next),
    "array": (lambda: np.arange(6), lambda v: v.__setitem__(2, 70)),
    "large array": (lambda: np.arange(6000), lambda v: v.__setitem__(2, 70)),
    "views of one array": (overlapping, change_array),
    "array of objects": (lambda: np.array([1, None], dtype=object), lambda v: v.__setitem__(1, "x")),
    "masked": (lambda: np.ma.MaskedArray([1, 2, 3], [0, 1, 0], fill_value=-5), change_masked),
    "masked for the first time": (lambda: np.ma.MaskedArray([1.0, 2.0, 3.0]), change_masked),
    "hard mask": (lambda: np.ma.MaskedArray([1, 2, 3], [0, 1, 0], hard_mask=True), change_masked),
    "tensor": (lambda: torch.zeros(3), lambda v: v.add_(1)),
    "expanded": (lambda: torch.zeros(3)[:, None].expand(3, 2), lambda v: v[:, 0].add_(1)),
    "Parameter": (lambda: torch.nn.Parameter(torch.zeros(3)), lambda v: v.data.add_(1)),
    "grad": (lambda: torch.zeros(3, requires_grad=True), lambda v: setattr(v, "grad", torch.ones(3))),
    "random.Random": (lambda: random.Random(3), lambda v: v.random()),
    "np Generator": (lambda: np.random.default_rng(3), lambda v: (v.random(), v.spawn(2))),
    "np RandomState": (lambda: np.random.RandomState(3), lambda v: v.standard_normal()),
    "torch.Generator": (lambda: torch.Generator().manual_seed(3), lambda v: torch.rand(2, generator=v)),
    "Module": (lambda: torch.nn.BatchNorm1d(2), lambda v: v(torch.rand(3, 2))),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_the_loop_changes_is_changed_in_place(name: str, tmp_path: Path) -> None:
    make, change = CHANGED[name]
    value, again = make(), make()
    life = Life([value], tmp_path)
    change(value)
    assert seen(value) != seen(again)

    (now,) = life.resumed([value], [again])

    assert now is again or hasattr(value, "__next__")
    assert seen(now) == seen(value)


def test_a_view_that_the_loop_makes_is_one_again(tmp_path: Path) -> None:
    base, tensor = np.arange(6), torch.zeros(4)
    life, again = Life([base, tensor], tmp_path), [np.arange(6), torch.zeros(4)]
    young = np.ones((2, 2))

    now = life.resumed([base, tensor, base[2:], tensor.numpy()[1:], young, young.T], again)
    now[0][3], now[1][2], now[4][0, 1] = 70, 5.0, 9.0

    assert (now[2][1], now[3][1], now[5][1, 0]) == (70, 5.0, 9.0)


def test_objects_that_only_a_set_leads_to_have_no_place(tmp_path: Path) -> None:
    layers = {torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)}

    with pytest.raises(NotSavable, match="the order of its objects is another one in each process"):
        Life([layers], tmp_path).resumed([layers], [layers])

    both = [[*layers], layers]
    assert Life(both, tmp_path).resumed(both, both)[1] is layers


class Pair(tuple[int, ...]):
    """A tuple with attributes."""

    seen: list[int]


def test_a_tuple_of_an_own_class_keeps_its_attributes(tmp_path: Path) -> None:
    value = Pair((1, 2))
    value.seen = [3]

    now = Life(None, tmp_path).resumed(value, None)

    assert (type(now), tuple(now), now.seen) == (Pair, (1, 2), [3])


def test_a_histogram_for_a_tracker_is_a_value(tmp_path: Path) -> None:
    histogram = pytest.importorskip("wandb").Histogram([1.0, 2.0, 2.5], num_bins=2)

    now = Life(None, tmp_path).resumed([histogram], None)[0]

    assert (type(now), vars(now)) == (type(histogram), vars(histogram))


def test_there_are_at_least_120_types() -> None:
    assert len(ALL) + len(CHANGED) >= 120
