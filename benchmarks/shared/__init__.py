"""What benchmarks share: folders and options, timing and tables, rows of CSV files, child processes, small models and loops."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

RESULTS = ROOT / "benchmarks" / "results"


def options(module: str) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's options, given its ``__name__``; its help begins with the question."""
    place = module.removesuffix(".__main__")
    question = (sys.modules[place].__doc__ or "").partition("\n")[0]
    return argparse.ArgumentParser(prog=f"python -m benchmarks {place.rpartition('.')[2]}", description=question)
