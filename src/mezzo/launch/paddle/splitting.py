"""Refuse models that Paddle splits over processes where each would decide by its own part whether to skip an update.

With ``paddle.DataParallel`` an overflow in one process reaches the gradients of all. A process of a split model sees only the
gradients of its part, so another could make the update that it skips.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import paddle.distributed as dist

from mezzo.errors import ScriptError
from mezzo.launch.patches import Patches

_SPLITS = (
    (dist, ("shard_tensor", "shard_layer", "shard_optimizer", "parallelize")),
    (dist.sharding, ("group_sharded_parallel",)),
    (dist.fleet, ("distributed_model", "distributed_optimizer")),
)
"""Paddle's functions that split models or optimizers; those of fleet do so if its strategy has degrees above 1."""


def refuse_split_models(patches: Patches) -> None:
    """Refuse calls that split a model until ``patches`` are undone; only for policies with a loss scale."""
    for module, names in _SPLITS:
        for name in names:
            patches.around(module, name, _fleet(name) if module is dist.fleet else _refusal(name))


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(original: Callable[..., Any], *args: Any, **kwargs: Any) -> NoReturn:
        raise ScriptError(
            f"paddle.distributed's {name} splits the model under a policy with a loss scale; allowed: paddle.DataParallel",
            hint="use a policy without a loss scale, such as bf16, or leave the script to its own scaler with --policy as-is",
        )

    return refuse


def _fleet(name: str) -> Callable[..., Any]:
    refuse = _refusal(f"fleet.{name}")

    def check(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        groups = dist.fleet.get_hybrid_communicate_group()
        sizes = () if groups is None else (
            groups.get_model_parallel_world_size(),
            groups.get_pipe_parallel_world_size(),
            groups.get_sharding_parallel_world_size(),
            groups.get_sep_parallel_world_size(),
        )  # fmt: skip
        return refuse(original) if any(size > 1 for size in sizes) else original(*args, **kwargs)

    return check
