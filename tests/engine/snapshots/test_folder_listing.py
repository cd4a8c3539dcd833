"""``mezzo report`` of a folder of snapshots."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mezzo
from mezzo.commands.report.command import report
from mezzo.engine.snapshots import container
from mezzo.engine.snapshots.folder import listing
from mezzo.errors import UsageError


def write(folder: Path) -> Path:
    container.write(
        folder / "000001-update-00000002.safetensors", {"position": {"epoch": 1, "batch": 4}}, {"w": torch.ones(1)}
    )
    newest = folder / "000002-update-00000003+1.safetensors"
    container.write(
        newest, {"position": {"epoch": 2, "batch": 5}}, {"w": torch.ones(2, 3), "a\x1b[2J": torch.tensor(1)}
    )
    return newest


def test_a_folder_of_snapshots_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = write(tmp_path)

    report([tmp_path])

    lines = capsys.readouterr().out.splitlines()
    older = tmp_path / "000001-update-00000002.safetensors"
    assert lines == [
        f"2 snapshots in {tmp_path}",
        f"  {newest.name}   {newest.stat().st_size:,} bytes   after 3 updates, 1 micro-batches of the next",
        f"  {older.name}   {older.stat().st_size:,} bytes   after 2 updates",
        f"in {newest.name}: 2 finished passes over the data and 5 batches; file version 3, "
        f"mezzo {mezzo.__version__}, torch {torch.__version__}",
        "  w          float32   2x3   24 bytes",
        "  a\\x1b[2J   int64   one number   8 bytes",
    ]
    assert [*listing(tmp_path)] == lines
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".html"] == []


def test_a_damaged_one_is_said(tmp_path: Path) -> None:
    write(tmp_path).write_bytes(b"x")

    assert [*listing(tmp_path)][-1].startswith("the newest cannot be read: ")


def test_pages_are_refused(tmp_path: Path) -> None:
    write(tmp_path)

    with pytest.raises(UsageError, match=r"--open shows pages, and .* has snapshots, which have none"):
        report([tmp_path], show=True)
