"""A time budget, as shown."""

from __future__ import annotations

import pytest

from mezzo.cli.values import Budget


def test_what_happens_is_told_with_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    Budget(600.0).say("fp32, seed 0")
    assert capsys.readouterr().err == "[0:00, 10:00 left] fp32, seed 0\n"
    late = Budget(0.001)
    while late.spent_s < 0.001:
        pass
    late.say("still here")
    assert capsys.readouterr().err == "[0:00, 0:00 left] still here\n"
