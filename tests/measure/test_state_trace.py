"""The file of a trace: what is written is read back, and a line that a kill has cut is left out."""

from __future__ import annotations

from pathlib import Path

from helpers_values import existing
from mezzo.commands.resume_check.judgement import start_of
from mezzo.measure.state_trace import Moment, OptimizerState, Point, RunTrace, WrittenFile, line_of, read_trace

FIRST = Point(
    updates=3,
    weights=["a", "b"],
    names=["0.weight", "0.bias"],
    optimizers=[OptimizerState(name="Adam", moments={"exp_avg": Moment(digest="c", rms=0.5)}, settings=[{"lr": 0.1}])],
)


def test_a_trace_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        line_of("point", FIRST),
        line_of("drew", {"updates": 3, "generators": ["torch"]}),
        line_of("wrote", WrittenFile(path="last.pt", updates=3, is_checkpoint=True)),
        line_of("point", Point(updates=4))[:20],
    ]
    path.write_text("".join(lines), encoding="utf-8")
    found = read_trace(path)
    assert found.points == {3: FIRST}
    assert [found.drawn_from("torch", after=n) for n in (2, 4)] == [True, False]
    assert [one.path for one in found.written] == ["last.pt"]
    assert (found.num_updates, found.end) == (3, None)


def test_a_missing_file_is_an_empty_trace(tmp_path: Path) -> None:
    assert read_trace(tmp_path / "none.jsonl") == RunTrace()


def test_the_start_is_found_by_the_weights() -> None:
    whole = RunTrace(points={n: Point(updates=n, weights=[f"a{n}", "frozen"], names=["a", "b"]) for n in range(6)})
    exact = start_of(whole, Point(updates=0, weights=["a3", "frozen"]), latest=5)
    part = start_of(whole, Point(updates=0, weights=["a3", "new"]), latest=5)
    assert [(one.updates, one.other_weights) for one in (exact, part) if one] == [(3, ()), (3, ("b",))]
    assert start_of(whole, Point(updates=0, weights=["other", "frozen"]), latest=5) is None


def test_equal_weights_are_distinguished_by_the_rest() -> None:
    whole = RunTrace(points={n: Point(updates=n, weights=["a"], names=["a"], samples=f"s{n}") for n in range(6)})
    found = existing(start_of(whole, Point(updates=0, weights=["a"], samples="s2"), latest=5))
    assert found.updates == 2
