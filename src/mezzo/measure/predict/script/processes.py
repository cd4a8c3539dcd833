"""Trace a script that shares its training among GPUs as one of its processes, the one of rank 0.

Collective operations return immediately. A model that ``DistributedDataParallel`` wraps keeps its buckets of gradients.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.nn import parallel

from mezzo.measure.predict.script.tapes import ONLY_PROCESS


@contextmanager
def first_process_alone(*, launched: bool) -> Iterator[None]:
    """Let the block run as the first process of its job, without the others.

    Args:
        launched: whether to set the variables that a launcher sets for the only process of a job.
    """
    with ExitStack() as stack:
        for home, name, substitute in (
            *(
                [(dist, "init_process_group", _with_fake_backend(dist.init_process_group))]
                if dist.is_available()
                else ()
            ),
            (processes, "spawn", _called_here),
            (parallel, "DistributedDataParallel", _WithBuckets),
            (parallel.distributed, "DistributedDataParallel", _WithBuckets),
            (parallel.DataParallel, "forward", _on_one_gpu),
            (parallel, "data_parallel", _data_parallel),
        ):
            stack.enter_context(patch.object(home, name, substitute))
        if launched:
            stack.enter_context(patch.dict(os.environ, ONLY_PROCESS))
        try:
            yield
        finally:
            if dist.is_available() and dist.is_initialized():
                dist.destroy_process_group()


def _with_fake_backend(original: Callable[..., None]) -> Callable[..., None]:
    """Return ``init_process_group`` with torch's backend whose collective operations do nothing."""

    def init(
        backend: object = None,
        init_method: object = None,
        timeout: object = None,
        world_size: int = -1,
        rank: int = -1,
        *_: object,
        **__: object,
    ) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", 1))
        original("fake", rank=max(0, rank), world_size=size, store=FakeStore())

    return init


def _called_here(fn: Callable[..., Any], args: tuple[Any, ...] = (), *_: object, **__: object) -> None:
    """Call what ``torch.multiprocessing.spawn`` would call in its first process: another would have no trace."""
    fn(0, *args)


def _on_one_gpu(model: Any, *inputs: Any, **kwargs: Any) -> Any:
    return model.module(*inputs, **kwargs)


def _data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: object = None,
    output_device: object = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    return module(*(inputs if isinstance(inputs, tuple) else (inputs,)), **(module_kwargs or {}))


class _WithBuckets(parallel.DistributedDataParallel):
    """A model with the buckets that store its gradients a second time, unless gradients are views of buckets."""

    def __init__(self, module: nn.Module, *_: object, gradient_as_bucket_view: bool = False, **__: object) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.require_backward_grad_sync = True
        trained = [p for p in module.parameters() if p.requires_grad]
        for number, dtype in enumerate(() if gradient_as_bucket_view else dict.fromkeys(p.dtype for p in trained)):
            size = sum(p.numel() for p in trained if p.dtype is dtype)
            self.register_buffer(f"_bucket{number}", torch.empty(size, dtype=dtype), persistent=False)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: the exchange of gradients takes no time."""
        yield

    def join(self, *_: object, **__: object) -> Any:
        """Do nothing: there are no other processes."""
        return self.no_sync()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Do nothing: nothing is exchanged."""
