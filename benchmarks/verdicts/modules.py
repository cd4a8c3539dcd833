"""Rates of ``mezzo fallback``: healthy trainings whose modules are blamed, and faults that are called not needed.

A training of eight modules is drawn: how much rounding moves each gradient, and what it really does in each of three batches under the
policy and in the FP32 run that is rounded as coarsely. Both are independent draws of as many normal or heavy-tailed numbers as the
parameter has elements. The policy's are 0.45 times as large, as measured on the digits CNN, a VGG, a U-Net and a ResNet (medians of 0.39
to 0.50). False alarms: no module does anything else. Misses: one module loses a share of its gradient and of those before it, which the
module shows when it runs alone, or, if ``hidden``, only in the training. The search itself judges, with these numbers as its runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.verdicts.rates import Array, Rate, drawn, run_of, worst
from mezzo.commands.fallback.find import default_tolerance, find
from mezzo.commands.fallback.search import TrialsAhead
from mezzo.observe.fallback.evidence import LocalError, Measured, StepErrors
from mezzo.observe.module_names import covered
from mezzo.observe.settings import FallbackSettings
from mezzo.policy import Policy
from mezzo.records import FallbackVerdict, RunRecord

MODULES = tuple(f"m{number}" for number in range(8))
SIZES = (1, 10, 1000)
"""Elements of each parameter."""
ROUNDING = (0.003, 0.03, 0.1, 0.3, 0.6)
"""How much rounding moves a typical gradient."""
POLICY_TO_ROUNDING = 0.45
BLAMED = ("found", "does not pay", "elsewhere")
_RUN = run_of("fp32")


@dataclass(frozen=True)
class Setting:
    """The assumptions of a simulation."""

    policy: str
    rounding: float
    size: int
    noise: str
    lost: float = 0.0
    """The share of a gradient that one module loses; infinite for an overflow."""
    hidden: bool = False


def rates(effort: float) -> list[Rate]:
    num, found = max(20, int(100 * effort)), []
    blamed, undecided, missed = (partial(share_of, verdicts=v) for v in (BLAMED, ("undecided",), ("not needed",)))
    for policy in ("fp16", "bf16"):
        what = f"fallback blames modules of a healthy training, {policy}"
        found.append(worst(what, _settings(policy), blamed, num=num, most=0.05))
        what = f"fallback undecided on a healthy training, {policy}"
        found.append(worst(what, _settings(policy), undecided, num=num))
        for what, lost, hidden in FAULTS:
            settings = _settings(policy, lost, hidden=hidden)
            found.append(worst(f"not needed, but {what}, {policy}", settings, missed, num=num, most=0.05))
    return found


FAULTS = (
    ("a module overflows", np.inf, False),
    ("a module loses its gradient", 1.0, False),
    ("a module loses 60% of it", 0.6, False),
    ("a gradient is lost outside the modules", 1.0, True),
)


def _settings(policy: str, lost: float = 0.0, *, hidden: bool = False) -> Iterator[Setting]:
    for rounding, size, noise in itertools.product(ROUNDING, SIZES, ("normal", "heavy")):
        yield Setting(policy, rounding, size, noise, lost, hidden)


def share_of(setting: Setting, verdicts: tuple[FallbackVerdict, ...], *, num: int, seed: int) -> float:
    """Return the share of ``num`` searches that end in one of ``verdicts``."""
    rng = np.random.default_rng(seed)
    policy = Policy.parse(setting.policy)
    found = [find(_Training(setting, rng), policy, folder=".").verdict for _ in range(num)]
    return sum(verdict in verdicts for verdict in found) / num


class _Training:
    """A training as the search sees it: the errors of its gradients, run by run."""

    def __init__(self, setting: Setting, rng: np.random.Generator) -> None:
        self._setting = setting
        amplified = setting.rounding * np.exp(0.4 * rng.standard_normal(len(MODULES)))
        self._rounding = amplified * _sizes(setting, rng)
        self._policy = POLICY_TO_ROUNDING * amplified * _sizes(setting, rng)
        own = default_tolerance(Policy.parse(setting.policy)) / 40
        self._local = own * np.exp(0.5 * rng.standard_normal(len(MODULES)))
        self._flops = rng.integers(1, 100, len(MODULES))
        self._culprit = int(rng.integers(len(MODULES))) if setting.lost else -1

    def __call__(self, policy: Policy, settings: FallbackSettings, ahead: TrialsAhead) -> tuple[Measured, RunRecord]:
        local = self._modules() if settings.role == "reference" else []
        errors = self._errors(policy, settings)[: None if settings.all_steps else 1]
        steps = [
            StepErrors(step=n, errors={f"{name}.weight": float(e) for name, e in zip(MODULES, row, strict=True)})
            for n, row in enumerate(errors, 1)
        ]
        return Measured(local=local, steps=steps), _RUN

    def _errors(self, policy: Policy, settings: FallbackSettings) -> Array:
        if settings.role == "rounding":
            return self._rounding
        if settings.role != "check" or settings.name == "instead":
            return np.zeros_like(self._policy)
        kept = np.array([covered(name, policy.fp32_modules) for name in MODULES])
        rounded = self._policy * np.sqrt(1.0 - kept.mean())
        if self._culprit < 0 or (kept[self._culprit] and not self._setting.hidden):
            return rounded
        reached = np.arange(len(MODULES)) <= self._culprit
        return np.where(reached, np.hypot(rounded, self._setting.lost), rounded)

    def _modules(self) -> list[LocalError]:
        found = []
        for number, name in enumerate(MODULES):
            own = float(self._local[number])
            loses = number == self._culprit and not self._setting.hidden
            output = self._setting.lost if loses else own
            flops = int(self._flops[number])
            found.append(LocalError(module=name, type="M", output=output, rounded=max(own, output), flops=flops))
        return found


def _sizes(setting: Setting, rng: np.random.Generator) -> Array:
    """Return the norms of errors of variance 1 by batch and module, relative to their expectation."""
    noise = drawn(setting.noise, (3, len(MODULES), setting.size), rng)
    found: Array = np.sqrt((noise**2).mean(axis=2))
    return found
