"""The files that several processes write next to one another."""

from __future__ import annotations

from pathlib import Path

from mezzo.records.files import files_of_ranks


def test_the_files_of_ranks_are_found_in_order(tmp_path: Path) -> None:
    own = tmp_path / "run.evidence.json"
    for name in (
        "run.evidence.rank10.json",
        "run.evidence.rank2.json",
        "other.evidence.rank1.json",
        "run.evidence.rankx.json",
    ):
        (tmp_path / name).write_text("{}")
    assert [place.name for place in files_of_ranks(own)] == [
        "run.evidence.json",
        "run.evidence.rank2.json",
        "run.evidence.rank10.json",
    ]
