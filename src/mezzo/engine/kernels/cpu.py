"""C++ CPU kernels (``cpu.cpp``), compiled once per machine, called through ctypes.

The library is cached in the user's cache folder under a name derived from the source, the flags and the processor, so a
change of any of them rebuilds it. Building takes two seconds; torch's headers are not needed. Calls release Python's
lock, and large groups are split over as many threads as torch uses.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mezzo.devices import this_device
from mezzo.engine.kernels.reference import AdamWSettings, Batch, SGDSettings
from mezzo.engine.kernels.storage import dense
from mezzo.formats import BF16, FP16, FP32, Format
from mezzo.library_files import cache_home
from mezzo.temporary import folder_of_process

_SOURCE = Path(__file__).with_name("cpu.cpp")
_HEADERS = tuple(
    Path(__file__).with_name(f"cpu_{part}.h")
    for part in ("block_formats", "blocks", "exponents", "fingerprints", "formats", "mirror", "sums")
)
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
_FP32 = FP32.dtype
_SPLIT, _NO_MASTER, _STOCHASTIC, _PACKED = 3, 3, 6, 7
"""The codes of a split master, of stochastic BF16 and of 8-bit moments; ``_NO_MASTER`` is added for a 16-bit format without a master."""


class _AdamW(ctypes.Structure):
    _fields_ = [(n, ctypes.c_double) for n in ("lr", "beta1", "beta2", "eps", "weight_decay")] + [
        (n, ctypes.c_int32) for n in ("maximize", "amsgrad")
    ]


class _SGD(ctypes.Structure):
    _fields_ = [(n, ctypes.c_double) for n in ("lr", "momentum", "dampening", "weight_decay")] + [
        (n, ctypes.c_int32) for n in ("nesterov", "maximize")
    ]


class _BlockFormat(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_float) for n in ("largest", "min_normal")),
        *((n, ctypes.c_int32) for n in ("mantissa_bits", "max_exponent", "rule", "stochastic")),
        ("seed", ctypes.c_uint32),
        *((n, ctypes.c_float) for n in ("encode", "decode")),
    ]


_RULE_CODES = {"exact": 0, "rceil": 1, "floor": 2}
_RULE_CODES_UNDER_TENSOR = {"exact": 3, "four_or_six": 4}
"""The codes of the rules of scales that share one of the tensor."""


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
    _declare(lib)
    return lib, f"compiled with {compiler} for this processor"


def _declare(lib: ctypes.CDLL) -> None:
    number, address = ctypes.c_int64, ctypes.c_void_p
    lib.mezzo_sum_of_squares.restype = ctypes.c_double
    arguments = {"sum_of_squares": 3, "adamw": 15, "sgd": 13, "exponents": 5, "fingerprints": 6, "mirror": 6}
    for name, tables in arguments.items():
        getattr(lib, f"mezzo_{name}").argtypes = [number, *[address] * tables, number]
    lib.mezzo_sums.argtypes = [number, *[address] * 5, *[number] * 4]
    lib.mezzo_round_blocks.argtypes = [number, address, address, *[number] * 4, address, number]
    lib.mezzo_hadamard.argtypes = [address, address, number, number, address]


def _build(compiler: str) -> Path:
    device = this_device("cpu")
    # Also by instruction sets: machines with different processors of the same name may share a home folder.
    build = " ".join([compiler, *_FLAGS, device.name, *sorted(device.flags)])
    source = b"".join(file.read_bytes() for file in (_SOURCE, *_HEADERS))
    key = hashlib.sha256(source + build.encode()).hexdigest()[:20]
    folder = _cache_folder()
    path = folder / f"kernels-{key}.so"
    if path.exists():
        return path
    temporary = path.with_suffix(f".{os.getpid()}.so")
    subprocess.run([compiler, *_FLAGS, str(_SOURCE), "-o", str(temporary)], check=True, capture_output=True, text=True)
    os.replace(temporary, path)  # two processes that build at the same time both end with a complete library
    return path


def _cache_folder() -> Path:
    """Return the user's cache folder, or a temporary one for this process if that cannot be written."""
    try:
        folder = cache_home() / "mezzo"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # the user's home does not exist, or cannot be written
        return folder_of_process()
    return folder if os.access(folder, os.W_OK) else folder_of_process()


def sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Return the sum of all squares in FP64: not finite exactly when a gradient is not."""
    gradients = [dense(g) for g in gradients]
    rows = [[g.data_ptr() for g in gradients], [g.numel() for g in gradients], [_CODES[g.dtype] for g in gradients]]
    count, table, row = _table(rows)
    total = _lib().mezzo_sum_of_squares(count, *row, torch.get_num_threads())
    del table  # its memory must stay alive during the call
    return torch.tensor(total, dtype=torch.double)


def exponents(tensors: Sequence[Tensor], tables: Sequence[Tensor], cuts: Sequence[int]) -> None:
    """Count the elements of contiguous tensors into their tables, like ``exponents.reference``."""
    rows = [[t.data_ptr() for t in tensors], [t.data_ptr() for t in tables]]
    rows += [[t.numel() for t in tensors], [_CODES[t.dtype] for t in tensors]]
    count, table, row = _table(rows)
    mantissas = (ctypes.c_int32 * len(cuts))(*cuts)
    _lib().mezzo_exponents(count, *row, ctypes.addressof(mantissas), torch.get_num_threads())
    del table  # its memory must stay alive during the call


def takes_values(tensor: Tensor) -> bool:
    """Return whether ``fingerprint`` and ``errors`` can read a tensor's memory, and the library was built."""
    return tensor.is_cpu and tensor.dtype in _CODES and tensor.is_contiguous() and library()[0] is not None


def fingerprint(tensor: Tensor, signs: Tensor, *, buckets: int) -> tuple[int, list[float]]:
    """Return the hash of a contiguous tensor, then its sums of squares and of fourth powers and its sketch.

    Args:
        tensor: in FP32, FP16 or BF16.
        signs: 1 or -1 for each element, in 8 bits.
        buckets: the numbers of a sketch, as the source has them.
    """
    numbers, bits = (ctypes.c_double * (2 + buckets))(), ctypes.c_int64()
    at = [tensor.data_ptr(), ctypes.addressof(numbers), ctypes.addressof(bits), tensor.numel(), _CODES[tensor.dtype]]
    count, table, row = _table([[number] for number in at])
    _lib().mezzo_fingerprints(count, *row, signs.data_ptr(), torch.get_num_threads())
    del table  # its memory must stay alive during the call
    return bits.value, list(numbers)


def errors(result: Tensor, exact: Tensor, *, seed: int | None = None) -> tuple[float, float]:
    """Return the sum of squares of a contiguous result's rounding errors, and of its exact values.

    Args:
        result: in FP32, FP16 or BF16. With a seed, the half of its elements that the seed draws get the opposite error.
        exact: of the same shape.
        seed: 0 or more, of 63 bits; None leaves the result as it is.
    """
    wide, sums = exact.double().contiguous(), (ctypes.c_double * 2)()
    at = [wide.data_ptr(), result.data_ptr(), ctypes.addressof(sums), result.numel(), _CODES[result.dtype]]
    count, table, row = _table([[number] for number in (*at, -1 if seed is None else seed)])
    _lib().mezzo_mirror(count, *row, torch.get_num_threads())
    del table  # its memory must stay alive during the call
    return sums[0], sums[1]


def sums(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], *, promoted: int) -> Tensor:
    """Return sums of products as ``accumulation`` defines them, (m, n).

    Args:
        a: finite numbers and the powers of two of their exponents, each (m, k) in FP32.
        b: likewise, (k, n).
        promoted: the products after which a sum is added to one in FP32.
    """
    left, right = [t.contiguous() for t in a], [t.contiguous() for t in b]
    (rows, width), columns = left[0].shape, right[0].shape[1]
    result = torch.empty(rows, columns)
    at = [t.data_ptr() for t in (*left, *right, result)]
    _lib().mezzo_sums(rows, *at, width, columns, promoted, torch.get_num_threads())
    return result


