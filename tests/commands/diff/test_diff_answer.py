"""What two logs say as parts of a record: the verdict, what differs at a beginning, outcomes, and compare points."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from helpers_diff import Edit, judged, unedited
from mezzo.commands.diff.answer import answer, compare_values, final_distance, together, verdict_of
from mezzo.commands.diff.judge import judge
from mezzo.observe.values.log import SQUARES, Floats, ValuesLog

RANDOM = np.random.default_rng(0)


def log_probabilities(rows: int, words: int, scale: float = 1.0) -> Floats:
    logits = scale * RANDOM.normal(size=(rows, words))
    found: Floats = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return found


def test_kl_is_exact_for_rows_of_log_probabilities() -> None:
    a = log_probabilities(5, 7)
    b = log_probabilities(5, 7)
    by_hand = sum(math.exp(p) * (p - q) for p, q in zip(a.ravel(), b.ravel(), strict=True)) / 5
    outside = sum(abs(math.exp(q - p) - 1) > 0.2 for p, q in zip(a.ravel(), b.ravel(), strict=True)) / 35
    found = compare_values("logits", "both runs", a, b)
    assert found.is_log_probabilities
    assert found.kl == pytest.approx(by_hand, rel=1e-12)
    assert found.outside == pytest.approx(outside)
    assert found.distance == pytest.approx(np.linalg.norm(a - b) / max(np.linalg.norm(a), np.linalg.norm(b)))
    assert (found.name, found.against, found.band) == ("logits", "both runs", 0.2)


def test_kl_of_chosen_words_is_estimated() -> None:
    """The mean over many words drawn from the first distribution is the divergence, within 3 standard errors."""
    a, b = log_probabilities(1, 8), log_probabilities(1, 8, scale=0.5)
    exact = float((np.exp(a) * (a - b)).sum())
    chosen = RANDOM.choice(8, size=20_000, p=np.exp(a[0]))
    found = compare_values("chosen", "both runs", a[0, chosen], b[0, chosen])
    samples = np.exp((b - a)[0, chosen]) - 1 - (b - a)[0, chosen]
    assert not found.is_log_probabilities
    assert found.kl == pytest.approx(samples.mean())
    assert abs(samples.mean() - exact) < 3 * samples.std() / 20_000**0.5


@pytest.mark.parametrize(
    ("a", "b", "distance", "outside"),
    [
        ([-1.0, -2.0], [-1.0, -2.0], 0.0, 0.0),
        ([-1.0, -2.0], [-1.0, -2.0 + math.log(1.19)], 0.078, 0.0),
        ([-1.0, -2.0], [-1.0, -2.0 + math.log(1.21)], 0.085, 0.5),
        ([-1.0, -2.0], [-1.0, -2.0 + math.log(0.79)], 0.097, 0.5),
    ],
)
def test_the_share_outside_the_band(a: list[float], b: list[float], distance: float, outside: float) -> None:
    found = compare_values("x", "both runs", np.array(a), np.array(b))
    assert found.distance == pytest.approx(distance, abs=1e-3)
    assert found.outside == outside


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([3.0, 4.0], [0.0, 0.0], 1.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1.0, math.nan], [1.0, 2.0], math.inf),
        ([-1.0, 0.5], [-1.0, -0.5], 1 / math.sqrt(1.25)),  # one is above 0
        ([], [], 0.0),
    ],
)
def test_values_that_are_no_log_probabilities(a: list[float], b: list[float], distance: float) -> None:
    found = compare_values("x", "both runs", np.array(a), np.array(b))
    assert found.distance == pytest.approx(distance)
    assert found.kl is None or a == [0.0, 0.0]


def test_masked_words_have_no_share_in_the_divergence() -> None:
    a = np.array([[math.log(0.5), math.log(0.5), -math.inf]])
    b = np.array([[math.log(0.25), math.log(0.75), -math.inf]])
    found = compare_values("x", "both runs", a, b)
    assert found.kl is None or found.kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))


SIDES: list[tuple[str, Edit, str, str]] = [
    ("settings", Edit("", "masks", "lr=1e-3", "lr=2e-3"), "beyond rounding", "settings"),
    ("operations", Edit("", "masks", "model(x), y)", "2 * model(x), y)"), "beyond rounding", "operations"),
    ("another operation", Edit("", "masks", "# model", "model.middle[2] = nn.Tanh()"), "beyond rounding", "operations"),
    ("drawn", Edit("", "masks", "model(x), y)", "F.dropout(model(x), 0.5), y)"), "beyond rounding", "random numbers"),
    ("format", Edit("", "masks", "model(x), y)", "model(x).bfloat16().float(), y)"), "beyond rounding", "operations"),
    (
        "part",
        Edit("", "masks", "torch.cat([self.larger(middle), two], 1)", "torch.cat([two, two, two], 1)"),
        "beyond rounding",
        "operations",
    ),
    ("data", Edit("", "masks", "manual_seed(1)", "manual_seed(2)"), "different data", "start"),
    ("weights", Edit("", "masks", "torch.manual_seed(0)", "torch.manual_seed(3)"), "different weights", "start"),
    ("nothing", Edit("", "masks", "# model", ""), "identical", ""),
    (
        "order",
        Edit(
            "",
            "masks",
            "# model",
            "nn.SiLU.__call__, m = nn.SiLU.__call__, model.middle[2]\nm.forward = lambda x: x * torch.sigmoid(x)",
        ),
        "rounding",
        "",
    ),
]


@pytest.mark.parametrize(("edit", "verdict", "by"), [pytest.param(*row[1:], id=row[0]) for row in SIDES])
def test_the_verdict_and_what_differs(edit: Edit, verdict: str, by: str) -> None:
    a, b, found = judged(edit, steps=1)
    parts = answer(a, b, found, control=unedited("masks", 1)[2], control_of_b=False)
    assert (parts["verdict"], [one.by for one in parts["beginnings"][:1]]) == (verdict, [by] if by else [])
    assert parts["has_control"]
    assert parts["num_identical"] == sum(distance == 0 for distance in found.distance.values())


def test_a_run_that_does_not_repeat_itself() -> None:
    a, b, _ = judged(Edit("", "masks", "model(x), y)", "model(x) + 1e-9, y)"), steps=1)
    found = judge(a, b, again=b)
    assert verdict_of(a, found) == ("not repeatable" if found.unstable else "identical")


def test_outcomes_of_each_step() -> None:
    a, b, found = judged(Edit("", "images", "momentum=0.9", "momentum=0.8"))
    outcomes = {(one.what, one.step): one for one in answer(a, b, found, control=None, control_of_b=False)["outcomes"]}
    assert {what for what, _ in outcomes} == {"loss", "gradients", "updates", "statistics"}
    assert outcomes["updates", 1].distance == outcomes["gradients", 2].distance == 0.0
    assert outcomes["updates", 2].distance > 100 * outcomes["updates", 2].allowed


@pytest.mark.parametrize(
    ("edit", "shares"),
    [
        (Edit("images: the optimizer", "images", "momentum=0.9", "momentum=0.8"), [1.0]),
        (Edit("masks: what begins with the loss", "masks", "model(x), y)", "2 * model(x), y)"), [1.0, 1.0]),
    ],
    ids=lambda value: value.name if isinstance(value, Edit) else "",
)
def test_the_share_of_the_final_difference(edit: Edit, shares: list[float]) -> None:
    a, b, found = judged(edit)
    beginnings = answer(a, b, found, control=None, control_of_b=False)["beginnings"]
    assert [one.explains for one in beginnings] == pytest.approx(shares)


def test_two_beginnings_share_the_final_difference() -> None:
    """Two gradients change their signs, so that two updates do: a share is what its squares are of both."""
    new = "model.out.bias.grad.neg_()\nmodel.down1[0].bias.grad.mul_(-1)"
    a, b, found = judged(Edit("", "masks", "# gradients", new), steps=1)
    shares = [one.explains for one in answer(a, b, found, control=None, control_of_b=False)["beginnings"]]
    squares = {e.module: a.numbers[e.row, SQUARES] for e in a.events if e.kind == "update"}
    changed = [squares["down1.0.bias"], squares["out.bias"]]  # 4 elements and 1
    assert shares == pytest.approx([one / sum(changed) for one in changed], rel=1e-6)


def test_growth_has_every_step() -> None:
    a, b, found = judged(Edit("", "images", "momentum=0.9", "momentum=0.8"))
    growth = answer(a, b, found, control=None, control_of_b=False)["growth"]
    assert [one.step for one in growth] == sorted(one.step for one in growth)
    names = {step: [(one.phase, one.module) for one in growth if one.step == step] for step in (1, 2)}
    assert names[1] == names[2]
    assert {one.bits for one in growth if one.step == 1} == {
        53.0
    }  # the updates of the second step differ, and nothing before


def test_what_could_not_be_compared_is_said() -> None:
    a = ValuesLog(problems={"compare point x": "a list was passed; allowed: a tensor"})
    b = ValuesLog(problems={"histc": "RuntimeError: no kernel"})
    notes = answer(a, b, judge(a, b), control=None, control_of_b=False)["notes"]
    assert [(one.what, one.value, one.reason) for one in notes] == [
        ("compare point x", "not compared in the first run", "a list was passed; allowed: a tensor"),
        ("histc", "not compared in the second run", "RuntimeError: no kernel"),
    ]


def test_several_vectors_are_one() -> None:
    a, _, _ = unedited("masks", 1)
    gradients = [n for n, event in enumerate(a.events) if event.kind == "gradient"]
    assert together(a, dict.fromkeys(gradients, 0.25)) == pytest.approx(0.25)
    squares = [a.numbers[a.events[n].row, 0] for n in gradients]
    one = together(a, {n: float(n == gradients[0]) for n in gradients})
    assert one == pytest.approx(math.sqrt(squares[0] / sum(squares)))


def test_how_far_what_matters_is() -> None:
    a, b, found = judged(Edit("", "masks", "loss.backward()", "(2 * loss).backward()"), steps=1)
    assert final_distance(a, b, found) == pytest.approx(0.5, rel=0.1)  # all gradients doubled
    b.points.update({"x#1": np.ones(3), "x#2": np.full(3, 2.0)})
    try:
        assert final_distance(a, b, found) == 0.5
    finally:
        b.points.clear()


def test_compare_points_of_both_runs_and_within_each() -> None:
    a, b = ValuesLog(), ValuesLog()
    a.points = {"x#1": np.ones(2), "x#2": np.full(2, 2.0), "only#1": np.ones(1), "shape#1": np.ones(1)}
    b.points = {"x#1": np.ones(2), "x#2": np.full(2, 4.0), "shape#1": np.ones(2)}
    found = answer(a, b, judge(a, b), control=None, control_of_b=False)["points"]
    assert [(one.name, one.against, one.distance) for one in found] == [
        ("x", "both runs", 0.0),
        ("x", "both runs, value 2", 0.5),
        ("x", "values 1 and 2 of the first run", 0.5),
        ("x", "values 1 and 2 of the second run", pytest.approx(0.75)),
    ]


@pytest.mark.parametrize(("skipped", "reason"), [((1,), "skipped this update"), ((), "has none in this step")])
def test_gradients_of_an_update_that_the_other_run_skipped(skipped: tuple[int, ...], reason: str) -> None:
    whole, *_ = unedited("masks", 1)
    last = next(n for n, event in enumerate(whole.events) if event.kind == "gradient")
    short = replace(whole, events=whole.events[:last], skipped=skipped)
    notes = answer(short, whole, judge(short, whole), control=None, control_of_b=False)["notes"]
    assert [(one.what.partition(" ")[0], one.value) for one in notes] == [
        ("gradients", "only in the second run"),
        ("updates", "only in the second run"),
    ]
    assert all(reason in one.reason for one in notes)
