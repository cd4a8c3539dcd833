"""Every type of Python, NumPy and torch, alone and inside others: it comes back the same through a file, or is refused by name."""

from __future__ import annotations

import types
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mezzo import SnapshotError
from mezzo.engine.snapshots import container
from mezzo.engine.snapshots.structure import Made, Memo, encode, put_together, take_apart
from snapshot_types import PLACES, REFUSED, SAVED, described, drawn


def through_file(value: Any, folder: Path) -> Any:
    tree, tensors = take_apart(value)
    container.write(folder / "file", tree, tensors)
    return put_together(*container.read(folder / "file")[:2])


@pytest.mark.parametrize("name", SAVED)
def test_a_type_comes_back_the_same_wherever_it_stands(name: str, tmp_path: Path) -> None:
    for place in PLACES.values():
        try:
            value = place(SAVED[name]())
        except TypeError:  # it cannot stand in a set
            continue

        assert described(through_file(value, tmp_path)) == described(value)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's, of layouts and quantization
def test_a_type_is_refused_by_name_wherever_it_stands(name: str) -> None:
    make, words = REFUSED[name]
    for place in PLACES.values():
        try:
            value = place(make())
        except TypeError:
            continue

        with pytest.raises(SnapshotError, match="the state contains a ") as refusal:
            take_apart(value)
        assert words in refusal.value.message


def test_there_are_at_least_120_types() -> None:
    assert len(SAVED) + len(REFUSED) >= 120


def test_what_two_names_mean_is_one_again(tmp_path: Path) -> None:
    shared: list[Any] = [[1], {"a": 1}, {1}, deque([1]), defaultdict(int), OrderedDict(a=1), Counter("a")]
    shared += [np.ones(2), torch.ones(2), bytearray(b"a"), drawn(1), types.SimpleNamespace(), (1, [2])]
    both = through_file({"one": shared, "two": [*shared], "in": ([*shared],)}, tmp_path)

    for one, two, three in zip(both["one"], both["two"], both["in"][0], strict=True):
        assert one is two is three
    assert len({*map(id, both["one"])}) == len(shared)


@pytest.mark.parametrize("make", [list, dict, deque, types.SimpleNamespace, OrderedDict, lambda: defaultdict(list)])
def test_values_that_contain_themselves_come_back(make: Any, tmp_path: Path) -> None:
    value = make()
    if isinstance(value, (list, deque)):
        value.append((value,))
    else:
        (value if isinstance(value, dict) else vars(value))["a"] = (value,)

    again = through_file([value, value], tmp_path)

    inner = again[0][0] if isinstance(value, (list, deque)) else None
    inner = inner or (again[0] if isinstance(value, dict) else vars(again[0]))["a"]
    assert again[1] is again[0] is inner[0]


def test_views_of_one_memory_stay_views(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    numbers = np.arange(6)
    state = {"row": base[1], "base": base, "column": base[:, 2], "bytes": base.view(torch.int32), "t": base.t()}
    state |= {
        "numbers": numbers,
        "back": numbers[::-1],
        "tensor": torch.from_numpy(numbers)[2:],
        "alone": torch.ones(2),
    }

    tree, tensors = take_apart(state)
    again = through_file(state, tmp_path)
    again["base"][1, 2] = 50
    again["numbers"][3] = 70

    assert list(tensors) == ["row", "numbers", "alone"]
    assert tree["row"]["at"] == 16
    assert [float(again["row"][2]), float(again["column"][1]), float(again["t"][2, 1])] == [50] * 3
    assert again["bytes"][1, 2] == torch.tensor(50.0).view(torch.int32)
    assert [int(again["back"][2]), int(again["tensor"][1])] == [70, 70]


def test_neighbours_in_one_memory_are_written_apart() -> None:
    _, tensors = take_apart([*torch.zeros(1000, 4)[::500]])

    assert [tuple(tensor.shape) for tensor in tensors.values()] == [(4,), (4,)]


def test_one_memo_joins_several_trees_and_knows_objects_by_name() -> None:
    model, history = torch.nn.Linear(1, 1), [0.5]
    memo = Memo()
    memo.know(model, "model")
    trees = [
        encode({"model": model, "loss": history}, memo=memo, place="globals"),
        encode([history], memo=memo, place="f"),
    ]
    made = Made(memo.finish(), {"model": model})

    first, second = map(made.decode, trees)

    assert (first["model"] is model, second[0] is first["loss"]) == (True, True)


def deep(levels: int) -> list[Any]:
    return [deep(levels - 1)] if levels else []


def test_nesting_has_a_bound_below_which_it_is_saved(tmp_path: Path) -> None:
    assert described(through_file(deep(140), tmp_path)) == described(deep(140))
    with pytest.raises(SnapshotError, match="values nested more than 150 deep"):
        take_apart(deep(160))


def test_a_tuple_that_contains_itself_is_refused() -> None:
    inner: list[Any] = []
    value = (inner,)
    inner.append(value)

    with pytest.raises(SnapshotError, match="a tuple that contains itself at 0"):
        take_apart(value)
