"""Seconds of a tape on one GPU: for each operation the longer of its arithmetic and its traffic, then all of them in a row.

The formulas follow from first principles, with a few constants (``constants``) fitted to public measurements of kernels and of steps::

    operation = (arithmetic^p + traffic^p)^(1/p) + latency
    traffic   = bytes from memory / (bandwidth x share reached) + bytes from the L2 cache / (its bandwidth)

- The arithmetic of products, convolutions and attention is in ``tiles``. Its unit is the matrix unit of the operands' format. FP32 runs
  in TF32 where the policy allows it. Depthwise convolutions do not use matrix units.
- In FP32, a convolution of 3 x 3 multiplies less where cuDNN may try its algorithms (``torch.backends.cudnn.benchmark``): Winograd's then
  wins. Without trials, which is torch's default, cuDNN 9's heuristics take products; cuDNN 8's often guessed Winograd's.
- A convolution of channels-first tensors on matrix units is preceded by copies to channels-last and followed by one back.
- torch's kernels of one element at a time, all but products, move a bounded number of elements in a cycle, whatever their size: in 16 bits
  they do not reach the bandwidth of GPUs with fast memory.
- A normalisation reads its operands twice. Over a batch it does so channel by channel, except for what stays in the L2 cache between the
  two passes: each multiprocessor works on a channel of its own. Channels-first, a block of threads passes over a channel twice, and
  waits for what it loads: from the L2 cache it comes sooner.
- torch normalises batches in BF16 with kernels of its own, not with cuDNN's (``ATen/native/Normalization.cpp``). They are slower channel
  by channel, but their forward pass has only the sums so.
- Attention in FP32 is memory-efficient attention, which computes each product as three in TF32 where there are matrix units for TF32,
  whether or not the policy allows it (``OpMultiplyAddFastF32``, xFormers' ``gemm_kernel_utils.h``).
- Operands and results that fit into a share of the L2 cache are found there.
- A board whose power is small for its multiprocessors and clock keeps a lower clock: power grows with about its square.
- Before compute capability 8.0, loads into shared memory are not asynchronous, and 16-bit products wait for them.
- A step takes no less than its operations take the host (``host``).

Limits: kernels are torch's, each on its own, in a step that repeats. Fused, compiled and captured steps run other kernels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mezzo.gpus import Gpu
from mezzo.measure.predict.tape import CostedOperation
from mezzo.measure.predict.tiles import Array, TiledProducts, attention_cycles, tile_cycles

HALF_FORMATS = ("fp16", "bf16")
FP8, FP4 = "fp8", "fp4"
"""The formats of products whose operands have a byte, or half a byte."""
_ELEMENT_BYTES = {FP8: 1, FP4: 0.5, **dict.fromkeys(HALF_FORMATS, 2)}
LATENCY_S = 4e-6
"""From the end of one kernel to the start of the next: the shortest products of the public tables."""
FEW_BITS = 0.75
"""Share of the peak that products in 8 and 4 bits reach, beside the share that 16-bit ones reach: FP8 on an H100 and NVFP4 on a B200 in the
public tables (``python -m benchmarks kernel_tables``)."""
_NARROW = ("7.0", "7.5", "8.0")
"""Compute capabilities with 64 FP32 lanes per multiprocessor; later ones have 128."""
_SHARING = {"9.0": 2, "10.0": 4}
"""Multiprocessors that share what they load, by compute capability: a cluster of two on Hopper; on Blackwell a cluster of two pairs,
each of which computes one tile (NVIDIA's tuning guides)."""
_MMA = {"9.0": 0.629}
"""Rate of ``mma`` over the peak, which needs Hopper's ``wgmma`` (Luo et al. 2024, arXiv 2402.13499). TF32 products whose operands do not
lie along the sum, as in all gradients, run with ``mma``, because ``wgmma`` takes TF32 only along the sum (PTX ISA); so does attention but
for FlashAttention 3."""
_TF32_PRODUCTS = 3
"""Products in TF32 for one in FP32."""
_L2_LATENCY = 0.55
"""Cycles of a load from the L2 cache over one from memory: about 260 and 470 on an A100 and an H100 (arXiv 2402.13499)."""
_PASSES = 2
"""Passes of a normalisation over its channels, forward and backward."""
_OWN_PASS = 2
"""Time of such a pass of torch's own kernels over one of cuDNN's. Not from a source: they load one element at a time and divide for each
(Welford's sums); steps in BF16 on an H100, which are in no fit, suggest the number."""
_UNALIGNED = 1 / 3
"""Rate of products on matrix units whose rows do not begin at multiples of 16 bytes: a head over an unpadded vocabulary takes three times
as long (Netflix, Scaling LLM post-training, 2026)."""
_EDGE = 4
"""Exponent with which two bounds are joined, so that there is no corner where they are equal."""
_CONVOLUTIONS = ("convolution", "convolution_input_gradient", "convolution_weight_gradient")
_ATTENTION = "_scaled_dot_product"
_BATCH_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "native_batch_norm_backward")
_READ_TWICE = ("native_layer_norm", "native_group_norm", "_softmax", "_log_softmax")


