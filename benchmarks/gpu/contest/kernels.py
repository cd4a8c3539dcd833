"""The optimizer's two passes over 110 M parameters, as a share of the bandwidth of a copy on the same device.

``reduce`` reads every gradient once; ``apply`` reads gradient, master and moments and writes master, moments and weight. These are
the ideal bytes, so a share says how close the kernels are to the limit of memory. "As called" includes the host's work; "kernels alone" is
the time in which torch's profiler saw the device busy.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

import mezzo
from benchmarks.gpu.contest.timing import Roofs, Sizes, block_ms, steps_for
from benchmarks.shared.models import bert_base_shapes
from mezzo.engine.optimizers.one_pass import choose

Passes: TypeAlias = dict[str, tuple[Callable[[], Any], int]]
"""What to run, and its ideal bytes for each parameter."""
# weights: (format, ideal bytes per parameter of reduce, and of apply)
_KINDS = {
    "fp16 weights with FP32 masters": (torch.float16, 2, 28),  # 2 + 4 + 8 read, 4 + 8 + 2 written
    "bf16 weights with their low bits": (torch.bfloat16, 2, 26),  # 2 + 2 + 2 + 8 read, 2 + 2 + 8 written
    "fp32 weights": (torch.float32, 4, 28),  # 4 + 4 + 8 read, 4 + 8 written
}

_REPEATS = 5
_NO_KERNELS = "the profiler returned no kernel: CUPTI is missing, or counters are for administrators only"


def measure(device: str, sizes: Sizes, roofs: Roofs) -> Iterator[dict[str, str]]:
    kernels, reason = choose(device)
    yield {"what": "kernels", "value": reason}
    for name, (dtype, reduced, applied) in _KINDS.items():
        weights = [nn.Parameter((torch.randn(s, device=device) * 0.02).to(dtype)) for s in shapes(sizes.parameters)]
        for weight in weights:
            weight.grad = torch.randn_like(weight) * 1e-3
        count = sum(w.numel() for w in weights)
        for step, (run, size) in {**_ours(weights, kernels, reduced, applied), **_theirs(weights)}.items():
            what = f"{name}, {count / 1e6:.1f} M: {step}"
            try:
                yield from _shares(what, run, size * count, device, sizes, roofs)
            except Exception as error:  # measure the other passes nevertheless
                yield {"what": what, "value": f"failed: {type(error).__name__}: {error}"}


def _ours(weights: list[nn.Parameter], kernels: Any, reduced: int, applied: int) -> Passes:
    optimizer = mezzo.AdamW(weights, lr=1e-4)
    one, zero = torch.ones((), device=weights[0].device), torch.zeros((), device=weights[0].device)
    gradients = [w.grad for w in weights if w.grad is not None]
    return {
        "reduce": (lambda: kernels.sum_of_squares(gradients), reduced),
        "apply": (lambda: optimizer.update(one, zero), applied),
    }


def _theirs(weights: list[nn.Parameter]) -> Passes:
    """Return torch's passes for FP32 weights; it has none for 16-bit weights with FP32 masters."""
    if weights[0].dtype is not torch.float32:
        return {}
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    return {
        "torch.optim.AdamW(fused=True)": (optimizer.step, 28),
        "torch's clip_grad_norm_": (lambda: nn.utils.clip_grad_norm_(weights, 1.0), 12),  # read; read and write
    }


def _shares(
    what: str, run: Callable[[], Any], ideal: int, device: str, sizes: Sizes, roofs: Roofs
) -> Iterator[dict[str, str]]:
    run()
    steps = steps_for(run, device, sizes)
    times = [block_ms(run, steps, device) / steps for _ in range(sizes.rounds)]
    yield {"what": f"{what}, as called", "value": _share(statistics.median(times), ideal, roofs)}
    if device == "cuda":
        busy = busy_ms(run)
        yield {"what": f"{what}, kernels alone", "value": _share(busy, ideal, roofs) if busy else _NO_KERNELS}


def _share(ms: float, ideal: int, roofs: Roofs) -> str:
    rate = ideal / ms / 1e6
    return f"{ms:.3f} ms, {rate:,.0f} GB/s, {100 * rate / roofs.copy_gb_per_s:.0f}% of a copy"


def busy_ms(run: Callable[[], Any]) -> float:
    """Return the milliseconds that the device is busy in one run, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(_REPEATS):
            run()
        torch.cuda.synchronize()
    return busy_us(found.key_averages()) / 1e3 / _REPEATS


def busy_us(events: Iterable[Any]) -> float:
    """Return the microseconds of a profile's kernels.

    An annotation is on the device's timeline too, and would count its kernels a second time: torch's optimizers
    are inside one, ``Optimizer.step#AdamW.step``.
    """
    from torch.autograd import DeviceType

    kernels = (e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation)
    return sum(float(e.self_device_time_total) for e in kernels)


def shapes(layers: int) -> list[tuple[int, ...]]:
    """Return the shapes of BERT-base with ``layers`` layers; three small ones for none."""
    return bert_base_shapes(layers) if layers else [(768, 32), (32, 768), (768,)]
