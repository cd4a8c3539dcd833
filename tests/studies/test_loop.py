"""The loop of runs: parts in their order, guessed runs next to wanted ones, what an interrupted command finished, and signals."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest

from mezzo.children.signals import Stopped, stoppable
from mezzo.launch.request import Request
from mezzo.records import AnyRecord, RunRecord, write_record
from mezzo.studies.loop import Done, Finished, Study, Wanted, carry_out
from mezzo.studies.side_by_side import RequestAndRecord, output_of, run_label
from record_builders import run_record


class Engine:
    """An engine that keeps what it was given together."""

    def __init__(self, at_once: int | None, *, interrupted: bool = False) -> None:
        self.at_once, self._interrupted = at_once, interrupted
        self.waves: list[list[int | None]] = []

    def opened(self, folder: Path) -> AbstractContextManager[None]:
        return nullcontext()

    def __call__(self, requests: Sequence[Request], limit_s: Callable[[], float | None]) -> Iterator[RequestAndRecord]:
        self.waves.append([request.seed for request in requests])
        for request in requests:
            if self._interrupted:
                with stoppable() as stop:
                    stop.handle(2)
                return
            yield request, run_record("fp32", seed=request.seed)


def asked(folder: Path, seed: int) -> Request:
    path = str(folder / str(seed) / "record.json")
    return Request(target="train.py", kind="script", policy="fp32", seed=seed, record_path=path, command=())


def course(folder: Path, engine: Engine, seeds: Sequence[int], finished: Sequence[int] = ()) -> list[int | None]:
    """Ask for runs by their seed, and expect the three that follow."""
    study = Study(engine, Finished(folder, {"script": "train.py"}))

    def reuse(request: Request) -> AnyRecord | None:
        assert request.digest
        return run_record("fp32", seed=request.seed) if request.seed in finished else None

    found = []
    for seed in seeds:
        after = range(seed + 1, seed + 4)
        record = study.record(
            asked(folder, seed), ahead=lambda after=after: (asked(folder, s) for s in after), reuse=reuse
        )  # type: ignore[misc]
        assert isinstance(record, RunRecord)
        found.append(record.seed)
    return found


@pytest.mark.parametrize(
    ("at_once", "seeds", "finished", "waves"),
    [
        (1, [0, 1, 2], (), [[0], [1], [2]]),
        (2, [0, 1, 2, 3], (), [[0, 1], [2, 3]]),
        (3, [0, 1, 2, 3], (), [[0, 1, 2], [3, 4, 5]]),  # 4 and 5 are never asked for
        (None, [0, 1, 2, 3, 4], (), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (3, [0, 9, 1], (), [[0, 1, 2], [9, 10, 11]]),  # the course went elsewhere, and came back
        (3, [0, 1, 2], (0, 2), [[1, 3]]),  # what an earlier command finished is not made, asked for or expected
    ],
)
def test_what_is_expected_is_made_beside_what_is_asked_for(
    tmp_path: Path, at_once: int | None, seeds: list[int], finished: tuple[int, ...], waves: list[list[int]]
) -> None:
    engine = Engine(at_once)
    assert course(tmp_path, engine, seeds, finished) == seeds
    assert engine.waves == waves


def test_a_signal_ends_the_course(tmp_path: Path) -> None:
    engine = Engine(2, interrupted=True)
    with stoppable(), pytest.raises(Stopped):
        course(tmp_path, engine, [0, 1])
    assert len(engine.waves) == 1


@pytest.mark.parametrize(
    ("path", "label", "output"),
    [
        ("out/fp32-seed0/record.json", "fp32-seed0", "output.log"),
        ("out/diagnose-fp16/pass2.json", "diagnose-fp16/pass2", "pass2.log"),
        ("out/runs/kept-4.last.record.json", "runs/kept-4.last", "kept-4.last.log"),
    ],
)
def test_a_run_and_its_output_are_named_after_its_record(tmp_path: Path, path: str, label: str, output: str) -> None:
    request = asked(tmp_path, 0).model_copy(update={"record_path": str(tmp_path / path)})
    assert run_label(request) == label
    assert output_of(request) == (tmp_path / path).with_name(output)


def learned(folder: Path, names: Sequence[str], *, lost: str = "", stop_in: str = "") -> tuple[list[str], list[str]]:
    """Carry out one part after another; return what each led to, and the printed lines."""
    study, left = Study(Engine(1), Finished(folder, {}, what="check")), [*names]
    found: list[str] = []
    lines: list[str] = []

    def run(name: str) -> RunRecord | None:
        if name == stop_in:
            with stoppable() as stop:
                stop.handle(2)
        record = run_record("fp32", num_steps=3)
        write_record(record, folder / name / "record.json")
        return None if name == lost else record

    def learn(name: str, done: Done) -> str:
        found.append(f"{name} {'resumed' if done.resumed else 'ran' if done.record is not None else 'lost'}")
        return f"learned {name}"

    def plan() -> Wanted | None:
        if not left:
            return None
        name = left.pop(0)
        do, told = partial(run, name), partial(learn, name)
        return Wanted(name=name, title=name.upper(), says=f"begins {name}", do=do, learn=told)

    with stoppable(), contextlib.suppress(Stopped):
        carry_out(plan, study=study, say=lines.append)
    return found, lines


@pytest.mark.parametrize(
    ("signal_in", "done", "stops"),
    [
        (None, [1, 2, 3], False),
        (0, [1], True),  # before the first part, which says itself that it was stopped
        (1, [1], True),
        (3, [1, 2, 3], False),  # all is done
    ],
)
def test_a_signal_ends_a_plan_before_its_next_part(signal_in: int | None, done: list[int], stops: bool) -> None:
    with stoppable() as stop:
        ended: list[int] = []

        def part() -> None:
            ended.append(len(ended) + 1)
            if ended[-1] == signal_in:
                stop.handle(2)

        if signal_in == 0:
            stop.handle(2)
        with pytest.raises(Stopped) if stops else contextlib.nullcontext():
            carry_out(lambda: Wanted(do=part) if len(ended) < 3 else None)
    assert ended == done


def test_a_plan_is_carried_out_and_continued(tmp_path: Path) -> None:
    assert learned(tmp_path, ["a", "b", "c"], lost="b", stop_in="b") == (
        ["a ran", "b lost"],  # the signal came in b: c never begins
        ["begins a", "A: learned a", "begins b", "B: learned b"],
    )
    assert learned(tmp_path, ["a", "b", "c"]) == (
        ["a resumed", "b ran", "c ran"],  # what was lost runs again
        [
            "A: learned a (from the interrupted check)",
            *("begins b", "B: learned b"),
            *("begins c", "C: learned c"),
        ],
    )


def test_runs_of_one_wave_are_told_as_they_end(tmp_path: Path) -> None:
    engine, ended = Engine(1), []
    study = Study(engine, Finished(tmp_path, {}))
    others = [asked(tmp_path, seed) for seed in (1, 2)]
    for seed in range(3):
        left = others[seed:]
        study.record(asked(tmp_path, seed), together=left, ended=lambda request, record: ended.append(request.seed))
    assert (engine.waves, ended) == ([[0, 1, 2]], [0, 1, 2])