def round_blocks(x: Tensor, fmt: Format, *, along: int, encode: float | None, seed: int | None) -> Tensor:
    """Return a contiguous matrix rounded like ``block_formats.rounded``, in one pass.

    Args:
        x: (rows, columns), in FP32, FP16 or BF16.
        fmt: a format with scales for blocks.
        along: the dimension that a product sums over.
        encode: the tensor's scale, if the blocks' scales share one.
        seed: of stochastic rounding, below 2**32; None rounds to the nearest.
    """
    scaling = fmt.scaling
    assert scaling is not None
    rule = _RULE_CODES[scaling.rule] if encode is None else _RULE_CODES_UNDER_TENSOR[scaling.rule]
    numbers = (fmt.mantissa_bits, fmt.max_exponent, rule, seed is not None, seed or 0, encode or 1.0)
    values = _BlockFormat(fmt.max, fmt.min_normal, *numbers, decode_scale(encode or 1.0))
    to, sizes = torch.empty(x.shape), (*x.shape, *scaling.tile(along))
    pointers = x.data_ptr(), to.data_ptr()
    _lib().mezzo_round_blocks(_CODES[x.dtype], *pointers, *sizes, ctypes.addressof(values), torch.get_num_threads())
    return to


def decode_scale(encode: float) -> float:
    """Return the reciprocal of a scale, rounded to FP32."""
    return ctypes.c_float(1.0 / encode).value


def hadamard(x: Tensor, signs: Tensor) -> Tensor:
    """Return a contiguous BF16 matrix with a multiple of 16 rows, mixed like ``block_formats.transformed``."""
    to = torch.empty_like(x)
    _lib().mezzo_hadamard(x.data_ptr(), to.data_ptr(), *x.shape, signs.data_ptr())
    return to


def adamw(batch: Batch, settings: AdamWSettings, factor: Tensor, found_inf: Tensor) -> None:
    """Update like ``reference.adamw``, in one pass."""
    s = settings
    values = _AdamW(s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, s.maximize, s.amsgrad)
    means, squares = batch.moments["exp_avg"], batch.moments["exp_avg_sq"]
    largest = batch.moments.get("max_exp_avg_sq", squares)
    _call(_lib().mezzo_adamw, batch, (means, squares, largest), values, factor, found_inf)


def sgd(batch: Batch, settings: SGDSettings, factor: Tensor, found_inf: Tensor) -> None:
    """Update like ``reference.sgd``, in one pass."""
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
    rows = [[t.data_ptr() for t in tensors] for tensors in lists]
    rows.append([w.numel() for w in batch.weights])
    rows.append([_kind(w, m, batch.stochastic) for w, m in zip(batch.weights, batch.masters, strict=True)])
    rows.append([_CODES[g.dtype] for g in batch.gradients])
    rows.append([_CODES.get(m.dtype, _PACKED) for m in moments[0]])
    rows.append(batch.numbers or [0] * len(batch.weights))
    count, table, row = _table(rows)
    at = ctypes.addressof(settings), factor.data_ptr(), found_inf.data_ptr()
    function(count, *row, *at, torch.get_num_threads())
    del table  # its memory must stay alive during the call


def _kind(weight: Tensor, master: Tensor, stochastic: bool) -> int:
    if weight is not master:
        return _SPLIT if master.dtype is torch.int16 else _CODES[weight.dtype]
    if weight.dtype is _FP32:
        return _CODES[_FP32]
    return _STOCHASTIC if stochastic else _CODES[weight.dtype] + _NO_MASTER


def _table(rows: list[list[int]]) -> tuple[int, array[int], list[int]]:
    """Return the length of the rows, one table with all of them, and the address of each row in it."""
    count = len(rows[0])
    table = array("q", [number for row in rows for number in row])
    start, _ = table.buffer_info()
    return count, table, [start + 8 * count * i for i in range(len(rows))]


def _lib() -> ctypes.CDLL:
    lib, reason = library()
    assert lib is not None, reason
    return lib
