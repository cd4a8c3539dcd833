"""Decide which steps of a run are faulty, and where each fault began, while the script runs. Imports no torch.

After each step the observer passes on whether the loss and the gradients were finite, and what the operations showed if they were
inspected. The kind of fault follows later, from the operation itself (``mezzo.commands.diagnose.verdict``).

A skipped update is no fault if dynamic loss scaling skips it on purpose. A dynamic scale starts too high and halves until the gradients
fit; later it grows now and then, to test whether they still do. So two kinds of skips are normal:

- all skips in a row before an optimizer's first successful update, however many there are;
- after that, one per growth interval (with a hysteresis of ``h``, up to ``h`` in a row count as one). A row that begins right after the
  first successful update counts as one, too: small gradients in a first batch do not show that a scale fits.

All others are faults: the gradients overflow at a scale that fitted before. So is every skip under a static scale, and a row of skips that
lasts to the end of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from mezzo.observe.nonfinite.evidence import (
    Evidence,
    FaultSource,
    GradientErrors,
    Harmless,
    Located,
    ModelNames,
    recorded,
)
from mezzo.observe.settings import HARMLESS_LISTED, LEAST_SCALE, STEPS_THAT_SETTLE, SURELY_LOW, WEIGHTY
from mezzo.records import RunRecord

OptimizerPart: TypeAlias = tuple[int, int]
"""The part of an update that one optimizer makes: the identity of the GradScaler, 0 for the policy's loss scale, and of the optimizer."""


@dataclass(kw_only=True)
class InspectedStep:
    """What the operations of a step showed."""

    sources: list[FaultSource]
    of_loss: list[FaultSource]
    """The sources of a loss that was not finite."""
    in_backward: list[FaultSource]
    """The sources of non-finite results in the backward pass."""
    in_update: list[FaultSource] = field(default_factory=list)
    """The sources of non-finite results between the backward pass and the optimizer's step."""
    by_update: FaultSource | None = None
    """The optimizer's step, if it made a weight infinite or NaN of finite gradients."""
    gradient_errors: GradientErrors | None
    """The errors of the gradients; None if they were not compared with their true values."""
    harmless: list[Harmless]
    """Values that left their format; if the step is not faulty, they made no difference."""


class ClosedStep(NamedTuple):
    """A step that is over."""

    number: int
    loss_finite: bool
    gradients_finite: bool
    skipped: bool
    inspected: InspectedStep | None
    """None if its operations were not inspected."""
    parts: Mapping[OptimizerPart, bool] = {}
    """Whether each part of its update was skipped; empty if the optimizers are unknown."""


class TrainingFacts(Protocol):
    """What an observer knows of the training."""

    def names(self) -> ModelNames:
        """Return the names of modules and parameters."""

    def skip_rule(self) -> SkipRule:
        """Return the settings of the loss scale in use."""

    def loss_scale(self) -> float:
        """Return the current loss scale."""

    def largest_norm(self) -> float:
        """Return the largest gradient norm before the step that just closed, at the current loss scale."""


