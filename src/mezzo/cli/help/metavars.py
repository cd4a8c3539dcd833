"""The words that stand for values in help and errors, each with an example that can be typed."""

from __future__ import annotations

from collections.abc import Mapping

EXAMPLES: Mapping[str, str] = {
    "POLICY": "bf16",
    "POLICIES": "fp32,bf16",
    "GPU": "a100-80gb",
    "GPUS": "a100-80gb,rtx-4090",
    "DURATION": "10m",
    "SIZE": "12GiB",
    "N": "3",
    "STEP": "100",
    "STEPS": "3,10",
    "SHARE": "0.02",
    "FOLDER": "runs/mine",
    "PLAN": "full",
    "PLANS": "full,12GiB",
    "REGEX": "'acc=([0-9.]+)'",
    "TRACKER": "tensorboard",
    "CLUSTER": "slurm:gres=gpu:1",
    "VERDICTS": "diverged,failed",
    "ACTION": "stop",
    "CHANGES": "channels-last,compile",
    "NAME=VALUES": "batch-size=32,64",
    "ARGUMENTS": "'--resume last.pt'",
    "LIBRARY:NAME": "timm:resnet50",
    "OPTIMIZER": "adamw",
    "PRICE": "2.10",
    "KIND": "fsdp",
    "PORT": "8000",
}
"""Of options; those of arguments are SCRIPT, [ARGUMENTS] and RECORD."""
