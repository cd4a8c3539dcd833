"""When processes exchange their wishes, and what they learn; with two processes: test_of_ranks.py, test_ranks.py, test_starting.py."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from mezzo.engine.processes import agreement
from mezzo.engine.processes.agreement import Agreement, are_several


def form_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    form_group()
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_the_interval_between_exchanges_follows_the_clock_and_at_most_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(agreement.time, "monotonic", lambda: now_s)
    together = Agreement(every_s=1.0)
    asked_at = []
    for update in range(1, 330):
        now_s += 1 / 64 if update <= 255 else 0.5  # it becomes slow
        if update >= together.next:
            assert together.exchange(update, [0, 3]) == [0, 3]
            asked_at.append(update)
    assert asked_at == [1, 3, 7, 15, 31, 63, 127, 191, 255, 319, 321, 323, 325, 327, 329]


def test_what_one_process_learns_of_itself() -> None:
    together = Agreement(every_s=1.0)
    assert together.all_equal([3, 7])
    assert together.in_all(True)
    assert not together.in_all(False)
    assert together.first_of({"kind": "loss spike"}) == (0, {"kind": "loss spike"})
    assert together.any_of(1, None) is None
    assert together.any_of(2, "alarm") == (0, "alarm")
    assert (together.rank, together.size, are_several()) == (0, 1, False)


def test_a_script_may_form_its_group_again() -> None:
    together = Agreement()
    assert together.largest([3]) == [3]
    dist.destroy_process_group()
    form_group()
    assert (together.rank, together.size, together.of_each("value")) == (0, 1, ["value"])
    assert together.largest([4]) == [4]


def test_a_process_that_hangs_times_out_by_the_scripts_own_limit() -> None:
    assert agreement._timeout() == timedelta(seconds=7)
