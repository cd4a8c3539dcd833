"""Time each operation of one step on the host, with the operations and bytes that its operands imply.

The clock is the CPU time of the thread: on a busy machine, time in which another process had the core does not count. On a GPU
an operation's time is that of its launch, so only the counts of operations and bytes are meaningful there.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mezzo.measure.flops import COUNTS, num_real_products
from mezzo.measure.watch.verdict import OperationWork


class OperationTimes(TorchDispatchMode):
    """A dispatch mode that times every operation; entered before other modes, so that it does not time them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[OperationWork] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation and time it."""
        began_s = time.thread_time()
        result = func(*args, **(kwargs or {}))
        cpu_s = time.thread_time() - began_s
        count = COUNTS.get(func.overloadpacket)
        flops = 0 if count is None else count(result, *args) * num_real_products(args)
        moved = 0 if func.is_view else _bytes((args, kwargs, result))
        self.operations.append(OperationWork(flops=flops, bytes=moved, cpu_s=cpu_s))
        return result

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allow torch.compile under this mode."""
        return True


def _bytes(values: Any) -> int:
    found = {id(leaf): leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}
    return sum(t.numel() * t.element_size() for t in found.values() if t.layout is torch.strided)
