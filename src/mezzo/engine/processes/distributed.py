"""Several processes that train one model: the values on which they must agree, and when they communicate.

Every process must compute the same loss scale, the same norm and the same answer to "skip this update?", or their weights drift
apart. Two ways to distribute training are supported:

``DistributedDataParallel``  every process has the whole model. The last backward pass of an accumulation window averages the
    gradients while it runs; earlier ones exchange nothing. Averaged gradients are bit-identical everywhere, and so is everything
    derived from them: no further communication is needed. Gradients that no backward pass averaged (a window closed early, several backward
    passes from one forward pass, several loss scales) are averaged when the window closes, without overlap.
``fully_shard``  every process has its shard of each tensor, and each backward pass averages the shards' gradients: gradients stay
    sharded, and a short window needs nothing special. With replicas of the shards (a mesh of two dimensions) the all-reduce
    among replicas waits for the window's last backward pass. At the update one all-reduce of one number computes the norm, which
    also shows whether a gradient is not finite.

Weights (``backward(weight=...)``) may differ between processes: gradients are divided by the sum over all of them. The sum is one more
number in that all-reduce, or has its own. Weights are counted in a unit: the first weight of the first process, sent once.

Limits: all processes call the session in the same way (with weights, or without); an exception that only one of them
raises, for example in its data loader, leaves the others waiting. ``DistributedDataParallel.join`` covers none of the session's own
communication.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from mezzo.devices import has_fp64
from mezzo.engine import session_errors
from mezzo.engine.gradients import all_finite, gradients_of, round_sums
from mezzo.engine.processes.exchange import (
    ReadScale,
    as_wide,
    averaged,
    divisors,
    format_of_reduction,
    no_scale,
    refuse_other_formats,
    refuse_sums_of_shards,
    refuse_world,
    use_in_hooks,
)
from mezzo.engine.processes.shards import Replica, buckets, is_shared, local, parts
from mezzo.engine.window import Window
from mezzo.errors import SessionError
from mezzo.explain import Choice
from mezzo.formats import FORMATS, FP16, FP32, FP64, Format
from mezzo.policy import Policy


class OneProcess:
    """A session's only process, which has all gradients."""

    several = False
    sharded = False
    """Whether models' parameters are shards, which ``fully_shard`` gathers into whole tensors for a forward pass."""
    group: Any = None
    """The process group, if there are several processes; None for all."""

    def explain(self) -> list[Choice]:
        """Return the choices made for several processes."""
        return []

    def check_loss(self, loss: Any, *, first: bool) -> None:
        """Refuse a value that is not a loss and, before the first update, a loss that is not finite; only then the host waits."""
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad or loss.dtype.is_complex:
            raise session_errors.no_loss(loss)
        if not torch.is_grad_enabled():  # scaling would cut the loss off from its graph
            raise session_errors.no_loss(loss)
        if first and not math.isfinite(value := loss.item()):
            raise session_errors.first_loss_not_finite(str(value))

    def unit(self, weight: float | None) -> float:
        """Return the unit in which weights are counted; 0 for the first of each window."""
        return 0.0

    def expect(self, calls: int) -> None:
        """Prepare for the next backward pass of a window that has had ``calls`` of them."""

    def ran(self, calls: int) -> None:
        """Register a backward pass, the ``calls``-th of its window, and prepare for the next."""

    def added(self) -> None:
        """Round the sums of gradients, to which some were added, if the policy names a format for them."""

    def collect(self) -> None:
        """Average gradients over the processes if no backward pass did."""

    def reduce_in(self, policy: Policy) -> None:
        """Reduce gradients from now on in the format that ``policy`` names; call it after weights were cast."""

    gradients: Callable[[Iterable[Tensor]], list[Tensor]] = staticmethod(gradients_of)
    """Returns the gradients of parameters; for sharded ones, this process's part."""

    def norm(
        self, gradients: list[Tensor], norm_of: Callable[[list[Tensor]], Tensor], window: Window | None = None
    ) -> Tensor:
        """Return the norm over all processes of the gradients that ``gradients()`` returned.

        Args:
            gradients: these gradients, or the same in another format.
            norm_of: returns the norm of a list of tensors.
            window: receives the totals of all processes' weights and losses.
        """
        return norm_of(gradients)

    def all_finite(self, gradients: list[Tensor]) -> bool:
        """Return whether the gradients that ``gradients()`` returned are finite in every process; waits for the device."""
        return all_finite(gradients)


