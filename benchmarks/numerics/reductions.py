"""How much does an emulated reduction over many processes change the gradients?"""

from __future__ import annotations

import torch

from mezzo.engine.processes.distributed import EmulatedWorld
from mezzo.policy import Policy

SIZES = (8, 64, 384, 4096)


def error(reduce: str, order: str, size: int) -> float:
    """Return the error of one reduction, a share of the gradients' norm."""
    world = EmulatedWorld(Policy.parse(f"fp32:reduce={reduce}:world={size}:reduce_order={order}"))
    world.reduce([torch.randn(2**14, generator=torch.Generator().manual_seed(0))])
    found = world.error()
    assert found is not None
    return found


def main() -> None:
    print("| processes |", " | ".join(map(str, SIZES)), "|")
    for reduce in ("bf16", "fp16"):
        for order in ("ring", "tree"):
            errors = (f"{error(reduce, order, size):.2%}" for size in SIZES)
            print(f"| `{reduce}`, {order} |", " | ".join(errors), "|")
