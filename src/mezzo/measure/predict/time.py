"""Seconds of a tape on one GPU: for each operation the longer of its arithmetic and its traffic, then all of them in a row.

The formulas follow from first principles, with a few constants (``constants``) fitted to public measurements::

    arithmetic = flops / (peak of its unit x share reached x how full its tiles and waves are)
    traffic    = bytes / (bandwidth x share reached)
    operation  = (arithmetic^p + traffic^p)^(1/p) + latency

- A product is cut into tiles of 128 x 64 results. The last wave of tiles leaves multiprocessors idle, edges of tiles are wasted,
  and a short sum (small depth) does not hide the loads before it.
- The unit is the matrix unit of the operands' format. FP32 runs in TF32 where the policy allows it. Depthwise convolutions do
  not use matrix units.
- In FP32, a convolution of 3 x 3 multiplies less where cuDNN may try its algorithms (``torch.backends.cudnn.benchmark``): Winograd's then
  wins. Without trials, which is torch's default, cuDNN's heuristics take products.
- A convolution of channels-first tensors on matrix units is preceded by copies to channels-last and followed by one back.
- Batch normalisation reads its input twice forward, and input and gradient twice backward, except for what stays in the L2 cache
  between the two passes: each multiprocessor works on a channel of its own. Channels-first, torch's kernels load one element at
  a time, whatever its size, so 16 bits do not make a block of threads faster.
- What one operation writes and the next reads stays in the L2 cache if it is small.
- A board whose power is small for its multiprocessors and clock keeps a lower clock: power grows with about its square.
- Before compute capability 8.0, loads into shared memory are not asynchronous, and 16-bit products wait for them.
- A step takes no less than its launches on the host.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mezzo.gpus import Gpu
from mezzo.measure.predict.tape import CostedOperation

Array: TypeAlias = NDArray[np.float64]
HALF_FORMATS = ("fp16", "bf16")
_TILE_ROWS, _TILE_COLUMNS, _TILE_DEPTH = 128, 64, 32
_SPLIT_DEPTH = 512
"""Depth from which a product with few tiles is split along its sum."""
_NARROW = ("7.0", "7.5", "8.0")
"""Compute capabilities with 64 FP32 lanes per multiprocessor; later ones have 128."""
_GROUP_COLUMNS = 16
"""Channels of a group that a grouped convolution computes together."""
_L2_SPEED = 3.0
"""Bandwidth of the L2 cache as a multiple of memory's."""
_CONVOLUTIONS = ("convolution", "convolution_input_gradient", "convolution_weight_gradient")
_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "native_batch_norm_backward")


@dataclass(frozen=True)
class Columns:
    """Operations as columns, for the formulas."""

    flops: Array
    moved_bytes: Array
    products: Array
    rows: Array
    columns: Array
    depth: Array
    half: NDArray[np.bool_]
    convolution: NDArray[np.bool_]
    depthwise: NDArray[np.bool_]
    grouped: NDArray[np.bool_]
    winograd: NDArray[np.bool_]
    norm_bytes: Array
    """Bytes that a normalisation over the batch reads; 0 for others."""
    norm_channel_bytes: Array
    """The same of one channel."""

    @classmethod
    def of(cls, operations: Sequence[CostedOperation]) -> Columns:
        """Return the columns of ``operations``, one entry each."""
        shapes = np.array([op.shape for op in operations], dtype=np.float64).reshape(-1, 5)
        products, rows, columns, depth, window = shapes.T
        moved = np.array([op.read_bytes + op.written_bytes for op in operations], dtype=np.float64)
        convolution = np.array([op.name in _CONVOLUTIONS for op in operations], dtype=bool)
        norm = np.array([op.name in _NORMS for op in operations], dtype=bool)
        read = np.where(norm, [float(op.read_bytes) for op in operations], 0.0)
        grouped = convolution & (products > 1)
        return cls(
            flops=np.array([op.flops for op in operations], dtype=np.float64),
            moved_bytes=moved,
            products=products,
            rows=rows,
            columns=columns,
            depth=depth,
            half=np.array([op.format in HALF_FORMATS for op in operations], dtype=bool),
            convolution=convolution,
            depthwise=grouped & ((np.minimum(rows, columns) <= 1) | (depth <= window)),
            grouped=grouped,
            winograd=convolution & (window == 9),
            norm_bytes=read,
            norm_channel_bytes=np.divide(read, rows, out=np.zeros_like(read), where=rows > 0),
        )


