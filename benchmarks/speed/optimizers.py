"""How fast is one AdamW update of FP16 weights with FP32 masters, clipped and checked, beside torch's ways and a copy?

Every way begins with scaled FP16 gradients and ends with updated FP16 weights. The hand-written way uses torch alone: FP32 copies of the
gradients, ``GradScaler.unscale_``, ``clip_grad_norm_``, ``AdamW(foreach=True)``, masters copied into the
weights. Ours reads every gradient twice (norm, update) and everything else once: 30 bytes per parameter, whose rate is compared with
a copy of a large tensor in the same rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.shared.harness import interleave, median_ms, ratio, report, spread, summary
from benchmarks.shared.models import Shapes, bert_base_shapes, resnet50_shapes
from mezzo import AdamW, DynamicScale
from mezzo.engine.gradients import not_finite
from mezzo.engine.kernels import fused
from mezzo.engine.optimizers import one_pass as module
from mezzo.engine.optimizers.one_pass import choose

IDEAL_BYTES = 30
"""Norm: 2 of gradient. Update: read 2 gradient, 4 master, 8 moments; write 4, 8 and 2 of weight."""
COPIED = 64 * 2**20
"""FP32 elements that are copied: far more than any cache holds."""
CLIP = 1.0
ROUNDS = {"bert_base": 5, "resnet50": 9}
HAND, COPY = "unscale_ + clip + AdamW(foreach) + copies", "copy_"
OURS, FUSED = "mezzo.AdamW", "mezzo.AdamW, torch's fused"


def main() -> None:
    rows, data = [], {}
    for name, shapes in (("resnet50", resnet50_shapes()), ("bert_base", bert_base_shapes())):
        count = sum(map(math.prod, shapes))
        pieces = {HAND: hand(shapes), OURS: one_pass(shapes, None), FUSED: one_pass(shapes, fused), COPY: memory_copy()}
        times = interleave(pieces, rounds=ROUNDS[name])
        took_ms = median_ms(times)
        share = [IDEAL_BYTES * count / a / (8 * COPIED / b) for a, b in zip(times[OURS], times[COPY], strict=True)]
        reach = summary([100 * value for value in share])
        what = f"{name}, {count / 1e6:.1f} M parameters in {len(shapes)} tensors"
        rows += [
            (f"{what}: mezzo.AdamW against the hand-written way", spread(ratio(times, HAND, OURS)), "4x or more"),
            (f"{what}: torch's fused kernels against it", spread(ratio(times, HAND, FUSED)), ""),
            (f"{what}: ideal bytes against the rate of copy_", spread(reach, "%"), "100% or more"),
            (f"{what}: ideal bytes a second", f"{IDEAL_BYTES * count / took_ms[OURS] / 1e6:.1f} GB/s", ""),
            (f"{what}: copy_, read and write", f"{8 * COPIED / took_ms[COPY] / 1e6:.1f} GB/s", ""),
        ]
        data[name] = {"median_ms": took_ms, "parameters": count, "percent_of_copy": reach}
    report("optimizers", rows, {"kernels": choose("cpu")[1], **data})


def _weights(shapes: Shapes) -> list[nn.Parameter]:
    torch.manual_seed(0)
    weights = [nn.Parameter((torch.randn(shape) * 0.02).half()) for shape in shapes]
    for weight in weights:
        weight.grad = (torch.randn(weight.shape) * 0.5).half()  # scaled: 2**-11 of it after unscaling
    return weights


def hand(shapes: Shapes) -> Callable[[], None]:
    weights = _weights(shapes)
    masters = [nn.Parameter(w.detach().float()) for w in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, foreach=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
    scaler.scale(torch.zeros(()))

    def update() -> None:
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(masters, CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)

    return update


def one_pass(shapes: Shapes, kernels: object | None, **settings: Any) -> Callable[[], None]:
    """Return the update as a session does it, with ``kernels`` (None: those chosen for the CPU) and settings of the optimizer."""
    weights = _weights(shapes)
    optimizer, scale = AdamW(weights, lr=1e-4, **settings), DynamicScale(2.0**11)
    chosen = choose("cpu")[0] if kernels is None else kernels

    def update() -> None:
        norm: Tensor = chosen.sum_of_squares([w.grad for w in weights]).sqrt()  # type: ignore[attr-defined]
        found, inverse = not_finite(norm), scale.inverse()
        coefficient = torch.clamp(CLIP / (norm * inverse + 1e-6), max=1.0)
        with mock.patch.object(module, "choose", return_value=(chosen, "")):
            optimizer.update((coefficient * inverse).float(), found)
        scale.update(found)

    return update


def memory_copy() -> Callable[[], None]:
    source, target = torch.ones(COPIED), torch.ones(COPIED)
    return lambda: target.copy_(source)
