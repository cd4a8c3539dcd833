"""The machine and the versions behind a measured number.

Importing this module imports no torch; ``environment`` does.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

from mezzo import devices
from mezzo.records import Environment
from mezzo.secrets import is_secret_variable
from mezzo.version import VERSION

TRITON_PACKAGES = ("triton", "pytorch-triton", "triton-windows")
"""The packages that contain Triton, by platform and channel."""

_NVIDIA_SMI_TIMEOUT_S = 10.0


def environment(device_kind: str) -> Environment:
    """Return the environment of a number measured on torch's device type ``device_kind``.

    GPU and driver are read for ``cuda`` only: reading them starts the CUDA runtime.
    """
    import torch

    on_gpu = device_kind == "cuda" and torch.cuda.is_available()
    known = {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "device": device_kind,
        "gpu": devices.this_device(device_kind).name if on_gpu else None,
        "driver": nvidia_driver() if on_gpu else None,
        "cuda": torch.version.cuda,
        "cudnn": cudnn_text(torch.backends.cudnn.version()),
        "triton": package_version(*TRITON_PACKAGES),
    }
    return environment_without_torch().model_copy(update=known)


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def environment_without_torch() -> Environment:
    """Return the environment without importing torch: for a run whose process died."""
    return Environment(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        mezzo=VERSION,
        python=platform.python_version(),
        torch=package_version("torch") or "not installed",
        os=platform.platform(),
        cpu=devices.cpu_name(),
        threads=os.cpu_count() or 1,
        device="unknown",
        **surroundings(),
    )


def surroundings() -> dict[str, Any]:
    """Return the fields of an environment that describe the shell, read now because a script may change them later."""
    try:
        folder = os.getcwd()
    except OSError:  # the folder has been deleted
        folder = ""
    return {"variables": variables_that_matter(os.environ), "folder": folder}


def nvidia_driver() -> str | None:
    """Return the version of NVIDIA's driver, or None if ``nvidia-smi`` finds no GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)  # one line per GPU, all alike


def package_version(*names: str) -> str | None:
    """Return the version of the first installed package among ``names``, or None."""
    for name in names:
        try:
            return str(metadata.version(name))  # type: ignore[no-untyped-call,unused-ignore]
        except metadata.PackageNotFoundError:
            continue
    return None


def cudnn_text(number: int | None) -> str | None:
    """Return cuDNN's version number as text: 91002 is 9.10.2 and, before 9, 8902 is 8.9.2."""
    if number is None:
        return None
    thousands = 10_000 if number >= 10_000 else 1_000
    return f"{number // thousands}.{number % thousands // 100}.{number % 100}"


_MATTERS = re.compile(
    r"""
    (?:ACCELERATE|ATEN|CUDA|CUDNN|DNNL|FLAGS|GOMP|HF|HIP|KERAS|KMP|MKL|NCCL|NVIDIA|OMP|ONEDNN|OPENBLAS|PADDLE)_\w+
    | (?:PYTORCH|ROCR|TRANSFORMERS|TRITON|XLA)_\w+
    | (?:CUBLAS|TORCH(?!ELASTIC))\w+
    | TF_(?:CPP|CUDNN|DETERMINISTIC|DISABLE|ENABLE|FORCE|GPU|NUM|USE|XLA)\w+  # TF_ alone is Terraform's as well
    | LD_PRELOAD | PYTHON(?:HASHSEED|OPTIMIZE|PATH) | NUMEXPR_NUM_THREADS | VECLIB_MAXIMUM_THREADS | TOKENIZERS_PARALLELISM
    | RANK | LOCAL_RANK | WORLD_SIZE | LOCAL_WORLD_SIZE | MASTER_ADDR | MASTER_PORT
    """,
    re.VERBOSE,
)
_OF_AN_IMAGE = re.compile(
    r"(?!PYTHON)(?!(?:HF|KERAS|TORCH|TRITON)_HOME)\w+_(?:VERSION|HOME|PATH)|NVIDIA_[A-SU-Z]\w+|TORCH_CUDA_ARCH_LIST"
)
"""Variables that a container image sets about itself; the record has the versions actually found."""


def variables_that_matter(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``environment`` that belong in a record, sorted by name."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if _matters(name) and not is_secret_variable(name, value)
    }


_COMPUTES = re.compile(
    r"(?:ATEN|CUBLAS|CUDNN|DNNL|FLAGS|JAX|ONEDNN|XLA)_\w+|KERAS_BACKEND|NVIDIA_TF32\w+|TORCH_(?:ALLOW|CUDNN)\w+"
    r"|TF_(?:DETERMINISTIC|DISABLE|ENABLE|USE)\w+|PYTHONHASHSEED"
)


def variables_that_compute(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``environment`` that change the numbers of a training, sorted by name."""
    return {name: value for name, value in sorted(environment.items()) if _COMPUTES.fullmatch(name)}


def _matters(name: str) -> bool:
    return _MATTERS.fullmatch(name) is not None and _OF_AN_IMAGE.fullmatch(name) is None
