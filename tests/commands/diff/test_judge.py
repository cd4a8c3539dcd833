"""What rounding explains, where the rest began, and which beginnings are one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from helpers_diff import Edit, judged, place, text_of, unedited, values_of
from mezzo.commands.diff.judge import JUMP, TIMES, bits_kept, judge
from mezzo.observe.values.log import (
    BUCKETS,
    NUMBERS,
    ROUNDING,
    SKETCH,
    SQUARES,
    Event,
    EventKind,
    Output,
    ValueRead,
    ValuesLog,
)


class Made(NamedTuple):
    """An event of a made-up log: its value, and what it reads."""

    value: float
    reads: tuple[int, ...] = ()
    kind: EventKind = "operation"
    op: str = "add"
    settings: tuple[str, ...] = ()
    step: int = 1
    module: str = ""
    size: int = 2


def log_of(*made: Made, unit: float = 0.0) -> ValuesLog:
    """Return a log of single numbers."""
    numbers = np.zeros((len(made), NUMBERS))
    numbers[:, SKETCH] = [one.value for one in made]
    numbers[:, SQUARES] = numbers[:, SKETCH] ** 2
    numbers[:, ROUNDING] = numbers[:, SQUARES] * unit**2
    hashes = np.array([one.value for one in made]).view(np.int64)
    events = [
        Event(
            one.kind,
            one.step,
            "update" if one.kind == "update" else "forward",
            one.op,
            one.module or str(n),
            "",
            settings=one.settings,
            reads=tuple(ValueRead(read, 0, ()) for read in one.reads),
            outputs=(Output("fp32", (one.size,)),),
            row=n,
        )
        for n, one in enumerate(made)
    ]
    return ValuesLog(events, hashes, numbers)


def chain(*values: float, end: EventKind = "loss") -> list[Made]:
    """Return events that each read the one before, the last of which is an outcome."""
    inner: list[EventKind] = ["operation"] * (len(values) - 1)
    kinds = [*inner, end]
    return [Made(value, (n - 1,) if n else (), kind) for n, (value, kind) in enumerate(zip(values, kinds, strict=True))]


def begun(a: Sequence[Made], b: Sequence[Made], control: Sequence[Made] | None, *, unit: float = 0.0) -> list[int]:
    first = log_of(*a, unit=unit)
    moved = None if control is None else log_of(*control)
    return [one.a for one in judge(first, log_of(*b), control=moved).beginnings]


BASE = chain(1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("b", "control", "unit", "expected"),
    [
        (chain(1.0, 1.0, 1.0, 1.0), chain(1.0, 1.0, 1.0, 1.0), 0.0, []),
        (chain(1.0, 1.1, 1.1, 1.1), chain(1.0, 1.0, 1.0, 1.0), 0.0, [1]),
        (chain(1.0, 1.1, 1.1, 1.1), chain(1.0, 1.1, 1.1, 1.1), 0.0, []),
        (chain(1.0, 1.1, 1.1, 1.1), chain(1.0, 1.005, 1.005, 1.005), 0.0, [1]),  # 18 times as far
        (chain(1.0, 1.1, 1.1, 1.1), chain(1.0, 1.01, 1.01, 1.01), 0.0, []),  # 9 times as far
        (chain(1.0, 1.1, 1.1, 1.1), chain(1.01, 1.0, 1.1, 1.1), 0.0, []),  # as far as its operand moves in the control
        (chain(1.0, 1.1, 1.1, 1.1), chain(1.0, 1.0, 1.0, 1.0), 0.01, []),  # as far as its format rounds
        (chain(1.0, 1.1, 1.0, 1.0), chain(1.0, 1.0, 1.0, 1.0), 0.0, []),  # nothing behind it differs
        (chain(1.0, 1.1, 1.1, 1.0), chain(1.0, 1.0, 1.0, 1.0), 0.0, []),  # no outcome differs
        (chain(1.0, 1.1, 1.5, 2.0), chain(1.0, 1.0, 1.0, 1.0), 0.0, [1]),
        (chain(1.5, 1.0, 1.0, 2.0), chain(1.0, 1.0, 1.0, 1.0), 0.0, [3]),
        (chain(1.0, 1.1, 1.1, float("nan")), chain(1.0, 1.0, 1.0, 1.0), 0.0, [1]),
        (chain(1.0, 1.0, 1.0, float("nan")), None, 0.0, [3]),
        (chain(1.0, 1.0, 1.1, 1.1), None, 0.0, [2]),
        (chain(1.0, 1.01, 1.3, 1.3), None, 0.001, []),  # each within 64 times what it reads
    ],
)
def test_where_it_begins(b: list[Made], control: list[Made] | None, unit: float, expected: list[int]) -> None:
    assert begun(BASE, b, control, unit=unit) == expected


def test_the_factors() -> None:
    assert (TIMES, JUMP, BUCKETS) == (16.0, 64.0, 64)


def test_a_difference_that_begins_twice_has_two_beginnings() -> None:
    a = [Made(1.0), Made(1.0), Made(1.0, (0,), "loss"), Made(1.0, (1,), "loss")]
    b = [Made(2.0), Made(3.0), Made(2.0, (0,), "loss"), Made(3.0, (1,), "loss")]
    assert begun(a, b, a) == [0, 1]


def test_a_second_planted_difference_behind_a_first_one_is_no_beginning() -> None:
    assert begun(BASE, chain(1.0, 2.0, 5.0, 9.0), BASE) == [1]


def test_updates_with_one_setting_are_one_beginning() -> None:
    a, b = (
        [Made(value, (), "update", "SGD", (f"lr={value}",), module=f"m{n}") for n in range(4)] for value in (1.0, 2.0)
    )
    (one,) = judge(log_of(*a), log_of(*b), control=log_of(*a)).beginnings
    assert (one.a, one.others, one.settings) == (0, (1, 2, 3), (("lr=1.0", "lr=2.0"),))


def test_losses_are_beginnings_of_their_own() -> None:
    a, b = ([Made(value, (), "loss", "loss", module=f"m{n}") for n in range(3)] for value in (1.0, 2.0))
    assert begun(a, b, a) == [0, 1, 2]


@pytest.mark.parametrize(("setting", "expected"), [("fused", []), ("lr", [2])])
def test_an_update_by_another_kernel_follows_its_gradient(setting: str, expected: list[int]) -> None:
    """Adam's first update is a sign, so that one small gradient moves it far; another learning rate is another update."""
    a, b = (
        [
            Made(1.0),
            Made(1.0 + far, (0,), "gradient"),
            Made(1.0 + 1e6 * far, (1,), "update", "Adam", (f"{setting}={far}",)),
        ]
        for far in (0.0, 1e-7)
    )
    assert begun(a, b, None, unit=2.0**-24) == expected


