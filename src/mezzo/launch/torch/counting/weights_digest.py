"""A digest of a script's weights: equal in all processes whose weights are equal to the bit.

It is computed when the script leaves its process group, because the model is often gone once the script has ended, and at the end. Sharded
weights are left out: every process has its own. Cost: one pass over the weights, and one number per parameter read from the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mezzo.engine.gradients import trained_leaves
from mezzo.engine.processes.shards import is_shared
from mezzo.launch.patches import Patches
from mezzo.launch.torch.state import TorchRun

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer formats by their size in bytes."""


class WeightsDigest:
    """The latest digest of the weights that a run trains."""

    def __init__(self, run: TorchRun) -> None:
        self._run = run
        self._last = ""

    def install(self, patches: Patches) -> None:
        """Compute the digest whenever the script destroys a process group."""
        if dist.is_available():
            patches.around(dist, "destroy_process_group", self._before)

    def _before(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.text()
        return original(*args, **kwargs)

    def text(self) -> str:
        """Return the digest of the weights, or the last one computed if they are gone; empty if there is none."""
        weights = [p for optimizer in self._run.objects.optimizers for p in trained_leaves(optimizer)]
        weights = weights or [p for root in self._run.objects.roots for p in root.parameters()]
        unsharded = [p for p in weights if not is_shared(p) and p.layout is torch.strided and not p.is_meta]
        if unsharded:
            self._last = digest(unsharded)
        return self._last


@torch.no_grad()
def digest(weights: list[Tensor]) -> str:
    """Return a digest of the shapes, formats and values of tensors; of values, the sum of their bits weighted by position."""
    parts = [f"{tuple(w.shape)}{w.dtype}{_sum_of_bits(w)}" for w in weights]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]


def _sum_of_bits(weight: Tensor) -> int:
    values = torch.view_as_real(weight) if weight.is_complex() else weight.detach()
    bits = values.contiguous().view(_WORDS[values.element_size()]).reshape(-1).long()
    positions = torch.arange(1, bits.numel() + 1, device=bits.device)
    return int((bits * positions).sum())
