"""Do the compiled GPU kernels spill registers, and how wide are their memory accesses, also for GPUs that are not here?

Each kernel is launched on small tensors through a stand-in that records its arguments, and then compiled as Triton would compile it for
these. Triton includes NVIDIA's compiler and disassembler.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from benchmarks.shared.harness import report
from mezzo.engine.kernels.reference import AdamWSettings, Batch, SGDSettings

GPUS = {"T4": 75, "A100": 80, "L4, RTX 4090": 89, "H100, H200": 90, "B200": 100, "RTX 5090": 120}
"""Compute capabilities."""
FP32, FP16, BF16, INT8, LOW_BITS = torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int16
# weights: formats of weight, gradient, moments and master
_KINDS = {
    "FP16 with masters": (FP16, FP16, FP32, FP32),
    "BF16 with low bits": (BF16, BF16, FP32, LOW_BITS),
    "FP32": (FP32, FP32, FP32, None),
    "BF16 with low bits, 8-bit moments": (BF16, BF16, INT8, LOW_BITS),
    "BF16 alone, BF16 moments, stochastic": (BF16, BF16, BF16, None),
}
_TYPES = {torch.int64: "i64", torch.int32: "i32", torch.float64: "fp64", FP32: "fp32"}
_ADAMW = AdamWSettings(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, amsgrad=False, maximize=False)
_SGD = SGDSettings(lr=1e-3, momentum=0.9, dampening=0.0, weight_decay=0.01, nesterov=True, maximize=False)
_OPTIONS = ("num_warps", "enable_fp_fusion", "maxnreg", "enable_reflect_ftz")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The arguments of a kernel's launch."""

    name: str
    kernel: Any
    arguments: tuple[Any, ...]
    compiled_in: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Code:
    """The compiled code of a launch."""

    registers: int
    """Of a thread."""
    spilled_bytes: int
    """Of a thread's values that found no register."""
    loads: dict[int, int]
    """How many instructions read how many bytes of global memory, both ways through the kernel counted."""
    stores: dict[int, int]

    def __str__(self) -> str:
        spilled = f"{self.spilled_bytes} bytes spilled" if self.spilled_bytes else "nothing spilled"
        wide = f"{self.loads.get(16, 0)} loads and {self.stores.get(16, 0)} stores of 16 bytes"
        return f"{self.registers} registers, {spilled}, {wide}"


class _Recorder:
    """Stands in for a kernel and records its launches."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **compiled_in: Any) -> None:
            self._launches.append(Launch(name="", kernel=self._kernel, arguments=arguments, compiled_in=compiled_in))

        return launch


def launches() -> Iterator[Launch]:
    """Yield every kernel as it is launched, for each kind of weights."""
    gpu = importlib.import_module("mezzo.engine.kernels.gpu")
    counting = importlib.import_module("mezzo.engine.kernels.gpu")
    exponents = importlib.import_module("mezzo.engine.kernels.exponents")
    one = torch.ones(())
    for dtype, name in ((FP16, "FP16"), (BF16, "BF16"), (FP32, "FP32")):
        gradients = [torch.ones(5000, dtype=dtype)]
        yield from _taken(gpu, "square_kernel", f"reduce, {name}", lambda g=gradients: gpu.sum_of_squares(g))
    for kind, formats in _KINDS.items():
        batch = _batch(*formats)
        yield from _taken(gpu, "adamw_kernel", f"AdamW, {kind}", lambda b=batch: gpu.adamw(b, _ADAMW, one, one))
    batch = _batch(*_KINDS["FP16 with masters"])
    yield from _taken(gpu, "begin_kernel", "begin", lambda: gpu.adamw(batch, _ADAMW, one, one))
    yield from _taken(gpu, "sgd_kernel", "SGD, FP16 with masters", lambda: gpu.sgd(batch, _SGD, one, one))
    values = [torch.ones(5000)]
    yield from _taken(
        counting, "exponent_kernel", "exponents, FP32", lambda: counting.count(values, list(exponents.tables(1)))
    )


def _batch(weight: torch.dtype, gradient: torch.dtype, moment: torch.dtype, master: torch.dtype | None) -> Batch:
    size = 5000
    weights = [torch.zeros(size, dtype=weight)]
    moments = ("exp_avg", "exp_avg_sq", "momentum_buffer")
    return Batch(
        weights=weights,
        gradients=[torch.zeros(size, dtype=gradient)],
        masters=weights if master is None else [torch.zeros(size, dtype=master)],
        steps=[torch.zeros(())],
        moments={name: [torch.zeros(size, dtype=moment)] for name in moments},
        stochastic=master is None,
    )


def _taken(module: ModuleType, kernel: str, name: str, run: Callable[[], object]) -> Iterator[Launch]:
    taken: list[Launch] = []
    kernels = {n: k for n, k in vars(module).items() if n.endswith("_kernel")}
    with mock.patch.multiple(module, **{n: _Recorder(k, taken) for n, k in kernels.items()}):
        run()
    for launch in taken:
        if launch.kernel is kernels[kernel]:
            yield dataclasses.replace(launch, name=name)


def compiled(launch: Launch, capability: int) -> Code:
    """Compile a launch for an NVIDIA GPU of this compute capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {n: v for n, v in launch.compiled_in.items() if n not in _OPTIONS}
    options = {n: v for n, v in launch.compiled_in.items() if n in _OPTIONS}
    passed = iter(launch.arguments)
    signature = {n: "constexpr" if n in constants else _type(next(passed)) for n in launch.kernel.arg_names}
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return read(made.asm["cubin"])


def _type(argument: Any) -> str:
    return f"*{_TYPES[argument.dtype]}" if isinstance(argument, torch.Tensor) else "i32"


def read(binary: bytes, *, widths: bool = True) -> Code:
    """Return the resources of a compiled kernel; ``widths`` of accesses come from the assembly, which CUDA 13 lacks for sm_70."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary)

        def told(*command: str) -> str:
            done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=True)
            return done.stdout

        resources = told(str(tools / "cuobjdump"), "--dump-resource-usage")
        assembly = told(str(tools / "nvdisasm")) if widths else ""
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", resources).groups()  # type: ignore[union-attr]
    return Code(
        registers=int(registers),
        spilled_bytes=int(stack) + int(local),
        loads=_widths(assembly, "LDG"),
        stores=_widths(assembly, "STG"),
    )


def _widths(assembly: str, instruction: str) -> dict[int, int]:
    """Return how many instructions move how many bytes: LDG.E.128 reads 16, LDG.E.U16 two, LDG.E four."""
    found: collections.Counter[int] = collections.Counter()
    for modifiers in re.findall(rf"\b{instruction}\.E((?:\.\w+)*)", assembly):
        width = re.search(r"\.[US]?(8|16|64|128)\b", modifiers)
        found[int(width[1]) // 8 if width else 4] += 1
    return dict(found)


def main() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET=1 interprets kernels; remove it from the environment to compile them")
    rows, data = [], []
    for launch in launches():
        for gpu, capability in GPUS.items():
            code = compiled(launch, capability)
            rows.append((f"{launch.name}: {gpu}", str(code), "nothing spilled"))
            data.append({"kernel": launch.name, "gpu": gpu, "capability": capability, **vars(code)})
    report("machine_code", rows, {"kernels": data})
