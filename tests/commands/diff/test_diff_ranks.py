"""One process and two: what only the exchange of gradients gets wrong is found where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers_values import record_at
from mezzo.cli import main
from mezzo.records import DiffRecord
from paths import SCRIPTS

SCRIPT = str(SCRIPTS / "diff" / "processes.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "verdict", "at"),
    [
        ("", "rounding", None),
        ("missing", "beyond rounding", ("gradient", "4.weight", 1)),
        ("sum", "beyond rounding", ("allreduce", "(script)", 1)),
        ("bf16", "beyond rounding", ("allreduce", "(script)", 1)),
        ("local statistics", "beyond rounding", ("batch_norm", "2", 1)),
    ],
)
def test_a_fault_of_the_exchange(fault: str, verdict: str, at: tuple[str, str, int] | None, tmp_path: Path) -> None:
    code = main(["diff", "--ranks", "1,2", "--out", str(tmp_path), SCRIPT, fault])
    record = record_at(tmp_path / "record.json", DiffRecord)
    assert record.why == ""
    assert (code, record.verdict) == (int(at is not None), verdict)
    if at is not None:
        first = record.beginnings[0].b
        assert (first.op, first.module, first.step) == at
