"""Reductions of real processes for tests/engine/processes/test_exchange.py: ``python exchange_runs.py RANK FOLDER`` is one of three.

In each scene the gradient of a process is known, because the loss is the product of a weight of zeros and a vector: see ``gradient``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mezzo import MezzoError, Session
from mezzo.launch.torch import switched
from mezzo.policy import Policy
from processes import leave_process_group

WORLD, WIDTH = 3, 4096


def gradient(rank: int, size: float) -> Tensor:
    """Return the gradient of a process before any scale; its largest elements are some 4 times ``size``."""
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(rank)) * size


class Product(nn.Module):
    """The product of a weight and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, vector: Tensor) -> Tensor:
        return (self.weight * vector).sum()


def by_session(policy: str, rank: int, *, size: float = 1.0, accumulate: int = 1, make: Any = None) -> Any:
    """Return the average that a session's update subtracts, and what it skipped."""
    model = (make or DistributedDataParallel)(Product())
    session = Session(model, torch.optim.SGD(model.parameters(), lr=1.0), policy=policy, accumulate=accumulate)
    with session.autocast():
        loss = model(gradient(rank, size))
    session.backward(loss)
    session.update()
    weight: Any = next(model.parameters()).detach()
    return -(weight.full_tensor() if hasattr(weight, "full_tensor") else weight).float(), session.skipped


def by_script(policy: str, rank: int, *, size: float = 1.0, make: Any = None, hook: bool = False) -> Any:
    """Return the gradient that a script sees under ``mezzo run``, what was skipped and what was left alone."""
    with switched(Policy.parse(policy)) as (run, _):
        model = (make or DistributedDataParallel)(Product())
        if hook:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

            model.register_comm_hook(None, allreduce_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model(gradient(rank, size)).backward()
        found: Any = next(model.parameters()).grad
        found = (found.full_tensor() if hasattr(found, "full_tensor") else found).clone()
        optimizer.step()
        return found, run.update.skips, [f"{r.what} {r.value}: {r.reason}" for r in run.notes.left_alone.values()]


def sharded(model: nn.Module, **formats: Any) -> nn.Module:
    """Return a model of ``fully_shard``, called by the name that a script imports."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    return fully_shard(model, **({"mp_policy": MixedPrecisionPolicy(**formats)} if formats else {}))


def with_hook(model: nn.Module) -> nn.Module:
    """Return a model of ``DistributedDataParallel`` with a communication hook of its own."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, allreduce_hook)
    return wrapped


def old_sharding(model: nn.Module) -> nn.Module:
    """Return a model of the older ``FullyShardedDataParallel``."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


BF16_SHARDS = functools.partial(sharded, reduce_dtype=torch.bfloat16)
SCENES: dict[str, Callable[[int], Any]] = {
    "session fp32": lambda rank: by_session("fp32:reduce=fp32", rank),
    "session bf16": lambda rank: by_session("fp32:reduce=bf16", rank),
    "session fp16": lambda rank: by_session("fp32:reduce=fp16", rank),
    "session fp16, small": lambda rank: by_session("fp16:reduce=fp16:init_scale=65536", rank, size=2.0**-28),
    "session fp16, overflow": lambda rank: by_session("fp16:reduce=fp16", rank, size=2.0 if rank == 1 else 1e-6),
    "session short window": lambda rank: by_session("fp32:reduce=bf16", rank, accumulate=2),
    "session shards": lambda rank: by_session("fp32:reduce=bf16", rank, make=BF16_SHARDS),
    "script fp32": lambda rank: by_script("fp32:reduce=fp32", rank),
    "script bf16": lambda rank: by_script("bf16:reduce=bf16", rank),
    "script fp16": lambda rank: by_script("fp32:reduce=fp16", rank),
    "script fp16, small": lambda rank: by_script("fp16:reduce=fp16:init_scale=65536", rank, size=2.0**-28),
    "script fp16, overflow": lambda rank: by_script("fp16:reduce=fp16", rank, size=2.0 if rank == 1 else 1e-6),
    "script shards": lambda rank: by_script("fp32:reduce=bf16", rank, make=sharded),
    "script's own hook": lambda rank: by_script("fp32:reduce=bf16", rank, hook=True),
    "refused: a session's world": lambda rank: by_session("fp32:reduce=bf16:world=8", rank),
    "refused: a script's world": lambda rank: by_script("fp32:reduce=bf16:world=8", rank),
    "refused: a session's sums": lambda rank: by_session("fp32:gradients=bf16", rank),
    "refused: a script's sums": lambda rank: by_script("fp32:gradients=bf16", rank),
    "refused: a hook of its own": lambda rank: by_session("fp32:reduce=bf16", rank, make=with_hook),
    "refused: other shards": lambda rank: by_session("bf16:reduce=bf16", rank, make=sharded),
    "refused: other gathering": lambda rank: by_session("bf16:gather=bf16", rank, make=sharded),
    "refused: shards in FP16": lambda rank: by_script("fp16:reduce=fp16", rank, make=sharded),
    "refused: old shards": lambda rank: by_script("fp32:reduce=bf16", rank, make=old_sharding),
}


def main(rank: int, folder: Path) -> None:
    """Play every scene and leave what was found."""
    torch.set_num_threads(1)
    address = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
    for name, scene in SCENES.items():
        try:
            found[name] = scene(rank)
        except MezzoError as error:
            found[name] = str(error)
        except Exception:
            found[name] = traceback.format_exc()
    torch.save(found, folder / f"{rank}.pt")
    with contextlib.suppress(RuntimeError):
        leave_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
