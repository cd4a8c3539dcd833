"""Requests for activation checkpointing: plans by name, and bytes."""

from __future__ import annotations

import pytest

from mezzo.errors import UsageError
from mezzo.measure.checkpointing.wanted import check_wanted, is_plan


@pytest.mark.parametrize("text", ["full", " every-3 ", "selective", "12GiB", "800 MB", "2.5gb"])
def test_plans_and_bytes_are_accepted(text: str) -> None:
    assert check_wanted(text) == text.strip()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ful", "--checkpoint 'ful'; did you mean full"),
        ("every-0", "--checkpoint 'every-0'; allowed: full, every-K with a number, selective, or bytes"),
        ("12", "--checkpoint '12'; allowed: full"),
        ("0GiB", "--checkpoint '0GiB'; allowed: full"),
        ("none", "--checkpoint 'none'; allowed: full, every-2, selective"),
        ("", "--checkpoint ''; allowed: full"),
    ],
)
def test_everything_else_is_refused_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_wanted(text)
    assert str(caught.value).startswith(message)
    assert "--checkpoint 12GiB" in str(caught.value.hint)


@pytest.mark.parametrize(("text", "expected"), [("none", True), ("every-12", True), ("every-", False), ("1GiB", False)])
def test_names_of_plans(text: str, expected: bool) -> None:
    assert is_plan(text) is expected
