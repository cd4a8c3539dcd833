"""Emulate in one process a reduction of gradients in 16 bits over N processes (``reduce=bf16:world=384``).

**Method.** Summing N shares in a format rounds every share and every partial sum. In BF16, with its 8 significant bits, a sum of
hundreds of shares loses accuracy with the square root of N in a ring, and more slowly in a tree. That sum is actually computed: N shares
are rounded, and added one after the other in the format's own arithmetic. The script's gradients then differ from the exact ones only by
the rounding of that reduction.

**Assumptions.** One process knows the average of the processes' gradients, but not the share of each. The shares are drawn
at random, element by element: their mean is the gradient ``g`` itself, and their standard deviation ``sqrt(N) * abs(g)``. So noise
and signal are equal in the average, as in a batch of the critical size over all processes, beyond which a larger
batch no longer pays (McCandlish et al., arXiv:1812.06162). The draws are normal, in pairs of opposite sign in random order, so that
their sum is zero; a gradient of zero stays zero.

**Limits.** Shares that hardly differ, from batches far beyond the critical size, are worse: a ring in BF16 adds up about 256 equal
shares, and each further one is less than half a unit of the sum and vanishes. A ring and a tree of pairs are the two extremes of
communication libraries; those that add in FP32 inside the network or a node round less. The emulation takes N passes over the gradients,
so its time says nothing about a real reduction.

The draws depend only on the gradients' values: a resumed run repeats those of an uninterrupted one, and the script's random numbers do
not change.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mezzo.engine.processes.exchange import LossScale, as_wide, averaged, divisors, format_of_reduction, no_scale
from mezzo.engine.processes.shards import buckets, local
from mezzo.formats import FP16, FP32, Format
from mezzo.policy import Policy

_CHUNK = 2**14
"""Elements that are summed at a time: they stay in a core's cache during the N passes."""
_TABLE = 16 * _CHUNK
"""Number of random numbers; each process reads them from another position."""


class EmulatedWorld:
    """Emulated processes, and the rounding of their reductions."""

    def __init__(self, policy: Policy, loss_scale: LossScale = no_scale) -> None:
        """Create ``policy.world`` processes.

        Args:
            policy: names the format, the number of processes and the order of the sum.
            loss_scale: returns the factor of gradients while they are in FP16.
        """
        fmt = format_of_reduction(policy)
        assert fmt is not None
        self.format: Format = fmt
        self.size, self.order = policy.world, policy.reduce_order
        self._sum = _in_a_ring if self.order == "ring" else _in_a_tree
        self._loss_scale: LossScale = loss_scale if fmt is FP16 else no_scale
        self._tables: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._errors: list[Tensor] = []

    @torch.no_grad()
    def reduce(self, gradients: Sequence[Tensor]) -> None:
        """Change ``gradients`` in place as their reduction over the processes would."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # hidden from counters and observers
            parts = [local(g) for g in gradients]
            real = [torch.view_as_real(g) if g.is_complex() else g for g in parts]
            for bucket in buckets([g for g in real if g.numel() and g.is_floating_point()]):
                before = torch.cat([as_wide(g).reshape(-1) for g in bucket])
                after = self._reduced(before)
                pieces = after.split([g.numel() for g in bucket])
                torch._foreach_copy_(bucket, [x.view(g.shape) for x, g in zip(pieces, bucket, strict=True)])
                self._errors.append((after - before).norm() / before.norm())

    def error(self) -> float | None:
        """Return the median of the reductions' errors, each relative to the gradients' norm; None before any; waits for the device."""
        known = [error for error in map(float, self._errors) if math.isfinite(error)]
        return sorted(known)[len(known) // 2] if known else None

    def _reduced(self, gradient: Tensor) -> Tensor:
        """Return the average of shares drawn around ``gradient``, rounded as the processes round it."""
        before, after = divisors(self.format, self.size)
        scale = self._loss_scale()
        share = gradient / before if scale is None else gradient * (scale.to(gradient.device) / before)
        rng = random.Random(struct.pack("d", float(gradient.double().sum())))
        total = torch.cat([self._sum(self._shares(part, rng)) for part in share.split(_CHUNK)])
        return averaged(total.to(gradient.dtype), after, scale)

    def _shares(self, mean: Tensor, rng: random.Random) -> Iterator[Tensor]:
        """Yield each process' share of a chunk in the format; the next one overwrites it."""
        table, pairs = self._table(mean), self.size // 2
        spread = self.size / math.sqrt(2 * pairs)  # sqrt(N), or more for an odd N, whose last share is the mean
        places = [rng.randrange(_TABLE - mean.numel() + 1) for _ in range(pairs)]
        draws = [(at, factor) for at in places for factor in (-spread, spread)] + [(0, 0.0)] * (self.size % 2)
        rng.shuffle(draws)
        wide, sent = torch.empty_like(mean), torch.empty_like(mean, dtype=self.format.dtype)
        for at, factor in draws:
            torch.addcmul(mean, mean, table[at : at + mean.numel()], value=factor, out=wide)
            yield sent.copy_(wide)

    def _table(self, like: Tensor) -> Tensor:
        key = (like.dtype, like.device)
        if key not in self._tables:
            numbers = torch.randn(_TABLE, generator=torch.Generator().manual_seed(0), dtype=FP32.dtype)
            self._tables[key] = numbers.to(device=like.device, dtype=like.dtype)
        return self._tables[key]


def _in_a_ring(shares: Iterator[Tensor]) -> Tensor:
    """Return the sum of ``shares``, each added to the partial sum of those before it."""
    total = next(shares).clone()
    for share in shares:
        total.add_(share)
    return total


def _in_a_tree(shares: Iterator[Tensor]) -> Tensor:
    """Return the sum of ``shares`` by pairs, pairs of pairs and so on; about log2(N) partial sums are kept."""
    waiting: list[tuple[int, Tensor]] = []
    for share in shares:
        level, total = 0, share.clone()
        while waiting and waiting[-1][0] == level:
            total.add_(waiting.pop()[1])
            level += 1
        waiting.append((level, total))
    total = waiting.pop()[1]
    while waiting:
        total.add_(waiting.pop()[1])
    return total
