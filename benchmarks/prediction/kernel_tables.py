"""How far is the price of a single kernel from its measured time, by kind and GPU of public tables?

The folder holds tables of products and attention (aiconfigurator), of products, convolutions, element-wise kernels and normalisations
(NeuSight), and of convolutions with their gradients (DeepBench); its README says where they come from. Kernels that take too little time to
tell them from their launch are left out, and so are attentions faster than the matrix units' peak, which cannot have met all keys, those
of fewer tokens than a block has, and those whose keys are stored in 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.shared import csv_rows, options
from benchmarks.shared.csv_rows import Cells
from benchmarks.shared.harness import Row, store
from mezzo.gpus import Gpu, find_gpu
from mezzo.measure.predict.tape import ATTENTION_ROWS, CostedOperation, ProductSize, TapePhase
from mezzo.measure.predict.tiles import Array
from mezzo.measure.predict.time import FP4, FP8, LATENCY_S, Card, Columns, Constants, fitted, operation_bounds

_GPUS = {
    "a100_sxm": "a100-40gb",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200-sxm",
    "b200_sxm": "b200-sxm",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
    "Tesla T4": "t4",
    "V100": "v100-16gb",
}
"""GPUs by their names in the tables, where ``mezzo.gpus`` has other names."""
_CLOCKED_S = 14e-6
"""What NeuSight's times contain beside the kernel, by the additions of different sizes on three GPUs."""
_LEAST_S = {"aiconfigurator": 10e-6, "neusight": 50e-6, "deepbench": 20e-6}
"""Shorter times measure the launch."""
_LONG_S = 2e-4
"""Longer kernels have an error of their own: calls and launches are next to nothing of them."""
_ELEMENTWISE = {"add": 2, "div": 2, "mul": 2, "pow": 2, "tanh": 1}
"""Element-wise kernels and their operands."""
_ROW_NORMS = {"softmax": "_softmax", "ln": "native_layer_norm"}


@dataclass(frozen=True)
class MeasuredKernel:
    """One kernel of a table."""

    kind: str
    gpu: Gpu
    operation: CostedOperation
    seconds: float
    clocked_s: float = 0.0
    """Part of ``seconds`` that is not the kernel's, or what else is priced beside it."""
    tries_algorithms: bool = False


def operation(
    name: str, form: str, shape: ProductSize, *, flops: int = 0, read: int, written: int, phase: TapePhase = "forward"
) -> CostedOperation:
    """Return one operation as a tape has it; images are channels-last, but for 16-bit ones, which the tables store channels-first."""
    return CostedOperation(name, phase, "", form, flops, read, written, shape, channels_last=form == "fp32")


def kernels(folder: Path) -> list[MeasuredKernel]:
    """Return the kernels of the tables in ``folder``."""
    found: list[MeasuredKernel] = []
    for path in sorted(folder.glob("*.csv")):
        read = _READERS.get(path.stem)
        for cells in csv_rows.read(path) if read is not None else ():
            gpu = find_gpu(_GPUS.get(name := cells.get("gpu") or cells["Device"], name))
            if gpu is not None:
                found.extend(read(cells, gpu))  # type: ignore[misc]
    return found


def _gemm(cells: Cells, gpu: Gpu) -> Iterator[MeasuredKernel]:
    m, n, k, seconds = int(cells["m"]), int(cells["n"]), int(cells["k"]), float(cells["latency_ms"]) / 1e3
    if cells["dtype"] == "bfloat16" and seconds >= _LEAST_S["aiconfigurator"]:
        shape = ProductSize(1, m, n, k, 1)
        op = operation("mm", "bf16", shape, flops=2 * m * n * k, read=2 * (m * k + n * k), written=2 * m * n)
        yield MeasuredKernel("products, BF16", gpu, op, seconds)


FEW_BITS = {"fp8": (FP8, 8.0), "fp8_block": (FP8, 8.25), "nvfp4": (FP4, 4.5)}
"""Products of 8 and 4 bits in the tables: their operands' format, and bits with scales. No constant is fitted to them."""