def test_a_sum_that_cancels_moves_by_as_much_as_its_terms() -> None:
    a, b = (
        [Made(1e6), Made(1e6 + moved), Made(1e-3 + moved, (1,)), Made(1e-3 + moved, (2,), "loss")]
        for moved in (0.0, 1.0)
    )
    assert begun(a, b, None, unit=2.0**-24) == []


def test_what_only_one_run_has() -> None:
    a = [Made(1.0, kind="data"), Made(1.0, (0,), "loss")]
    b = [a[0], Made(2.0, (0,), op="mul"), Made(2.0, (1,), op="view"), Made(2.0, (2,), "loss")]
    first, second = log_of(*a), log_of(*b)
    (one,) = judge(first, second, control=first).beginnings
    assert (one.a, one.b, one.only_a, one.only_b) == (1, 3, (), (1,))  # a view changes no value


def test_a_run_that_does_not_repeat_itself() -> None:
    a, again = log_of(*chain(1.0, 1.0, 1.0, 1.0)), log_of(*chain(1.0, 1.1, 1.2, 1.3))
    found = judge(a, log_of(*chain(1.0, 1.1, 1.1, 1.1)), again=again, control=a)
    assert (found.unstable, found.beginnings) == ([1], [])


def test_steps_of_one_line_are_one_beginning() -> None:
    _, b, found = judged(
        Edit("", "masks", "# model", 'model.larger = lambda x: F.interpolate(x, scale_factor=2, mode="nearest")')
    )
    assert [place(b.events[one.b]) for one in found.beginnings] == ["interpolate Masks forward 1"]


def test_a_function_on_all_gradients_is_one_beginning() -> None:
    a, _, found = judged(
        Edit("", "masks", "# gradients", "nn.utils.clip_grad_norm_(model.parameters(), 0.01)"), steps=1
    )
    assert len(found.beginnings) == 1
    assert len(found.beginnings[0].others) == len([e for e in a.events if e.kind == "gradient"]) - 1


def test_the_formats_of_a_policy_are_no_difference_of_their_own() -> None:
    a, again, control_of_a = unedited("masks", 1)
    text = text_of("masks")
    b, control = (values_of(text, policy="bf16", steps=(1,), mirrored=mirrored) for mirrored in (False, True))
    meant = judge(a, b, again=again, control=control, control_of_b=True, same_formats=False)
    planted = judge(a, b, again=again, control=control_of_a)
    assert meant.beginnings == []
    assert place(b.events[planted.beginnings[0].b]) == "conv2d down1.0 forward 1"
    assert planted.beginnings[0].formats == ("fp32", "bf16")


@pytest.mark.parametrize(
    ("distance", "bits"), [(0.0, 53.0), (1.0, 0.0), (0.25, 2.0), (4.0, 0.0), (2.0**-24, 24.0), (np.inf, 0.0)]
)
def test_bits(distance: float, bits: float) -> None:
    assert bits_kept(distance) == bits


def test_a_single_number_that_one_draw_left_where_it_was() -> None:
    """What a loss is computed from moves by 1e-3 in the control, the loss and its multiple not at all: by luck."""

    def log(multiple: float, *, start: float = 1.0, size: int = 1) -> list[Made]:
        made = Made(start), Made(2.0, (0,), op="mean"), Made(multiple, (1,), op="mul"), Made(multiple, (2,), "loss")
        return [one._replace(size=size) for one in made]

    control = log(2.0, start=1.0 + 1e-3)
    assert begun(log(2.0), log(2.0 + 1e-5), control) == []
    assert begun(log(2.0), log(2.1), control) == [2]
    several = log(2.0, size=2), log(2.0 + 1e-5, size=2), log(2.0, start=1.0 + 1e-3, size=2)
    assert begun(*several) == [2]  # of several numbers, not all stay by luck
