"""Compile all GPU kernels through Triton's own JIT for a GPU that is not there, and print what came of it as JSON.

Usage: ``python jit_program.py CAPABILITY``.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
warnings.simplefilter("error")

import torch  # noqa: E402
from benchmarks.gpu.machine_code import _ADAMW, _KINDS, _SGD, BF16, FP16, FP32, read  # noqa: E402
from triton_driver import install, launched, loaded  # noqa: E402

from mezzo.engine.kernels import exponents, gpu  # noqa: E402
from mezzo.engine.kernels.reference import Batch  # noqa: E402

CAPABILITY = int(sys.argv[1])


def batch(sizes: list[int], formats: tuple[Any, ...], *, at: int) -> Batch:
    """Return tensors of these sizes that begin ``at`` elements behind a multiple of 16 bytes."""
    weight, gradient, moment, master = formats

    def made(dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.zeros(size + at, dtype=dtype)[at:] for size in sizes]

    weights = made(weight)
    return Batch(
        weights=weights,
        gradients=made(gradient),
        masters=weights if master is None else made(master),
        steps=[torch.zeros(()) for _ in sizes],
        moments={name: made(moment) for name in ("exp_avg", "exp_avg_sq", "momentum_buffer")},
        numbers=list(range(len(sizes))),
        stochastic=master is None,
    )


def launch_all(sizes: list[int], *, at: int) -> None:
    """Launch every kernel on tensors of these sizes."""
    one = torch.ones(())
    for dtype in (FP16, BF16, FP32):
        values = [torch.ones(size + at, dtype=dtype)[at:] for size in sizes]
        gpu.sum_of_squares(values)
        gpu.count(values, list(exponents.tables(len(values))))
    for formats in _KINDS.values():
        gpu.adamw(batch(sizes, formats, at=at), _ADAMW, one, one)
        gpu.sgd(batch(sizes, formats, at=at), _SGD, one, one)


def main() -> None:
    """Launch everything once, then at other addresses and counts, and print what was compiled in each."""
    install(CAPABILITY)
    launch_all([5000], at=0)
    first = list(loaded)
    launches = len(launched)
    launch_all([1], at=0)
    launch_all([5000, 3] * 8 + [4096], at=1)
    gpu.sum_of_squares([torch.empty(0, dtype=BF16), torch.ones(3)])
    codes = [(name, read(binary, widths=False)) for name, binary in first]
    print(
        json.dumps(
            {
                "kernels": [[name, code.registers, code.spilled_bytes] for name, code in codes],
                "launches": launches,
                "compiled_later": [name for name, _ in loaded[len(first) :]],
                "empty_launches": launched.count(0),
            }
        )
    )


if __name__ == "__main__":
    main()
