"""Which processes train a parameter: each a shard of it (``DTensor``), or each a replica (``DistributedDataParallel``).

``fully_shard`` turns parameters and gradients into such tensors. They are recognised by their ``to_local`` method, so that
torch's distributed tensors are imported only if a script uses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mezzo.devices import has_fp64
from mezzo.engine.processes.exchange import Exchange, format_of_reduction
from mezzo.errors import SessionError
from mezzo.formats import FP32, FP64, Format
from mezzo.policy import Policy

_WHOLE = (Tensor, nn.Parameter)


def is_shared(tensor: Tensor) -> bool:
    """Return whether several processes share ``tensor``."""
    return type(tensor) not in _WHOLE and hasattr(tensor, "to_local")


def local(tensor: Any) -> Tensor:
    """Return this process's part of ``tensor``, in the same memory; a plain tensor itself."""
    if type(tensor) in _WHOLE or not is_shared(tensor):  # called for every tensor of every update
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[no-any-return]


def shared_as(parameter: Any, part: Tensor) -> Tensor:
    """Return ``part``, this process's part of a tensor of the parameter's shape, as a tensor that is sharded like ``parameter``.

    It stays on its device, which may be the host.
    """
    if not is_shared(parameter):
        return part
    if part.device.type != parameter.device.type:  # from_local would move it to the device of the parameter's mesh
        whole = torch.empty_like(parameter.detach(), dtype=part.dtype, device=part.device)
        local(whole).copy_(part)
        return whole
    return type(parameter).from_local(  # type: ignore[no-any-return]
        part, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def whole_of(parameter: Any, part: Tensor) -> Tensor:
    """Return a whole tensor that is sharded like ``parameter``, from every process's part; all of them must call it."""
    return shared_as(parameter, part).full_tensor()  # type: ignore[attr-defined, no-any-return]


def part_of(parameter: Any, whole: Tensor) -> Tensor:
    """Return this process's part of a tensor that all processes have whole, cut like ``parameter``; nothing is exchanged."""
    from torch.distributed.tensor import Replicate

    mesh = parameter.device_mesh
    replica = type(parameter).from_local(whole, mesh, [Replicate()] * mesh.ndim)
    return replica.redistribute(placements=parameter.placements).to_local()  # type: ignore[no-any-return]


def norm_of_all(gradients: Sequence[Any], norm_of: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """Return the norm of gradients over all processes that share them, the same in each.

    It takes one all-reduce of one number for each way in which gradients are sharded, among the processes that exchange the shards.

    Args:
        gradients: some, or all, sharded; plain ones count as they are in this process.
        norm_of: returns the norm of a list of plain tensors.
    """
    alike: dict[Any, list[Any]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.device_mesh, gradient.placements) if is_shared(gradient) else None, []).append(
            gradient
        )
    squares = []
    for key, some in alike.items():
        here = [part for part in map(local, some) if part.numel()]
        wide = FP64.dtype if has_fp64(local(some[0]).device) else FP32.dtype
        square = norm_of(here).to(wide).square() if here else torch.zeros((), dtype=wide, device=local(some[0]).device)
        mesh: Any
        mesh, placements = (None, ()) if key is None else key
        for dim, place in enumerate(placements):
            if not place.is_replicate():
                dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    return torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt().float()


def parts(tensor: Any) -> int:
    """Return the number of processes over which one copy of ``tensor`` is spread; 1 for a plain tensor."""
    if not is_shared(tensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(mesh.size(i) for i, place in enumerate(tensor.placements) if not place.is_replicate())


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
