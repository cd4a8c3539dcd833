"""Each rank's own files."""

from __future__ import annotations

from pathlib import Path

from helpers_launch import request_for
from mezzo.launch.ranks.merged import for_rank
from mezzo.observe.settings import AnySettings, DiagnoseSettings, FallbackSettings, RangesSettings


def asked(observe: AnySettings, rank: int, folder: Path) -> AnySettings:
    request = request_for(folder, "t.py", policy="fp16", observe=observe)
    found = for_rank(request, rank, folder=folder, number=4, ranks=3)
    assert found.rank == rank
    assert found.observe is not None
    return found.observe


def test_no_two_ranks_write_one_file(tmp_path: Path) -> None:
    diagnose = [
        asked(DiagnoseSettings(evidence_path=str(tmp_path / "run.evidence.json")), r, tmp_path) for r in range(3)
    ]
    assert [Path(o.evidence_path).name for o in diagnose if o.kind == "diagnose"] == [
        "run.evidence.json",
        "run.evidence.rank1.json",
        "run.evidence.rank2.json",
    ]
    fallback = [asked(FallbackSettings(folder=str(tmp_path)), rank, tmp_path) for rank in range(2)]
    assert [o.folder for o in fallback if o.kind == "fallback"] == [str(tmp_path), str(tmp_path / "rank1")]
    assert (tmp_path / "rank1").is_dir()
    ranges = asked(RangesSettings(), 1, tmp_path)
    assert ranges.kind == "ranges"
    assert ranges.counts_path == str(tmp_path / "run-4.counts.json")
