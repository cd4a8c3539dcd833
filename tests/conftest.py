"""One thread a process: on two cores the threads of two test processes wait for each other more than they work."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in child processes
