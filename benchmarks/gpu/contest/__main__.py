"""Run the benchmark on one GPU within a time budget.

Rows are on disk as soon as they are measured (``gpu-DATE.jsonl``, and a table in ``gpu-DATE.md``). A case that does not fit into the
remaining time becomes a row that says so; name it with ``--only`` to measure it in another run. If a kernel destroys the GPU's context, the
measuring process is started again and continues with the next case.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import mezzo
from benchmarks.gpu.contest.cases import LOST, plan
from benchmarks.gpu.contest.results import Results
from benchmarks.shared import ROOT, options

MARGIN_S = 10.0
"""Reserved to end the process and write the table."""


def main(argv: Sequence[str] = ()) -> int:
    """Run the benchmark within its budget; return the exit code."""
    started = time.time()
    assert mezzo.Session  # imports Mezzo's dependencies: if one is missing, only the other libraries would be measured
    args = _parse(argv)
    if args.list:
        for case in plan(tiny=args.tiny):
            print(f"{case.seconds:5.0f} s  {case.name}")
        return 0
    name = f"gpu-{datetime.now(timezone.utc):%Y%m%dT%H%M%S}{'-tiny' if args.tiny else ''}.jsonl"
    results = Results(args.out.resolve() / name)
    end = started + 60 * args.minutes - MARGIN_S
    settings = {"device": args.device, "tiny": args.tiny, "only": args.only, "deadline": end}
    settings |= {"results": str(results.path), "command": shlex.join(["python", "-m", "benchmarks", "contest", *argv])}
    code = supervise(
        [sys.executable, "-m", "benchmarks.gpu.contest.worker", json.dumps(settings)], results, end, args.minutes
    )
    print(results.write_markdown().read_text(encoding="utf-8"))
    print(results.path)
    return code


def supervise(command: list[str], results: Results, end: float, minutes: float) -> int:
    """Run ``command`` until it ends or the time is over; restart it as long as it dies in a different case each time."""
    seen = -1
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    while True:
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        try:
            code = process.wait(timeout=max(1.0, end - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            _close(results, "stopped", f"the budget of {minutes:g} minutes ended")
            return 0
        if code == 0:
            return 0
        _close(results, "failed", f"the process ended with exit code {code}")
        progress = len(results.begun())
        if (code != LOST and code > 0) or progress == seen or time.time() > end:
            return code
        seen = progress


def _close(results: Results, status: str, why: str) -> None:
    case = results.open_case()
    if case is not None:
        results.add("row", case=case, way="", status=status, why=why)
        results.add("end", case=case, seconds=0)


def _parse(argv: Sequence[str]) -> Any:
    parser = options(__name__)
    parser.add_argument("--minutes", type=float, default=8.0, help="budget of the whole run")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models: a test of this program, on a CPU")
    parser.add_argument("--only", default="", help="regular expression: cases to run in addition to the roofs")
    parser.add_argument("--list", action="store_true", help="print the cases with their estimated seconds and stop")
    return parser.parse_args(argv)
