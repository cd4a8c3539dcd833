"""Which failures the policy's format explains, and what to type then."""

from __future__ import annotations

import pytest

from mezzo.report.commands import explained

REFUSED = "an operation does not accept the format of O1; find the modules that must stay in FP32", "fallback"
CASES: list[tuple[list[str], tuple[str, str] | None]] = [
    (["RuntimeError: expected scalar type Float but found Half"], REFUSED),
    (
        ["RuntimeError: value cannot be converted to type c10::Half without overflow"],
        ("a number in the script is beyond the range of O1; find its line", "diagnose"),
    ),
    (
        ["RuntimeError: value cannot be converted to type at::Half without overflow", "KeyError: 'x'"],
        ("a number in the script is beyond the range of O1; find its line", "diagnose"),
    ),
    (["KeyError: 'x'", "RuntimeError: Unsupported dtype BFloat16"], REFUSED),
    (["KeyError: 'x'", "RuntimeError: value cannot be converted to type int8_t without loss"], None),
    ([], None),
]


@pytest.mark.parametrize(("errors", "expected"), CASES)
def test_a_failure_that_the_format_explains(errors: list[str], expected: tuple[str, str] | None) -> None:
    assert explained(errors, "O1") == expected