@dataclass(frozen=True)
class Card:
    """A GPU for the formulas, under one policy and layout; each field is a number, or an array with one for each operation."""

    half_flops_per_s: Any
    single_flops_per_s: Any
    """Of FP32 operands, in TF32 or FP32's matrix units where there are any and they may be used."""
    single_in_tf32: Any
    simd_flops_per_s: Any
    bandwidth_bytes_per_s: Any
    l2_bytes: Any
    multiprocessors: Any
    clock_hz: Any
    channels_last: Any
    power_w: Any
    """Of the board, for each multiprocessor and GHz."""
    tries_algorithms: Any
    """Whether cuDNN may try its algorithms."""
    waits_for_loads: Any
    """Whether there are no asynchronous copies into shared memory, which came with compute capability 8.0."""

    @classmethod
    def of(cls, gpu: Gpu, *, tf32: bool, channels_last: bool, tries_algorithms: bool = False) -> Card:
        """Return the card of ``gpu``, with TF32 allowed or not, images stored channels-last or not, and algorithms tried or not."""
        in_tf32 = tf32 and gpu.tf32_flops_per_s is not None
        single = gpu.tf32_flops_per_s if in_tf32 else gpu.fp32_matrix_flops_per_s or gpu.fp32_flops_per_s
        lanes = 64 if gpu.compute_capability in _NARROW or gpu.compute_capability.startswith("gfx") else 128
        return cls(
            half_flops_per_s=gpu.fp16_flops_per_s or gpu.fp32_flops_per_s,
            single_flops_per_s=single,
            single_in_tf32=in_tf32,
            simd_flops_per_s=gpu.fp32_flops_per_s,
            bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s,
            l2_bytes=gpu.l2_bytes,
            multiprocessors=gpu.multiprocessors,
            clock_hz=gpu.fp32_flops_per_s / (2 * lanes * gpu.multiprocessors),
            channels_last=channels_last,
            power_w=gpu.power_w / (gpu.fp32_flops_per_s / (2 * lanes) / 1e9),
            tries_algorithms=tries_algorithms,
            waits_for_loads=gpu.compute_capability in ("7.0", "7.5"),
        )


@dataclass(frozen=True)
class Bounds:
    """Seconds of each operation by what bounds it."""

    arithmetic: Array
    traffic: Array
    total: Array


def operation_bounds(ops: Columns, card: Card, constants: Constants) -> Bounds:
    """Return the seconds of each operation."""
    c = constants
    arithmetic, traffic = _arithmetic(ops, card, c), _traffic(ops, card, c)
    total = (arithmetic**c.overlap + traffic**c.overlap) ** (1 / c.overlap) + c.latency_s
    return Bounds(arithmetic, traffic, total)


def _clock_share(card: Card, c: Constants) -> Any:
    """Return the share of the stated clock that the board's power allows: power grows with about the square of the clock."""
    return np.minimum(1.0, card.power_w / c.full_clock_w) ** 0.5


def _traffic(ops: Columns, card: Card, c: Constants) -> Array:
    channels_first, clock = np.logical_not(card.channels_last), _clock_share(card, c)
    copied = ops.convolution & ~ops.depthwise & ops.half & channels_first
    moved = ops.moved_bytes * (1 + np.where(copied, 2 * c.layout_copies, 0.0))
    kept_in_l2 = np.minimum(1.0, card.l2_bytes / np.maximum(1.0, ops.norm_channel_bytes * card.multiprocessors))
    moved = moved + ops.norm_bytes * c.norm_passes * (1 - kept_in_l2)
    from_l2 = np.minimum(1.0, c.l2_share * card.l2_bytes / np.maximum(1.0, ops.moved_bytes))
    moved = moved * (1 - from_l2 * (1 - 1 / _L2_SPEED))
    memory = card.bandwidth_bytes_per_s * c.bandwidth
    issue = card.multiprocessors * card.clock_hz * clock * c.issue_bytes
    bandwidth = (memory**-2 + issue**-2) ** -0.5
    block_bytes = c.block_elements * np.where(ops.half, 2, 4)
    by_channel = np.where((ops.norm_bytes > 0) & channels_first, ops.rows * block_bytes * card.clock_hz * clock, np.inf)
    result: Array = moved / np.minimum(bandwidth, by_channel)
    return result


def _arithmetic(ops: Columns, card: Card, c: Constants) -> Array:
    single = card.single_flops_per_s * np.where(card.single_in_tf32, c.tf32, c.fp32)
    winograd = np.maximum(single, card.simd_flops_per_s * c.fp32 * c.winograd)
    half = card.half_flops_per_s * c.half * np.where(card.waits_for_loads, c.waiting, 1.0)
    peak = np.where(ops.half, half, np.where(ops.winograd & card.tries_algorithms, winograd, single))
    peak = np.where(ops.grouped, peak * c.grouped, peak)
    peak = np.where(ops.depthwise, card.simd_flops_per_s * c.depthwise, peak)
    units = ops.flops / (peak * _fullness(ops, card, c))
    narrow = np.clip(np.minimum(ops.rows, ops.columns), 16, 128)
    loaded = ops.flops / 2 * np.where(ops.half, 2, 4) * (1 / 128 + 1 / narrow)
    feeding = np.where(ops.depthwise, 0.0, loaded) / (card.multiprocessors * card.clock_hz * c.feed_bytes)
    units, feeding = units / _clock_share(card, c), feeding / _clock_share(card, c)
    result: Array = (units**c.overlap + feeding**c.overlap) ** (1 / c.overlap)
    return result


