"""List the benchmarks, or run some: ``python -m benchmarks NAME ...``, or one with its own words: ``python -m benchmarks NAME --help``."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.shared import options

HERE = Path(__file__).parent
BENCH = (
    "agreement emulation session_overhead ddp_overhead state_bytes host_time startup optimizers low_memory float64 paper whole_step audit "
    "ranges diagnose snapshots watching trainers machine_code"
).split()
"""``bench`` runs these: all that run with CI's packages and without a GPU, in some ten minutes."""


class Benchmark(NamedTuple):
    """A module or package whose first line is a question."""

    module: str
    question: str

    def run(self, words: Sequence[str] = ()) -> int:
        main = importlib.import_module(self.module).main
        if inspect.signature(main).parameters:
            return main(list(words)) or 0
        options(self.module).parse_args(list(words))  # it has none
        return main() or 0


def benchmarks() -> dict[str, Benchmark]:
    """Return all benchmarks by name, in the order of the folders."""
    found = {}
    for path in sorted(HERE.rglob("*.py")):
        with path.open(encoding="utf-8") as file:
            question = file.readline().strip().strip('"')
        if question.endswith("?"):
            place = path.parent if path.name == "__init__.py" else path.with_suffix("")
            main = [*place.parts[len(HERE.parts) - 1 :], *(["__main__"] if (place / "__main__.py").exists() else [])]
            found[place.name] = Benchmark(".".join(main), question)
    return found


def main(words: Sequence[str]) -> int:
    known = benchmarks()
    if not words:
        folder = ""
        for name, one in known.items():
            if (above := one.module.split(".")[1]) != folder:
                folder = above
                print(f"\n{folder}")
            print(f"  {name:18} {one.question}")
        print(
            "\nbench: all that need no GPU, no other package and some ten minutes. NAME --help shows the options of one."
        )
        return 0
    if words == ["bench"]:
        words = BENCH
    if words[0] not in known:
        print(f"no benchmark is named {words[0]!r}: python -m benchmarks lists them", file=sys.stderr)
        return 2
    if all(word in known for word in words):
        return max(known[word].run() for word in words)
    return known[words[0]].run(words[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
