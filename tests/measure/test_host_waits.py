"""Times of waits: nested ones once, other threads' not, cut at the window's ends."""

from __future__ import annotations

import threading

import pytest

from mezzo.measure import host as module
from mezzo.measure.host import Waits


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_waits_are_timed_once_and_cut(clock: list[float]) -> None:
    waits = Waits()

    def inner() -> None:
        clock[0] += 1.0

    timed = waits.timed(inner)

    def outer() -> None:
        timed()
        clock[0] += 2.0

    waits.timed(outer)()  # 0 to 3
    clock[0] = 10.0
    timed()  # 10 to 11
    assert (len(waits), waits.total_s) == (2, 4.0)
    assert waits.between(0, 20) == 4.0
    assert waits.between(2, 10.5) == 1.5
    assert waits.between(4, 9) == 0.0


def test_the_end_of_an_iterator_is_timed_and_raised(clock: list[float]) -> None:
    waits = Waits()
    with pytest.raises(StopIteration):
        waits.timed(iter([]).__next__)()
    assert len(waits) == 1


def test_another_thread_and_a_pause_count_nothing(clock: list[float]) -> None:
    waits = Waits()
    timed = waits.timed(lambda: None)
    thread = threading.Thread(target=timed)
    thread.start()
    thread.join()
    with waits.paused():
        timed()
    assert len(waits) == 0