def _fullness(ops: Columns, card: Card, c: Constants) -> Array:
    """Return the useful share of the units' work: edges of tiles, idle multiprocessors and short sums waste some."""

    def padded(size: Array, unit: int) -> Array:
        found: Array = np.maximum(1.0, np.ceil(size / unit) * unit)
        return found

    product = (ops.flops > 0) & ~ops.depthwise
    rows, columns = np.maximum(ops.rows, ops.columns), np.minimum(ops.rows, ops.columns)
    edges = rows * columns / (padded(rows, _TILE_ROWS) * padded(columns, _TILE_COLUMNS))
    edges = np.where(ops.grouped, columns / padded(columns, _GROUP_COLUMNS), edges)
    tiles = np.maximum(1.0, ops.products * np.ceil(rows / _TILE_ROWS) * np.ceil(columns / _TILE_COLUMNS))
    tiles = tiles * np.maximum(1.0, np.minimum(card.multiprocessors / tiles, ops.depth / _SPLIT_DEPTH))
    waves = tiles / (np.ceil(tiles / card.multiprocessors) * card.multiprocessors)
    sums = ops.depth / (padded(ops.depth, _TILE_DEPTH) + c.depth_latency)
    result: Array = np.where(product, np.maximum(1e-3, edges * waves * sums), 1.0)
    return result


def longer_of(device_s: Any, host_s: Any) -> Any:
    """Return about the longer of two times, without a corner where they are equal."""
    return (device_s**4 + host_s**4) ** 0.25


# ``python -m benchmarks predict_fit`` writes that file from public measurements. The errors are measured on GPUs of an architecture that
# was left out of the fit.


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The free parameters of the formulas; the defaults are where a fit begins."""

    half: float = 0.75
    """Share of the peak rate that 16-bit products reach."""
    tf32: float = 0.75
    fp32: float = 0.75
    depthwise: float = 0.2
    """Share of the FP32 rate that depthwise convolutions reach."""
    grouped: float = 0.5
    """Rate of grouped convolutions as a share of others'."""
    winograd: float = 2.0
    """Rate of FP32 convolutions of 3 x 3 over what their multiplications allow: Winograd's algorithm needs fewer."""
    bandwidth: float = 0.75
    """Share of the memory's bandwidth that is reached."""
    issue_bytes: float = 20.0
    """Bytes that one multiprocessor moves in a cycle, at most."""
    block_elements: float = 1.25
    """Elements that one block of threads moves in a cycle: channels-first batch normalisation has one block per channel."""
    feed_bytes: float = 40.0
    """Bytes that matrix units get from the L2 cache, per cycle and multiprocessor."""
    layout_copies: float = 0.5
    """Copies of a channels-first 16-bit convolution's operands, in reads and writes of all of them."""
    norm_passes: float = 1.0
    """Extra reads of batch normalisation's operands."""
    l2_share: float = 0.2
    """Share of the L2 cache in which an operation finds what the last one wrote."""
    overlap: float = 2.0
    """1 where arithmetic and traffic wait for each other, large where they overlap."""
    depth_latency: float = 32.0
    """Products of a sum that pass before its units are full."""
    latency_s: float = 3e-6
    """From the end of one kernel to the start of the next."""
    launch_s: float = 6e-6
    """Host time of one kernel; assumed, not fitted: the rows have large batches."""
    full_clock_w: float = 2.2
    """Board power for each multiprocessor and GHz below which the clock falls."""
    waiting: float = 0.8
    """Rate of 16-bit products where loads into shared memory are not asynchronous, over that where they are."""
    old_libraries: float = 1.15
    """Time of steps on matrix units in containers of 2020 and 2021, over later ones."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Constants, and the rows that they were fitted to."""

    constants: Constants
    num_rows: int
    low: float
    """10th percentile of measured over predicted throughput, architectures left out."""
    high: float
    """90th percentile."""
    validated: dict[str, list[str]]
    """Architecture: the precisions that rows have measured."""

    def covers(self, architecture: str, precision: str) -> bool:
        """Return whether rows of that architecture and precision were measured."""
        return precision in self.validated.get(family(architecture), ())


def family(architecture: str) -> str:
    """Return the group with which a fit leaves an architecture out: ``GA10x`` for ``Ampere GA102``."""
    name = architecture.split()[0] if architecture.startswith(("Ada", "Blackwell")) else architecture.split()[-1]
    return "GA10x" if name in ("GA102", "GA104") else name


def fitted() -> Fitted:
    """Return the constants that ship."""
    data: dict[str, Any] = json.loads((files("mezzo.measure.predict") / "constants.json").read_text(encoding="utf-8"))
    return Fitted(**{**data, "constants": Constants(**data["constants"])})
