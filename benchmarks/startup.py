"""How long ``mezzo --help`` takes, and that it imports no torch."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from benchmarks.harness import report

RUNS = 9


def main() -> None:
    """Measure whole processes."""
    command = [sys.executable, "-m", "mezzo", "--help"]
    times = []
    for _ in range(RUNS + 1):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    seconds = times[1:]  # the first one fills the disk cache
    program = "import sys, mezzo.cli\ntry: mezzo.cli.main(['--help'])\nfinally: print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    imports = printed.strip().endswith("True")
    text = f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"
    rows = [("mezzo --help, whole process", text, "under 0.3 s"), ("imports torch", str(imports), "False")]
    report("startup", rows, {"seconds": seconds})


if __name__ == "__main__":
    main()
