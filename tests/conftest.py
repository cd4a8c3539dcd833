"""One thread a process: on machines with few cores, threads of parallel tests would wait for each other. And Triton without a GPU."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in child processes

import torch

if not torch.cuda.is_available():
    # Its interpreter runs kernels on a CPU. Triton decides when it is imported, so before any test does.
    os.environ["TRITON_INTERPRET"] = "1"
