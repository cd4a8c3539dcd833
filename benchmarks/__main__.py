"""Run benchmarks by name, or all that need no GPU."""

import importlib
import sys

from benchmarks.harness import chosen

for name in chosen(sys.argv[1:]):
    importlib.import_module(f"benchmarks.{name}").main()
