"""Run the named benchmarks, or without names those of ``harness.chosen``; or one with its own options: ``host_time --device cuda``."""

import importlib
import sys

from benchmarks.harness import chosen

if any(word.startswith("-") for word in sys.argv[2:]):
    importlib.import_module(f"benchmarks.{sys.argv[1]}").main(sys.argv[2:])
else:
    for name in chosen(sys.argv[1:]):
        importlib.import_module(f"benchmarks.{name}").main()
