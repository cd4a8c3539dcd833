"""Measured rows as JSON lines, each on disk before the next is measured, and as a Markdown table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.shared.harness import table

Row = dict[str, Any]
_COLUMNS = ("way", "ms a step", "a second", "against", "peak MiB", "loss", "of peak", "note")


class Results:
    """The rows of one run in a file that only grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, kind: str, **fields: Any) -> None:
        """Add a row: ``environment``, ``begin``, ``row`` or ``end``."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")

    def rows(self) -> list[Row]:
        """Return all rows so far; a last line that was cut off is left out."""
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []:
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return rows

    def begun(self) -> list[str]:
        return list(dict.fromkeys(row["case"] for row in self.rows() if row["kind"] == "begin"))

    def open_case(self) -> str | None:
        """Return the case that has begun and not ended, or None."""
        ended = {row["case"] for row in self.rows() if row["kind"] == "end"}
        return next((case for case in self.begun() if case not in ended), None)

    def write_markdown(self) -> Path:
        path = self.path.with_suffix(".md")
        path.write_text(markdown(self.rows()), encoding="utf-8")
        return path


def markdown(rows: list[Row]) -> str:
    """Return the rows as a page: the environment, then a table for each case."""
    lines = ["# One GPU", ""]
    for row in rows:
        if row["kind"] == "environment":
            lines += [f"- {name}: {value}" for name, value in row.items() if name != "kind"]
    measured = [row for row in rows if row["kind"] == "row"]
    for case in dict.fromkeys(row["case"] for row in measured):
        own = [row for row in measured if row["case"] == case]
        shown = _training if any("ms_median" in row or row.get("way") for row in own) else _listed
        lines += ["", f"## {case}", "", shown(own).removesuffix("\n")]
    return "\n".join(lines) + "\n"


def _listed(rows: list[Row]) -> str:
    cells = [(r.get("what") or r["status"], r.get("value") or r["why"]) for r in rows]
    return table(("what", "value"), ([_cell(one) for one in row] for row in cells))


def _training(rows: list[Row]) -> str:
    measured_first = sorted(rows, key=lambda row: row["status"] != "measured")
    return table(_COLUMNS, ([_cell(one) for one in _cells(row)] for row in measured_first))


def _cells(row: Row) -> list[str]:
    if row["status"] != "measured":
        return [row.get("way", ""), *[""] * 6, f"{row['status']}: {row['why']}"]
    return [
        row["way"],
        f"{row['ms_median']:.2f} ({row['ms_min']:.2f} to {row['ms_max']:.2f})",
        f"{row['a_second']:,.0f} {row['unit']}",
        f"{row['speed_median']:.2f}x ({row['speed_min']:.2f} to {row['speed_max']:.2f})"
        if "speed_median" in row
        else "",
        _number(row["peak_mib"], "{:,.0f}"),
        f"{row['loss']:.4f} after {row['loss_steps']}",
        _number(row["percent_of_peak"], "{:.0f}%"),
        row["note"],
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _cell(text: str) -> str:
    return str(text).replace("|", "/").replace("\n", " ")
