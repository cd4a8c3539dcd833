"""How often does ``mezzo gate`` fail an unchanged script, and how often does it find what was planted?

Two parts. Simulated: losses and metrics of a known distribution are judged, with and without pairs. Real: trainings of a small script
on this machine, with other processes that come and go, each gate with runs of its own. Planted are a loss moved by two standard
deviations of the golden's, 3% more memory, one module in FP32, and 25% more CPU time in every step.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.shared import options
from benchmarks.shared.harness import report
from benchmarks.verdicts.rates import Rate
from mezzo.cli.script import Script
from mezzo.commands.gate.command import accepted, gated
from mezzo.commands.gate.golden import read_golden
from mezzo.commands.gate.judge import FIRST_RUNS, MORE_RUNS, judge
from mezzo.commands.gate.runs import GateRuns
from mezzo.records import GateRecord, Golden, GoldenRun
from mezzo.studies.loop import Finished, Study
from mezzo.studies.side_by_side import one_after_another

SCRIPT = Path(__file__).parents[1] / "scripts" / "gates" / "train.py"
GOLDEN_RUNS = 10
MOST_FALSE, LEAST_FOUND = 0.01, 0.95
MOVED = 2.0
Draw = Callable[[np.random.Generator], float]
LOGNORMAL_SIGMA = 0.75

DRAWS: dict[str, Draw] = {
    "normal": lambda rng: float(rng.standard_normal()),
    "Student's t, 3 degrees": lambda rng: float(rng.standard_t(3)) / 3**0.5,
    "lognormal": lambda rng: float(_standard_lognormal(rng)),
}
"""Losses with a standard deviation of 1."""


def _standard_lognormal(rng: np.random.Generator) -> float:
    squared = LOGNORMAL_SIGMA**2
    spread = float(np.sqrt((np.exp(squared) - 1.0) * np.exp(squared)))
    return (float(np.exp(LOGNORMAL_SIGMA * rng.standard_normal())) - float(np.exp(squared / 2))) / spread


def simulated(num: int, draws: Mapping[str, Draw] = DRAWS) -> list[Rate]:
    """Return the rates of simulated gates: pairs that are alike but for a little noise, and runs that have nothing in common."""
    rates = []
    for name, draw in draws.items():
        for what, own_share in (("paired, noise of 0.2", 0.2), ("no pairs", 1.0)):
            for metric in (False, True):
                title = f"{what}, {name}{', and a metric' if metric else ''}"
                for moved in (0.0, MOVED):
                    rng = np.random.default_rng(0)
                    share = statistics.fmean(
                        _fails(rng, draw, own_share=own_share, moved=moved, metric=metric) for _ in range(num)
                    )
                    most, least = (None, LEAST_FOUND) if moved else (MOST_FALSE, None)
                    how = f"loss moved by {moved:g} standard deviations: found" if moved else "unchanged: failed"
                    rates.append(Rate(what=f"{title}; {how}", share=share, num=num, most=most, least=least))
    return rates


def _fails(rng: np.random.Generator, draw: Draw, *, own_share: float, moved: float, metric: bool) -> bool:
    """Return whether a simulated gate fails; ``own_share`` is the part of a run's deviation that its seed does not decide."""
    seeds = range(GOLDEN_RUNS + MORE_RUNS)
    common = [draw(rng) for _ in seeds]

    def run(seed: int, by: float) -> GoldenRun:
        values = [own_share * draw(rng) + (common[seed] if own_share < 1.0 else 0.0) for _ in range(2)]
        return GoldenRun(
            seed=seed, num_steps=10, losses={"loss": 9.0 + values[0] + by}, metric=values[1] if metric else None
        )

    golden = Golden(
        golden_version=1,
        script="train.py",
        policy="fp32",
        script_sha256="",
        machine={},
        timed_in="reference",
        runs=[run(seed, 0.0) for seed in seeds[:GOLDEN_RUNS]],
    )
    runs = [run(seed, moved) for seed in seeds[:FIRST_RUNS]]
    while len(runs) < FIRST_RUNS + MORE_RUNS and judge(golden, runs, machine={}).wants_more:
        runs += [run(seed, moved) for seed in seeds[len(runs) : len(runs) + FIRST_RUNS]]
    failed = {check.name for check in judge(golden, runs, machine={}).checks if check.status == "failed"}
    return bool(failed & ({"loss"} if moved else {"loss", "metric"}))


