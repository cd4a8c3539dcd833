"""How long do updates by Muon and Adafactor take beside torch's, how exact are they, and what do fewer bits of state cost?

The times are of one block of BERT base, its four square matrices and its two wide ones, with FP32 weights: both sides then do the same
work. Muon multiplies in BF16: natively as torch does, or in FP32 with rounded operands, as a CPU without BF16 units needs it. Distances
are of one matrix after Newton-Schulz from float64's. The regression is that of ``low_memory``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz as torchs_newton_schulz

import mezzo
from benchmarks.memory.low_memory import SEEDS, train
from benchmarks.shared.harness import interleave, median_ms, ratio, report, spread, summary
from mezzo.engine.optimizers import muon as module
from mezzo.engine.optimizers.muon import orthogonalized

BLOCK = [(768, 768)] * 4 + [(3072, 768), (768, 3072)]
MATRICES = [(128, 128), (128, 512), (512, 128), (768, 768)]
COEFFICIENTS, STEPS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
ROUNDS = 5
STORED = [
    ("fp32", "fp32", "nearest"),
    ("fp32", "bf16", "nearest"),
    ("fp32", "8bit", "nearest"),
    ("bf16-master", "fp32", "nearest"),
    ("bf16-master", "8bit", "nearest"),
    ("bf16-pure", "8bit", "stochastic"),
]
OURS, EMULATED, TORCH_S = "mezzo.Muon, native products", "mezzo.Muon, emulated products", "torch.optim.Muon"
ADAFACTOR, TORCH_S_ADAFACTOR = "mezzo.Adafactor", "torch.optim.Adafactor"


def main() -> None:
    warnings.simplefilter("ignore", mezzo.PrecisionWarning)
    rows: list[tuple[str, str, str]] = []
    pieces = {
        OURS: update(mezzo.Muon),
        EMULATED: update(mezzo.Muon),
        TORCH_S: update(torch.optim.Muon),
        ADAFACTOR: update(mezzo.Adafactor),
        TORCH_S_ADAFACTOR: update(torch.optim.Adafactor),
    }
    around = {OURS: lambda: units(native=True), EMULATED: lambda: units(native=False)}
    times = interleave(pieces, rounds=ROUNDS, around=around)
    for ours, theirs in ((OURS, TORCH_S), (EMULATED, TORCH_S), (ADAFACTOR, TORCH_S_ADAFACTOR)):
        rows.append((f"a block of BERT base: time of {ours} over {theirs}", spread(ratio(times, ours, theirs)), ""))
    distances = {f"{rows_} x {columns}": distance(rows_, columns) for rows_, columns in MATRICES}
    for shape, found in distances.items():
        text = ", ".join(f"{name} {100 * value:.2f}%" for name, value in found.items())
        rows.append((f"{shape}: distance from float64 after Newton-Schulz", text, ""))
    data: dict[str, Any] = {"median_ms": median_ms(times), "distances": distances}
    for name, build in (("Muon", muon), ("Adafactor", adafactor)):
        exact: list[float] = []
        for policy, moments, rounding in STORED:
            ends = [
                train(functools.partial(build, moments=moments, rounding=rounding), policy, n) for n in range(SEEDS)
            ]
            exact = exact or [loss for loss, _ in ends]
            against = summary([loss / first for (loss, _), first in zip(ends, exact, strict=True)])
            what = f"{name}, {policy}, moments={moments}, rounding={rounding}"
            rows.append((f"{what}: bytes a parameter", f"{ends[0][1]:.2f}", ""))
            rows.append((f"{what}: final loss against FP32", spread(against), ""))
            data[what] = {"bytes_a_parameter": ends[0][1], "loss_against_fp32": against}
    report("matrix_optimizers", rows, data)


def update(build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[], None]:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape) * 0.02) for shape in BLOCK]
    for weight in weights:
        weight.grad = torch.randn(weight.shape)
    return build(weights).step  # type: ignore[return-value]


@contextmanager
def units(*, native: bool) -> Iterator[None]:
    """Make Muon multiply natively, or not."""
    with mock.patch.object(module, "_units", return_value=(native, "as measured")):
        yield


def distance(rows: int, columns: int) -> dict[str, float]:
    """Return how far each way is from float64, as a share of its norm."""
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    settings: dict[str, Any] = {"coefficients": COEFFICIENTS, "steps": STEPS, "eps": EPS}
    exact = by_reference(matrix.double())
    ways = {
        "native": orthogonalized(matrix, native=True, **settings),
        "emulated": orthogonalized(matrix, native=False, **settings),
        "torch's": torchs_newton_schulz(matrix, COEFFICIENTS, STEPS, EPS),
        "the author's": by_reference(matrix),
    }
    return {name: float((found.double() - exact).norm() / exact.norm()) for name, found in ways.items()}


def by_reference(matrix: Tensor) -> Tensor:
    """Iterate as github.com/KellerJordan/Muon does (commit 00ba60d), in the matrix's own format."""
    (a, b, c), tall = COEFFICIENTS, matrix.size(0) > matrix.size(1)
    x = matrix.mT if tall else matrix
    x = x / (x.norm() + EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + (c * gram) @ gram) @ x
    return x.mT if tall else x


def muon(model: nn.Module, **storage: Any) -> mezzo.Muon:
    groups = mezzo.Muon.groups(model, adamw_names=["2"], adamw={"lr": 3e-3})
    return mezzo.Muon(groups, lr=0.02, weight_decay=0.0, **storage)


def adafactor(model: nn.Module, **storage: Any) -> mezzo.Adafactor:
    return mezzo.Adafactor(model.parameters(), lr=0.02, **storage)
