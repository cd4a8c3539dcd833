"""Rows of measurements in CSV files, gzipped where the name ends in ``.gz``, and the loop that measures until its time is over."""

from __future__ import annotations

import csv
import gzip
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

Cells = dict[str, str]
T = TypeVar("T")


def read(path: Path) -> Iterator[Cells]:
    with _opened(path, "r") as file:
        yield from csv.DictReader(file)


def continued(path: Path) -> Iterator[Cells]:
    """Yield the rows of a file that more are added to, if there is one; a last line that was cut off is removed."""
    if path.exists():
        text = path.read_bytes()
        path.write_bytes(text[: text.rfind(b"\n") + 1])
        yield from read(path)


def append(path: Path, rows: Iterable[Mapping[str, Any]], names: Iterable[str], *, mode: str = "a") -> None:
    """Add rows to a file, each as soon as it is available; a new one begins with ``names``."""
    is_new = mode == "w" or not path.exists() or path.stat().st_size == 0
    with _opened(path, mode) as file:
        writer = csv.DictWriter(file, list(names), lineterminator="\n")
        if is_new:
            writer.writeheader()
        for row in rows:
            writer.writerow(row)
            file.flush()


write = partial(append, mode="w")
"""Write rows to a new file."""


def until(limit_s: float, cases: Iterable[T]) -> Iterator[T]:
    """Yield cases; none begins that would end later than ``limit_s`` seconds from now if it took as long as the longest so far."""
    begin, longest = time.monotonic(), 0.0
    for case in cases:
        at = time.monotonic()
        if at - begin + longest > limit_s:
            print(f"the time is over before {case}", flush=True)
            return
        yield case
        longest = max(longest, time.monotonic() - at)


def _opened(path: Path, mode: str) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, f"{mode}t", encoding="utf-8", newline="")  # type: ignore[return-value]
    return path.open(mode, encoding="utf-8", newline="")  # type: ignore[return-value]
