"""Verdicts from handwritten traces: what counts as a difference, and what is named."""

from __future__ import annotations

import pytest

from mezzo.commands.resume_check.judgement import Runs, judged
from mezzo.measure.state_trace import ObjectState, Point, RunTrace, WrittenFile

STEPS, STOP, AT = 8, 5, 4


def trace(begin: int, end: int, *, drew: tuple[str, ...] = (), **parts: object) -> RunTrace:
    """Return a trace in which every part of the state follows from the step, unless ``parts`` has a function of the step for it."""
    found = {}
    for n in range(begin, end + 1):
        usual: dict[str, object] = {
            "weights": [f"w{n}"],
            "names": ["weight"],
            "generators": {"torch": f"t{n}", "python": "p"},
            "samples": f"s{n}",
            "batch": n % 4 + 1,
            "inputs": f"i{n}",
            "counters": {"step": n},
        }
        own = {name: make(n) for name, make in parts.items()}  # type: ignore[operator]
        found[n - begin] = Point(updates=n - begin, **(usual | own))
    last = found.pop(end - begin)
    return RunTrace(points=found, drew={n: set(drew) for n in found}, end=last)


def runs(resumed: RunTrace, **more: object) -> Runs:
    losses = [float(n) for n in range(STEPS)]
    usual: dict[str, object] = {
        "whole": trace(0, STEPS, drew=("torch",)),
        "stopped": trace(0, STOP),
        "resumed": resumed,
        "whole_losses": losses,
        "resumed_losses": losses[AT:],
        "stopped_after": STOP,
        "checkpoints": ["last.pt"],
    }
    return Runs(**(usual | more))  # type: ignore[arg-type]


def test_the_same_course_is_exact() -> None:
    found = judged(runs(trace(AT, STEPS)))
    assert (found.verdict, found.resumed_at, found.missing, found.without_effect) == ("exact", AT, [], [])


def anew(n: int) -> dict[str, object]:
    """Return generators that are not as they were, since the order was drawn a second time."""
    return {"torch": f"u{n}", "python": "p"}


@pytest.mark.parametrize(
    ("batch", "drew", "states"),
    [
        (1, (), ["random generators"]),  # the pass begins here: its order is drawn from the generator
        (2, (), ["data order"]),
        (2, ("torch",), ["data order", "random generators"]),  # dropout draws from it as well
    ],
)
def test_the_order_of_an_interrupted_pass(batch: int, drew: tuple[str, ...], states: list[str]) -> None:
    passes = {"batch": lambda n: (n - AT + batch - 1) % 4 + 1}
    parts = {"samples": lambda n: f"s{n + 4}", "generators": anew, "weights": other, **passes}
    whole, stopped = trace(0, STEPS, drew=drew, **passes), trace(0, STOP, **passes)
    found = judged(runs(trace(AT, STEPS, **parts), whole=whole, stopped=stopped))
    assert [one.state for one in found.missing] == states


@pytest.mark.parametrize(
    "parts",
    [
        {"generators": lambda n: {"torch": f"t{n}", "python": "q"}},
        {"counters": lambda n: {"step": n - AT}},
        {"inputs": lambda n: f"i{n}", "counters": lambda n: {}},
    ],
)
def test_what_has_no_effect_is_no_difference(parts: dict[str, object]) -> None:
    found = judged(runs(trace(AT, STEPS, **parts)))
    assert (found.verdict, found.missing) == ("exact", [])


def other(n: int) -> list[str]:
    """Return weights that leave those of the undisturbed run after the first resumed step."""
    return [f"w{n}" if n == AT else f"x{n}"]


@pytest.mark.parametrize(
    ("parts", "states"),
    [
        ({"generators": lambda n: {"torch": f"u{n}", "python": "p"}, "weights": other}, ["random generators"]),
        (
            {"samples": lambda n: f"s{n - AT}", "batch": lambda n: n % 4 + 2, "weights": other},
            ["data position"],
        ),
        ({"samples": lambda n: f"z{n}", "weights": other}, ["data order"]),
        ({"counters": lambda n: {"step": n - AT}, "weights": other}, ["step counter"]),
        ({"weights": other}, ["unknown"]),
        ({"schedulers": lambda n: [ObjectState(name="StepLR", values={"last_epoch": "0"})]}, []),
        ({"copies": lambda n: {"ema": "e"}}, ["unknown"]),
    ],
)
def test_a_difference_is_named(parts: dict[str, object], states: list[str]) -> None:
    found = judged(runs(trace(AT, STEPS, **parts)))
    assert [one.state for one in found.missing] == states
    assert found.verdict == ("differs" if states else "exact")


@pytest.mark.parametrize(
    ("losses", "weights", "first"),
    [
        ([4.0, 5.0, 6.0, 7.5], [], 8),
        ([4.0, 5.5, 6.0, 7.5], [], 6),
        ([4.0, 5.0, 6.0, 7.5], [7], 7),
        ([4.5, 5.0, 6.0, 7.0], [7], 5),
        ([4.0, 5.0, 6.0, 7.0], [6, 7], 6),
    ],
)
def test_the_first_step_that_differs_is_named(losses: list[float], weights: list[int], first: int) -> None:
    resumed = trace(AT, STEPS, weights=lambda n: [f"x{n}" if n in weights else f"w{n}"])
    found = judged(runs(resumed, resumed_losses=losses))
    assert (found.verdict, found.first_difference) == ("differs", first)


def test_a_scheduler_that_starts_over_counts_without_an_effect() -> None:
    whole = trace(0, STEPS, schedulers=lambda n: [ObjectState(name="StepLR", values={"last_epoch": str(n)})])
    resumed = trace(AT, STEPS, schedulers=lambda n: [ObjectState(name="StepLR", values={"last_epoch": str(n - AT)})])
    found = judged(runs(resumed, whole=whole))
    assert [(one.state, one.undisturbed, one.resumed) for one in found.missing] == [
        ("scheduler", "last_epoch 4", "last_epoch 0")
    ]


def test_more_steps_than_undisturbed_is_a_difference() -> None:
    losses = [float(n) for n in range(AT, STEPS + 2)]
    found = judged(runs(trace(AT, STEPS + 2), resumed_losses=losses))
    assert found.verdict == "differs"


@pytest.mark.parametrize(
    ("more", "verdict"),
    [
        ({"resumed": trace(0, STEPS)}, "does_not_resume"),
        ({"resumed": trace(0, STEPS), "checkpoints": []}, "no_checkpoint"),
        ({"resumed": trace(0, STEPS, weights=lambda n: [f"other{n}"])}, "does_not_resume"),
        ({"resumed": RunTrace()}, "does_not_resume"),
        ({"error": "KeyError: 'model'"}, "does_not_resume"),
        ({"stopped": trace(0, STOP, weights=lambda n: [f"w{n}" if n < 3 else "x"])}, "undecided"),
    ],
)
def test_runs_without_a_comparison(more: dict[str, object], verdict: str) -> None:
    found = judged(runs(trace(AT, STEPS), **{key: value for key, value in more.items() if key != "resumed"}))
    if "resumed" in more:
        found = judged(runs(**more))  # type: ignore[arg-type]
    assert (found.verdict, found.missing) == (verdict, [])


def test_a_checkpoint_that_came_too_late_is_named() -> None:
    whole = trace(0, STEPS)
    whole.written.append(WrittenFile(path="last.pt", updates=8, is_checkpoint=True))
    found = judged(runs(trace(0, STEPS), whole=whole, checkpoints=[]))
    assert found.why.endswith("stopped after step 5; undisturbed, it first writes one after step 8 of 8")
