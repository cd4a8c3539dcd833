"""One step of a training on one kind of GPU: how long each operation takes, and what limits it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from mezzo.engine.matrix_units.low_layers import fault_of_sizes
from mezzo.formats import Recipe
from mezzo.gpus import Gpu
from mezzo.measure.predict.calibrate import Calibration
from mezzo.measure.predict.host import SERVER, Host
from mezzo.measure.predict.rates import MachineRates
from mezzo.measure.predict.sharding import GpuGroup
from mezzo.measure.predict.tape import CostedOperation, TrainingTape
from mezzo.measure.predict.tiles import Array
from mezzo.measure.predict.time import (
    FP4,
    FP8,
    HALF_FORMATS,
    LATENCY_S,
    Bounds,
    Card,
    Columns,
    Constants,
    fitted,
    longer_of,
    operation_bounds,
)
from mezzo.policy import PRESETS, Policy
from mezzo.policyfields import recipe_of
from mezzo.records import ModuleShare

ALONE = GpuGroup()
_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions of a step: the GPU, how many of them train together, rates if measured, and the host."""

    gpu: Gpu
    job: GpuGroup = ALONE
    calibration: Calibration | None = None
    """Rates measured on a GPU of this kind; None for the constants that ship."""
    host: Host = SERVER

    def rates(self, policy: str) -> MachineRates | None:
        """Return the measured rates of ``policy``; None unless FP32, which it is compared with, was measured as well."""
        if self.calibration is None:
            return None
        measured = self.calibration.rates
        own = policy.split("-")[0]
        if own == "tf32" and own not in measured:
            own = "fp32"  # a GPU without TF32
        return measured[own] if {"fp32", own} <= set(measured) else None

    def covering(self, policy: str) -> Conditions:
        """Return these conditions, without rates if they do not cover ``policy``: compared steps must be priced in the same way."""
        return self if self.rates(policy) is not None else replace(self, calibration=None)

    @property
    def band(self) -> tuple[float, float]:
        """10th and 90th percentile of measured over predicted throughput."""
        if self.calibration is not None:
            return self.calibration.low, self.calibration.high
        return fitted().band(self.gpu.architecture)

    def step(self, tape: TrainingTape, policy: str) -> PredictedStep:
        """Return a step of ``tape``, which was recorded on one GPU, under ``policy``."""
        return PredictedStep(tape, self, policy=policy)

    def throughput(self, tape: TrainingTape, policy: str, *, num_batches: int) -> float:
        """Return the samples per second of all GPUs; an update accumulates ``num_batches`` batches of the tape's size."""
        return self.job.num_gpus * tape.batch * num_batches / self.step(tape, policy).seconds