class Faults:
    """The faulty steps of a run, as they become known."""

    def __init__(self, training: TrainingFacts, suspects: Sequence[int]) -> None:
        """Begin with none.

        Args:
            training: the training.
            suspects: steps that were faulty in an earlier run.
        """
        self._training = training
        self._suspects, self._left = frozenset(suspects), list(suspects)
        self._suspects_done = False
        """Whether every suspect was inspected."""
        self.skips = Skips()
        self.bad_steps: list[int] = []
        self._located: list[Located] = []
        """The places to blame, in the order of their steps."""
        self._skipped: list[Located] = []
        """Overflows in updates that the loss scale skipped: faults only if those skips are not normal."""
        self._harmless: dict[str, Harmless] = {}
        """Values that left their format and made no difference, by line."""
        self._is_incurable = False
        """Whether a step was bad for a reason that no later step can cure."""
        self._lost_step: int | None = None
        """The step whose loss was not finite."""
        self._zeros = 0.0
        """The share of gradient elements that the format lost in the last healthy step that was inspected."""
        self._broken_updates: list[int] = []
        """Steps whose update made a weight infinite or NaN of finite gradients."""

    @property
    def are_enough(self) -> bool:
        """Whether no later step can add anything."""
        return self._is_incurable or self._suspects_done or bool(self._located)

    def close(self, step: ClosedStep) -> bool:
        """Judge a step that is over; return whether a suspect was healthy this time, so that all later steps must be inspected."""
        training, fault = self._training, None
        bad = not (step.loss_finite and step.gradients_finite) or step.skipped
        if step.inspected is not None:
            loss_bad, before = not step.loss_finite, training.largest_norm
            fault = place_to_blame(
                step.inspected, step.number, training.names(), loss_bad=loss_bad, bad=bad, before=before
            )
        if fault is None and not bad and step.inspected is not None and step.inspected.by_update is not None:
            fault = Located(step=step.number, source=recorded(step.inspected.by_update, training.names()))
            self._broken_updates.append(step.number)
        if fault is not None:
            curable = step.skipped and step.loss_finite and fault.gradients is None and fault.fits_fp32
            (self._skipped if curable else self._located).append(fault)
        elif step.inspected is not None and not bad:
            errors = step.inspected.gradient_errors
            self._zeros = 0.0 if errors is None else errors.zeros
            self._harmless |= {value.line: value for value in step.inspected.harmless}
        rule = training.skip_rule()
        if step.loss_finite:  # a loss that is infinite is not skipped because of its scale
            self.skips.closed(step.number, step.parts, skipped=step.skipped, rule=rule)
        if bad:
            self.bad_steps.append(step.number)
            self._lost_step = step.number if not step.loss_finite else self._lost_step
            self._is_incurable |= not step.loss_finite or not step.skipped or self._endless() or not rule.dynamic
        if self._left[:1] != [step.number]:
            return False
        self._left.pop(0)
        again = bad or fault is not None
        self._suspects_done = again and not self._left
        if not again:
            self._left = []
        return not again

    def _endless(self) -> bool:
        """Return whether no update succeeded even at a scale below 1: then the scale is not the cause."""
        return not self.skips.settled() and self._training.loss_scale() < 1

    def first(self, lowered: Sequence[int] = ()) -> Located | None:
        """Return the place to blame in the steps so far; an overflow that the loss scale skipped counts only if the skip is not normal.

        Args:
            lowered: steps whose skips have lowered the scale too far.
        """
        if self._located:
            return self._located[0]
        for wanted in (self._suspects, {*self.skips.steps(), *lowered}):
            found = next((fault for fault in self._skipped if fault.step in wanted), None)
            if found is not None:
                return found
        return None

    def evidence(self, run: RunRecord, *, watched: Sequence[int], unfinished: InspectedStep | None) -> Evidence:
        """Return the evidence of these steps.

        Args:
            run: the record of the run.
            watched: the steps whose operations were inspected.
            unfinished: what the operations of the last step showed, if it was inspected and never ended.
        """
        settled, lowered = _lowered(run) if self._training.skip_rule().dynamic else (None, [])
        fault, inspected = self.first(lowered), list(watched)
        unskipped = [step for step in self.bad_steps if not run.steps.skipped[step - 1]]
        lost = [self._lost_step] if self._lost_step else []
        faulty = sorted({*self.skips.steps(), *unskipped, *lost, *self._broken_updates, *lowered})
        if fault is None and run.error is not None and unfinished is not None and not faulty:
            last, names = len(run.steps) + 1, self._training.names()
            fault = place_to_blame(unfinished, last, names, loss_bad=True, bad=True, before=None)
            inspected.append(last)
        too_short = settled is not None and settled >= SURELY_LOW and len(run.steps) < STEPS_THAT_SETTLE
        return Evidence(
            located=fault,
            watched=inspected,
            bad_steps=self.bad_steps,
            faulty_steps=faulty,
            lost_step=self._lost_step,
            settled_scale=settled,
            may_settle_higher=too_short and set(faulty) <= set(lowered),
            zeros=self._zeros,
            harmless=list(self._harmless.values())[:HARMLESS_LISTED],
        )


