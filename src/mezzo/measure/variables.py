"""The environment variables that change what a training computes or where it runs, for its record; secrets are left out."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mezzo.secrets import is_secret_variable

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
