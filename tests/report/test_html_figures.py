"""Charts of whatever a script may compute: no value makes a page fail, warn or grow."""

from __future__ import annotations

import math
import random

import pytest

import record_builders as build
from mezzo.records import CompareRecord, Difference, Loss, Memory, RunRecord, Steps
from mezzo.report.html import render_html

ODD = [
    math.nan,
    math.inf,
    -math.inf,
    0.0,
    -0.0,
    1e308,
    -1e308,
    5e-324,
    -5e-324,
    1e-30,
    1.0,
    -1.0,
    0.5,
    2.0**1000,
    65536.0,
]


def values(dice: random.Random, count: int) -> list[float]:
    pool = dice.sample(ODD, dice.randint(1, 4))
    return [dice.choice(pool) for _ in range(count)]


def odd_run(dice: random.Random, policy: str, seed: int) -> RunRecord:
    count = dice.choice([0, 1, 2, 7, 900])
    several = dice.random() < 0.3
    losses = [Loss(name=f"net{n}", steps=list(range(1, count + 1)), values=values(dice, count)) for n in range(2)]
    steps = Steps(
        loss=values(dice, count),
        losses=losses if several else [],
        loss_scale=values(dice, count) if dice.random() < 0.7 else [],
        skipped=[dice.random() < 0.3 for _ in range(count)],
        grad_norm=values(dice, count),
        time_ms=values(dice, count),
    )
    sizes = [dice.choice([None, 0, 1, 2**62]) for _ in range(5)]
    memory = Memory(
        parameters_bytes=sizes[0],
        gradients_bytes=sizes[1],
        optimizer_bytes=sizes[2],
        activations_bytes=sizes[3],
        cuda_allocated_bytes=sizes[4],
    )
    return build.run_record(policy, seed=seed, steps=steps, memory=memory)


def odd_difference(dice: random.Random) -> Difference:
    value, baseline, difference, low, high, margin = values(dice, 6)
    scale = dice.choice(["absolute", "ratio", "proportion"])
    return Difference(
        value=value, baseline=baseline, scale=scale, difference=difference, low=low, high=high, margin=abs(margin)
    )  # type: ignore[arg-type]


def odd_comparison(dice: random.Random) -> CompareRecord:
    runs = [odd_run(dice, policy, seed) for policy in ("fp32", "fp16") for seed in range(dice.randint(1, 3))]
    rows = [
        row.model_copy(
            update={
                "loss": odd_difference(dice),
                "metric": None,
                "memory": run.memory,
                "memory_ratio": values(dice, 1)[0],
            }
        )
        for row, run in zip(build.compare_rows()[::2], (runs[0], runs[-1]), strict=True)
    ]
    return build.compare_record(rows=rows, runs=runs)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
def test_no_value_makes_a_page_fail(seed: int) -> None:
    dice = random.Random(seed)
    for record in (odd_comparison(dice), odd_run(dice, "fp16", 0)):
        page = render_html(record)
        assert page.endswith("</html>")
        assert len(page.encode()) < 400_000
        for drawing in page.split('<svg class="')[1:]:
            shown = drawing.split("</svg>")[0]
            assert "nan" not in shown.lower().replace("nan</text>", "")
            assert "inf" not in shown.lower()
