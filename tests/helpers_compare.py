"""Runs for comparisons, made from a few numbers."""

from __future__ import annotations

from typing import Any

from mezzo.commands.compare.judge import compare
from mezzo.records import CompareRecord, Environment, Metric, Row, RunRecord, Steps

ENVIRONMENT = Environment(
    date="2026-01-01T00:00:00+00:00", mezzo="0", python="3", torch="2", os="Linux", cpu="x", threads=1, device="cpu"
)
STEPS_FIELDS = ("skipped", "time_ms", "loss_scale", "losses")


def falling(final: float, *, start: float = 5.0, num_steps: int = 20) -> list[float]:
    """Return losses whose first tenth is ``start`` and whose other steps are ``final``."""
    num_first = max(1, num_steps // 10)
    return [start] * num_first + [final] * (num_steps - num_first)


def run(
    policy: str, loss: list[float], *, seed: int | None = 0, metric: float | None = None, **fields: Any
) -> RunRecord:
    """Return a run with these losses; a metric is the last of two values."""
    steps = Steps(loss=loss, **{k: fields.pop(k) for k in STEPS_FIELDS if k in fields})
    name = fields.pop("metric_name", "perplexity")
    known: dict[str, Any] = {
        "command": ["mezzo", "run", "train.py"],
        "script": "train.py",
        "script_sha256": "0" * 64,
        "policy": policy,
        "seed": seed,
        "environment": ENVIRONMENT,
        "steps": steps,
        "metric": None if metric is None else Metric(name=name, pattern="", steps=[1, 2], values=[0.5, metric]),
    }
    return RunRecord(**known | fields)


def series(policy: str, finals: list[float], **fields: Any) -> list[RunRecord]:
    """Return one run a final loss, with seeds from 0 on."""
    return [run(policy, falling(final), seed=seed, **fields) for seed, final in enumerate(finals)]


def with_metric(policy: str, metrics: list[float | None], *, name: str, final: float = 1.0) -> list[RunRecord]:
    """Return one run a metric, all with the same losses."""
    return [run(policy, falling(final), seed=i, metric=m, metric_name=name) for i, m in enumerate(metrics)]


def judge(runs: list[RunRecord], *, margin: float = 0.02, baseline: str = "fp32") -> CompareRecord:
    """Return the comparison of ``runs``."""
    return compare(runs, baseline=baseline, margin=margin, command=["mezzo", "compare"])


def row_of(runs: list[RunRecord], policy: str = "bf16", **options: Any) -> Row:
    """Return one policy's row."""
    return next(row for row in judge(runs, **options).rows if row.policy == policy)
