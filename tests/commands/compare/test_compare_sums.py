"""``mezzo compare`` on a script whose sums are long: fewer bits for them change what it learns."""

from __future__ import annotations

from pathlib import Path

from helpers_launch import children_in_this_process
from helpers_values import record_at
from mezzo.cli import main
from mezzo.records import CompareRecord
from paths import SCRIPTS

SUMS = str(SCRIPTS / "diff" / "sums.py")


def verdicts(folder: Path, policies: str, *arguments: str) -> dict[str, str]:
    with children_in_this_process():
        words = ["--gpus", "none", "--fail-on", "none", "--policies", policies, "--out", str(folder)]
        assert main(["compare", *words, SUMS, *arguments]) == 0
    record = record_at(folder / "record.json", CompareRecord)
    explained = {choice.what for run in record.runs for choice in run.explanation}
    assert explained & {"sums of products", "sums of gradients"}
    return {row.policy: row.verdict for row in record.rows}


def test_products_added_up_in_fewer_bits(tmp_path: Path) -> None:
    """Sums of 4096 products lose 7%, unless they are promoted after every 128."""
    found = verdicts(tmp_path, "fp8,fp8:accumulate=fp22,fp8:accumulate=fp22-128", "0", "1e-5")
    assert found == {"fp8": "baseline", "fp8:accumulate=fp22": "different", "fp8:accumulate=fp22-128": "equivalent"}


def test_gradients_added_up_in_bf16(tmp_path: Path) -> None:
    """63 gradients of 0.15% each are lost, a tenth of the sum: as with a learning rate a tenth smaller."""
    found = verdicts(tmp_path, "fp32,fp32:gradients=bf16", "63", "1e-3")
    assert found == {"fp32": "baseline", "fp32:gradients=bf16": "different"}
