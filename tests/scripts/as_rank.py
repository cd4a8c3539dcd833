"""Run a script as one process of several, and let gloo's threads finish before Python ends: ``as_rank.py SCRIPT WORDS``.

A gloo thread frees its last exchange after it woke the script, and needs the interpreter for that. If Python is ending by then, torch
aborts the process ("terminate called without an active exception", https://github.com/pytorch/pytorch/issues/190489), whatever the script
did. ``mezzo run`` writes its record in between, so only scripts that are started directly need this. They can import the tests' helpers.
"""

import atexit
import runpy
import sys
import time
from pathlib import Path

del sys.argv[0]
sys.path.append(str(Path(__file__).parents[1]))
atexit.register(time.sleep, 0.2)
runpy.run_path(sys.argv[0], run_name="__main__")
