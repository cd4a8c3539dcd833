"""Durations, as typed and as shown."""

from __future__ import annotations

import pytest

from mezzo.cli.values import clock, seconds_of
from mezzo.errors import UsageError

TYPED = [("90s", 90.0), ("10m", 600.0), ("1h", 3600.0), ("1.5M", 90.0), (" 2m ", 120.0)]


@pytest.mark.parametrize(("text", "seconds"), TYPED)
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text, option="--budget", example="10m") == seconds


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        *((text, "10m") for text in ("m", "0s", "0", "-5m", "often", "")),
        *(("90", "90s"), ("5", "5m"), ("1d", "24h"), ("10min", "10m"), ("2 hours", "2h")),
    ],
)
def test_durations_that_are_none(text: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        seconds_of(text, option="--budget", example="10m")
    expected = f"--budget {text!r}; allowed: a time above 0 with its unit, such as 30s, 5m or 1h\n  hint: type: --budget {meant}"
    assert str(caught.value) == expected


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (61.0, "1:01"), (3661.0, "1:01:01")])
def test_clocks(seconds: float, text: str) -> None:
    assert clock(seconds) == text
