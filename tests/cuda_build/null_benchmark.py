"""The GPU benchmark's worker with tiny models, on GPUs that compute nothing. Usage: ``python null_benchmark.py FILE SECONDS CASES``."""

from __future__ import annotations

import sys
import time

import null_model  # noqa: F401  answers what a session asks about a loss
import torch
import triton_driver
from benchmarks.gpu.contest.worker import Worker

triton_driver.install(90, device_type="cuda")
torch.backends.cudnn.enabled = False  # it asks the driver for itself
torch.backends.cuda.enable_cudnn_sdp(False)
settings = {"device": "cuda", "tiny": True, "only": sys.argv[3], "results": sys.argv[1], "command": "a test"}
Worker({**settings, "deadline": time.time() + float(sys.argv[2])}).run()
