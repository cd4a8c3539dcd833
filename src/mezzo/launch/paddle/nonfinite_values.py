"""Find the first value of a Paddle script that left its format's range: what ``mezzo diagnose`` records in one run.

After every step two numbers are read: the loss and the norm of the gradients. Operations are recorded in chosen steps only
(``lost_values``). What follows from them is decided as for PyTorch (``mezzo.observe.nonfinite.faults``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mezzo.formats import FP16, Format
from mezzo.launch.paddle.lost_values import ValueFollower
from mezzo.launch.paddle.replay import KEPT, NO_UPPER, NONE, Limits, NotRepeated, ReplayedPass, gradients
from mezzo.launch.paddle.state import LayerNames, PaddleRun
from mezzo.launch.paddle.surveys import finite
from mezzo.launch.paddle.tape import StepObserver, TapedOperation
from mezzo.launch.patches import Patches
from mezzo.observe.nonfinite.evidence import Evidence, GradientErrors, Harmless, Source, WrongGradient, write_evidence
from mezzo.observe.nonfinite.faults import ClosedStep, Faults, InspectedStep, SkipRule
from mezzo.observe.settings import LOST_BELOW, ROUNDOFFS, SHARE_BELOW, DiagnoseSettings
from mezzo.records import RunRecord


class NonFinite(StepObserver):
    """An observer of non-finite values, and of those that became finite again."""

    kind = "diagnose"

    def __init__(self, settings: DiagnoseSettings, run: PaddleRun) -> None:
        super().__init__(run, steps=settings.steps)
        self._settings, self._until = settings, settings.steps[-1]
        self._followed = ValueFollower(run, self.loss_scale)
        self._passes: list[ReplayedPass] = []
        self._losses: list[Any] = []
        self._inspected: InspectedStep | None = None
        self._unfinished: InspectedStep | None = None
        """What was found in a step that never ended."""
        self._faults = Faults(self, settings.suspects)
        self._problems: dict[str, str] = {}
        self._scale_is_set = False
        run.fp32_patterns = (*run.fp32_patterns, *settings.changes.fp32_modules)

    # --- recording ---------------------------------------------------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Record Paddle's operations until ``patches`` are undone."""
        self._followed.tape.install(patches)

    def begin(self) -> None:
        """Begin to record operations."""
        self._followed.tape.start()

    def end(self) -> None:
        """Stop recording, and discard the operations."""
        self._followed.tape.stop()
        self._followed.clear()
        self._passes, self._losses = [], []

    def close(self) -> None:
        """Stop, wherever the script ended; keep what was found in a step that never ended."""
        if self.observing and self._followed.tape.on:
            self._unfinished = self._inspect(bad=True)
        self.end()

    def backward_begins(self, losses: Iterable[Any]) -> None:
        """Record the losses of a backward pass; set the policy's loss scale if the settings say so."""
        super().backward_begins(losses)
        self._losses += list(losses)
        if self._settings.changes.loss_scale is not None and self.observing and not self._scale_is_set:
            self._scale_is_set = True
            self.run.scale.value = self._settings.changes.loss_scale

    def scaled(self, losses: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Keep the gradients from which the backward pass starts."""
        if self._followed.tape.on:
            self._passes.append(ReplayedPass(list(losses), list(gradients)))

    def scaler_met(self, scaler: Any) -> None:
        """Set the scale of the script's own scaler if the settings say so."""
        if self._settings.changes.loss_scale is not None and self.observing and not self._scale_is_set:
            self._scale_is_set = True
            scaler.set_init_loss_scaling(self._settings.changes.loss_scale)

    def judge(self, norm: Any | None) -> None:
        """Inspect the step's records before its weights change."""
        bad = not all(map(finite, self._losses)) or (norm is not None and not math.isfinite(float(norm)))
        self._inspected = self._inspect(bad=bad)

    def _inspect(self, *, bad: bool) -> InspectedStep:
        followed, errors = self._followed, None
        with followed.tape.paused():
            if not bad and any(source.kind in ("made", "vanished") for source in followed.sources):
                errors = self._gradient_errors()
        of_losses = followed.of_losses(self._losses)
        harmless = [
            Harmless(op=s.op, line=s.line, format=s.format, largest=s.wide, absorbed_by=list(s.swallowed))
            for s in followed.sources
            if s.kind == "made" and s.wide and s.swallowed
        ]
        return InspectedStep(
            sources=list(followed.sources),
            of_loss=of_losses,
            in_backward=followed.in_backward,
            gradient_errors=errors,
            harmless=harmless,
        )

    def _gradient_errors(self) -> GradientErrors | None:
        if self.run.casts:
            self._problems["backward"] = (
                "values in the GPU's own 16-bit formats are not recomputed: silent saturation is not judged"
            )
            return None
        weights = [p for p in self.run.parameters() if not p.stop_gradient]
        try:
            sources = tuple(self._followed.sources)
            return gradient_errors(
                self._followed.tape.operations, self._passes, weights, self._followed.format, sources
            )
        except NotRepeated as why:
            self._problems["step"] = f"silent saturation was not judged, because {why}"
            return None

    # --- steps -------------------------------------------------------------------------------------------------------------------------

    def decide(self, step: int, *, loss_finite: bool, gradients_finite: bool, skipped: bool) -> None:
        """Judge the step that is over; end the script where enough is known."""
        inspected, self._inspected = self._inspected, None
        if self._faults.close(ClosedStep(step, loss_finite, gradients_finite, skipped, inspected)):
            self._waiting = list(range(step + 1, self._until + 1))
        if self._faults.are_enough:
            self._waiting = []

    # --- what is known of the training (``faults.TrainingFacts``) -------------------------------------------------------------------

    def skip_rule(self) -> SkipRule:
        """Return the settings of the loss scale in use."""
        if self.run.script_scale is not None or self.run.script_scaler is not None:
            return SkipRule(dynamic=True)
        policy = self.run.policy
        if policy is None or policy.loss_scale == "none":
            return SkipRule(dynamic=True)
        dynamic = policy.loss_scale == "dynamic"
        return SkipRule(dynamic=dynamic, growth_interval=policy.growth_interval, hysteresis=policy.hysteresis)

    def loss_scale(self) -> float:
        """Return the current loss scale."""
        scaler = self.run.script_scaler
        return float(scaler._scale) if scaler is not None else self.run.scale.value

    def names(self) -> LayerNames:
        """Return the names of layers and parameters."""
        return LayerNames(self._followed.tape.roots)

    def largest_norm(self) -> float:
        """Return the largest gradient norm of the steps before the one that just closed, at the current loss scale."""
        norms = self.run.steps.norms()[:-1]
        return max((norm * self.run.scale.value for norm in norms if 0 < norm < math.inf), default=0.0)

    # --- the evidence --------------------------------------------------------------------------------------------------------------------

    def too_short(self) -> bool:
        """Return whether nothing was inspected."""
        return not (self.watched or self._faults.bad_steps)

    def evidence(self, run: RunRecord) -> Evidence:
        """Return the evidence of the run."""
        found = self._faults.evidence(run, watched=self.watched, unfinished=self._unfinished)
        return found.model_copy(
            update={
                "own_scaler": self.run.script_scale is not None,
                "scaled": self.run.scale.checks or self.run.script_scale is not None,
                "narrow": self.run.policy is None or self.run.policy.lowers,
                "problems": self._problems,
            }
        )

    def record(self, run: RunRecord) -> RunRecord:
        """Write the evidence where the settings say; return the run's own record."""
        if self._settings.evidence_path:
            write_evidence(self.evidence(run), self._settings.evidence_path)
        return run


# The thresholds are those of PyTorch's diagnosis (``mezzo.observe.nonfinite.shadows``): gradients are judged tensor by tensor, and
# one that contains only rounding noise (a bias before a norm) is not judged.


def gradient_errors(
    operations: Sequence[TapedOperation],
    passes: Sequence[ReplayedPass],
    weights: Sequence[Any],
    fmt: Format,
    sources: tuple[Source, ...],
) -> GradientErrors | None:
    """Return which gradients of ``weights`` the range of ``fmt`` made wrong; None if the step has no finite gradients.

    Args:
        operations: the operations of the step.
        passes: its backward passes.
        weights: its trained parameters.
        fmt: the format that the policy rounds to.
        sources: where the step lost values; a replay of the whole step does not show which of them a gradient depends on.

    Raises:
        NotRepeated: the step cannot be computed again.
    """

    def replayed(limits: Limits) -> dict[int, Any]:
        return gradients(operations, passes, weights, fmt, limits)

    actual = {key: g for key, g in replayed(KEPT).items() if np.isfinite(g).all()}
    if not actual:
        return None
    true = replayed(NONE)
    if not all(np.isfinite(true[key]).all() for key in actual):
        raise NotRepeated("without the format's limits its gradients are beyond FP32")
    by_id = {id(weight): weight for weight in weights}
    below, zeros, norm = _compared(actual, true, by_id, fmt, sources)
    above = _compared(actual, replayed(NO_UPPER), by_id, fmt, sources)[0] if below else []
    noise = FP16.eps * max((_root_mean_square(g) for g in true.values()), default=0.0)
    above = [wrong for wrong in above if wrong.error * _root_mean_square(true[id(wrong.parameter)]) > noise]
    lost = [wrong for wrong in below if wrong.error > LOST_BELOW]
    size = sum(g.size for g in actual.values())
    enough = sum(true[id(wrong.parameter)].size for wrong in lost) > SHARE_BELOW * size
    return GradientErrors(tuple(above), tuple(lost) if enough else (), len(actual), zeros, norm)


def _compared(
    actual: dict[int, Any], true: dict[int, Any], weights: dict[int, Any], fmt: Format, sources: tuple[Source, ...]
) -> tuple[list[WrongGradient], float, float]:
    """Return the gradients that are wrong, the share of elements that became 0, and the norm of the true gradients."""
    wrong, num_zeros, num_nonzero, norms = [], 0, 0, [0.0]
    for key, gradient in actual.items():
        norm, nonzero = _norm(true[key]), true[key] != 0
        norms.append(norm)
        num_nonzero += int(nonzero.sum())
        num_zeros += int(((gradient == 0) & nonzero).sum())
        difference = _norm(gradient.astype(np.float64) - true[key])
        if norm > 0 and difference > ROUNDOFFS * fmt.eps / 2 * norm:
            wrong.append(WrongGradient(weights[key], difference / norm, sources))
    return wrong, num_zeros / num_nonzero if num_nonzero else 0.0, math.hypot(*norms)


def _root_mean_square(gradient: Any) -> float:
    return _norm(gradient) / math.sqrt(gradient.size) if gradient.size else 0.0


def _norm(values: Any) -> float:
    return float(np.linalg.norm(values.astype(np.float64).ravel()))
