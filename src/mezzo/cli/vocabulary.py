"""The words of help and errors: an example of each value, and what to type for the words of other tools."""

from __future__ import annotations

from collections.abc import Mapping

COUNTERPARTS: Mapping[str, str] = {
    "--policy": "--policies",
    "--policies": "--policy",
    "--gpu": "--gpus",
    "--gpus": "--gpu",
    "--seed": "--seeds",
    "--seeds": "--seed",
    "--steps": "--at",
    "--at": "--steps",
}
"""Options for one and for several, and for how many steps and which: a command has one of them."""

OTHER_NAMES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "--amp": (("--policy", "fp16"),),
    "--amp-level": (("--policy",), ("--policies",)),
    "--fp16": (("--policy", "fp16"),),
    "--bf16": (("--policy", "bf16"),),
    "--half": (("--policy", "fp16"),),
    "--precision": (("--policy",), ("--policies",)),
    "--mixed-precision": (("--policy",), ("--policies",)),
    "--format": (("--policy",), ("--policies",)),
    "--dtype": (("--policy",), ("--policies",)),
    "--output": (("--out",),),
    "--output-dir": (("--out",),),
    "--step": (("--at",), ("--steps",)),
    "--repeats": (("--seeds",),),
    "--runs": (("--seeds",),),
    "--workers": (("--jobs",),),
    "--time": (("--budget",), ("--timeout",)),
    "--time-limit": (("--budget",), ("--timeout",)),
    "--batch-size": (("--batch",),),
    "--seq-len": (("--sequence",),),
    "--seq-length": (("--sequence",),),
    "--img-size": (("--image",),),
    "--image-size": (("--image",),),
    "--gradient-checkpointing": (("--checkpoint", "full"),),
    "--patch": (("--write-patch",),),
    "--html": (("--open",),),
    "--device": (("--gpu",), ("--gpus",)),
}
"""Names that other tools have for our options: the first of ours that the command has is meant, with its value."""

COMMANDS: Mapping[str, str] = {
    "train": "run",
    "start": "run",
    "exec": "run",
    "launch": "run",
    "python": "run",
    "benchmark": "compare",
    "bench": "compare",
    "test": "check",
    "patch": "check --write-patch",
    "convert": "check --write-patch",
    "profile": "watch",
    "speed": "watch",
    "monitor": "watch",
    "trace": "audit",
    "debug": "diagnose",
    "nan": "diagnose",
    "estimate": "predict",
    "memory": "predict",
    "optimize": "tune",
    "search": "tune",
    "autotune": "tune",
    "resume": "resume-check",
    "info": "doctor",
    "env": "doctor",
    "ls": "report",
    "list": "report",
    "show": "report",
    "view": "report",
}
"""Words that people try as commands, and the command that does it, with an option where it needs one."""

LIKELY = (
    "run",
    "compare",
    "check",
    "predict",
    "tune",
    "watch",
    "audit",
    "diagnose",
    "diff",
    "ranges",
    "fallback",
    "gate",
)
"""The commands that an option without a command is tried with, in this order."""


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
    "FILE": "precision.toml",
    "GOLDEN": "golden.json",
    "EXPORT": "findings.sarif",
    "RECORD": "record.json",
    "PLAN": "full",
    "PLANS": "full,12GiB",
    "REGEX": "'acc=([0-9.]+)'",
    "TRACKER": "tensorboard",
    "CLUSTER": "slurm:gres=gpu:1",
    "VERDICTS": "diverged,failed",
    "ACTION": "stop",
    "CHANGES": "channels-last,compile",
    "NAME=VALUES": "batch-size=32,64",
    "COMMIT": "main~1",
    "COUNTS": "1,2",
    "ARGUMENTS": "'--resume last.pt'",
    "LIBRARY:NAME": "timm:resnet50",
    "OPTIMIZER": "adamw",
    "PRICE": "2.10",
    "HOST": "here",
    "KIND": "fsdp",
    "PORT": "8000",
}
"""Of options; arguments are SCRIPT, [ARGUMENTS] and RECORD."""