@dataclass(frozen=True)
class Columns:
    """Operations as columns, for the formulas."""

    flops: Array
    moved_bytes: Array
    products: Array
    rows: Array
    columns: Array
    depth: Array
    element_bytes: Array
    """Of an operand."""
    convolution: NDArray[np.bool_]
    depthwise: NDArray[np.bool_]
    winograd: NDArray[np.bool_]
    attention: NDArray[np.bool_]
    attention_gradient: NDArray[np.bool_]
    heads: Array
    """Heads that share their keys."""
    gradient: NDArray[np.bool_]
    """Whether it is a product of a backward pass; a convolution that checkpointing computes again is none."""
    unaligned: NDArray[np.bool_]
    channels_last: NDArray[np.bool_]
    read_twice: Array
    """Bytes that a normalisation over features reads a second time."""
    norm_bytes: Array
    """Bytes that a normalisation over the batch reads; 0 for others."""
    norm_channel_bytes: Array
    """The same of one channel."""
    norm_gradient: NDArray[np.bool_]
    """Whether it is the gradient of one."""

    @classmethod
    def of(cls, operations: Sequence[CostedOperation]) -> Columns:
        """Return the columns of ``operations``, one entry each."""

        def flags(found: Sequence[bool]) -> NDArray[np.bool_]:
            return np.array(found, dtype=bool)

        shapes = np.array([op.shape for op in operations], dtype=np.float64).reshape(-1, 5)
        products, rows, columns, depth, window = shapes.T
        read = np.array([op.read_bytes for op in operations], dtype=np.float64)
        sizes = [_ELEMENT_BYTES.get(op.format, 4) for op in operations]
        convolution = flags([op.name in _CONVOLUTIONS for op in operations])
        channels_last = flags([op.channels_last for op in operations])
        grouped = convolution & (products > 1)
        # cuDNN has no kernel for channels-last depthwise convolutions of FP32: they run as grouped products
        own_kernel = ~channels_last | (np.array(sizes) == 2)
        norm = np.where(flags([op.name in _BATCH_NORMS for op in operations]), read, 0.0)
        twice = flags([op.name.startswith(_READ_TWICE) for op in operations])
        return cls(
            flops=np.array([op.flops for op in operations], dtype=np.float64),
            moved_bytes=read + np.array([op.written_bytes for op in operations], dtype=np.float64),
            products=products,
            rows=rows,
            columns=columns,
            depth=depth,
            element_bytes=np.array(sizes, dtype=np.float64),
            convolution=convolution,
            depthwise=grouped & ((np.minimum(rows, columns) <= 1) | (depth <= window)) & own_kernel,
            winograd=convolution & ~grouped & (window == 9),
            attention=flags([op.name.startswith(_ATTENTION) for op in operations]),
            attention_gradient=flags(
                [op.name.startswith(_ATTENTION) and op.name.endswith("_backward") for op in operations]
            ),
            heads=np.maximum(1.0, window),
            gradient=flags([op.phase == "backward" and op.name != "convolution" for op in operations]),
            unaligned=flags([op.unaligned for op in operations]),
            channels_last=channels_last,
            read_twice=np.where(twice, read, 0.0),
            norm_bytes=norm,
            norm_channel_bytes=np.divide(norm, rows, out=np.zeros_like(norm), where=rows > 0),
            norm_gradient=flags([op.name == "native_batch_norm_backward" for op in operations]),
        )


