"""The evidence of several processes as one."""

from __future__ import annotations

from typing import Any

import pytest

from mezzo.observe.nonfinite.evidence import Evidence, Located, LostValues, of_all
from mezzo.observe.nonfinite.faults import where_it_began


def located(step: int) -> Located:
    return Located(step=step, source=LostValues(kind="made", op="exp", module="0", format="fp16"))


CASES: list[tuple[list[Evidence | None], dict[str, Any] | None]] = [
    ([None, None], None),
    ([Evidence(watched=[1])], {"watched": [1], "found_by_rank": None}),
    ([Evidence(located=located(3)), Evidence(located=located(3))], {"located": located(3), "found_by_rank": None}),
    ([Evidence(watched=[1]), Evidence(located=located(2))], {"located": located(2), "found_by_rank": 1}),
    ([None, Evidence(located=located(2))], {"located": located(2), "found_by_rank": 1}),
    # what the processes agreed on while they ran
    ([Evidence(located=located(4), found_by_rank=1), Evidence(located=located(4))], {"found_by_rank": 1}),
    (
        [Evidence(bad_steps=[2], faulty_steps=[2]), Evidence(bad_steps=[1, 2])],
        {"bad_steps": [1, 2], "faulty_steps": [2]},
    ),
    ([Evidence(watched=[1]), Evidence(watched=[1, 2, 4])], {"watched": [1, 2, 4]}),
]


@pytest.mark.parametrize(("by_rank", "found"), CASES)
def test_of_all(by_rank: list[Evidence | None], found: dict[str, Any] | None) -> None:
    evidence = of_all(by_rank)
    if found is None:
        assert evidence is None
        return
    assert evidence is not None
    assert {name: getattr(evidence, name) for name in found} == found


NONE, OWN, ARRIVED = None, located(2), located(2).model_copy(update={"arrived": True})
BEGAN: list[tuple[list[Located | None], int]] = [
    # the place that each process found, by rank; the rank where the fault began
    ([NONE, NONE], -1),
    ([OWN, NONE], 0),
    ([ARRIVED, OWN], 1),  # the other process saw it first
    ([ARRIVED, ARRIVED, OWN], 2),
    ([NONE, ARRIVED], 1),
    ([OWN, OWN], 0),
]


@pytest.mark.parametrize(("found", "rank"), BEGAN)
def test_a_fault_is_that_of_the_process_where_it_began(found: list[Located | None], rank: int) -> None:
    began, place = where_it_began(found)
    assert began == rank
    assert place is (None if rank < 0 else found[rank])
