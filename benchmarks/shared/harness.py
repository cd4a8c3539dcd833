"""Compare the times of pieces of code on a machine that is not quiet.

Rounds are interleaved: every piece runs once per round, and ratios are computed within a round, so that a slower machine slows down
all pieces alike. Times are CPU times of one thread, which the load of other processes changes least. Figures are medians, with the
smallest and the largest value.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared import RESULTS, ROOT

Row = tuple[str, str, str]
"""What was measured, the result, and the target."""
OF_ONE_MACHINE: dict[str, Any] = {"folder": True, "variables": {"TORCHINDUCTOR_CACHE_DIR": True, "PYTHONPATH": True}}
"""The parts of the environment that are paths of this machine."""

WARM_UP = 2
"""Rounds before the timed ones."""


def interleave(
    pieces: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    around: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
) -> dict[str, list[float]]:
    """Return the milliseconds of thread CPU time of every piece in every round.

    A piece named in ``around`` runs inside that context; entering and leaving it is not timed.
    """
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {name: [] for name in pieces}
    for number in range(WARM_UP + rounds):
        for name, run in pieces.items():
            with (around or {}).get(name, nullcontext)():
                started = time.thread_time()
                run()
                took_ms = (time.thread_time() - started) * 1e3
            if number >= WARM_UP:
                times[name].append(took_ms)
    return times


def ratio(times: Mapping[str, list[float]], of: str, to: str) -> dict[str, float]:
    """Return median, smallest and largest ratio of two pieces, round by round."""
    return summary([a / b for a, b in zip(times[of], times[to], strict=True)])


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


BUILDS = 12
"""How often both sides of a comparison are rebuilt: their placement in memory favours one of them by a percent or two."""
CONFIDENCE = 0.95


def over_builds(ratios: Iterable[Iterable[float]]) -> dict[str, Any]:
    """Return the median over builds of each build's median ratio, and the interval of these medians.

    The interval is the narrowest one between two of them that contains the true median in at least 95% of all cases: from the 3rd to the
    10th of 12. Fewer than six have no such interval; then it is from the smallest to the largest. ``confidence`` is the
    interval's.
    """
    medians = sorted(statistics.median(build) for build in ratios)
    outside = max((k for k in range(len(medians) // 2) if _confidence(len(medians), k) >= CONFIDENCE), default=0)
    return {
        "ratio": statistics.median(medians),
        "interval": [medians[outside], medians[-1 - outside]],
        "confidence": round(_confidence(len(medians), outside), 3),
        "medians_of_builds": [round(median, 4) for median in medians],
    }


def _confidence(builds: int, outside: int) -> float:
    """Return how often the true median lies between the builds' medians, with ``outside`` of them left out at either end."""
    return 1 - 2 * sum(math.comb(builds, k) for k in range(outside + 1)) / 2**builds


def median_ms(times: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def spread(value: Mapping[str, float], unit: str = "x", *, digits: int = 2) -> str:
    """Return a figure as text: median (smallest to largest)."""
    return "{median:.{0}f}{1} ({min:.{0}f} to {max:.{0}f})".format(digits, unit, **value)


def report(name: str, rows: list[Row], data: dict[str, Any]) -> None:
    """Print rows of (what, measured, target) and write them with the environment to ``results/NAME.json``.

    The environment is the CPU's, even if there is a GPU: all rows were measured on the CPU.
    """
    show(name, rows)
    facts = {"command": f"python -m benchmarks {name}", "environment": surroundings("cpu"), **data}
    write(RESULTS / f"{name}.json", rows, facts)


def store(name: str, command: Sequence[str], rows: list[Row], *libraries: str) -> None:
    """Write rows that were printed to ``results/NAME.json``, with the command without folders, and the libraries' versions."""
    words = [Path(word).name if "/" in word else word for word in command]
    versions = {library: metadata.version(library) for library in libraries}
    facts = {"command": shlex.join(["python", "-m", "benchmarks", *words]), "environment": surroundings("cpu")}
    write(RESULTS / f"{name}.json", rows, {**facts, "libraries": versions})


def show(name: str, rows: list[Row]) -> None:
    width = max(len(what) for what, _, _ in rows)
    print(f"\n{name}")
    for what, measured, target in rows:
        print(f"  {what:{width}}  {measured:34}  {target}", flush=True)


def write(path: Path, rows: list[Row], facts: Mapping[str, Any]) -> None:
    """Write a file of results: the command, the environment, the rows, then the other facts."""
    facts = dict(facts)
    record = {
        "name": path.stem,
        "command": facts.pop("command"),
        "environment": facts.pop("environment"),
        "rows": [{"what": what, "measured": measured, "target": target} for what, measured, target in rows],
        **facts,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def surroundings(device: str) -> dict[str, Any]:
    """Return the environment of measurements on a device; for a GPU this calls the driver."""
    from mezzo.measure.environment import environment  # programs that measure torch alone do without Mezzo

    return environment(device).model_dump(exclude=OF_ONE_MACHINE)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) + "\n"


def with_table(page: str, begin: str, end: str, table: str) -> str:
    """Return a page with the text between two markers replaced.

    Raises:
        SystemExit: the page does not have the markers once, in this order.
    """
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed or begin in rest:
        raise SystemExit(
            f"the page needs the line {begin.strip()!r}, and after it {end!r}, once each, around its table"
        )
    return before + begin + table + end + after


def record_of(words: Sequence[str], out: Path) -> Any:
    """Run a command of Mezzo that writes to ``out``, and return its record; its exit code is ignored, because the record has the reason."""
    from mezzo.records import read_record

    done = subprocess.run(
        [sys.executable, "-m", "mezzo", *words], cwd=ROOT, check=False, capture_output=True, text=True
    )
    if not (out / "record.json").is_file():
        raise SystemExit(f"{' '.join(words)}: no record, exit code {done.returncode}\n{done.stderr[-2000:]}")
    return read_record(out / "record.json")
