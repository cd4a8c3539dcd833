"""A time budget: as typed, and as shown."""

from __future__ import annotations

import pytest

from mezzo.cli.budget import Budget, clock, seconds_of
from mezzo.errors import UsageError


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("10m", 600.0), ("1h", 3600.0), ("1.5M", 90.0)])
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["10", "m", "0s", "-5m", "1d", ""])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        seconds_of(text)
    assert (
        str(caught.value)
        == f"--budget {text!r}; allowed: a number above 0 with a unit, s, m or h\n  hint: type: --budget 10m"
    )


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (61.0, "1:01"), (3661.0, "1:01:01")])
def test_clocks(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_what_happens_is_told_with_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    Budget(600.0).say("fp32, seed 0")
    assert capsys.readouterr().err == "[0:00, 10:00 left] fp32, seed 0\n"
    late = Budget(0.001)
    while late.spent_s < 0.001:
        pass
    late.say("still here")
    assert capsys.readouterr().err == "[0:00, 0:00 left] still here\n"
