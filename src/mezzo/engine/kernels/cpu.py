"""The compiled way for CPUs: ``cpu.cpp``, built once a machine with the C++ compiler at hand and called by addresses.

The library is kept in the user's cache folder under a name that holds the source, the flags and the processor, so a
change of any builds anew. Building takes two seconds; torch's headers are not needed. Calls release Python's lock,
and large groups are shared among as many threads as torch uses.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezzo.devices import this_device
from mezzo.engine.kernels.batch import AdamWSettings, Batch, SGDSettings
from mezzo.engine.kernels.layout import dense
from mezzo.formats import BF16, FP16, FP32

_SOURCE = Path(__file__).with_name("cpu.cpp")
_COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math: it would drop the checks for NaN and infinity. Without contraction a*b+c rounds twice, as torch's kernels do.
_FLAGS = [
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-shared",
    "-fPIC",
    "-pthread",
]
_CODES = {FP32.dtype: 0, FP16.dtype: 1, BF16.dtype: 2}
_SPLIT, _ALONE = 3, 3
"""The code of a split master, and what is added to a 16-bit format's code where there is none."""


class _AdamW(ctypes.Structure):
    _fields_ = [(n, ctypes.c_double) for n in ("lr", "beta1", "beta2", "eps", "weight_decay")] + [
        (n, ctypes.c_int32) for n in ("maximize", "amsgrad")
    ]


class _SGD(ctypes.Structure):
    _fields_ = [(n, ctypes.c_double) for n in ("lr", "momentum", "dampening", "weight_decay")] + [
        (n, ctypes.c_int32) for n in ("nesterov", "maximize")
    ]


@functools.cache
def library() -> tuple[ctypes.CDLL | None, str]:
    """Return the built library, or None, and why."""
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        return None, f"no C++ compiler ({', '.join(_COMPILERS)}) is on the PATH"
    try:
        path = _build(compiler)
        lib = ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        detail = (
            error.stderr.strip().splitlines()[-1:] if isinstance(error, subprocess.CalledProcessError) else [str(error)]
        )
        return None, f"{compiler} could not build the kernels: {' '.join(detail)}"
    lib.mezzo_sum_of_squares.restype = ctypes.c_double
    return lib, f"compiled with {compiler} for this processor"


def _build(compiler: str) -> Path:
    device = this_device("cpu")
    # The instruction sets too: a home may be shared by machines whose processors go by one name.
    made_of = " ".join([compiler, *_FLAGS, device.name, *sorted(device.flags)])
    key = hashlib.sha256(_SOURCE.read_bytes() + made_of.encode()).hexdigest()[:20]
    folder = _cache_folder()
    path = folder / f"kernels-{key}.so"
    if path.exists():
        return path
    fresh = path.with_suffix(f".{os.getpid()}.so")
    subprocess.run([compiler, *_FLAGS, str(_SOURCE), "-o", str(fresh)], check=True, capture_output=True, text=True)
    os.replace(fresh, path)  # two processes that build at once both end with a whole library
    return path


def _cache_folder() -> Path:
    """Return the user's cache folder, or one for this process alone where there is none to write to."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mezzo"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # pathlib raises RuntimeError for a user without a home
        return Path(tempfile.mkdtemp(prefix="mezzo-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="mezzo-"))


def sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Return the sum of all squares in FP64: not finite exactly when a gradient is not."""
    gradients = [dense(g) for g in gradients]
    addresses, sizes, codes = _addresses(gradients), _sizes(gradients), _codes(gradients)  # alive during the call
    call = _lib().mezzo_sum_of_squares
    total = call(ctypes.c_int64(len(gradients)), _at(addresses), _at(sizes), _at(codes), _threads())
    return torch.tensor(total, dtype=torch.double)


def adamw(batch: Batch, settings: AdamWSettings, factor: Tensor, found_inf: Tensor) -> None:
    """Update as ``reference.adamw`` says, in one pass."""
    s = settings
    values = _AdamW(s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, s.maximize, s.amsgrad)
    means, squares = batch.moments["exp_avg"], batch.moments["exp_avg_sq"]
    largest = batch.moments.get("max_exp_avg_sq", squares)
    _call(_lib().mezzo_adamw, batch, (means, squares, largest), values, factor, found_inf)


def sgd(batch: Batch, settings: SGDSettings, factor: Tensor, found_inf: Tensor) -> None:
    """Update as ``reference.sgd`` says, in one pass."""
    s = settings
    values = _SGD(s.lr, s.momentum, s.dampening, s.weight_decay, s.nesterov, s.maximize)
    buffers = batch.moments.get("momentum_buffer", batch.masters)  # not touched without momentum
    _call(_lib().mezzo_sgd, batch, (buffers,), values, factor, found_inf)


def _call(
    function: Any,
    batch: Batch,
    moments: Sequence[list[Tensor]],
    settings: ctypes.Structure,
    factor: Tensor,
    found_inf: Tensor,
) -> None:
    lists = (batch.weights, batch.gradients, batch.masters, *moments, batch.steps)
    tables = [_addresses(tensors) for tensors in lists]
    sizes, weight_codes, gradient_codes = _sizes(batch.weights), _weight_codes(batch), _codes(batch.gradients)
    function(
        ctypes.c_int64(len(batch.weights)),
        *(_at(table) for table in tables),
        _at(sizes),
        _at(weight_codes),
        _at(gradient_codes),
        ctypes.byref(settings),
        ctypes.c_void_p(factor.data_ptr()),
        ctypes.c_void_p(found_inf.data_ptr()),
        _threads(),
    )


def _lib() -> ctypes.CDLL:
    lib, reason = library()
    assert lib is not None, reason
    return lib


def _threads() -> ctypes.c_int64:
    return ctypes.c_int64(torch.get_num_threads())


def _at(table: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(table.ctypes.data)


def _addresses(tensors: list[Tensor]) -> Any:
    return np.array([t.data_ptr() for t in tensors], dtype=np.int64)


def _sizes(tensors: list[Tensor]) -> Any:
    return np.array([t.numel() for t in tensors], dtype=np.int64)


def _codes(tensors: list[Tensor]) -> Any:
    return np.array([_CODES[t.dtype] for t in tensors], dtype=np.int32)


def _weight_codes(batch: Batch) -> Any:
    pairs = zip(batch.weights, batch.masters, strict=True)
    return np.array([_weight_code(w, m) for w, m in pairs], dtype=np.int32)


def _weight_code(weight: Tensor, master: Tensor) -> int:
    if master.dtype is torch.int16:
        return _SPLIT
    alone = weight is master and weight.dtype is not FP32.dtype
    return _CODES[weight.dtype] + (_ALONE if alone else 0)