@contextmanager
def busy(num: int) -> Iterator[None]:
    """Keep ``num`` processes that compute for up to three seconds and sleep as long."""
    code = (
        "import time, random\nwhile True:\n"
        "    end = time.time() + 3 * random.random()\n    while time.time() < end: sum(range(10000))\n"
        "    time.sleep(3 * random.random())"
    )
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(num)]
    try:
        yield
    finally:
        for other in others:
            other.kill()


def real(
    folder: Path, *, unchanged: int, planted: int, arguments: Sequence[str], say: Callable[[str], None]
) -> list[Rate]:
    """Return the rates of real gates on the script with ``arguments``."""

    def runs(words: Sequence[str]) -> GateRuns:
        script = Script(target=str(SCRIPT), arguments=[*arguments, *words])
        study = Study(one_after_another, Finished(folder, {}, what="gate"))
        return GateRuns(script=script, policy=None, policy_typed="", metric=None, folder=folder, study=study)

    path, first = folder / "golden.json", runs([])
    with first.opened(os.environ):
        accepted(first, path, None)
        golden = read_golden(path, accept="")
        losses = [run.losses["loss"] for run in golden.runs]
        num_bytes = golden.runs[0].memory_bytes or 0
        plants = {
            "unchanged: failed": ((), ""),
            "loss moved by 2 standard deviations: found": (("--add", str(MOVED * statistics.stdev(losses))), "loss"),
            "3% more memory: found": (("--pad", str(round(0.03 * num_bytes / 16))), "memory"),
            "one module in FP32: found": (("--own-format",), "formats"),
            "25% more CPU time: found": (("--slower", "0.25"), "speed"),
        }
        found: dict[str, list[bool]] = {what: [] for what in plants}
        for number in range(planted):
            for what, (words, name) in plants.items():
                for _ in range(1 if name else unchanged // planted):
                    gate = replace(runs(words), clock=first.clock, records=[])
                    record = gated(gate, path, golden)
                    failed = [check.name for check in record.failed]
                    found[what].append(name in failed if name else bool(failed))
                    say(
                        f"{number}: {what}: {', '.join(failed) or 'nothing'}, {len(gate.records)} runs, {_speed(record)}"
                    )
    return [
        Rate(
            what=f"{' '.join(arguments) or 'seeded'}, {what}",
            share=statistics.fmean(found[what]),
            num=len(found[what]),
            most=None if name else MOST_FALSE,
            least=LEAST_FOUND if name else None,
        )
        for what, (_, name) in plants.items()
    ]


def _speed(record: GateRecord) -> str:
    check = next((one for one in record.checks if one.name == "speed"), None)
    return (
        f"{check.now / check.golden:.3f} times the golden's step" if check and check.now and check.golden else "no time"
    )


def main(words: list[str]) -> None:
    parser = options("benchmarks.verdicts.gates")
    parser.add_argument("--simulated", type=int, default=4000, help="simulated gates of each kind")
    parser.add_argument("--unchanged", type=int, default=200, help="real gates on the unchanged script")
    parser.add_argument("--planted", type=int, default=60, help="real gates of each planted change")
    parser.add_argument("--load", type=int, default=2, help="other processes")
    args = parser.parse_args(words)
    found = simulated(args.simulated)
    for arguments, unchanged in (((), args.unchanged), (("--unseeded",), args.planted)):
        if args.planted:
            with tempfile.TemporaryDirectory() as folder, busy(args.load):
                found += real(
                    Path(folder),
                    unchanged=unchanged,
                    planted=args.planted,
                    arguments=arguments,
                    say=lambda text: print(text, file=sys.stderr, flush=True),
                )
    report("gates", [(r.what, r.text, r.aim) for r in found], {"rates": {r.what: r.share for r in found}})
