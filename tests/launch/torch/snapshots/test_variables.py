"""The state of a script by its variables: what is found, what is left out, and where it is restore."""

from __future__ import annotations

import logging
import random
import sys
from argparse import Namespace
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mezzo.errors import SnapshotError
from mezzo.launch.torch.snapshots.counters import count_of, enumerations, loop_values, set_count
from mezzo.launch.torch.snapshots.variables import ScriptState, restore, set_variables


class Meter:
    """An object of a script's own class."""

    def __init__(self) -> None:
        self.total, self.model = 1.5, None


def variables() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {
        "model": model,
        "weight": model.weight,
        "optimizer": optimizer,
        "groups": optimizer.param_groups,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "step": 3,
        "history": [(1, 2.5)],
        "counts": Counter("ab"),
        "args": Namespace(lr=0.1),
        "meter": Meter(),
        "total": torch.zeros(3),
        "data": torch.zeros(600_000),
        "loss": (model.weight.sum() * 2),
        "outputs": model(torch.ones(4, 2)),
        "generator": torch.Generator().manual_seed(1),
        "draws": np.random.default_rng(2),
        "dice": random.Random(3),
        "logger": logging.getLogger("x"),
        "nn": nn,
        "self_made": variables,
        "_private": 1,
    }


def test_what_is_found_and_what_is_not() -> None:
    found = ScriptState(lambda module: module == __name__)

    state = found.frame(variables())

    assert list(found.objects) == ["model", "optimizer", "schedule", "generator", "draws", "dice"]
    assert found.left_out == {
        "data": "2,400,000 bytes that the loop has not changed in place, taken for data",
        "logger": "a logging.Logger",
    }
    kept = set(state) - set(found.objects)
    assert kept == {"step", "history", "counts", "args", "meter", "total", "loss"}
    assert state["meter"] == {"attributes": {"total": {"value": 1.5}, "model": {"value": None}}}


def test_it_is_put_in_place() -> None:
    before = variables()
    model, optimizer = before["model"], before["optimizer"]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before["schedule"].step()
    before["step"], before["meter"].total = 8, 4.5
    before["history"].append((2, 0.5))
    before["total"] += 2
    before["counts"]["c"] = 5
    before["mixed"] = [before["model"], 1, 2]
    state = ScriptState(lambda module: module == __name__).frame(before)
    now = variables() | {"mixed": [None]}
    history, total = now["history"], now["total"]

    assert list(restore(now, state)) == []

    assert (now["step"], now["meter"].total) == (8, 4.5)
    assert (now["counts"], now["mixed"]) == (Counter(a=1, b=1, c=5), [None, 1, 2])
    assert history == [(1, 2.5), (2, 0.5)]
    assert total.tolist() == [2.0, 2.0, 2.0]
    assert torch.equal(now["model"].weight, model.weight)
    assert torch.equal(now["model"].weight.grad, model.weight.grad)
    assert now["optimizer"].param_groups[0]["lr"] == pytest.approx(0.01)
    assert now["schedule"].last_epoch == 1


def test_an_object_that_is_gone_is_named() -> None:
    state = ScriptState(lambda module: module == __name__).frame(variables())
    now = variables()
    del now["model"]
    now["optimizer"] = 3

    assert list(restore(now, state)) == ["model", "optimizer"]


def test_the_variables_of_a_running_function_are_set() -> None:
    def function() -> tuple[int, str]:
        number, text = 1, "a"
        assert set_variables(sys._getframe(), {"number": {"value": 7}, "text": {"value": "b"}}) == []
        return number, text

    assert function() == (7, "b")


class Batches:
    """An iterator whose loop is inspected while it runs."""

    def __init__(self, look: Any) -> None:
        self._look, self._left = look, 3

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        self._look(self)
        self._left -= 1
        if self._left < 0:
            raise StopIteration
        return self._left


def test_enumerate_goes_on_with_another_count() -> None:
    seen: list[int] = []

    def jump(batches: Batches) -> None:
        (counting,) = enumerations(batches)
        seen.append(count_of(counting))
        if len(seen) == 2:
            set_count(counting, 40)

    assert [number for number, _ in enumerate(Batches(jump), 5)] == [5, 40, 41]
    assert seen == [5, 6, 41, 42]


def test_zip_is_refused_and_a_plain_loop_has_no_count() -> None:
    def look(batches: Batches) -> None:
        assert enumerations(batches) == []

    assert list(iter(Batches(look))) == [2, 1, 0]
    with pytest.raises(SnapshotError, match="the loop gets its batches through zip"):
        list(zip(range(5), Batches(look), strict=False))


def test_the_variables_of_loops_around() -> None:
    seen = []
    for epoch in range(2):  # noqa: B007
        for name in ("a", "b"):  # noqa: B007
            for _ in Batches(lambda _: seen.append(loop_values(sys._getframe(1).f_back))):
                break
    assert seen == [{"epoch": e, "name": n} for e in range(2) for n in "ab"]
