"""The environment variables that change what a training computes or where it runs, for its record; never a secret."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PREFIXES = (
    *(
        "ACCELERATE_",
        "ATEN_",
        "CUBLAS",
        "CUDA_",
        "CUDNN_",
        "DNNL_",
        "FLAGS_",
        "GOMP_",
        "HF_",
        "HIP_",
        "KERAS_",
        "KMP_",
        "MKL_",
    ),
    *(
        "NCCL_",
        "NVIDIA_",
        "OMP_",
        "ONEDNN_",
        "OPENBLAS_",
        "PADDLE_",
        "PYTORCH_",
        "ROCR_",
        "TF_",
        "TORCH",
        "TRANSFORMERS_",
    ),
    *("TRITON_", "XLA_"),
)
_NAMES = {
    *(
        "LD_PRELOAD",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "NUMEXPR_NUM_THREADS",
        "PYTHONHASHSEED",
    ),
    *("PYTHONOPTIMIZE", "PYTHONPATH", "RANK", "TOKENIZERS_PARALLELISM", "VECLIB_MAXIMUM_THREADS", "WORLD_SIZE"),
}
_OF_THE_IMAGE = re.compile(r".*_(?:VERSION|HOME|PATH)|NVIDIA_(?:REQUIRE|DRIVER|PRODUCT|BUILD).*|TORCH_CUDA_ARCH_LIST")
"""What a container image sets about itself; the record names the versions that were found."""

_KEPT = re.compile(r"(?:HF|TORCH|KERAS|TRITON)_HOME")
"""Those of them that say where a training finds its models and data."""

_SECRET_WORDS = {
    *(
        "APIKEY",
        "AUTH",
        "COOKIE",
        "CREDENTIAL",
        "CREDENTIALS",
        "KEY",
        "KEYS",
        "PASS",
        "PASSWD",
        "PASSWORD",
        "PAT",
        "SECRET",
    ),
    *("SECRETS", "TOKEN", "TOKENS"),
}
_SECRET_VALUE = re.compile(
    r"://[^/\s@]*@|\b(?:hf|sk|ghp|gho|github_pat|glpat|xox[abp])[-_]\w{12,}|\bBearer ", re.IGNORECASE
)
"""An address with a password in it, and how the keys of well-known services begin."""


def variables_that_matter(environment: Mapping[str, str]) -> dict[str, str]:
    """Return those of ``environment`` that belong into a record, by name."""
    return {
        name: value for name, value in sorted(environment.items()) if _matters(name) and not _is_secret(name, value)
    }


def _matters(name: str) -> bool:
    if name in _NAMES or _KEPT.fullmatch(name):
        return True
    return name.startswith(_PREFIXES) and _OF_THE_IMAGE.fullmatch(name) is None


def _is_secret(name: str, value: str) -> bool:
    return not _SECRET_WORDS.isdisjoint(name.upper().split("_")) or _SECRET_VALUE.search(value) is not None
