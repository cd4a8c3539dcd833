"""Rows of public throughput tables, recorded as tapes and priced together, and the fit of the constants on them and on kernels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import least_squares
from torch import Tensor, nn

from benchmarks.prediction.kernel_tables import MeasuredKernel, Priced
from benchmarks.prediction.zoo.trainings import NotBuilt, installed, training
from benchmarks.shared import csv_rows
from mezzo.gpus import Gpu, find_gpu
from mezzo.measure.predict.host import SERVER
from mezzo.measure.predict.tape import CostedOperation, TrainingTape
from mezzo.measure.predict.tiles import Array
from mezzo.measure.predict.time import Card, Columns, Constants, family, longer_of, operation_bounds
from mezzo.measure.predict.training import record_training
from mezzo.policy import Policy

BATCHES = 8, 16
"""The batch sizes that are recorded; costs at others follow."""
SAME_AS = {"MI250 (1 GCD)": "MI210", "V100-SXM3-32GB": "V100-SXM2-32GB"}
"""GPUs with another name in the table of GPUs: half an MI250 is an MI210."""


class _BertAdam(torch.optim.Optimizer):
    """Adam as in BERT's FP32 scripts of that time: one parameter after another, each clipped separately."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
            p.grad.norm()
            p.grad.mul_(0.5)
            state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
            state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
            update = state["m"] / (state["v"].sqrt() + 1e-6)
            update += 0.01 * p
            p.add_(-(1e-4 * update))


def _adafactor(params: Any) -> torch.optim.Optimizer:
    """Return Adafactor as transformers' trainer sets it."""
    made = installed("transformers").optimization.Adafactor(params, lr=1e-4, scale_parameter=False, relative_step=False)
    assert isinstance(made, torch.optim.Optimizer)
    return made


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "none": partial(torch.optim.SGD, lr=0.1),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-4, foreach=True),
    "fused-adam": partial(torch.optim.Adam, lr=1e-4, fused=True),
    "bert-adam": _BertAdam,
    "rmsprop": partial(torch.optim.RMSprop, lr=0.1, momentum=0.9),
    "adafactor": _adafactor,
    "adam-8bit": partial(torch.optim.SGD, lr=0.1),  # its kernels are added
}
NAMED = {
    "SGD-momentum": "sgd",
    "FusedAdam/BertAdam": "fused-adam",
    "FusedAdam": "fused-adam",
    "RMSprop": "rmsprop",
    "none (fwd+bwd)": "none",
    "FusedLAMB": "none",
}
"""Optimizers by their names in the tables; others are priced as Adam."""


@dataclass(frozen=True)
class Row:
    """The training of a row of gpu_training_throughput.csv."""

    model: str
    size: str
    precision: str
    """``fp32``, ``tf32``, ``fp16`` (autocast), ``fp16-half`` (the model in FP16 with masters), ``fp16-pure`` (without) or ``bf16``."""
    layout: str
    optimizer: str
    checkpointed: bool = False
    """Whether each layer keeps its input alone, as transformers' models do it."""
    num_batches: int = 1
    """Batches that one update accumulates."""

    def tape(self, batch: int) -> TrainingTape:
        """Return the tape at ``batch``; TF32 runs the same operations as FP32."""
        precision = {"tf32": "fp32"}.get(self.precision, self.precision)
        same = replace(self, precision=precision, num_batches=1)
        low, high = (_recorded(same, n) for n in BATCHES)
        return low.at_batch(high, batch)

    def operations(self, batch: int) -> list[CostedOperation]:
        """Return the operations of a step: an update, and the batches that it accumulates."""
        found = self.tape(batch).operations
        return found + (self.num_batches - 1) * [op for op in found if op.phase != "optimizer"]


