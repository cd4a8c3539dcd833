"""Find the first value of a Paddle script that left its format's range: what ``mezzo diagnose`` records in one run.

After every step two numbers are read: the loss and the norm of the gradients. Operations are recorded in chosen steps only
(``lost_values``). The evidence (``mezzo.observe.nonfinite.evidence``) has the same form as for PyTorch, and so has the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mezzo.launch.paddle.layer_names import LayerNames
from mezzo.launch.paddle.nonfinite.gradient_errors import GradientErrors, gradient_errors
from mezzo.launch.paddle.nonfinite.lost_values import ValueFollower
from mezzo.launch.paddle.nonfinite.replay import NotRepeated, ReplayedPass
from mezzo.launch.paddle.observing import StepObserver
from mezzo.launch.paddle.state import PaddleRun
from mezzo.launch.paddle.surveys import finite
from mezzo.launch.patches import Patches
from mezzo.observe.limits import HARMLESS_LISTED, WEIGHTY
from mezzo.observe.nonfinite.evidence import Evidence, Harmless, Located, write_evidence
from mezzo.observe.nonfinite.sources import Source
from mezzo.observe.settings import DiagnoseSettings
from mezzo.observe.skips import SkipRule, Skips
from mezzo.records import RunRecord


@dataclass
class _Inspected:
    """What was found in one step."""

    sources: list[Source] = field(default_factory=list)
    of_losses: list[Source] = field(default_factory=list)
    """The sources of losses that are not finite."""
    in_backward: list[Source] = field(default_factory=list)
    errors: GradientErrors | None = None


class NonFinite(StepObserver):
    """An observer of non-finite values, and of those that became finite again."""

    kind = "diagnose"

    def __init__(self, settings: DiagnoseSettings, run: PaddleRun) -> None:
        super().__init__(run, steps=settings.steps)
        self._settings, self._until = settings, settings.steps[-1]
        self._followed = ValueFollower(run, self._loss_scale)
        self._passes: list[ReplayedPass] = []
        self._losses: list[Any] = []
        self._inspected: _Inspected | None = None
        self._unfinished: _Inspected | None = None
        """What was found in a step that never ended."""
        self._suspects = list(settings.suspects)
        self._suspects_confirmed = False
        """Whether the last suspect step was faulty again."""
        self._skips = Skips()
        self._bad_steps: list[int] = []
        self._faults: list[Located] = []
        self._open: list[Located] = []
        """Where gradients overflowed in updates that the loss scale skipped: faults only if the scale never recovers."""
        self._harmless: dict[str, Harmless] = {}
        self._problems: dict[str, str] = {}
        self._cannot_recover = self._scale_is_set = False
        self._lost_step: int | None = None
        run.fp32_patterns = (*run.fp32_patterns, *settings.fp32_modules)

    # --- recording ---------------------------------------------------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Record Paddle's operations until ``patches`` are undone."""
        self._followed.tape.install(patches)

    def begin(self) -> None:
        """Begin to record operations."""
        self._followed.tape.on = True

    def end(self) -> None:
        """Stop recording, and discard the operations."""
        self._followed.tape.on = False
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
        if self._settings.loss_scale is not None and self.observing and not self._scale_is_set:
            self._scale_is_set = True
            self.run.scale.value = self._settings.loss_scale

    def scaled(self, losses: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Keep the gradients from which the backward pass starts."""
        if self._followed.tape.on:
            self._passes.append(ReplayedPass(list(losses), list(gradients)))

    def scaler_met(self, scaler: Any) -> None:
        """Set the scale of the script's own scaler if the settings say so."""
        if self._settings.loss_scale is not None and self.observing and not self._scale_is_set:
            self._scale_is_set = True
            scaler.set_init_loss_scaling(self._settings.loss_scale)

    def judge(self, norm: Any | None) -> None:
        """Inspect the step's records before its weights change."""
        bad = not all(map(finite, self._losses)) or (norm is not None and not math.isfinite(float(norm)))
        self._inspected = self._inspect(bad=bad)

    def _inspect(self, *, bad: bool) -> _Inspected:
        followed, errors = self._followed, None
        with followed.tape.paused():
            if not bad and any(source.kind in ("made", "vanished") for source in followed.sources):
                errors = self._gradient_errors()
        return _Inspected(list(followed.sources), followed.of_losses(self._losses), followed.in_backward, errors)

    def _gradient_errors(self) -> GradientErrors | None:
        if self.run.casts:
            self._problems["backward"] = (
                "values in the GPU's own 16-bit formats are not recomputed: silent saturation is not judged"
            )
            return None
        weights = [p for p in self.run.parameters() if not p.stop_gradient]
        try:
            return gradient_errors(self._followed.tape.operations, self._passes, weights, self._followed.format)
        except NotRepeated as why:
            self._problems["step"] = f"silent saturation was not judged, because {why}"
            return None

    # --- steps -------------------------------------------------------------------------------------------------------------------------

    def decide(self, step: int, *, loss_finite: bool, gradients_finite: bool, skipped: bool) -> None:
        """Judge the step that is over; end the script where enough is known."""
        inspected, self._inspected = self._inspected, None
        bad = not (loss_finite and gradients_finite) or skipped
        fault = None if inspected is None else self._blamed(inspected, step, loss_bad=not loss_finite, bad=bad)
        if fault is not None:
            curable = skipped and loss_finite and fault.gradients is None and fault.fits_fp32
            (self._open if curable else self._faults).append(fault)
        elif inspected is not None and not bad:
            self._harmless |= {harmless.line: harmless for harmless in _harmless(inspected)}
        if loss_finite:
            self._skips.closed(step, [], skipped=skipped, rule=self._rule())
        if bad:
            self._bad_steps.append(step)
            self._lost_step = step if not loss_finite else self._lost_step
            self._cannot_recover |= (
                not loss_finite or not skipped or self._skips_without_end() or not self._rule().dynamic
            )
        self._suspect_is_over(step, bad=bad or fault is not None)
        if self._cannot_recover or self._suspects_confirmed or self._faults:
            self._waiting = []

    def _suspect_is_over(self, step: int, *, bad: bool) -> None:
        """Record whether a step that is over was a suspect; if it was not faulty this time, inspect all later steps."""
        if self._suspects[:1] != [step]:
            return
        self._suspects.pop(0)
        self._suspects_confirmed = not self._suspects and bad
        if not bad:
            self._suspects = []
            self._waiting = list(range(step + 1, self._until + 1))

    def _skips_without_end(self) -> bool:
        return not self._skips.settled() and self._loss_scale() < 1

    def _rule(self) -> SkipRule:
        if self.run.script_scale is not None or self.run.script_scaler is not None:
            return SkipRule(dynamic=True)
        policy = self.run.policy
        if policy is None or policy.loss_scale == "none":
            return SkipRule(dynamic=True)
        dynamic = policy.loss_scale == "dynamic"
        return SkipRule(dynamic=dynamic, growth_interval=policy.growth_interval, hysteresis=policy.hysteresis)

    def _loss_scale(self) -> float:
        scaler = self.run.script_scaler
        return float(scaler._scale) if scaler is not None else self.run.scale.value

    # --- blame -------------------------------------------------------------------------------------------------------------------------

    def _blamed(self, inspected: _Inspected, step: int, *, loss_bad: bool, bad: bool) -> Located | None:
        names = LayerNames(self._followed.tape.roots)
        if not bad:
            return self._silent_fault(inspected, step, names)
        candidates = inspected.of_losses if loss_bad and inspected.of_losses else inspected.in_backward
        chosen = [source for source in candidates if source.kind != "constant"] or candidates
        source = min(chosen, key=lambda s: s.index, default=None)
        if source is None:
            return None
        cause = next(iter(source.because), None)
        symptom = None if cause is None else source.as_record(names)
        return Located(step=step, source=(cause or source).as_record(names), symptom=symptom)

    def _silent_fault(self, inspected: _Inspected, step: int, names: LayerNames) -> Located | None:
        """Return where values left the format and made gradients wrong, although these are finite."""
        errors = inspected.errors
        if errors is None:
            return None
        above = [s for s in inspected.sources if s.kind == "made" and s.wide is not None]
        if errors.above and above:
            wrong = errors.wrong(errors.above, names)
            return Located(step=step, source=min(above, key=lambda s: s.index).as_record(names), gradients=wrong)
        below = sorted((s for s in inspected.sources if s.kind == "vanished"), key=lambda s: s.index)
        if not (errors.below and below) or errors.faded(self._largest_norm()):
            return None
        heaviest = max(below, key=lambda s: s.share)
        source = next((s for s in below if s.share >= WEIGHTY), heaviest)
        wrong = errors.wrong(errors.below, names, errors.zeros)
        return Located(step=step, source=source.as_record(names), gradients=wrong)

    def _largest_norm(self) -> float:
        """Return the largest norm of the gradients of earlier steps, including the loss scale."""
        norms = self.run.steps.norms()[:-1]
        return max((norm * self.run.scale.value for norm in norms if 0 < norm < math.inf), default=0.0)

    # --- the evidence --------------------------------------------------------------------------------------------------------------------

    def too_short(self) -> bool:
        """Return whether nothing was inspected."""
        return not (self.watched or self._bad_steps)

    def _faulty_steps(self, run: RunRecord) -> list[int]:
        unskipped = [step for step in self._bad_steps if not run.steps.skipped[step - 1]]
        return sorted({*self._skips.steps(), *unskipped, *([self._lost_step] if self._lost_step else [])})

    def evidence(self, run: RunRecord) -> Evidence:
        """Return the evidence of the run."""
        faulty, watched, unfinished = self._faulty_steps(run), list(self.watched), len(run.steps) + 1
        relevant = {*self._skips.steps(), *self._settings.suspects}
        fault = next(iter(self._faults), None) or next((f for f in self._open if f.step in relevant), None)
        if fault is None and run.error is not None and self._unfinished is not None and not faulty:
            fault = self._blamed(self._unfinished, unfinished, loss_bad=True, bad=True)
            watched.append(unfinished)
        return Evidence(
            located=fault,
            watched=watched,
            bad_steps=self._bad_steps,
            faulty_steps=faulty,
            lost_step=self._lost_step,
            own_scaler=self.run.script_scale is not None,
            scaled=self.run.scale.checks or self.run.script_scale is not None,
            problems=self._problems,
            harmless=list(self._harmless.values())[:HARMLESS_LISTED],
        )

    def record(self, run: RunRecord) -> RunRecord:
        """Write the evidence where the settings say; return the run's own record."""
        if self._settings.evidence_path:
            write_evidence(self.evidence(run), self._settings.evidence_path)
        return run


def _harmless(inspected: _Inspected) -> list[Harmless]:
    return [
        Harmless(op=s.op, line=s.line, format=s.format, largest=s.wide, absorbed_by=list(s.swallowed))
        for s in inspected.sources
        if s.kind == "made" and s.wide and s.swallowed
    ]