class PredictedStep:
    """One step on one GPU of a job."""

    def __init__(self, tape: TrainingTape, conditions: Conditions, *, policy: str) -> None:
        """Price each operation of ``tape``."""
        job, gpu = conditions.job, conditions.gpu
        self.communication_s = job.communication_s(tape, gpu)
        self.tape = job.tape_of_rank(tape)
        ops, constants = Columns.of(self.tape.operations), fitted().constants
        recipe = recipe_of(PRESETS[policy])
        half = "bf16" if recipe is not None else policy.split("-")[0]  # few bits leave the other operations in BF16
        card = Card.of(gpu, tf32=policy != "fp32", tries_algorithms=self.tape.tries_algorithms, bf16=half == "bf16")
        found = operation_bounds(ops, card, constants)
        self.parts = {"arithmetic": found.arithmetic, "bandwidth": found.traffic}
        rates = conditions.rates(policy)
        self.operation_s = found.total if rates is None else rates.seconds(self.tape.operations)
        self.note = ""
        """A remark on what the policy means for this model, if there is one."""
        if recipe is not None:
            self._in_few_bits(gpu, PRESETS[policy], recipe, constants)
        self.device_s = float(self.operation_s.sum())
        self.host_s = 0.0 if self.tape.is_compiled else conditions.host.seconds(self.tape.operations)
        self.seconds = job.step_s(float(longer_of(self.device_s, self.host_s)), self.communication_s, tape)
        self.captured_s = job.step_s(self.device_s, self.communication_s, tape)
        """Seconds if the step was captured as a CUDA graph, which needs the host no more."""

    def _in_few_bits(self, gpu: Gpu, policy: Policy, recipe: Recipe, constants: Constants) -> None:
        layers = low_layers(self.tape.operations, policy, recipe)
        self.note = layers.sentence
        indices = np.flatnonzero(layers.chosen)
        if not len(indices):
            return
        operations = [self.tape.operations[index] for index in indices]
        bounds = low_bounds(operations, gpu, recipe, constants)
        ratio = self.operation_s[indices].sum() / bounds.total.sum()
        comparison = f"are {ratio:.2g} times as fast as" if ratio >= 1 else f"take {1 / ratio:.2g} times as long as"
        self.note += f". They {comparison} in BF16, casts included"
        self.parts["arithmetic"][indices], self.parts["bandwidth"][indices] = bounds.arithmetic, bounds.traffic
        self.operation_s[indices] = bounds.total

    @property
    def is_bound_by_host(self) -> bool:
        """Whether the host needs longer for the step's operations than the GPU."""
        return self.host_s > self.device_s

    def bounds(self) -> dict[str, float]:
        """Return the share of the step by what limits its operations."""
        if self.is_bound_by_host:
            return {"arithmetic": 0.0, "bandwidth": 0.0, "launch": 1.0}
        return shares_by_kind(self.operation_s, self.kinds())

    def kinds(self) -> NDArray[np.str_]:
        """Return what limits each operation."""
        arithmetic, traffic = self.parts["arithmetic"], self.parts["bandwidth"]
        longer = np.where(arithmetic > traffic, "arithmetic", "bandwidth")
        result: NDArray[np.str_] = np.where(self.operation_s < 2 * LATENCY_S, "launch", longer)
        return result


def shares_by_kind(operation_s: Array, kinds: NDArray[np.str_]) -> dict[str, float]:
    """Return the share of each kind in the seconds of all operations."""
    return {
        kind: float(operation_s[kinds == kind].sum() / operation_s.sum())
        for kind in ("arithmetic", "bandwidth", "launch")
    }


def seconds_by_module(
    tape: TrainingTape, operation_s: Array, kinds: NDArray[np.str_], *, name_of: Callable[[str], str] = str
) -> dict[str, dict[str, float]]:
    """Return the seconds of each module by kind, the longest first; the optimizer counts as one module."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for operation, seconds, kind in zip(tape.operations, operation_s, kinds, strict=True):
        name = "(optimizer)" if operation.phase == "optimizer" else name_of(operation.module) or "(model)"
        found[name][str(kind)] += float(seconds)
    return dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))


def module_shares(tape: TrainingTape, operation_s: Array, kinds: NDArray[np.str_]) -> list[ModuleShare]:
    """Return the modules with the largest shares of the step's seconds; names are shortened where the tree is deep."""
    found = [*seconds_by_module(tape, operation_s, kinds, name_of=_shortened).items()][:_SHOWN]
    return [
        ModuleShare(
            module=name,
            share=sum(seconds.values()) / float(operation_s.sum()),
            bound=max(seconds, key=lambda kind: seconds[kind]),
        )
        for name, seconds in found
    ]


def _shortened(module: str) -> str:
    """Return the name up to its first number: ``encoder.layer.3.output`` is part of ``encoder.layer``."""
    return ".".join([*takewhile(lambda part: not part.isdecimal(), module.split("."))][:3])


# Layers are chosen as Mezzo's policies choose them (``engine.matrix_units.low_layers``): sizes in multiples of a block, large
# enough, not the last, and in blocks not the first. Weights, gradients and saved activations stay in 16 bits, so memory is as under BF16.
# For each of a layer's three products::
#
#     product = as in ``time``, at the peak of 8 or 4 bits, with operands of so many bits
#     casts   = (rows x depth + depth x columns) x (2 x passes + bits / 8) bytes / bandwidth + 2 x passes launches
#
# An operand with a scale for the whole tensor or a row is read twice, for its largest magnitude and for rounding: two fused kernels, as
# torch.compile makes them. Blocks are rounded as they are read; NVFP4 has a scale for the tensor as well. Few bits lose where a product
# has few rows and columns for the size of its operands: the casts then cost more than the faster units gain.