def _lowered(run: RunRecord) -> tuple[float | None, list[int]]:
    """Return the loss scale at which a run settled, and the steps whose skipped updates lowered it, if it is below ``LEAST_SCALE``.

    That is the scale which seven tenths of the second half do not exceed: the last scale alone varies by a few doublings. In a short run,
    whose answer may be undecided, it is four tenths, so that fewer low scales are missed. How often this is wrong is simulated
    (``python -m benchmarks verdicts``).
    """
    steps = run.steps
    later = sorted(scale for scale in steps.loss_scale[len(steps.loss_scale) // 2 :] if not math.isnan(scale))
    tenths = 7 if len(steps) >= STEPS_THAT_SETTLE else 4
    settled = later[tenths * (len(later) - 1) // 10] if later else math.inf
    lowered = [n for n, scale in enumerate(steps.loss_scale, 1) if steps.skipped[n - 1] and scale < LEAST_SCALE]
    if settled >= LEAST_SCALE or not lowered or all(steps.skipped):
        return None, []
    return settled, lowered


def place_to_blame(
    inspected: InspectedStep,
    step: int,
    names: ModelNames,
    *,
    loss_bad: bool,
    bad: bool,
    before: Callable[[], float] | None,
) -> Located | None:
    """Return the place to blame for a step's fault; None if there is no fault.

    Args:
        inspected: what its operations showed.
        step: its number.
        names: the names of modules and parameters.
        loss_bad: whether its loss is not finite.
        bad: whether the loss or a gradient is not finite.
        before: returns the largest gradient norm of the earlier steps; None if the step never ended.
    """
    refused = next((s for s in inspected.sources if s.kind == "refused"), None)
    if refused is not None and before is None:
        return _loud(refused, step, names)
    errors = inspected.gradient_errors
    quiet = _saturated(errors, step, names, bad=bad) or (None if bad else _vanished(errors, step, names, before))
    if not bad:
        return quiet
    suspects = inspected.of_loss if loss_bad and inspected.of_loss else inspected.in_backward or inspected.in_update
    chosen = [s for s in suspects if s.kind != "constant"] or suspects
    places = [_loud(source, step, names, loss_bad=loss_bad) for source in sorted(chosen, key=lambda s: s.index)]
    if not places:
        return None
    # What a lower loss scale leaves is the fault, also where an overflow of the scale came before it.
    loud = next((place for place in places if not place.fits_unscaled), places[0])
    return quiet if quiet is not None and loud.fits_unscaled else loud


def _saturated(errors: GradientErrors | None, step: int, names: ModelNames, *, bad: bool) -> Located | None:
    """Return the overflow that made finite gradients, or a finite loss, wrong; in a bad step, only one of the forward pass."""
    wrong = () if errors is None else errors.above or errors.losses
    made = [s for gradient in wrong for s in gradient.sources if s.kind == "made"]
    sources = [s for s in made if s.wide is not None or (s.in_fp64 is not None and not (bad and s.in_update))]
    source = min((s for s in sources if not (bad and s.backward)), key=lambda s: s.index, default=None)
    if source is None or errors is None:
        return None
    return Located(step=step, source=recorded(source, names), gradients=errors.as_record(names, below=False))


def _vanished(
    errors: GradientErrors | None, step: int, names: ModelNames, before: Callable[[], float] | None
) -> Located | None:
    """Return where gradients became zero because they are too small for the format; None if the training has converged."""
    wrong = () if errors is None else errors.below
    sources = sorted({s for gradient in wrong for s in gradient.sources if s.kind == "vanished"}, key=lambda s: s.index)
    if not sources or errors is None or (before is not None and errors.faded(before())):
        return None
    heaviest = max(sources, key=lambda s: s.share)
    source = next((s for s in sources if s.share >= WEIGHTY), heaviest)
    return Located(step=step, source=recorded(source, names), gradients=errors.as_record(names, below=True))


def _loud(source: FaultSource, step: int, names: ModelNames, *, loss_bad: bool = True) -> Located:
    """Return the place where the loss or a gradient became infinite or NaN, or the earlier place that caused it."""
    earlier = next((s for s in source.because if s.kind == "made"), None)
    first = earlier or source
    vanished = next((s for s in first.because if s.kind == "vanished"), None)
    return Located(
        step=step,
        source=recorded(first, names),
        vanished=None if vanished is None else recorded(vanished, names),
        symptom=None if earlier is None else recorded(source, names),
        arrived=first.kind == "entered" and not loss_bad,
    )


def where_it_began(found: Sequence[Located | None]) -> tuple[int, Located | None]:
    """Return the rank where a fault began, and its place to blame; (-1, None) if there is no fault.

    Args:
        found: the place to blame that each process found, by rank. A fault that may come from another process counts only if no process
            found its own: the process that receives bad gradients first is a matter of speed.
    """
    places = [(place.arrived, rank) for rank, place in enumerate(found) if place is not None]
    _, rank = min(places, default=(False, -1))
    return rank, None if rank < 0 else found[rank]


class SkipRule(NamedTuple):
    """The settings of a loss scale that decide which skips are normal."""

    dynamic: bool
    growth_interval: int = 2000
    hysteresis: int = 1


@dataclass
class _History:
    searching: list[int] = field(default_factory=list)
    """Steps skipped before the first successful update."""
    num_updates: int = 0
    num_made: int = 0
    in_row: int = 0
    skips: list[tuple[int, int]] = field(default_factory=list)
    """Skips after the first successful update, without the tolerated rest of a row: the numbers of the optimizer's update and the step."""
    good_in_row: int = 0
    """Successful updates since the last skip: after a growth interval of them the scale has grown."""
    open_row: list[int] = field(default_factory=list)
    """The steps of a row right after the first successful update, which is a fault only if it never ends."""

    @property
    def settled(self) -> bool:
        """Whether an update succeeded."""
        return self.num_made > 0


class Skips:
    """The updates of each optimizer with each scaler."""

    def __init__(self) -> None:
        self._histories: dict[OptimizerPart, _History] = {}
        self.faulty: dict[int, None] = {}
        """Steps whose skips are faults, in the order in which that became known."""
        self.unexplained: list[int] = []
        """The first step of each row of skips that neither the search for a scale nor its growth explains: the scale may not be the
        cause."""

    def closed(self, step: int, parts: Mapping[OptimizerPart, bool], *, skipped: bool, rule: SkipRule) -> None:
        """Record whether a step, and each part of its update, was skipped; ``parts`` is empty if the optimizers are unknown."""
        parts = dict(parts) or {(0, 0): skipped}
        if skipped and not any(parts.values()):  # the overflow was detected for all optimizers together
            parts = dict.fromkeys(parts, True)
        for key, part_skipped in parts.items():
            self._note(step, self._histories.setdefault(key, _History()), rule, skipped=part_skipped)

    def settled(self) -> bool:
        """Return whether any update succeeded."""
        return any(history.settled for history in self._histories.values())

    def steps(self) -> list[int]:
        """Return the steps whose skips are faults if the run ends now, including optimizers that never made an update."""
        histories = self._histories.values()
        endless = [h.searching for h in histories if not h.settled] + [
            h.open_row for h in histories if len(h.open_row) > 1
        ]
        return sorted({*self.faulty, *(step for row in endless for step in row)})

    def _note(self, step: int, history: _History, rule: SkipRule, *, skipped: bool) -> None:
        history.num_updates += 1
        if not skipped:
            history.num_made, history.in_row, history.open_row = history.num_made + 1, 0, []
            history.good_in_row += 1
            return
        history.in_row += 1
        grew, history.good_in_row = history.good_in_row >= rule.growth_interval, 0
        if not rule.dynamic:
            self.faulty[step] = None
            return
        if not history.settled:
            history.searching.append(step)
            return
        if history.num_made == 1:
            history.open_row.append(step)
        elif history.in_row == 1 and not grew:
            self.unexplained.append(step)
        if history.in_row > 1 and (history.num_made == 1 or history.in_row <= rule.hysteresis):
            return
        recent = [s for number, s in history.skips if history.num_updates - number < rule.growth_interval]
        history.skips.append((history.num_updates, step))
        if recent:  # each was normal until a second one followed
            self.faulty.update(dict.fromkeys([*recent, step]))
