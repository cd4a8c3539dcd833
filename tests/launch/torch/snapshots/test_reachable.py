"""Digests of what a script can reach change with every value, wherever it is, and with nothing else."""

from __future__ import annotations

import collections
import copy
import decimal
import functools
import gc
import itertools
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mezzo.launch.torch.snapshots import reachable
from mezzo.launch.torch.snapshots.reachable import apply_settings, changed_since, digests_of, settings_now


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 1


def closure() -> Any:
    count = 1

    def add(number: int) -> int:
        nonlocal count
        count += number
        return count

    return add


def advanced(iterator: Any) -> Any:
    next(iterator)
    return iterator


def _set(value: Any, name: str, new: Any) -> None:
    setattr(value, name, new)


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "number in a list": (lambda: [1, [2, 3]], lambda v: v[1].append(4)),
    "long list": (lambda: list(range(1000)), lambda v: v.__setitem__(500, 0)),
    "order of a dict": (lambda: {"a": 1, "b": 2}, lambda v: v.update(a=v.pop("a"))),
    "key that is a tuple": (lambda: {(1, 2): 3}, lambda v: v.update({(1, 2): 4})),
    "set": (lambda: {1, 2}, lambda v: v.add(3)),
    "deque": (lambda: collections.deque([1]), lambda v: v.append(2)),
    "tensor": (lambda: torch.zeros(3), lambda v: v.add_(1)),
    "-0.0": (lambda: torch.zeros(3), lambda v: v.neg_()),
    "gradient": (lambda: nn.Parameter(torch.zeros(2)), lambda v: _set(v, "grad", torch.ones(2))),
    "requires_grad": (lambda: torch.zeros(2), lambda v: v.requires_grad_()),
    "sparse tensor": (lambda: torch.eye(2).to_sparse(), lambda v: v.add_(torch.eye(2).to_sparse())),
    "array": (lambda: np.zeros(3), lambda v: v.__setitem__(0, 1)),
    "array of objects": (lambda: np.array([[1], None], dtype=object), lambda v: v[0].append(2)),
    "slot": (Slotted, lambda v: _set(v, "count", 2)),
    "closure": (closure, lambda v: v(1)),
    "default": (lambda: functools.partial(print, []), lambda v: v.args[0].append(1)),
    "weight of a module": (lambda: nn.Linear(2, 2), lambda v: v.weight.data.fill_(2)),
    "training mode": (lambda: nn.Linear(2, 2), lambda v: v.eval()),
    "moment": (lambda: _stepped(), lambda v: v.step()),
    "position of an iterator": (lambda: iter([1, 2, 3]), advanced),
    "position of enumerate": (lambda: enumerate([5, 5, 5]), advanced),
    "position of a cycle": (lambda: itertools.cycle([1, 2]), advanced),
    "random.Random": (lambda: random.Random(0), lambda v: v.random()),
    "numpy generator": (lambda: np.random.default_rng(0), lambda v: v.random()),
    "numpy random state": (lambda: np.random.RandomState(0), lambda v: v.rand()),
    "torch generator": (torch.Generator, lambda v: torch.rand(1, generator=v)),
    "global generator": (lambda: 0, lambda v: random.random()),
    "library setting": (lambda: 0, lambda v: np.seterr(over="ignore")),
}  # fmt: skip


def _stepped() -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.Adam([parameter])


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen_and_nothing_else(name: str) -> None:
    make, change = CASES[name]
    random_before, errors_before = random.getstate(), np.geterr()
    try:
        value = make()
        before = digests_of([("", {"value": value})])
        assert digests_of([("", {"value": value})]) == before
        change(value)
        assert digests_of([("", {"value": value})]) != before
    finally:
        random.setstate(random_before)
        np.seterr(**errors_before)


def test_one_object_under_two_names_is_told_from_two_equal_ones() -> None:
    shared = [1]
    one, two = digests_of([("", {"a": shared, "b": shared})]), digests_of([("", {"a": shared, "b": copy.copy(shared)})])
    assert one["b"] == "same as a"
    assert one != two


def test_cycles_end() -> None:
    ring: list[Any] = []
    ring.append(ring)
    assert digests_of([("", {"ring": ring})])["ring[0]"] == "same as ring"


def test_large_arrays_are_sampled_and_memory_maps_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(reachable, "_SAMPLE_BYTES", 100)
    before = digests_of([("", {"large": np.zeros(1000)})])
    assert digests_of([("", {"large": np.full(1000, 7.1)})]) != before
    mapped = np.memmap(tmp_path / "data", dtype=np.uint8, mode="w+", shape=(10,))
    unread = digests_of([("", {"mapped": mapped})])
    mapped[:] = 1
    assert digests_of([("", {"mapped": mapped})]) == unread


def test_too_many_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "_MOST_VALUES", 10)
    with pytest.raises(ValueError, match="more than 10 values"):
        digests_of([("", {"value": [[n] for n in range(20)]})])


# --- Settings that a loop has changed are found, and made again ---


CHANGES: dict[str, Callable[[], Any]] = {
    "torch.get_default_dtype()": lambda: torch.set_default_dtype(torch.float64),
    "torch.get_default_device()": lambda: torch.set_default_device("meta"),
    "torch.are_deterministic_algorithms_enabled()": lambda: torch.use_deterministic_algorithms(True),
    "torch.is_anomaly_enabled()": lambda: torch.autograd.set_detect_anomaly(True),
    "torch.get_num_threads()": lambda: torch.set_num_threads(3),
    "torch.backends.cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "torch.backends.cudnn.deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "numpy.geterr()": lambda: np.seterr(over="ignore"),
    "decimal.getcontext().prec": lambda: setattr(decimal.getcontext(), "prec", 7),
    "sys.getrecursionlimit()": lambda: sys.setrecursionlimit(5000),
    "gc.isenabled()": gc.disable,
    "os.getcwd()": lambda: os.chdir("/"),
}


def test_every_setting_is_tried() -> None:
    assert list(settings_now()) == list(CHANGES)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_setting_that_changed_is_made_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = settings_now()
    try:
        CHANGES[name]()
        changed = changed_since(before)
        assert list(changed) == [name]
        apply_settings({name: before[name]})
        assert changed_since(before) == {}
        apply_settings(changed)
        assert changed_since(before) == changed
    finally:
        apply_settings(before)
        torch.set_default_device(None)