_LINEAR = ("addmm", "mm")
_FIRST, _LAST = "the first layer", "the last layer"


@dataclass(frozen=True, kw_only=True)
class LowLayers:
    """Which operations of a tape run in 8 or 4 bits, and which linear layers do not."""

    name: str
    """The policy's format."""
    chosen: NDArray[np.bool_]
    """By operation."""
    num_layers: int
    num_chosen: int
    others: Counter[str]
    """Reason: how many layers stay in 16 bits for it."""

    @property
    def sentence(self) -> str:
        """How many layers run in fewer bits and why the others do not, in a sentence."""
        if not self.num_layers:
            return f"It has no linear layers, so {self.name} is BF16"
        why = "; ".join(f"{count}: {reason}" for reason, count in self.others.most_common())
        verb = "runs" if self.num_chosen == 1 else "run"
        head = f"{self.num_chosen} of {self.num_layers} linear layers {verb} in {self.name}"
        return head + (f", the others in BF16 ({why})" if why else "")


def low_layers(operations: Sequence[CostedOperation], policy: Policy, recipe: Recipe) -> LowLayers:
    """Return which products of a 16-bit step's ``operations`` run in fewer bits under ``policy``."""
    layers: dict[str, tuple[int, int]] = {}
    for op in operations:
        if op.phase == "forward" and _is_linear(op):
            layers[op.module] = op.shape.columns, op.shape.depth
    faults = {name: fault_of_sizes(*sizes, recipe) for name, sizes in layers.items()}
    words = {"not multiples": f"a size is not a multiple of {recipe.multiple}", "too small": "too small to gain"}
    reasons = {name: None if fault is None else words[fault] for name, fault in faults.items()}
    if layers and (not recipe.by_layer or policy.end_layers == "bf16"):
        reasons[next(reversed(layers))] = _LAST
        if recipe.by_layer:
            reasons[next(iter(layers))] = _FIRST
    chosen = {name for name, reason in reasons.items() if reason is None}
    return LowLayers(
        name=policy.compute.upper(),
        chosen=np.array([_is_linear(op) and op.module in chosen for op in operations], dtype=bool),
        num_layers=len(layers),
        num_chosen=len(chosen),
        others=Counter(reason for reason in reasons.values() if reason),
    )


def _is_linear(op: CostedOperation) -> bool:
    return op.name in _LINEAR and op.format in HALF_FORMATS and op.phase in ("forward", "backward")


def low_bounds(operations: Sequence[CostedOperation], gpu: Gpu, recipe: Recipe, constants: Constants) -> Bounds:
    """Return the seconds of ``operations``, linear products of 16-bit operands, in fewer bits with the casts of their operands."""
    bits, passes = recipe.values.bits_per_value, passes_of(recipe)
    name = FP8 if bits >= 8 else FP4
    small = [replace(op, format=name, read_bytes=int(op.read_bytes * bits) // 16) for op in operations]
    found = operation_bounds(Columns.of(small), Card.of(gpu, tf32=True), constants)
    shapes = [op.shape for op in operations]
    elements = np.array([s.products * s.depth * (s.rows + s.columns) for s in shapes], dtype=np.float64)
    casts = elements * (2 * passes + bits / 8) / (gpu.bandwidth_bytes_per_s * constants.bandwidth)
    return Bounds(found.arithmetic, found.traffic + casts, found.total + casts + 2 * passes * LATENCY_S)


def passes_of(recipe: Recipe) -> int:
    """Return how often an operand is read before it is rounded: for its largest magnitude as well, unless blocks alone share scales."""
    scaling = recipe.values.scaling
    assert scaling is not None
    return 1 if recipe.by_layer and scaling.over is None else 2
