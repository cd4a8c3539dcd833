"""What a trace knows of graph nodes by their numbers."""

from __future__ import annotations

import pytest

from mezzo.observe.trace import nearest


@pytest.mark.parametrize(("number", "found"), [(0, 2), (2, 2), (3, 5), (5, 5), (6, 9), (9, 9), (10, 9)])
def test_the_nearest_number_is_the_next_one_or_the_last(number: int, found: int) -> None:
    assert nearest([2, 5, 9], number) == found
