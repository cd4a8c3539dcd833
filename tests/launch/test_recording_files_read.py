"""Which of the files that a script opens may be another run's: by how they are opened, and by their time."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from mezzo.launch.recording import FilesRead, files_read

BEGAN, STARTED = 1_700_000_000.5, 1_700_000_100.5


def written(path: Path, at_s: float, *, content: bytes = b"weights") -> Path:
    path.write_bytes(content)
    os.utime(path, (at_s, at_s))
    return path


def names(files: FilesRead) -> list[str]:
    return [Path(found.path).name for found in files.found]


def looked_at(*paths: object) -> list[str]:
    files = FilesRead(since_s=BEGAN, before_s=STARTED)
    for path in paths:
        files.read(path)
    return names(files)


@pytest.mark.parametrize(
    ("at_s", "found"),
    [
        (STARTED - 50.25, True),
        (STARTED - 0.01, True),
        (STARTED + 0.01, False),  # by the run itself
        (BEGAN + 0.01, True),
        (BEGAN - 0.01, True),  # a clock that ticks less often than Python's
        (BEGAN - 1.25, False),
        (BEGAN - 0.5, True),  # whole seconds: perhaps written up to two seconds later
        (BEGAN - 2.5, False),
        (STARTED - 0.5, False),  # whole seconds: perhaps by the run itself
        (STARTED - 1.5, True),
    ],
)
def test_a_file_is_noted_by_its_time(tmp_path: Path, at_s: float, found: bool) -> None:
    assert looked_at(written(tmp_path / "last.pt", at_s)) == (["last.pt"] if found else [])


def test_what_is_no_file_of_content_is_left_out(tmp_path: Path) -> None:
    os.utime(tmp_path, (STARTED - 9.5, STARTED - 9.5))
    assert looked_at(tmp_path) == []
    assert looked_at(tmp_path / "missing") == []
    assert looked_at(written(tmp_path / "lock", STARTED - 9.25, content=b"")) == []
    assert looked_at(3, None, b"\x00", object()) == []


PLACES = "__pycache__/m.cpython.pyc lib/site-packages/p/data.json mlruns/0/meta.yaml wandb/run/log.txt mlflow.db m.pyc"


@pytest.mark.parametrize("place", PLACES.split())
def test_what_carries_no_training_is_left_out(tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    assert looked_at(written(path, STARTED - 9.25)) == []


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR"])
def test_caches_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, str(tmp_path))
    assert looked_at(written(tmp_path / "kernel.so", STARTED - 9.25)) == []


@pytest.mark.parametrize("variable", ["HF_HOME", "XDG_CACHE_HOME"])
def test_a_folder_whose_name_only_begins_like_a_cache_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "hf"))
    checkpoints = tmp_path / "hf_checkpoints"
    checkpoints.mkdir()
    assert looked_at(written(checkpoints / "last.pt", STARTED - 9.25)) == ["last.pt"]


def test_the_time_survives_renaming_and_copying(tmp_path: Path) -> None:
    first = written(tmp_path / "last.tmp", STARTED - 9.25)
    os.replace(first, tmp_path / "last.pt")
    shutil.copy2(tmp_path / "last.pt", tmp_path / "best.pt")
    assert looked_at(tmp_path / "last.pt") == ["last.pt"]
    assert looked_at(tmp_path / "best.pt") == ["best.pt"]


# --- by which calls --------------------------------------------------------------------------------------------------------------


def heard(path: Path, use: Callable[[Path], object]) -> list[str]:
    """Return what is noted while ``use`` opens a file that was written a second ago, in a comparison that began before."""
    os.utime(path, (now := time.time() - 1.0003, now))
    with files_read(now - 60.0) as files:
        use(path)
    return names(files)


@pytest.mark.parametrize(("earlier_s", "found"), [(0.0101, []), (0.5003, ["last.pt"])])
def test_a_file_dated_a_tick_before_the_run_may_be_its_own(tmp_path: Path, earlier_s: float, found: list[str]) -> None:
    path = written(tmp_path / "last.pt", STARTED)
    now = time.time()
    os.utime(path, (now - earlier_s,) * 2)
    with files_read(now - 60.0) as files:
        path.read_bytes()
    assert names(files) == found


def opened(mode: str) -> Callable[[Path], object]:
    return lambda path: path.open(mode).close()


READ: list[Callable[[Path], object]] = [
    *(opened(mode) for mode in ("r", "rb", "r+", "a+")),
    Path.read_bytes,
    lambda path: os.close(os.open(path, os.O_RDONLY)),
    lambda path: os.close(os.open(os.fsencode(path), os.O_RDWR)),
    lambda path: shutil.copy(path, path.with_suffix(".copy")),
    lambda path: np.memmap(path, mode="r").shape,
]
NOT_READ: list[Callable[[Path], object]] = [
    *(opened(mode) for mode in ("w", "w+", "a")),
    lambda path: os.close(os.open(path, os.O_RDWR | os.O_TRUNC)),
    os.path.exists,
    Path.stat,
]


@pytest.mark.parametrize(("use", "read"), [*((one, True) for one in READ), *((one, False) for one in NOT_READ)])
def test_opening_for_reading_is_recorded(tmp_path: Path, use: Callable[[Path], object], read: bool) -> None:
    path = tmp_path / "last.pt"
    path.write_bytes(b"weights")
    assert heard(path, use) == (["last.pt"] if read else [])


def test_a_path_from_the_folder_of_the_moment_is_noted_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "last.pt"
    path.write_bytes(b"weights")
    os.utime(path, (now := time.time() - 1.0003, now))
    with files_read(now - 60.0) as files:
        Path("last.pt").read_bytes()
        Path("last.pt").read_bytes()
    assert [found.path for found in files.found] == [str(path)]
    assert files.found[0].written_at_s == pytest.approx(now, abs=1e-5)


def test_a_checkpoint_of_torch_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    torch.save({"w": torch.ones(2)}, path)
    assert heard(path, torch.load) == ["last.pt"]
    assert heard(path, lambda p: torch.load(p, mmap=True)) == ["last.pt"]


def test_libraries_that_open_files_in_native_code_are_recorded(tmp_path: Path) -> None:
    tensors = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": torch.ones(2)}, tensors)

    def through_the_package(path: Path) -> list[str]:
        with safetensors.safe_open(path, framework="pt") as file:
            return list(file.keys())

    assert heard(tensors, through_the_package) == ["model.safetensors"]
    assert heard(tensors, lambda path: safetensors.torch.load_file(path)) == ["model.safetensors"]
    raw = tmp_path / "raw.bin"
    raw.write_bytes(b"1234")
    assert heard(raw, lambda path: torch.from_file(str(path), size=1)) == ["raw.bin"]
    base = tmp_path / "study.db"
    sqlite3.connect(base).execute("create table a (x)").connection.close()
    assert heard(base, lambda path: sqlite3.connect(path).close()) == ["study.db"]


def test_nothing_is_heard_outside(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    path.write_bytes(b"weights")
    load, open_safely = torch.jit.load, safetensors.safe_open
    with files_read(None) as never:
        path.read_bytes()
    with files_read(time.time()) as ended:
        pass
    os.utime(path, (time.time() - 1.0003,) * 2)
    path.read_bytes()
    assert (never.found, ended.found) == ([], [])
    assert (torch.jit.load, safetensors.safe_open) == (load, open_safely)


def test_a_run_that_reads_a_million_files_forgets_what_it_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.launch.recording._MAX_PATHS", 3)
    files = FilesRead(since_s=BEGAN, before_s=STARTED)
    for number in range(8):
        files.read(written(tmp_path / f"{number}.pt", STARTED - 9.25))
    assert len(files.found) == 8
    assert len(files._seen) <= 3
