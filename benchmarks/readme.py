"""Make the figures of the README: a recorded session, a picture of a report, and its table of figures, from the benchmarks' results.

``make readme`` runs the benchmarks that count rather than time, takes both pictures again and writes the table. Times need a quiet
machine and longer than a few minutes: the table takes them from the results that ``make bench`` left.
"""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import RESULTS, with_table
from benchmarks.recording import record_session
from mezzo import read_record
from mezzo.records import CompareRecord

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- made by make readme -->\n", "<!-- end of what make readme made -->"

COUNTED = ("agreement", "state_bytes", "float64")
"""Benchmarks whose figures are the same on a busy machine."""

PICTURE = "docs/images/report.png"
OPTIONS = ["--policies", "fp32,bf16,bf16-pure", "--seeds", "3", "--metric", "acc +([0-9.]+)"]
SCRIPT = ["examples/digits.py"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, HEIGHT = 1280, 1400

Rows = dict[str, str]
"""The figures of one benchmark, as text by its own words."""


class Line(NamedTuple):
    """One row of the table: what, the benchmark, and the figures as text."""

    what: str
    benchmark: str
    figures: Callable[[Rows], str]


def _median(text: str) -> str:
    """Return the median of ``4.68x (4.55 to 4.77)``, without its unit."""
    return text.split("x")[0]


def _emulated(rows: Rows, other: str) -> str:
    return (
        f"{_median(rows[f'digits CNN: {other}'])}x (CNN), {_median(rows[f'small transformer: {other}'])}x (transformer)"
    )


def _one_pass(rows: Rows) -> str:
    found = [_median(text) for what, text in rows.items() if "mezzo.AdamW against" in what]
    return "{}x (25.6 M parameters), {}x (109.5 M)".format(*found)


def _bytes(rows: Rows) -> str:
    of = {what.split(", rounding")[0]: text.removesuffix(".00") for what, text in rows.items()}
    return (
        f"{of['fp16-master, moments=fp32']} in FP16, {of['bf16-master, moments=fp32']} in BF16; with 8-bit moments "
        f"{of['fp16-master, moments=8bit']} and {of['bf16-master, moments=8bit']}, without masters {of['bf16-pure, moments=8bit']}"
    )


def _identical(rows: Rows) -> str:
    tensors = [text.split(" of ") for what, text in rows.items() if "bit-identical" in what]
    same, total = (sum(int(pair[side]) for pair in tensors) for side in (0, 1))
    return f"{same} of {total} tensors bit-identical"


def _nearer(rows: Rows) -> str:
    found = [
        f"{_median(text)}x with {what.split(':')[0].replace('_', ' ').replace('=', ' ')}" for what, text in rows.items()
    ]
    return ", ".join(found)


LINES = [
    Line(
        'emulated FP16 training step: speed over `torch.autocast("cpu", float16)`',
        "emulation",
        lambda rows: _emulated(rows, 'torch.autocast("cpu", float16) over emulated'),
    ),
    Line(
        "emulated FP16 training step: time over FP32's",
        "emulation",
        lambda rows: _emulated(rows, "emulated fp16 over fp32"),
    ),
    Line(
        "loss scales identical to `torch.amp.GradScaler`'s over random overflow patterns",
        "agreement",
        lambda rows: next(text for what, text in rows.items() if what.startswith("loss scales")),
    ),
    Line(
        "weights after 50 steps in FP16 and BF16, compared with a hand-written autocast and GradScaler loop",
        "agreement",
        _identical,
    ),
    Line(
        "Python calls a step in FP16, over that loop's",
        "session_overhead",
        lambda rows: (
            f"{float(rows['fp16: Python calls a step against the hand-written loop'][:-1]):.2f}x; "
            f"{float(rows['fp16, clipping: Python calls a step against the hand-written loop'][:-1]):.2f}x with clipping"
        ),
    ),
    Line(
        "`mezzo.AdamW` on FP16 weights with masters: speed over unscale, clip, AdamW(foreach) and copies",
        "optimizers",
        _one_pass,
    ),
    Line("bytes a parameter with AdamW: weights, gradients, masters and moments", "state_bytes", _bytes),
    Line(
        "distance of the weights to float64 after 10,000 updates: `torch.optim.AdamW`'s over `mezzo.AdamW`'s",
        "float64",
        _nearer,
    ),
]


def results(name: str) -> Rows:
    """Return the rows that a benchmark wrote to ``results/NAME.json``."""
    record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return {row["what"]: row["measured"] for row in record["rows"]}


def table() -> str:
    """Return the README's table of figures, each with the command that prints it."""
    lines = ["| what | measured | `python -m benchmarks` |", "|---|---|---|"]
    lines += [f"| {line.what} | {line.figures(results(line.benchmark))} | `{line.benchmark}` |" for line in LINES]
    return "\n".join(lines) + "\n"


def written(text: str) -> str:
    """Return the README's ``text`` with the table made anew."""
    return with_table(text, BEGIN, END, table())


def unfair(record: CompareRecord) -> list[str]:
    """Return the policies to leave out of a picture, because times of emulated formats would appear beside measured ones."""
    return [row.policy for row in record.rows if row.emulated]


def take_picture() -> None:
    """Compare policies on the digits example and photograph the report."""
    browser = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if browser is None:
        raise SystemExit(f"the picture is taken by one of {', '.join(BROWSERS)}: install one")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mezzo", "compare", *OPTIONS, "--out", f"{folder}/report", *SCRIPT]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
        record = read_record(Path(folder) / "report/record.json")
        assert isinstance(record, CompareRecord)
        if names := unfair(record):
            raise SystemExit(
                f"{', '.join(names)}: emulated on this CPU. Take the picture where BF16 is native (see mezzo doctor)"
            )
        photograph(browser, Path(folder) / "report/report.html", ROOT / PICTURE)


def photograph(browser: str, page: Path, picture: Path) -> None:
    """Write the top of a page as a picture."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=6000"]
    flags += [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}"]
    subprocess.run([browser, *flags, page.as_uri()], check=True, capture_output=True, timeout=120)


def main() -> None:
    """Run the benchmarks that count, record the session, take the picture and write the table."""
    for name in COUNTED:
        importlib.import_module(f"benchmarks.{name}").main()
    record_session()
    take_picture()
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
