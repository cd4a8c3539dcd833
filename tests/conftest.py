"""One thread a process: on machines with few cores, threads of parallel tests would wait for each other. And Triton without a GPU."""

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in child processes

import torch

if not torch.cuda.is_available():
    # Its interpreter runs kernels on a CPU. Triton decides when it is imported, so before any test does.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_finish() -> None:
    """Take what was imported, a million objects, out of the walks that garbage collection makes and that fallback makes."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Give it back: at the interpreter's end, native libraries call objects that were never collected leaks."""
    gc.unfreeze()
