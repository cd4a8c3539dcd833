"""``DistributedDataParallel`` in a session: choose the backward pass that averages, and average outside backward passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mezzo.engine.processes.exchange import Exchange, format_of_reduction
from mezzo.errors import SessionError
from mezzo.formats import Format
from mezzo.policy import Policy

BUCKET_BYTES = 64 * 2**20
"""Size of the buffers in which gradients are averaged outside a backward pass."""


class Replica:
    """A ``DistributedDataParallel`` module, and whether its last backward pass averaged the gradients.

    A backward pass averages only once after each forward pass with ``require_backward_grad_sync``; a second backward pass from the same
    forward pass adds this process's own gradients. Averaging averaged gradients again changes nothing.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model = model
        self.format: Format | None = None
        """The format in which gradients are reduced; None for their own."""
        self.averaged = False
        self._forward = _ForwardPasses()
        self._learns_graph: bool = model.static_graph
        model.register_forward_pre_hook(self._forward)

    def reduce_in(self, policy: Policy) -> None:
        """Reduce gradients in the format that ``policy`` names."""
        self.format = format_of_reduction(policy)

    def expect(self, *, exchange: bool) -> None:
        """Set whether the next backward pass averages the gradients."""
        # A static graph is recorded in the very first backward pass, and only if that averages.
        exchange = exchange or self._learns_graph
        if self.model.require_backward_grad_sync is not exchange:  # setting it takes nine Python calls
            self.model.require_backward_grad_sync = exchange

    def ran(self) -> None:
        """Register a backward pass."""
        self.averaged, self._forward.will_average = self._forward.will_average, False
        self._learns_graph &= not self.averaged

    def average(self) -> None:
        """Average the gradients over the processes, as a backward pass would."""
        model, group = self.model, self.model.process_group
        parameters = [p for n, p in model.module.named_parameters() if n not in model.parameters_to_ignore]
        parameters = [p for p in parameters if p.requires_grad]
        if model.find_unused_parameters:
            _fill_used_elsewhere(parameters, group)
        for bucket in buckets([p.grad for p in parameters if p.grad is not None]):
            flat = torch.cat([g.reshape(-1) for g in bucket])
            if self.format is None:
                dist.all_reduce(flat.div_(dist.get_world_size(group)), group=group)
            else:
                Exchange(self.format, group).begin(flat).wait()
            pieces = flat.split([g.numel() for g in bucket])
            torch._foreach_copy_(bucket, [x.view(g.shape) for x, g in zip(pieces, bucket, strict=True)])
        model.require_forward_param_sync = True  # the next forward pass broadcasts buffers, as after any exchange
        self.averaged = True


class _ForwardPasses:
    """A hook that records whether a forward pass made the model ready to average; a class, so that the model still copies and pickles."""

    def __init__(self) -> None:
        self.will_average = False

    def __call__(self, model: DistributedDataParallel, inputs: Any) -> None:
        self.will_average |= model.require_backward_grad_sync and torch.is_grad_enabled()


def _fill_used_elsewhere(parameters: list[nn.Parameter], group: Any) -> None:
    """Set the gradients of parameters that have one only in another process to zeros; waits for the device."""
    used = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
    dist.all_reduce(used, group=group)
    for parameter, count in zip(parameters, used.tolist(), strict=True):
        if count and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield gradients in groups of one format and device, each group no larger than a bucket, or a single larger gradient."""
    for kind in dict.fromkeys((g.dtype, g.device) for g in gradients):
        bucket: list[Tensor] = []
        size = 0
        for gradient in (g for g in gradients if (g.dtype, g.device) == kind):
            if bucket and size + gradient.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(gradient)
            size += gradient.nbytes
        yield bucket


def bare(model: nn.Module) -> nn.Module:
    """Return the module inside ``DistributedDataParallel``, any other as it is; its names are those in a single process."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def rebuild(models: Iterable[nn.Module]) -> None:
    """Rebuild the buckets of ``DistributedDataParallel`` in the formats that parameters were cast to.

    Raises:
        SessionError: one has a process group or a communication hook, so it cannot be rebuilt.
    """
    for model in (m for outer in models for m in outer.modules() if isinstance(m, DistributedDataParallel)):
        if model.process_group is not dist.group.WORLD or model._comm_hooks:
            raise SessionError(
                "the policy casts weights, and DistributedDataParallel with a process_group or a communication hook "
                "cannot be rebuilt for the cast weights",
                hint="register the hook after the session is built, leave process_group out, or use policy fp16 or bf16",
            )
        # New buckets and hooks in place, by the code of torch's deep copy, which keeps options such as static_graph.
        model.__setstate__(model.__getstate__())
