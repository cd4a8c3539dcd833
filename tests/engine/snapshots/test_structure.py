"""States as JSON and tensors: what comes back is what was given, types included, and nothing else can."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo import SnapshotError
from mezzo.engine.snapshots.structure import put_together, take_apart

KEYS = st.text(max_size=4) | st.integers(-3, 3) | st.none() | st.tuples(st.integers(0, 2))
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=4)
)
VALUES = st.recursive(
    LEAVES | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


def through_json(state: Any) -> Any:
    tree, tensors = take_apart(state)
    return put_together(json.loads(json.dumps(tree)), {name: tensor.clone() for name, tensor in tensors.items()})


def typed(value: Any) -> Any:
    """Return ``value`` with the type of everything in it: 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return type(value).__name__, [(typed(k), typed(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [typed(v) for v in value]
    return type(value).__name__, value


@settings(max_examples=60, deadline=None, derandomize=True)
@given(VALUES)
def test_values_come_back_with_their_types(value: Any) -> None:
    assert typed(through_json(value)) == typed(value)


@pytest.mark.parametrize(
    ("tensor", "strides"),
    [
        (torch.zeros(2, 3), None),
        (torch.zeros(2, 6)[:, ::2], None),  # with gaps: written without them
        (torch.zeros(3, 2).t(), [1, 2]),
        (torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last), [24, 1, 8, 2]),
        (torch.zeros(3, 1).expand(3, 4), [1, 0]),
    ],
)
def test_only_an_unusual_order_of_dimensions_is_written(tensor: torch.Tensor, strides: list[int] | None) -> None:
    assert take_apart(tensor)[0].get("strides") == strides


def test_a_tensor_is_never_called_what_the_file_calls_its_header() -> None:
    _, tensors = take_apart({"__metadata__": torch.zeros(1)})
    assert [*tensors] == ["__metadata__'"]


def test_tensors_keep_their_layout_and_are_written_once() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state = {"a": image, "b": [image, image[0]], "t": torch.arange(6).reshape(2, 3).t(), "gaps": torch.arange(6)[::2]}

    tree, tensors = take_apart(state)
    again = put_together(tree, {name: tensor.contiguous() for name, tensor in tensors.items()})

    assert list(tensors) == ["a", "t", "gaps"]  # image[0] is a view of the same memory
    given = [image, image, state["t"], state["gaps"]]
    assert all(map(torch.equal, [again["a"], again["b"][0], again["t"], again["gaps"]], given))
    assert (again["a"].stride(), again["t"].stride()) == (image.stride(), (1, 3))


class Thing:
    """Nothing that JSON knows."""


REFUSED = [
    ({"model": {"deep": [1, Thing()]}}, r"contains a Thing at model\.deep\.1; allowed: numbers, texts, bytes"),
    (lambda: 1, r"the state contains a function at its top"),
    ({"s": torch.eye(2).to_sparse()}, r"a tensor that is not dense: of layout torch\.sparse_coo at s; allowed: "),
    ({"o": np.array([Thing()])}, "the state contains a ndarray of object at o"),
]


@pytest.mark.parametrize(("state", "message"), REFUSED)
def test_what_cannot_be_read_without_running_code_is_refused(state: Any, message: str) -> None:
    with pytest.raises(SnapshotError, match=message):
        take_apart(state)


def view(shape: list[int], strides: list[int], at: int, *, dtype: str = "float32") -> dict[str, Any]:
    """Return the entry of a view of the tensor ``a``, of 16 bytes."""
    return {"$": "tensor", "value": "a", "shape": shape, "strides": strides, "at": at, "dtype": dtype}


FORGED: list[Any] = [
    {"$": "os.system", "value": "echo"},
    {"$": "tensor", "value": "none"},
    {"$": "tensor"},
    view([2, 2], [2, 1], 8),
    view([2**40, 2**40], [1, 1], 0),
    view([2], [-1], 4),
    view([2], [1], 2),
    view([2], [1, 1], 0),
    view([2], [1], 0, dtype="os"),
    {**view([2], [4], 0, dtype="|O"), "$": "array"},
    {**view([2**30], [4], 0, dtype="<f4"), "$": "array"},
    {**view([2], [4], 0, dtype="[('a', '|O')]"), "$": "array"},
    {"$": "array", "value": "a", "dtype": "<f4", "shape": [2**40]},
    {"$": "same", "value": 0},
    {"$": "same", "value": -1},
    {"$": "same", "value": True},
    {"$": "known", "value": "optimizer"},
    {"$": "defaultdict", "value": [], "calls": "eval"},
    {"$": "torch.dtype", "value": ["load"]},
    {"$": "scalar", "value": ["|O", "00"]},
    {"$": "random.Random", "value": [{"$": "tuple", "value": [3, {"$": "tuple", "value": [1]}, None]}]},
    {"$": "torch.Generator", "value": ["cpu", {"$": "tensor", "value": "a"}]},
    {"$": "torch.Size", "value": ["x"]},
    {"$": "int", "value": [5]},
    {"$": "dict", "value": "x"},
    {"$": ["tuple"], "value": []},
    {"$": "bytes", "value": "***"},
    {"$": "dict", "value": [[1, 2, 3]]},
]


@pytest.mark.parametrize("tree", FORGED)
def test_forged_trees_are_refused(tree: Any) -> None:
    with pytest.raises((ValueError, TypeError, LookupError, RuntimeError)):
        put_together(tree, {"a": torch.ones(2, 2)})