@cache
def _recorded(row: Row, batch: int) -> TrainingTape:
    found = training(row.model, row.size)
    half = row.precision in ("fp16-half", "fp16-pure")
    channels_last = row.layout == "nhwc" and found.kind != "language transformer"

    def build() -> nn.Module:
        model = found.build()
        if half:
            model.half()
        if row.checkpointed:
            model.gradient_checkpointing_enable()
        return model.to(memory_format=torch.channels_last) if channels_last else model

    def batch_of(n: int) -> dict[str, Tensor]:
        inputs = found.batch_of(n)
        if half:
            inputs = {k: v.half() if v.is_floating_point() else v for k, v in inputs.items()}
        if channels_last:
            inputs["x"] = inputs["x"].contiguous(memory_format=torch.channels_last)
        return inputs

    policy = Policy.parse(row.precision) if row.precision in ("fp16", "bf16") else None
    optimizer = OPTIMIZERS[row.optimizer]
    tape = record_training(build, batch_of, found.loss_of, batch=batch, optimizer=optimizer, policy=policy, steps=1)
    if row.optimizer in ("none", "adam-8bit"):
        tape.operations = [op for op in tape.operations if op.phase != "optimizer"]
    if row.optimizer == "adam-8bit":  # bitsandbytes has a kernel for each weight, which keeps two states of a byte
        sizes = [block.size_bytes // 4 for block in tape.blocks if block.kind == "parameters"]
        tape.operations += [
            CostedOperation("adam_8bit", "optimizer", "", "fp32", 0, 10 * size, 6 * size) for size in sizes
        ]
    if (
        row.precision == "fp16-half"
    ):  # an FP32 copy of each weight: gradients are cast and unscaled, the result is cast back
        halves = sum(block.size_bytes for block in tape.blocks if block.kind == "parameters")
        tape.operations += [
            CostedOperation("unscale", "optimizer", "", "fp32", 0, halves, 2 * halves),
            CostedOperation("master_update", "optimizer", "", "fp32", 0, 2 * halves, halves),
        ]
    return tape


def row_of(cells: Mapping[str, str]) -> tuple[Row, int, str]:
    """Return the training of a row, its batch size and the kind of its model.

    Raises:
        NotBuilt: the training cannot be built.
    """
    model, size, math, notes = cells["model"], cells["img_or_seq"], cells["effective_math"], cells["notes"]
    if int(cells["n_gpus"]) != 1:
        raise NotBuilt("several GPUs")
    if math == "fp16 weights":
        precision = "fp16-pure"
    elif "O2" in math or math == "fp16 pure":
        precision = "fp16-half" if "bert" in model else "fp16"
    else:
        precision = re.match(r"fp32|tf32|fp16|bf16", math).group()  # type: ignore[union-attr]
    optimizer = NAMED.get(cells["optimizer"], "adam")
    if cells["optimizer"] == "FusedAdam/BertAdam" and precision != "fp16-half":
        optimizer = "bert-adam"
    optimizer = "adafactor" if "adafactor" in notes else "adam-8bit" if "8-bit Adam" in notes else optimizer
    accumulated = re.search(r"accum(?:ulation)? ?(\d+)", notes)
    layout = {"nhwc": "nhwc", "nhwc(AMP)": "nhwc" if precision == "fp16" else "nchw"}.get(cells["layout"], "nchw")
    batch = int(cells["batch_per_gpu"] or ("64" if model.startswith("ssd") else "128"))
    row = Row(
        model,
        size,
        precision,
        layout,
        optimizer,
        checkpointed="ckpt" in notes or "checkpointing" in notes,
        num_batches=int(accumulated.group(1)) if accumulated else 1,
    )
    return row, batch, training(model, size).kind


@dataclass(frozen=True)
class Measured:
    """A row that can be predicted."""

    cells: dict[str, str]
    row: Row
    kind: str
    gpu: Gpu
    ops: Columns
    """Different operations."""
    counts: Array
    """How often each operation runs."""
    host_s: float
    throughput: float
    seconds: float

    @property
    def family(self) -> str:
        """The group of architectures with which the row is held out."""
        return family(self.gpu.architecture)

    @property
    def old(self) -> bool:
        """Whether the row's matrix units were driven by libraries before 2022."""
        found = re.search(r"NGC PyTorch 1\.(\d+)", self.cells["framework"])
        return found is not None and int(found.group(1)) < 12 and self.row.precision != "fp32"

    @property
    def setting(self) -> tuple[str, ...]:
        return self.cells["model"], self.gpu.name, self.row.precision, self.row.layout


def read(path: Path) -> tuple[list[Measured], Counter[str]]:
    """Return the rows of a table that can be predicted, and the number of other rows by reason."""
    rows, reasons = [], Counter[str]()
    for cells in csv_rows.read(path):
        try:
            rows.append(measured(cells))
        except NotBuilt as error:
            reasons[str(error)] += 1
    return rows, reasons


def measured(cells: dict[str, str]) -> Measured:
    """Return a row of a table.

    Raises:
        NotBuilt: it cannot be predicted.
    """
    gpu = find_gpu(SAME_AS.get(cells["gpu"], cells["gpu"]))
    if gpu is None:
        raise NotBuilt(f"no facts about the GPU {cells['gpu']}")
    row, batch, kind = row_of(cells)
    operations = row.operations(batch)
    throughput = float(cells["throughput_per_gpu"])
    priced = merged(Columns.of(operations))
    seconds = row.num_batches * batch / throughput
    return Measured(cells, row, kind, gpu, *priced, SERVER.seconds(operations), throughput, seconds)


def merged(columns: Columns) -> tuple[Columns, Array]:
    """Return the different operations among ``columns``, and how often each of them occurs."""
    own = {f.name: getattr(columns, f.name) for f in fields(Columns)}
    table = np.stack([column.astype(np.float64) for column in own.values()], axis=1)
    rows, counts = np.unique(table, axis=0, return_counts=True)
    found = {name: row.astype(own[name].dtype) for name, row in zip(own, rows.T, strict=True)}
    return Columns(**found), counts.astype(np.float64)


class _Joint:
    """All operations of many rows as one set of columns, so that one pass prices all rows."""

    def __init__(self, rows: Sequence[Measured]) -> None:
        sizes = [len(row.ops.flops) for row in rows]
        self.at = np.cumsum([0, *sizes[:-1]])
        self.ops = Columns(**{f.name: np.concatenate([getattr(r.ops, f.name) for r in rows]) for f in fields(Columns)})
        cards = [
            # The scripts of all tables with convolutions set cudnn.benchmark: NVIDIA's and Lambda's examples, and timm's
            Card.of(r.gpu, tf32=r.row.precision != "fp32", tries_algorithms=True)
            for r in rows
        ]
        self.card = Card(**{f.name: np.repeat([getattr(c, f.name) for c in cards], sizes) for f in fields(Card)})
        self.old = np.array([row.old for row in rows])
        self.counts = np.concatenate([row.counts for row in rows])
        self.host_s = np.array([row.host_s for row in rows])

    def device_s(self, constants: Constants) -> Array:
        found: Array = np.add.reduceat(self.counts * operation_bounds(self.ops, self.card, constants).total, self.at)
        return found

    def seconds(self, constants: Constants) -> Array:
        found: Array = longer_of(self.device_s(constants), self.host_s)
        return found * np.where(self.old, constants.old_libraries, 1.0)


PRIOR = {
    "half": 0.1, "tf32": 0.3, "fp32": 0.3, "depthwise": 0.7, "bandwidth": 0.1, "layout_copies": 0.4, "l2_share": 0.4, "l2_bytes": 0.3,
    "overlap": 0.3, "feed_bytes": 0.3, "fill_cycles": 0.3, "winograd": 0.2, "block_elements": 0.4, "issue_elements": 0.5, "waiting": 0.3,
    "full_clock_w": 0.2, "old_libraries": 0.1,
}  # fmt: skip
"""The expected distance of each constant from the start of the fit: the standard deviation of its logarithm."""
SHARES = ("half", "tf32", "fp32", "bandwidth")
_ERROR = 0.1
"""The expected error of a step's logarithm."""
_KERNELS = {
    "products, BF16": 4.0, "element-wise": 4.0, "softmax": 2.0, "attention": 2.0, "products, FP32": 1.5, "batched products": 0.5,
    "native_layer_norm": 0.5, "convolutions": 0.0,
}  # fmt: skip
"""How many steps' worth each kind of kernel has on each GPU. Convolutions tell of the algorithms of cuDNN 7 and 8: they are not fitted."""


def _weights(kernels: Priced) -> Array:
    names, counts = np.unique(kernels.groups, return_counts=True)
    worth = {name: next(w for kind, w in _KERNELS.items() if name.startswith(kind)) for name in names}
    each = {name: worth[name] / count**0.5 for name, count in zip(names, counts, strict=True)}
    return np.array([each[name] for name in kernels.groups])


def fit(rows: Sequence[Measured], kernels: Sequence[MeasuredKernel]) -> Constants:
    """Return constants fitted on steps and kernels: least squares of logarithms, with outliers damped and repeats sharing one weight."""
    start, joint, priced, names = Constants(), _Joint(rows), Priced(kernels), list(PRIOR)
    repeats = Counter(row.setting for row in rows)
    weights = np.array([repeats[row.setting] ** -0.5 for row in rows]) / _ERROR
    kernel_weights = _weights(priced) / _ERROR
    wanted, width = np.log([row.seconds for row in rows]), np.array([PRIOR[name] for name in names])

    def moved(theta: Array) -> Constants:
        return replace(start, **{n: getattr(start, n) * float(np.exp(v)) for n, v in zip(names, theta, strict=True)})

    def errors(theta: Array) -> Array:
        constants = moved(theta)
        steps = weights * (np.log(joint.seconds(constants)) - wanted)
        return np.concatenate([steps, kernel_weights * np.log(priced.ratios(constants)), theta / width])

    top = [float(np.log(0.98 / getattr(start, name))) if name in SHARES else np.inf for name in names]
    begin = np.zeros(len(names))
    found = least_squares(errors, begin, bounds=(-np.inf, top), loss="soft_l1", max_nfev=25, diff_step=1e-2)
    return moved(found.x)


def bound_by_host(rows: Sequence[Measured], constants: Constants) -> NDArray[np.bool_]:
    """Return whether the host needs longer for each row's step than the GPU."""
    found: NDArray[np.bool_] = np.array([row.host_s for row in rows]) > _Joint(rows).device_s(constants)
    return found


def ratios(rows: Sequence[Measured], constants: Constants) -> Array:
    """Return predicted over measured throughput of each row."""
    return np.array([row.seconds for row in rows]) / _Joint(rows).seconds(constants)


def held_out(rows: Sequence[Measured], kernels: Sequence[MeasuredKernel], by: str) -> Array:
    """Return predicted over measured throughput, each row by constants fitted without its ``family``, or without its ``kind``.

    A family's kernels are left out as well; kernels have no kind of model.
    """
    found = np.empty(len(rows))
    for value in sorted({getattr(row, by) for row in rows}):
        outside = [row for row in rows if getattr(row, by) != value]
        others = [one for one in kernels if by != "family" or family(one.gpu.architecture) != value]
        inside = [place for place, row in enumerate(rows) if getattr(row, by) == value]
        found[inside] = ratios([rows[place] for place in inside], fit(outside, others))
    return found