@dataclass(frozen=True)
class Card:
    """A GPU for the formulas, under one policy; each field is a number, or an array with one for each operation."""

    fp8_flops_per_s: Any
    fp4_flops_per_s: Any
    half_flops_per_s: Any
    single_flops_per_s: Any
    """Of FP32 operands, in TF32 or FP32's matrix units where there are any and they may be used."""
    single_in_tf32: Any
    simd_flops_per_s: Any
    bandwidth_bytes_per_s: Any
    l2_bytes: Any
    multiprocessors: Any
    clock_hz: Any
    power_w: Any
    """Of the board, for each multiprocessor and GHz."""
    tries_algorithms: Any
    """Whether cuDNN may try its algorithms."""
    waits_for_loads: Any
    """Whether there are no asynchronous copies into shared memory, which came with compute capability 8.0."""
    sharing: Any
    """Multiprocessors that share what they load."""
    tf32_flops_per_s: Any
    """0 where there are no matrix units for TF32."""
    mma: Any
    """Rate of ``mma`` over the peak."""
    own_norms: Any
    """Whether torch normalises batches of 16-bit images with kernels of its own, as in BF16."""
    flash_3: Any
    """Whether attention is FlashAttention 3, as in serving libraries; torch has FlashAttention 2."""

    @classmethod
    def of(
        cls, gpu: Gpu, *, tf32: bool, tries_algorithms: bool = False, bf16: bool = False, flash_3: bool = False
    ) -> Card:
        """Return the card of ``gpu``.

        Args:
            gpu: the GPU.
            tf32: whether TF32 is allowed.
            tries_algorithms: whether cuDNN may try its algorithms.
            bf16: whether the 16-bit format is BF16, not FP16.
            flash_3: whether attention is FlashAttention 3.
        """
        capability = gpu.compute_capability
        in_tf32 = tf32 and gpu.tf32_flops_per_s is not None
        single = gpu.tf32_flops_per_s if in_tf32 else gpu.fp32_matrix_flops_per_s or gpu.fp32_flops_per_s
        lanes = 64 if capability in _NARROW or capability.startswith("gfx") else 128
        half = gpu.fp16_flops_per_s or gpu.fp32_flops_per_s
        return cls(
            fp8_flops_per_s=gpu.fp8_flops_per_s or half,
            fp4_flops_per_s=gpu.fp4_flops_per_s or half,
            half_flops_per_s=half,
            single_flops_per_s=single,
            single_in_tf32=in_tf32,
            simd_flops_per_s=gpu.fp32_flops_per_s,
            bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s,
            l2_bytes=gpu.l2_bytes,
            multiprocessors=gpu.multiprocessors,
            clock_hz=gpu.fp32_flops_per_s / (2 * lanes * gpu.multiprocessors),
            power_w=gpu.power_w / (gpu.fp32_flops_per_s / (2 * lanes) / 1e9),
            tries_algorithms=tries_algorithms,
            waits_for_loads=capability in ("7.0", "7.5"),
            sharing=_SHARING.get(capability, 1),
            tf32_flops_per_s=gpu.tf32_flops_per_s or 0.0,
            mma=_MMA.get(capability, 1.0),
            own_norms=bf16,
            flash_3=flash_3,
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
    clock_hz = card.clock_hz * _clock_share(card, c)
    arithmetic, traffic = _arithmetic(ops, card, c, clock_hz), _traffic(ops, card, c, clock_hz)
    total = (arithmetic**c.overlap + traffic**c.overlap) ** (1 / c.overlap) + LATENCY_S
    return Bounds(arithmetic, traffic, total)


def _clock_share(card: Card, c: Constants) -> Any:
    """Return the share of the stated clock that the board's power allows: power grows with about the square of the clock."""
    return np.minimum(1.0, card.power_w / c.full_clock_w) ** 0.5


def _traffic(ops: Columns, card: Card, c: Constants, clock_hz: Any) -> Array:
    channels_first, half = ~ops.channels_last, ops.element_bytes == 2
    copied = ops.convolution & ~ops.depthwise & (half | np.equal(card.single_in_tf32, True)) & channels_first
    kept_in_l2 = np.minimum(1.0, card.l2_bytes / np.maximum(1.0, ops.norm_channel_bytes * card.multiprocessors))
    moved = ops.moved_bytes * (1 + np.where(copied, 2 * c.layout_copies, 0.0))
    moved = moved + ops.norm_bytes * (1 - kept_in_l2) + ops.read_twice
    # a product's second operand, such as a weight, was not written just before
    cold = np.minimum(ops.moved_bytes, ops.products * ops.columns * ops.depth * ops.element_bytes)
    warm = ops.moved_bytes - cold
    from_l2 = np.clip(2 - warm / (c.l2_share * card.l2_bytes), 0.0, 1.0) * warm / np.maximum(1.0, ops.moved_bytes)
    memory = card.bandwidth_bytes_per_s * c.bandwidth
    cycles = card.multiprocessors * clock_hz
    elements = np.where(ops.flops > 0, np.inf, cycles * c.issue_elements * ops.element_bytes)
    reached = (memory**-_EDGE + elements**-_EDGE) ** (-1 / _EDGE)
    found = moved * (1 - from_l2) / reached + moved * from_l2 / np.maximum(memory, cycles * c.l2_bytes)
    # the forward pass of torch's own kernels has only the sums channel by channel
    own_passes = np.where(ops.norm_gradient, _PASSES, 1) * _OWN_PASS
    passes = np.where(np.equal(card.own_norms, True) & half, own_passes, _PASSES)
    wait = 1 - from_l2 * (1 - _L2_LATENCY)
    by_channel = passes * wait * ops.columns / (c.block_elements * clock_hz)
    result: Array = np.maximum(found, np.where((ops.norm_bytes > 0) & channels_first, by_channel, 0.0))
    return result


def _arithmetic(ops: Columns, card: Card, c: Constants, clock_hz: Any) -> Array:
    def column(value: Any) -> Array:
        return np.broadcast_to(np.asarray(value, dtype=np.float64), ops.flops.shape)

    half, few = ops.element_bytes == 2, ops.element_bytes <= 1
    in_tf32 = ~half & ~few & np.equal(card.single_in_tf32, True)
    peak = column(card.single_flops_per_s * np.where(card.single_in_tf32, c.tf32, c.fp32))
    winograd = np.maximum(peak, card.simd_flops_per_s * c.fp32 * c.winograd)
    peak = np.where(ops.winograd & np.equal(card.tries_algorithms, True), winograd, peak)
    peak = np.where(half, card.half_flops_per_s * c.half * np.where(card.waits_for_loads, c.waiting, 1.0), peak)
    in_few = np.where(ops.element_bytes == 1, card.fp8_flops_per_s, card.fp4_flops_per_s)
    peak = np.where(few, in_few * c.half * FEW_BITS, peak)
    by_mma = np.where(half, ops.attention & ~np.equal(card.flash_3, True), in_tf32 & ops.gradient & ~ops.attention)
    peak = np.where((half | in_tf32) & ops.unaligned, peak * _UNALIGNED, peak)
    in_three = ops.attention & ~half & ~few & np.greater(card.tf32_flops_per_s, 0)
    peak = np.where(in_three, card.tf32_flops_per_s * c.tf32 / _TF32_PRODUCTS, peak)
    peak = np.where(by_mma | in_three, peak * card.mma, peak)
    # FLOPs of one multiprocessor in a cycle: a lower clock slows both alike
    per_cycle = peak / (card.multiprocessors * card.clock_hz)
    tiled = TiledProducts(
        products=ops.products,
        rows=np.maximum(ops.rows, ops.columns),
        columns=np.minimum(ops.rows, ops.columns),
        depth=ops.depth,
        element_bytes=ops.element_bytes,
        flops_per_cycle=per_cycle,
        multiprocessors=column(card.multiprocessors),
        sharing=column(card.sharing),
    )
    cycles = ops.flops / (per_cycle * card.multiprocessors)  # of products whose shape is not known
    products = (ops.flops > 0) & (ops.depth > 0) & ~ops.depthwise & ~ops.attention
    cycles[products] = tile_cycles(tiled.where(products), feed_bytes=c.feed_bytes, fill_cycles=c.fill_cycles)
    fused = replace(tiled, rows=ops.rows, columns=ops.columns, sharing=ops.heads)
    cycles[ops.attention] = attention_cycles(
        fused.where(ops.attention),
        ops.attention_gradient[ops.attention],
        feed_bytes=c.feed_bytes,
        fill_cycles=c.fill_cycles,
        longest_first=(ops.attention_gradient | np.equal(card.flash_3, True))[ops.attention],
    )
    simd = card.simd_flops_per_s * c.depthwise / (card.multiprocessors * card.clock_hz)
    depthwise = ops.flops / column(card.multiprocessors * simd)
    result: Array = np.where(ops.depthwise, depthwise, cycles) / clock_hz
    return result


def longer_of(device_s: Any, host_s: Any) -> Any:
    """Return about the longer of two times, without a corner where they are equal."""
    return (device_s**_EDGE + host_s**_EDGE) ** (1 / _EDGE)


# ``python -m benchmarks predict_fit`` writes that file from public measurements. The errors are measured on GPUs of an architecture that
# was left out of the fit.


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The free parameters of the formulas; the defaults are where a fit begins."""

    half: float = 0.85
    """Share of the peak rate that 16-bit products reach."""
    tf32: float = 0.75
    fp32: float = 0.75
    depthwise: float = 0.1
    """Share of the FP32 rate that depthwise convolutions reach."""
    winograd: float = 2.0
    """Rate of FP32 convolutions of 3 x 3 over what their multiplications allow: Winograd's algorithm needs fewer."""
    bandwidth: float = 0.88
    """Share of the memory's bandwidth that is reached."""
    issue_elements: float = 4.5
    """Elements that one multiprocessor moves in a cycle, at most, outside of products."""
    block_elements: float = 0.7
    """Elements that one block of threads passes over in a cycle: channels-first batch normalisation has one block per channel."""
    feed_bytes: float = 64.0
    """Bytes that matrix units get from the L2 cache, per cycle and multiprocessor."""
    fill_cycles: float = 3000.0
    """Cycles of a tile in which its units wait: for the first loads, and while its results are written."""
    l2_bytes: float = 10.0
    """Bytes that one multiprocessor streams from the L2 cache in a cycle."""
    l2_share: float = 0.4
    """Share of the L2 cache in which an operation finds its operands."""
    layout_copies: float = 0.5
    """Copies of a channels-first convolution's operands, in reads and writes of all of them."""
    overlap: float = 3.0
    """1 where arithmetic and traffic wait for each other, large where they overlap."""
    full_clock_w: float = 2.2
    """Board power for each multiprocessor and GHz below which the clock falls."""
    waiting: float = 0.65
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
    bands: dict[str, tuple[float, float]]
    """The same two for rows of one architecture, where there are enough."""
    validated: dict[str, list[str]]
    """Architecture: the precisions that rows have measured."""

    def band(self, architecture: str) -> tuple[float, float]:
        """Return the 10th and 90th percentile of measured over predicted throughput on GPUs of ``architecture``."""
        return self.bands.get(family(architecture), (self.low, self.high))

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
    bands = {name: (low, high) for name, (low, high) in data["bands"].items()}
    return Fitted(**{**data, "constants": Constants(**data["constants"]), "bands": bands})
