"""Average gradients over processes in the format that the policy names (``reduce=``).

A bucket of gradients goes through::

    FP32, BF16    divide by N, round to the format, sum                           as DistributedDataParallel: BF16 has FP32's range
    FP16          divide by about sqrt(N), round, sum, divide by the rest         as fully_shard: N times a value would overflow,
                                                                                  and an Nth of a small one would become 0

Gradients are divided in FP32 before rounding, so each is rounded once before it is sent; torch's compression hooks round first and
then divide, which rounds twice unless N is a power of two. ``about sqrt(N)`` is a power of two, so dividing by it is exact.

Gradients that were already unscaled are multiplied by the loss scale again for FP16, or small ones would be lost; the sum is
divided by it. A sum that leaves FP16's range is infinite in every process, so that all skip the same update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mezzo.errors import PolicyError, SessionError
from mezzo.formats import FORMATS, FP16, FP32, Format
from mezzo.policy import Policy

ReadScale = Callable[[], Tensor | None]
"""Returns the loss scale by which the gradients were divided; None for 1."""


def no_scale() -> Tensor | None:
    """Return None: the gradients still have their scale, or had none."""
    return None


def divisors(fmt: Format, size: int) -> tuple[float, float]:
    """Return the divisors of gradients of ``size`` processes, before and after they are summed in ``fmt``."""
    if fmt is not FP16:
        return float(size), 1.0
    before = 2.0 ** math.ceil(math.log2(size) / 2)
    return before, size / before


def format_of_reduction(policy: Policy) -> Format | None:
    """Return the format that ``policy`` reduces in; None for the gradients' own."""
    return None if policy.reduce == "auto" else FORMATS[policy.reduce]


class Exchange:
    """The average over a group of processes, in one format."""

    def __init__(self, fmt: Format, group: Any = None, loss_scale: ReadScale = no_scale) -> None:
        """Prepare to average.

        Args:
            fmt: the format in which gradients are sent and summed.
            group: the processes; None for all.
            loss_scale: returns the factor of gradients while they are in FP16.
        """
        self.format, self._group = fmt, group
        self._loss_scale: ReadScale = loss_scale if fmt is FP16 else no_scale

    def begin(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Begin to average ``buffer`` in place; the result of the future is ``buffer``."""
        before, after = divisors(self.format, dist.get_world_size(self._group))
        wide, scale = as_wide(buffer), self._loss_scale()
        sent = (wide / before if scale is None else wide * (scale.to(wide.device) / before)).to(self.format.dtype)

        def finish(done: Any) -> Tensor:
            total = done.value()[0].to(wide.dtype)
            return buffer.copy_(averaged(total, after, scale))

        return dist.all_reduce(sent, group=self._group, async_op=True).get_future().then(finish)  # type: ignore[no-any-return]


def as_wide(gradient: Tensor) -> Tensor:
    """Return a gradient in FP32 if it has 16 bits, else as it is."""
    return gradient.to(FP32.dtype) if gradient.element_size() < FP32.bytes else gradient


def averaged(total: Tensor, after: float, scale: Tensor | None) -> Tensor:
    """Return the average from the sum ``total``: divided by the rest of N and by the loss scale.

    Without the scale an overflow is NaN instead of infinite: it must survive a script's clamp of its gradients.
    """
    if scale is None:
        return total if after == 1.0 else total / after
    return (total / (scale.to(total.device) * after)).add_(total, alpha=0)


def exchange_in_hook(state: Any, bucket: Any) -> Any:
    """Average a bucket of ``DistributedDataParallel``; ``state`` is an ``Exchange``."""
    return state.begin(bucket.buffer())


exchange_in_hook.__annotations__.clear()  # torch compares them with classes, and they are strings here


def use_in_hooks(models: Iterable[DistributedDataParallel], policy: Policy) -> None:
    """Let ``DistributedDataParallel`` modules reduce in the policy's format during their backward passes.

    Raises:
        SessionError: a module has a communication hook of its own.
    """
    for model in models:
        if model._comm_hooks:
            raise SessionError(
                f"policy {policy!s} reduces in {policy.reduce}, and DistributedDataParallel has a communication hook of its own, which "
                "decides the format",
                hint="leave reduce out of the policy, or the hook out of the script",
            )
        set_hook(model, policy)


def refuse_world(policy: Policy) -> None:
    """Refuse to emulate processes among several real ones, or the sums of one process.

    Raises:
        PolicyError: the policy emulates one of them.
    """
    if policy.world == 1 and policy.changes_gradients:
        raise PolicyError(
            f"policy {policy!s} emulates sums of gradients in one process, and {dist.get_world_size()} train; allowed: one process",
            hint="try this policy in one process, and leave gradients out with several",
        )
    if policy.world > 1:
        raise PolicyError(
            f"policy {policy!s} emulates {policy.world} processes, and {dist.get_world_size()} real ones train; allowed: one process",
            hint="leave world out: real processes reduce in the format themselves",
        )


def refuse_sums_of_shards(policy: Policy) -> None:
    """Refuse to emulate the sums of gradients that ``fully_shard`` may keep to itself between backward passes.

    Raises:
        PolicyError: the policy emulates them.
    """
    if policy.gradients != "auto" and policy.changes_gradients:
        raise PolicyError(
            f"policy {policy!s} rounds the sums of gradients after every backward pass, and fully_shard can keep them to itself; "
            "allowed: gradients=auto",
            hint="leave gradients out, or try the policy on the model without fully_shard",
        )


def refuse_other_formats(roots: Iterable[Any], policy: Policy, *, reduces: bool = True) -> None:
    """Refuse a model that ``fully_shard`` exchanges in other formats than the policy's.

    Args:
        roots: the modules that ``fully_shard`` was called on.
        policy: the session's.
        reduces: whether ``fully_shard`` reduces the gradients; an emulated world reduces them in the policy's format.

    Raises:
        SessionError: the formats differ.
    """
    for root in roots:
        mp_policy = root._get_fsdp_state()._mp_policy
        gathered = mp_policy.param_dtype or FP32.dtype
        formats = {"gather": gathered, "reduce": mp_policy.reduce_dtype or gathered}
        for field, argument in (("gather", "param_dtype"), ("reduce", "reduce_dtype")):
            requested = getattr(policy, field) if reduces or field == "gather" else "auto"
            if requested != "auto" and formats[field] is not FORMATS[requested].dtype:
                raise SessionError(
                    f"policy {policy!s} says {field}={requested}, and fully_shard was called with {argument}={formats[field]}",
                    hint=f"pass mp_policy=MixedPrecisionPolicy({argument}={FORMATS[requested].dtype}) to fully_shard, or leave {field} out",
                )


def set_hook(model: DistributedDataParallel, policy: Policy, loss_scale: ReadScale = no_scale) -> None:
    """Register the communication hook that reduces in the policy's format, if it names one."""
    fmt = format_of_reduction(policy)
    if fmt is not None:
        group = None if model.process_group is dist.group.WORLD else model.process_group
        model.register_comm_hook(Exchange(fmt, group, loss_scale), exchange_in_hook)
