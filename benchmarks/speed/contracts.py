"""What does ``mezzo audit --expect`` cost a step after the first updates?

Each loop trains a small transformer in a process of its own, as a script would; their blocks run alternately. Before the first block come
as many updates as the lint of the script's own mixed precision inspects, so that every loop is in its steady state. The loop that only
records the steps (``mezzo run --policy as-is``) shows what of the cost is the contract's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from benchmarks.shared.harness import report
from benchmarks.shared.loops import plain_step
from benchmarks.shared.models import small_transformer
from benchmarks.shared.processes import build, ratio
from mezzo.launch.torch import switched
from mezzo.observe.contracts.contract import Contract
from mezzo.observe.settings import AuditSettings

FIRST, STEPS, BLOCKS, BUILDS = 110, 10, 8, 6
TARGET = "1.02 or less"


@contextmanager
def _loop(kind: str) -> Iterator[Callable[[], None]]:
    settings = AuditSettings(steps=(3,), contract=Contract()) if kind == "contract" else None
    with nullcontext() if kind == "plain" else switched(None, observe=settings):
        model, loss_of = small_transformer()
        step = plain_step(model, loss_of, torch.optim.AdamW(model.parameters(), lr=1e-4))

        def steps(number: int) -> None:
            for _ in range(number):
                step()

        steps(FIRST)
        yield partial(steps, STEPS)


def main() -> None:
    kinds = {kind: partial(_loop, kind) for kind in ("plain", "run", "contract")}
    builds = [build(kinds, blocks=BLOCKS) for _ in range(BUILDS)]
    found = {kind: ratio(builds, kind, "plain") for kind in ("run", "contract")}
    rows = [
        ("a step with a contract, after the first updates, against a plain step", _text(found["contract"]), TARGET),
        ("the same under mezzo run --policy as-is", _text(found["run"]), ""),
    ]
    report("contracts", rows, {"ratio_of_thread_time": found, "steps_before": FIRST, "steps_of_a_block": STEPS})


def _text(one: dict[str, Any]) -> str:
    low, high = one["interval"]
    return f"{one['ratio']:.3f}x ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
