"""Runs in waves: what is expected is made beside what is asked for, once, and used when it is asked for; the rest counts for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from mezzo.children.signals import Stopped, stoppable
from mezzo.launch.request import Request
from mezzo.launch.resuming import Waves
from mezzo.launch.side_by_side import Ended, output_of, run_label
from mezzo.records import AnyRecord, RunRecord
from record_builders import run_record


class Engine:
    """An engine that keeps what it was given together."""

    def __init__(self, at_once: int | None, *, interrupted: bool = False) -> None:
        self.at_once, self._interrupted = at_once, interrupted
        self.waves: list[list[int | None]] = []

    def opened(self, folder: Path) -> AbstractContextManager[None]:
        return nullcontext()

    def __call__(self, requests: Sequence[Request], limit_s: Callable[[], float | None]) -> Iterator[Ended]:
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
    waves = Waves(engine, {"script": "train.py"})

    def reuse(request: Request) -> AnyRecord | None:
        assert request.digest
        return run_record("fp32", seed=request.seed) if request.seed in finished else None

    found = []
    for seed in seeds:
        after = range(seed + 1, seed + 4)
        record = waves.record(
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
