"""How much CPU time passes until work begins, for ``mezzo --help`` and ``mezzo run``?"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.shared import ROOT
from benchmarks.shared.harness import ratio, report, spread, summary

RUNS = 7
SCRIPTS = {
    "ten steps": [str(ROOT / "tests/scripts/plain.py"), "10"],
    "examples/digits.py": [str(ROOT / "examples/digits.py")],
}


def cpu_s(words: Sequence[str], folder: str) -> float:
    """Return the CPU time of a Python process with its children, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], cwd=folder, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    mezzo = ["-m", "mezzo"]
    kinds = {"help": [*mezzo, "--help"]}
    for name, script in SCRIPTS.items():
        kinds |= {name: script, f"{name}, mezzo run": [*mezzo, "run", "--policy", "as-is", "--out", "out", *script]}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(RUNS + 1):
            for name, words in kinds.items():
                took_s = cpu_s(words, folder)
                if number:  # the first one fills the disk cache
                    seconds[name].append(took_s)
    loaded_by_help = "{'torch', 'pydantic'} & {*sys.modules} or ['neither']"
    program = f"import sys, mezzo.cli\ntry: mezzo.cli.main(['--help'])\nfinally: print(*({loaded_by_help}))"
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    loaded = printed.strip().splitlines()[-1]
    text = spread(summary(seconds["help"]), " s", digits=3)
    rows = [("mezzo --help, CPU time", text, "0.25 s"), ("imports torch or pydantic", loaded, "neither")]
    for name, target in zip(SCRIPTS, ("1.15", "1.2"), strict=True):
        text = spread(ratio(seconds, f"{name}, mezzo run", name), "")
        rows.append((f"mezzo run over python, {name}, CPU time", text, target))
    report("startup", rows, {"seconds": seconds})