class Emulated(OneProcess):
    """The only process, with gradients rounded as sums (``gradients=bf16``), or as if others reduced them (``reduce=bf16:world=9``)."""

    def __init__(self, trained: Sequence[nn.Parameter], policy: Policy) -> None:
        self._trained = trained
        self._sums = None if policy.gradients == "auto" else FORMATS[policy.gradients]
        self._world = EmulatedWorld(policy) if policy.world > 1 else None
        self._due = False

    def explain(self) -> list[Choice]:
        """Return that processes are emulated, and the error of their rounding so far."""
        if self._world is None:
            return []
        value = f"{self._world.size}, emulated"
        error = self._world.error()
        reason = "only the rounding of their reduction is: this process has the gradients of all"
        if error is not None:
            reason += f"; so far it changes the gradients by {error:.1e} of their norm (median of the updates)"
        return [Choice(what="processes", value=value, reason=reason)]

    def ran(self, calls: int) -> None:
        """Register a backward pass, whose gradients must be rounded and reduced."""
        self._due = True
        self.added()

    def added(self) -> None:
        """Round the sums of gradients."""
        if self._sums is not None:
            round_sums(map(local, gradients_of(self._trained)), self._sums)

    def collect(self) -> None:
        """Reduce the window's gradients, once."""
        if self._due and self._world is not None:
            self._world.reduce(gradients_of(self._trained))
            self._due = False


