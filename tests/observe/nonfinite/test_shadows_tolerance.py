"""How far a gradient may be off and still be rounding."""

from __future__ import annotations

import pytest

from mezzo.observe.nonfinite.evidence import FaultSource
from mezzo.observe.nonfinite.shadows import tolerance


def source(form: str) -> FaultSource:
    return FaultSource(0, "made", "mm", None, "", backward=False, format=form, operands=[], wide=None, scale=1.0)


@pytest.mark.parametrize(
    ("forms", "most"),
    [
        ([], 0.0),
        (["fp16"], 40 * 2.0**-11),  # forty unit roundoffs, half an eps each
        (["bf16"], 40 * 2.0**-8),
        (["fp16", "bf16"], 40 * 2.0**-8),
        (["int64"], 0.0),
    ],
)
def test_the_tolerance_is_forty_roundoffs_of_the_widest(forms: list[str], most: float) -> None:
    assert tolerance([source(form) for form in forms]) == most
