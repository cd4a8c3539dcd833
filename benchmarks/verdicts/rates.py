"""A simulated rate, and the search for the worst of many settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mezzo.records import Environment, RunRecord, Steps

Array = NDArray[np.float64]
Setting = TypeVar("Setting")
SEEDS = (2, 3, 5, 10)


@dataclass(frozen=True, kw_only=True)
class Rate:
    """How often a verdict was returned, and the number of simulated comparisons."""

    what: str
    share: float
    num: int
    most: float | None = None
    """The largest acceptable rate."""
    least: float | None = None

    @property
    def text(self) -> str:
        error = (self.share * (1 - self.share) / self.num) ** 0.5
        return f"{100 * self.share:.2f}% (standard error {100 * error:.2f})"

    @property
    def aim(self) -> str:
        if self.most is not None:
            return f"{100 * self.most:g}% or less"
        return "" if self.least is None else f"{100 * self.least:g}% or more"


def worst(
    what: str,
    settings: Iterable[Setting],
    share_of: Callable[..., float],
    *,
    num: int,
    times: int = 10,
    most: float | None = None,
) -> Rate:
    """Return the rate of the setting whose rate is largest, simulated again with more comparisons.

    Args:
        what: the rate's name.
        settings: all of them.
        share_of: simulates a setting, with ``num`` comparisons and a ``seed``.
        num: comparisons per setting in the search.
        times: the factor by which the worst setting gets more comparisons.
        most: the largest acceptable rate.
    """
    found = [(share_of(setting, num=num, seed=1 + place), place, setting) for place, setting in enumerate(settings)]
    _, place, setting = max(found, key=lambda item: item[:2])
    share = share_of(setting, num=times * num, seed=10_000 + place)
    return Rate(what=what, share=share, num=times * num, most=most)


def run_of(policy: str, *, seed: int | None = None, steps: Steps | None = None) -> RunRecord:
    """Return a run's record that has nothing but its steps."""
    nowhere = Environment(date="", mezzo="", python="", torch="", os="", cpu="", threads=1, device="cpu")
    facts: dict[str, Any] = {name: value for name, value in (("seed", seed), ("steps", steps)) if value is not None}
    return RunRecord(command=[], script="train.py", script_sha256="", policy=policy, environment=nowhere, **facts)


def drawn(noise: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return noise of variance 1: ``normal``, ``heavy`` (Student's t with 3 degrees of freedom) or ``skewed`` (exponential)."""
    if noise == "heavy":
        return rng.standard_t(3, shape) / np.sqrt(3.0)
    return rng.exponential(size=shape) - 1.0 if noise == "skewed" else rng.standard_normal(shape)