class Processes(OneProcess):
    """The processes of ``DistributedDataParallel`` or ``fully_shard``."""

    several = True

    def __init__(
        self,
        replicas: list[DistributedDataParallel],
        roots: list[Any],
        *,
        group: Any,
        device: torch.device,
        accumulate: int,
        num_losses: int,
    ) -> None:
        """Create the processes of a session.

        Args:
            replicas: the ``DistributedDataParallel`` modules.
            roots: the modules that ``fully_shard`` was called on.
            group: the process group; None for all processes.
            device: the session's device.
            accumulate: backward passes in a window.
            num_losses: losses with their own scales.
        """
        self._replicas = [Replica(model) for model in replicas]
        self._roots = roots
        self.sharded = bool(roots)
        self._replicated_shards = any(parts(p) < p.device_mesh.size() for p in _shared(roots))
        self.group, self._size = group, dist.get_world_size(group)
        self._wide = FP64.dtype if has_fp64(device) else FP32.dtype
        self._device, self._accumulate, self._several_scales = device, accumulate, num_losses > 1
        self._unit = 0.0
        self._copies: list[int] = []
        self._first_loss: Tensor | None = None
        self._reduces, self._held_back = True, False

    def explain(self) -> list[Choice]:
        """Return how many processes there are, and when they exchange gradients."""
        if self.sharded:
            reason = "every backward pass averages the shards' gradients; one all-reduce per update for the norm"
        elif self._several_scales:
            reason = "gradients are averaged at the update: losses have scales of their own"
        else:
            reason = "the last backward pass of a window averages the gradients"
        return [Choice(what="processes", value=str(self._size), reason=reason)]

    def reduce_in(self, policy: Policy) -> None:
        """Exchange gradients in the format that ``policy`` names, during backward passes and between them."""
        use_in_hooks([replica.model for replica in self._replicas], policy)
        for replica in self._replicas:
            replica.reduce_in(policy)

    def check_loss(self, loss: Any, *, first: bool) -> None:
        """Refuse a value that is not a loss; when the window closes, all processes learn whether the first loss was finite."""
        super().check_loss(loss, first=False)
        for replica in self._replicas:
            if replica.model._join_config.enable:
                raise _in_join()
        if first:
            self._first_loss = loss.detach()

    def unit(self, weight: float | None) -> float:
        """Return the unit in which weights are counted: the first process's first weight; its broadcast waits for the device once."""
        if weight is not None and not self._unit:
            unit = torch.full((), float(weight), dtype=self._wide, device=self._device)
            dist.broadcast(unit, group=self.group, group_src=0)
            self._unit = unit.item()
        return self._unit

    def expect(self, calls: int) -> None:
        """Let the next backward pass exchange gradients if it completes a full window; so does every one after it."""
        for replica in self._replicas:
            replica.expect(exchange=calls + 1 >= self._accumulate and not self._several_scales)
        if self._replicated_shards:
            # Gradients with different scales must not be summed before they have one scale.
            self._reduces = calls + 1 >= self._accumulate or self._several_scales
            for root in self._roots:
                root.set_requires_all_reduce(self._reduces, recurse=False)

    def ran(self, calls: int) -> None:
        """Record whether the backward pass exchanged gradients, and prepare for the next."""
        for replica in self._replicas:
            replica.ran()
        self._held_back = self._replicated_shards and not self._reduces
        if self._accumulate > 1:  # otherwise every backward pass exchanges
            self.expect(calls)

    def collect(self) -> None:
        """Average the gradients that no backward pass averaged.

        Raises:
            NonFiniteLossError: the very first loss was not finite in some process.
            SessionError: shards of several replicas were not reduced yet, which only a backward pass can do.
        """
        if self._first_loss is not None:
            self._check_first_loss(self._first_loss)
        if self._held_back:
            raise SessionError(
                f"update() before the window's {self._accumulate} backward passes, on a mesh that replicates shards: "
                "fully_shard keeps their sum to itself until the last",
                hint="drop the last, shorter window of an epoch, or shard over a mesh of one dimension",
            )
        for replica in self._replicas:
            if not replica.averaged:
                replica.average()

    def gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return this process's part of the gradients of ``parameters``."""
        gradients = gradients_of(parameters)
        if not self.sharded:
            return gradients
        self._copies = [self._size // parts(g) for g in gradients]
        return [local(g) for g in gradients]

    def norm(
        self, gradients: list[Tensor], norm_of: Callable[[list[Tensor]], Tensor], window: Window | None = None
    ) -> Tensor:
        """Return the norm over all processes, the same in each; replicated gradients count once."""
        if not self.sharded and (window is None or not (window.weighted or window.found_inf)):
            return norm_of(gradients)  # nothing to exchange: averaged gradients are the same everywhere
        numbers: list[Tensor] = []
        if self.sharded:
            squares, dtype = self._squares_here(gradients, norm_of)
            numbers.append(squares)
        else:
            norm = norm_of(gradients)
            dtype = norm.dtype
        losses = [] if window is None else sorted(window.found_inf)
        if window is not None:
            if window.weighted:
                numbers.append(torch.full((), window.sum_of_shares(), dtype=self._wide, device=self._device))
            numbers += [window.found_inf[loss].to(self._wide) for loss in losses]
        sums = self._sums(numbers)
        if self.sharded:
            norm = sums.pop(0).sqrt().to(dtype)
        if window is not None:
            total = (sums.pop(0) / self._size).to(dtype) if window.weighted else None
            window.exchanged(total, {loss: (found > 0).float() for loss, found in zip(losses, sums, strict=True)})
        return norm

    def _squares_here(
        self, gradients: list[Tensor], norm_of: Callable[[list[Tensor]], Tensor]
    ) -> tuple[Tensor, torch.dtype]:
        """Return this process's part of the sum of squares, in FP64 if the device has it, and the format of a norm.

        If ``n`` processes have a gradient, each contributes 1/n of it.
        """
        by_copies: dict[int, list[Tensor]] = {}
        for copies, gradient in zip(self._copies, gradients, strict=True):
            by_copies.setdefault(copies, []).append(gradient)
        norms = {n: norm_of([g for g in alike if g.numel()]) for n, alike in by_copies.items()} or {1: norm_of([])}
        squares = [norm.to(self._wide).square() / copies for copies, norm in norms.items()]
        return torch.stack(squares).sum(), next(iter(norms.values())).dtype

    def _sums(self, numbers: list[Tensor]) -> list[Tensor]:
        if not numbers:
            return []
        sums = torch.stack(numbers)
        dist.all_reduce(sums, group=self.group)
        return list(sums)

    def all_finite(self, gradients: list[Tensor]) -> bool:
        """Return whether the gradients that ``gradients()`` returned are finite in every process; waits for the device."""
        here = all_finite(gradients)
        return self._everywhere(here) if self.sharded else here

    def _everywhere(self, here: bool) -> bool:
        count = torch.tensor(float(here), device=self._device)
        dist.all_reduce(count, group=self.group)
        return count.item() == self._size

    def _check_first_loss(self, first: Tensor) -> None:
        loss, self._first_loss = first.item(), None
        if not self._everywhere(math.isfinite(loss)):
            elsewhere = " here and not finite in another process" if math.isfinite(loss) else ""
            raise session_errors.first_loss_not_finite(f"{loss}{elsewhere}")


def _in_join() -> SessionError:
    return SessionError(
        "a session in join(), where a process without batches makes no updates and takes no part in a session's exchanges; "
        "allowed: the same number of backward passes in every process",
        hint="give each process the same number of batches (DistributedSampler, drop_last=True) and leave join() out",
    )


def processes_for(
    models: Sequence[nn.Module],
    trained: Sequence[nn.Parameter],
    policy: Policy,
    *,
    accumulate: int,
    num_losses: int,
) -> OneProcess:
    """Return the processes that train the models: several for ``DistributedDataParallel`` or ``fully_shard``.

    Args:
        models: the session's models.
        trained: the parameters of models and optimizers.
        policy: the session's policy.
        accumulate: backward passes in a window.
        num_losses: losses with their own scales.

    Raises:
        SessionError: parameters would drift apart, or the policy cannot be applied to shards.
        PolicyError: the policy emulates processes or sums of one process, and there are several; or sums of shards.
    """
    alone: OneProcess = Emulated(trained, policy) if policy.changes_gradients else OneProcess()
    if not (dist.is_available() and dist.is_initialized()):
        return alone
    modules = list(dict.fromkeys(m for model in models for m in model.modules()))
    replicas = [m for m in modules if isinstance(m, DistributedDataParallel)]
    roots = [m for m in modules if hasattr(m, "set_requires_all_reduce")]
    if not replicas and not roots:
        return alone
    if roots:
        refuse_sums_of_shards(policy)
    if policy.changes_gradients and dist.get_world_size() == 1:
        refuse_other_formats(roots, policy, reduces=False)
        return alone
    _refuse_unshared(replicas, trained)
    refuse_world(policy)
    refuse_other_formats(roots, policy)
    if roots and policy.casting == "model":
        raise SessionError(
            f"policy {policy!s} casts weights, and fully_shard's are shards of FP32 weights",
            hint=f"use policy {policy.compute}: with mp_policy=MixedPrecisionPolicy(param_dtype={policy.storage.dtype}) "
            "the shards are the FP32 masters of 16-bit weights",
        )
    return Processes(
        replicas,
        roots,
        group=_group(replicas, _shared(roots)),
        device=trained[0].device,
        accumulate=accumulate,
        num_losses=num_losses,
    )


def _shared(roots: Iterable[nn.Module]) -> list[Any]:
    return list(dict.fromkeys(p for root in roots for p in root.parameters() if is_shared(p)))


def _refuse_unshared(replicas: list[DistributedDataParallel], trained: Iterable[nn.Parameter]) -> None:
    kept = {p for m in replicas for n, p in m.module.named_parameters() if n not in m.parameters_to_ignore}
    for parameter in trained:
        if parameter.requires_grad and parameter not in kept and not is_shared(parameter):
            raise SessionError(
                f"a parameter of shape {tuple(parameter.shape)} belongs to this process alone, while several share others: "
                "each process would train its own copy",
                hint="wrap the whole model, call fully_shard on the outermost module too, and build optimizers after that",
            )


def _group(replicas: Iterable[DistributedDataParallel], shared: Iterable[Any]) -> Any:
    """Return the group of processes that train together: the largest group of any part; None for all processes."""
    groups = {dist.get_world_size(m.process_group): m.process_group for m in replicas}
    meshes = {p.device_mesh.size(): p.device_mesh for p in shared}
    largest = max([*groups, *meshes])
    if largest == dist.get_world_size():
        return None
    if largest in groups:
        return groups[largest]
    mesh = meshes[largest]
    if mesh.ndim > 1:
        raise SessionError(
            f"the model is sharded over {largest} of {dist.get_world_size()} processes on a mesh of {mesh.ndim} dimensions; "
            "allowed: all processes, or a mesh of one dimension",
            hint="build the mesh over all processes, or with one dimension",
        )
    return mesh.get_group()


_CHUNK = 2**14
"""Elements that are summed at a time: they stay in a core's cache during the N passes."""
_TABLE = 16 * _CHUNK
"""Number of random numbers; each process reads them from another position."""


class EmulatedWorld:
    """Emulated processes, and the rounding of their reductions.

    Summing N shares in a format rounds every share and every partial sum. In BF16, with its 8 significant bits, a sum of hundreds
    of shares loses accuracy with the square root of N in a ring, and more slowly in a tree. That sum is actually computed: N
    shares are rounded, and added one after the other in the format's own arithmetic. The script's gradients then differ from the
    exact ones only by the rounding of that reduction.

    One process knows the average of the processes' gradients, but not the share of each. The shares are drawn at random, element
    by element: their mean is the gradient ``g`` itself, and their standard deviation ``sqrt(N) * abs(g)``. So noise and signal
    are equal in the average, as in a batch of the critical size over all processes, beyond which a larger batch no longer pays
    (McCandlish et al., arXiv:1812.06162). The draws are normal, in pairs of opposite sign in random order, so that their sum is
    zero; a gradient of zero stays zero.

    Limits: shares that hardly differ, from batches far beyond the critical size, are worse: a ring in BF16 adds up about 256
    equal shares, and each further one is less than half a unit of the sum and vanishes. A ring and a tree of pairs are the two
    extremes of communication libraries; those that add in FP32 inside the network or a node round less. The emulation takes N
    passes over the gradients, so its time says nothing about a real reduction.

    The draws depend only on the gradients' values: a resumed run repeats an uninterrupted run's, and the script's random
    numbers do not change.
    """

    def __init__(self, policy: Policy, loss_scale: ReadScale = no_scale) -> None:
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
        self._loss_scale: ReadScale = loss_scale if fmt is FP16 else no_scale
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
