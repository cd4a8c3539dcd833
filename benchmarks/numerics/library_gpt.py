"""How far from BF16 does a small GPT end when it trains in formats of 8 and 4 bits?

Two layers of width 64 learn the source of Python's standard library for 2,000 steps, under five seeds that share data and start.
An hour on two cores. ``--record`` prints an earlier comparison's record instead.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.shared import ROOT, options
from benchmarks.shared.harness import Row, record_of, report
from mezzo.records import CompareRecord, read_record

SCRIPT = ROOT / "benchmarks" / "scripts" / "block_formats" / "library_gpt.py"
POLICIES = ("bf16", "fp8", "mxfp8", "nvfp4", "mxfp4")
PUBLISHED = {
    "mxfp8": "+0.1% (marin-community/marin#7271)",
    "nvfp4": "+1% to +1.5% (arXiv:2509.25149)",
    "mxfp4": "more than NVFP4 (arXiv:2509.25149)",
}
"""Differences in the training of large models."""


def rows_of(record: CompareRecord) -> list[Row]:
    """Return the difference of each policy's final loss to BF16's, and what was published of large models."""
    found: list[Row] = []
    for row in record.rows:
        if row.loss is not None and row.policy != POLICIES[0]:
            shown = (
                f"{row.loss.difference:+.2%} (95% interval {row.loss.low:+.2%} to {row.loss.high:+.2%}), {row.verdict}"
            )
            found.append((f"{row.policy}: final loss over bf16's", shown, PUBLISHED.get(row.policy, "")))
    return found


def main(argv: Sequence[str] = ()) -> None:
    parser = options(__name__)
    parser.add_argument("--record", type=Path, help="the folder of an earlier comparison of these policies")
    folder = parser.parse_args(argv).record
    if folder is not None:
        record = read_record(folder / "record.json")
    else:
        with tempfile.TemporaryDirectory() as place:
            words = ["compare", "--policies", ",".join(POLICIES), "--seeds", "5", "--gpus", "none", "--out", place]
            record = record_of([*words, str(SCRIPT)], Path(place))
    assert isinstance(record, CompareRecord)
    report(
        "library_gpt",
        rows_of(record),
        {"final_loss": {row.policy: row.loss.value for row in record.rows if row.loss is not None}},
    )
