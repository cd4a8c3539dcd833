"""Refuse ``join()``, torch's context for uneven data, where the processes of a run have to act at the same update.

Inside ``join()`` a process that has run out of batches takes part only in the model's reductions, and makes no updates. It would take no
part in the exchanges of ``--snapshot`` and ``--guard``, and all others would wait for it until the group's time-out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mezzo.errors import ScriptError
from mezzo.launch.patches import Patches


def refuse_join(option: str, patches: Patches) -> None:
    """Raise where the script enters ``join()`` in several processes, until ``patches`` are undone.

    ``option`` is the command-line option that cannot be used with it.
    """
    if not dist.is_available():
        return
    from torch.distributed.algorithms.join import Join

    patches.around(Join, "__enter__", functools.partial(_enter, option))


def _enter(option: str, original: Callable[..., Any], self: Any) -> Any:
    if self._enable and dist.get_world_size(self._process_group) > 1:
        raise ScriptError(
            f"{option} in several processes, and the script trains under join(), where they make different numbers of updates; "
            "allowed: the same number in each",
            hint=f"leave {option} out, or give each process as many batches (DistributedSampler, drop_last=True) and leave join() out",
        )
    return original(self)
