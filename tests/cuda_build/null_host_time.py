"""The host-time benchmark on GPUs that compute nothing. Usage: ``python null_host_time.py FOLDER MODEL START``."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import null_model  # answers what is asked about a loss
import torch
from benchmarks.speed import host_time

folder, model, start = sys.argv[1:]
torch.backends.cuda.enable_cudnn_sdp(False)  # it asks the driver for itself
host_time.BUILDS = 1
host_time.MODELS["gpt2"] = partial(host_time.gpt2, tiny=True)
plan = host_time.PLANS["cuda", model]
host_time.PLANS["cuda", model] = replace(plan, steps=2, blocks=2)
if __name__ == "__main__":
    host_time.main(["--device", "cuda", "--model", model, "--out", folder, "--start", start])
    print("driver calls of the process that forks:", null_model.calls.null_gpu_calls(b""))