def few_bits(folder: Path, constants: Constants) -> list[MeasuredKernel]:
    """Return the products of 8 and 4 bits; a serving library rounds the activations in one pass, and has rounded the weights before."""
    found = []
    for cells in csv_rows.read(folder / "gemm_aiconfigurator.csv"):
        gpu, seconds = find_gpu(_GPUS.get(cells["gpu"], cells["gpu"])), float(cells["latency_ms"]) / 1e3
        if cells["dtype"] not in FEW_BITS or gpu is None or seconds < _LEAST_S["aiconfigurator"]:
            continue
        form, bits = FEW_BITS[cells["dtype"]]
        m, n, k = (int(cells[name]) for name in "mnk")
        read = int(bits * (m * k + n * k)) // 8
        op = operation("mm", form, ProductSize(1, m, n, k, 1), flops=2 * m * n * k, read=read, written=2 * m * n)
        cast_s = m * k * (2 + bits / 8) / (gpu.bandwidth_bytes_per_s * constants.bandwidth) + LATENCY_S
        found.append(MeasuredKernel(f"products, {cells['dtype'].upper()}", gpu, op, seconds, cast_s))
    return found


def _attention(cells: Cells, gpu: Gpu) -> Iterator[MeasuredKernel]:
    batch, tokens, heads, keys, depth = (
        int(cells[name]) for name in ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim")
    )
    seconds = float(cells["latency_ms"]) / 1e3
    flops = 2 * batch * heads * tokens**2 * depth
    if (
        cells["kv_cache_dtype"] != "bfloat16"
        or tokens < ATTENTION_ROWS
        or seconds < max(_LEAST_S["aiconfigurator"], flops / (gpu.fp16_flops_per_s or 1))
    ):
        return
    shape = ProductSize(batch * heads, tokens, (tokens + ATTENTION_ROWS) // 2, depth, heads // keys)
    read, written = 2 * batch * tokens * depth * (heads + 2 * keys), 2 * batch * tokens * depth * heads
    op = operation("_scaled_dot_product_flash_attention", "bf16", shape, flops=2 * flops, read=read, written=written)
    yield MeasuredKernel("attention, BF16", gpu, op, seconds, LATENCY_S)


def _streaming(kind: str, cells: Cells, gpu: Gpu) -> Iterator[MeasuredKernel]:
    size, seconds = 4 * int(cells["B"]) * int(cells["H"]), float(cells["Latency"]) / 1e3
    name = _ROW_NORMS.get(kind, kind)
    op = operation(name, "fp32", ProductSize(), read=size * _ELEMENTWISE.get(kind, 1), written=size)
    if seconds >= _LEAST_S["neusight"]:
        label = "element-wise, FP32" if kind in _ELEMENTWISE else f"{name.removeprefix('_')}, FP32"
        yield MeasuredKernel(label, gpu, op, seconds, _CLOCKED_S)


def _product(kind: str, cells: Cells, gpu: Gpu) -> Iterator[MeasuredKernel]:
    batch, m, n, k = (int(cells[name]) for name in "BMNK")
    products, rows = (1, batch * m) if kind == "linear" else (batch, m)
    op = operation(
        "mm" if kind == "linear" else "bmm",
        "fp32",
        ProductSize(products, rows, n, k, 1),
        flops=2 * products * rows * n * k,
        read=4 * products * k * (rows + n),
        written=4 * products * rows * n,
    )
    if (seconds := float(cells["Latency"]) / 1e3) >= _LEAST_S["neusight"]:
        yield MeasuredKernel(
            "products, FP32" if kind == "linear" else "batched products, FP32", gpu, op, seconds, _CLOCKED_S
        )


def _convolution(cells: Cells, gpu: Gpu) -> Iterator[MeasuredKernel]:
    batch, inputs, outputs, side, size, stride, padding = (
        int(cells[name])
        for name in ("B", "Input_Channel", "Output_Channel", "Kernel_Szie", "Input_Size", "Stride", "Padding")
    )
    places, window = batch * ((size + 2 * padding - side) // stride + 1) ** 2, side**2
    op = operation(
        "convolution",
        "fp32",
        ProductSize(1, places, outputs, inputs * window, window),
        flops=2 * places * outputs * inputs * window,
        read=4 * inputs * (batch * size**2 + outputs * window),
        written=4 * places * outputs,
    )
    if (seconds := float(cells["Latency"]) / 1e3) >= _LEAST_S["neusight"]:
        yield MeasuredKernel("convolutions, FP32, as cuDNN guesses", gpu, op, seconds, _CLOCKED_S)


def _convolution_and_gradients(cells: Cells, gpu: Gpu) -> Iterator[MeasuredKernel]:
    width, height, inputs, batch, outputs, fw, fh, pw, ph, sw, sh = (
        int(cells[name]) for name in "w h c n k filter_w filter_h pad_w pad_h stride_w stride_h".split()
    )
    form, window = ("fp32", fw * fh) if "FP32" in cells["sheet"] else ("fp16", fw * fh)
    places = batch * ((width + 2 * pw - fw) // sw + 1) * ((height + 2 * ph - fh) // sh + 1)
    element = 4 if form == "fp32" else 2
    x, y, weight = (element * n for n in (batch * inputs * width * height, places * outputs, outputs * inputs * window))
    shapes = {
        "forward": ("convolution", x + weight, y, (places, outputs, inputs * window)),
        "input_gradient": (
            "convolution_input_gradient",
            y + weight,
            x,
            (batch * width * height, inputs, outputs * window),
        ),
        "weight_gradient": ("convolution_weight_gradient", x + y, weight, (outputs, inputs * window, places)),
    }
    for column, (name, read, written, sizes) in shapes.items():
        text = cells[f"{column}_ms"]
        if not text.replace(".", "").isdigit() or (seconds := float(text) / 1e3) < _LEAST_S["deepbench"]:
            continue
        op = operation(
            name,
            form,
            ProductSize(1, *sizes, window),
            flops=2 * places * outputs * inputs * window,
            read=read,
            written=written,
            phase="forward" if column == "forward" else "backward",
        )
        label = f"convolutions, {form.upper()}, {column.replace('_', ' ')}"
        yield MeasuredKernel(label, gpu, op, seconds, tries_algorithms=True)


_READERS: dict[str, Callable[[Cells, Gpu], Iterator[MeasuredKernel]]] = {
    "gemm_aiconfigurator": _gemm,
    "attention_aiconfigurator": _attention,
    **{f"neusight_{kind}": partial(_streaming, kind) for kind in (*_ELEMENTWISE, *_ROW_NORMS)},
    **{f"neusight_{kind}": partial(_product, kind) for kind in ("linear", "bmm")},
    "neusight_conv": _convolution,
    "deepbench_conv_V100": _convolution_and_gradients,
}


class Priced:
    """Kernels that are priced together, whatever the constants."""

    def __init__(self, measured: Sequence[MeasuredKernel]) -> None:
        self.ops = Columns.of([one.operation for one in measured])
        cards = [
            Card.of(
                one.gpu,
                tf32=False,
                tries_algorithms=one.tries_algorithms,
                flash_3="attention" in one.kind and one.gpu.compute_capability in ("9.0", "10.0"),
            )
            for one in measured
        ]
        self.card = Card(**{f.name: np.array([getattr(card, f.name) for card in cards]) for f in fields(Card)})
        self.clocked_s = np.array([one.clocked_s for one in measured])
        self.measured_s = np.array([one.seconds for one in measured])
        self.groups = np.array([f"{one.kind}: {one.gpu.label}" for one in measured])

    def ratios(self, constants: Constants) -> Array:
        """Return predicted over measured seconds."""
        found: Array = (operation_bounds(self.ops, self.card, constants).total + self.clocked_s) / self.measured_s
        return found


def main(argv: Sequence[str] = ()) -> None:
    parser = options(__name__)
    parser.add_argument("folder", type=Path, help="the tables")
    folder, constants = parser.parse_args(argv).folder, fitted().constants
    priced = Priced([*kernels(folder), *few_bits(folder, constants)])
    ratios = priced.ratios(constants)
    rows: list[Row] = []
    for group in sorted(set(priced.groups)):
        own = priced.groups == group
        longer = ratios[own & (priced.measured_s > _LONG_S)]
        rows.append((group, f"{said(ratios[own])}; above {_LONG_S * 1e3:g} ms: {said(longer)}", ""))
    for what, text, _ in rows:
        print(f"{what:64} {text}")
    store("kernel_tables", ["kernel_tables", *argv], rows)


def said(ratios: NDArray[np.float64]) -> str:
    """Return the mean and the 90th percentile of absolute errors, and the bias, in words."""
    if not len(ratios):
        return "none"
    errors = 100 * (ratios - 1)
    size = np.abs(errors)
    middle = np.median(errors)
    return f"mean {size.mean():5.1f}%  p90 {np.quantile(size, 0.9):5.1f}%  median {middle:+5.1f}%  of {len(errors)}"
