"""Find the modules that must stay in FP32, given a way to run a few training steps.

The order of runs: the FP32 reference, the FP32 noise run, the policy with nothing kept, then the search, then the set that it found on
all batches. The tolerance depends on the format: forty units of roundoff. A hundred healthy layers in a row stay well below that, and
one that loses its values goes far beyond.

A run starts with the loss scale at which dynamic scaling would settle for the modules that are not kept, computed from the
reference's gradients: a set is judged by what it loses, not by the search for a scale in the first steps.

Imports no torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from mezzo.errors import PolicyError, ScriptError, SessionError
from mezzo.observe.fallback.evidence import LocalError, LossyProduct, Measured, fitting_scale
from mezzo.observe.fallback.operations import in_fp32, needed
from mezzo.observe.fallback.search import Names, search
from mezzo.observe.fallback.trials import Measure, expected, guesses_for, name_of
from mezzo.observe.limits import ROUNDOFFS
from mezzo.observe.module_names import covered
from mezzo.observe.settings import FallbackSettings
from mezzo.policy import Policy
from mezzo.records import FallbackRecord, FallbackVerdict, ModuleError, Reason, RunRecord, Verification

_MAX_TOLERANCE = 0.5
_NOISE_SHARE = 0.25  # of the tolerance: a gradient that FP32 noise moves by more is not judged
_EXPENSIVE = 0.1  # of the FLOPs: a container with more is opened, in case parts of it suffice
_MAX_IGNORED = 200


@dataclass(kw_only=True)
class SearchState:
    """The state of a search for modules."""

    policy: Policy
    tolerance: float
    measure: Measure
    folder: str
    steps: tuple[int, ...]
    note: Callable[[str], None]
    local: list[LocalError] = field(default_factory=list)
    ignored: dict[str, float] = field(default_factory=dict)
    noise: float = 0.0
    trials: list[Verification] = field(default_factory=list)
    reference: tuple[Measured, RunRecord] | None = None
    """The run in FP32 that all others are compared with."""
    answers: list[Measured] = field(default_factory=list)
    """The measurements of all runs after the reference."""
    has_op_lists: bool = True
    """Whether the framework can keep single operations in FP32."""
    operations: Names = ()
    """Operations, or families of them, that must run in FP32 if no set of modules helps."""


def default_tolerance(policy: Policy) -> float:
    """Return the largest relative error of a gradient that passes under ``policy``."""
    compute = policy.required_formats[0]
    return min(_MAX_TOLERANCE, ROUNDOFFS * compute.eps / 2)


def find(
    measure: Measure,
    policy: Policy,
    *,
    folder: str,
    tolerance: float | None = None,
    fresh: int = 2,
    note: Callable[[str], None] = lambda _: None,
) -> FallbackRecord:
    """Return which modules must stay in FP32 under ``policy``.

    Args:
        measure: runs the first steps of the training, the same ones each time.
        policy: the policy to judge; modules that it already keeps in FP32 stay there.
        folder: where runs write their measurements.
        tolerance: the largest relative error of a parameter's gradient that passes; None for the format's default.
        fresh: how many more batches the set is checked on.
        note: called with each line of progress.

    Raises:
        PolicyError: the policy computes nothing below FP32.
        SessionError: the tolerance or the number of batches is out of range.
        ScriptError: the training cannot be run, or its gradients cannot be compared.
    """
    _check(policy, tolerance, fresh)
    state = SearchState(
        policy=policy,
        tolerance=default_tolerance(policy) if tolerance is None else tolerance,
        measure=measure,
        folder=folder,
        steps=tuple(range(1, fresh + 2)),
        note=note,
    )
    verdict, reason, kept, run = _judge(state)
    return _record(state, run, verdict, reason, kept)


def _check(policy: Policy, tolerance: float | None, fresh: int) -> None:
    if not policy.lowers:
        raise PolicyError(
            f"policy {policy!s} computes everything in FP32 or TF32; there is nothing to keep in FP32",
            hint="choose a policy that lowers, such as fp16, bf16 or fp8",
        )
    if tolerance is not None and not 0 < tolerance < 1:
        raise SessionError(
            f"tolerance={tolerance!r}; allowed: above 0 and below 1",
            hint="leave it out: it then suits the format (fp16 0.02, bf16 0.16)",
        )
    if not 0 <= fresh <= 100:
        raise SessionError(f"fresh={fresh!r}; allowed: 0 to 100 batches", hint="check on two fresh batches: fresh=2")


def _judge(state: SearchState) -> tuple[FallbackVerdict, str, Names, RunRecord]:
    state.note("FP32, every module by itself")
    settings = FallbackSettings(steps=state.steps, policy=state.policy, folder=state.folder)
    reference, run = state.measure(Policy.parse("fp32"), settings, tuple)
    state.reference = reference, run
    state.has_op_lists = not run.framework.startswith("keras")
    state.local = _ranked(reference.local, state.policy)
    state.steps = tuple(step.step for step in reference.steps)
    broken = sorted(name for step in reference.steps for name, error in step.errors.items() if error != 0)
    if broken:
        reason = f"in FP32 the gradient of {broken[0]} is not finite, so precision is not the cause"
        return "fp32 fails", reason, (), run
    if not reference.steps or not reference.steps[0].errors:
        raise ScriptError(
            f"{run.script} calls no module whose parameters get gradients, so there is none to keep in FP32",
            hint=f"call the model as model(x), not as model.forward(x): {state.policy.name} lowers nothing outside modules either",
        )
    return *_after_reference(state), run


def _after_reference(state: SearchState) -> tuple[FallbackVerdict, str, Names]:
    unsteady = _judge_noise(state)
    return ("not repeatable", unsteady, ()) if unsteady else _searched(state)


def _measured(state: SearchState, policy: Policy, settings: FallbackSettings) -> Measured:
    """Run the training; runs that the search may request next, whatever the outcome of this one, may run at the same time."""
    assert state.reference is not None
    first, run = state.reference

    def replay(measure: Measure) -> object:
        fresh = replace(
            state, measure=measure, note=lambda _: None, ignored={}, noise=0.0, trials=[], operations=(), answers=[]
        )
        return _after_reference(fresh)

    known = [*state.answers]
    measured, _ = state.measure(policy, settings, lambda: expected(replay, known, run, guesses_for(first)))
    state.answers.append(measured)
    return measured


def _judge_noise(state: SearchState) -> str:
    """Find the gradients that FP32 itself determines; return why none can be judged, or an empty string."""
    state.note("FP32 again, rounded another way")
    settings = FallbackSettings(role="noise", steps=state.steps, folder=state.folder, name="noise")
    noisy = _measured(state, Policy.parse("fp32"), settings)
    worst: dict[str, float] = {}
    for step in noisy.steps:
        for name, error in step.errors.items():
            worst[name] = max(worst.get(name, 0.0), error)
    limit = _NOISE_SHARE * state.tolerance
    state.ignored = {name: error for name, error in worst.items() if not error <= limit}
    state.noise = max((error for name, error in worst.items() if name not in state.ignored), default=0.0)
    if not worst:
        return "a second run in FP32 has no gradients to compare"
    if 2 * len(state.ignored) <= len(worst):
        return ""
    name = max(state.ignored, key=lambda n: state.ignored[n])
    return (
        f"a second run in FP32, each output moved by its last bit, changes {len(state.ignored)} of {len(worst)} gradients by "
        f"more than {limit:.2g} ({name}: {state.ignored[name]:.2g}): the runs differ in data or random numbers, "
        "or the training is that unstable; precision cannot be judged"
    )


def _searched(state: SearchState) -> tuple[FallbackVerdict, str, Names]:
    names = [local.module for local in state.local if not local.unnamed]
    costs = {local.module: float(local.flops) for local in state.local}
    search_modules = functools.partial(search, names, tolerance=state.tolerance, costs=costs, whole=_not_opened(state))
    first = search_modules(functools.partial(_verify, state))
    if first is None:
        return _elsewhere(state)
    if len(state.steps) < 2:
        return _found(state, first, "there was no fresh batch to check the set on")
    error = _verify(state, first, all_steps=True)
    if error <= state.tolerance:
        return _found(state, first, f"checked on {len(state.steps) - 1} fresh batches")
    state.note("a fresh batch needs more: the search continues over all batches")
    again = search_modules(functools.partial(_verify, state, all_steps=True), base=first, known={first: error})
    if again is None:
        return _elsewhere(state)
    return _found(state, again, f"searched on {len(state.steps)} batches, since the set of the first failed on another")


_CHANGED_NOTHING = "the policy lowers nothing in these steps, or no value that it rounds, so this says nothing about it"


def _not_opened(state: SearchState) -> set[str]:
    """Return the containers that are not opened, because their own computation fails; an expensive one is opened anyway."""
    most = _EXPENSIVE * max((local.flops for local in state.local), default=0)
    return {local.module for local in state.local if _suspicion(local) > state.tolerance and local.flops <= most}


def _found(state: SearchState, kept: Names, how: str) -> tuple[FallbackVerdict, str, Names]:
    if not kept:
        worst = max((t.error for t in state.trials), default=0.0)
        if worst == 0:
            return "not needed", f"every gradient is the same to the bit as in FP32; {how}: {_CHANGED_NOTHING}", ()
        return "not needed", f"with nothing kept in FP32 no gradient is off by more than {worst:.2g}; {how}", ()
    return "found", f"with fewer modules a gradient is off by more than {state.tolerance:.2g}; {how}", kept


def _elsewhere(state: SearchState) -> tuple[FallbackVerdict, str, Names]:
    """Return the verdict that no set of modules helps, and whether operations in FP32 do."""
    least = min(state.trials, key=lambda trial: trial.error)
    outcome = _operations_in_fp32(state) if state.has_op_lists else "Keras cannot keep single operations in FP32"
    reason = (
        f"with every module that has a name kept in FP32 a gradient is still off by more than {state.tolerance:.2g} "
        f"({least.tensor or 'no gradient'}: {least.error:.2g}): the cause is outside them, in the model's own forward or in "
        f"the script, or it is not precision; {outcome}"
    )
    return "elsewhere", reason, ()


def _operations_in_fp32(state: SearchState) -> str:
    """Search for operations that help; return how that ended."""
    state.note("no set of modules helps: operations in FP32, wherever they run")
    verify = functools.partial(_verify, state, ())
    state.operations = needed(
        state.policy,
        lambda names: verify(operations=names),
        tolerance=state.tolerance,
        without=next((trial.error for trial in state.trials if not trial.kept), math.inf),
    )
    named = ", ".join(state.operations)
    outcome = f"with {named} in FP32 wherever they run it passes" if named else "nor does any operation in FP32 help"
    lossy = state.reference[0].lossy if state.reference is not None else None
    return outcome if lossy is None else f"{outcome}; {_lossy(lossy, state.policy)}"


def _lossy(product: LossyProduct, policy: Policy) -> str:
    form = policy.required_formats[0].name.upper()
    return (
        f"the first product that {form} cannot hold is at {product.line}: it makes {min(1.0, product.lost):.0%} of the "
        "differences between its rows wrong, as of positions that round to one number"
    )


def _verify(state: SearchState, kept: Names, *, operations: Names = (), all_steps: bool = False) -> float:
    """Run the training with modules or operations in FP32 as well; return the largest error of a gradient."""
    policy = in_fp32(_keeping(state.policy, kept), operations)
    if policy.loss_scale == "dynamic":
        policy = policy.replace(init_scale=_scale(state, policy, kept))
    settings = FallbackSettings(
        role="check",
        steps=state.steps,
        all_steps=all_steps,
        folder=state.folder,
        name=name_of(kept, operations, all_steps=all_steps),
        ignored=tuple(state.ignored),
    )
    measured = _measured(state, policy, settings)
    # The first batches may overflow while the loss scale settles; an overflow after a finite batch fails.
    first = next((n for n, step in enumerate(measured.steps) if math.isfinite(step.worst[0])), None)
    judged = measured.steps[first:] if first is not None else []
    judged = judged if all_steps else judged[:1]
    error, tensor = max((step.worst for step in judged or measured.steps), default=(math.inf, ""))
    trial = Verification(
        kept=list(kept),
        operations=list(operations),
        error=error,
        tensor=tensor,
        init_scale=policy.init_scale if policy.loss_scale != "none" else 1.0,
        steps=[step.step for step in judged],
        passed=error <= state.tolerance,
    )
    state.trials.append(trial)
    num, kind = (len(operations), "operation") if operations else (len(kept), "module")
    what = f"{num} {kind}{'' if num == 1 else 's'} in FP32" if num else "nothing in FP32"
    state.note(f"{what}: {tensor} is off by {error:.2g}" if tensor else f"{what}: it fails")
    return error


def _keeping(policy: Policy, kept: Sequence[str]) -> Policy:
    return policy.replace(fp32_modules=tuple(dict.fromkeys((*policy.fp32_modules, *kept))))


def _scale(state: SearchState, policy: Policy, kept: Names) -> float:
    """Return the scale at which dynamic scaling settles: the gradients of the modules that are not kept just fit."""
    free = [local for local in state.local if not local.unnamed and not covered(local.module, kept)]
    inside = [local.largest for local in free if not any(covered(name, [local.module]) for name in kept)]
    largest = max((value for value in inside if math.isfinite(value)), default=0.0)
    return max(policy.min_scale, fitting_scale(largest, policy.init_scale))


def _ranked(local: Sequence[LocalError], policy: Policy) -> list[LocalError]:
    """Return the modules, the most suspect first: by their own error, then leaves first, then the cheapest first.

    Errors that only rounded inputs cause count half: a norm behind a layer kept in FP32 would get FP32 inputs.
    """
    named: dict[str, LocalError] = {}
    for error in local:  # a name that occurs in several models is kept in all of them
        known = named.get(error.module)
        if known is None or _suspicion(error) > _suspicion(known):
            named[error.module] = error
    free = [error for error in named.values() if not any(fnmatchcase(error.module, p) for p in policy.fp32_modules)]
    containers = {
        error.module
        for error in free
        if any(covered(other.module, [error.module]) and other != error for other in free)
    }
    return sorted(free, key=lambda error: (-_suspicion(error), error.module in containers, error.flops))


def _suspicion(local: LocalError) -> float:
    if local.reason:
        return 0.25  # unknown: after what is certainly wrong, before what is healthy
    rounded = math.inf if math.isnan(local.rounded) else local.rounded
    return max(min(1.0, local.worst), min(1.0, rounded) / 2)


def _record(state: SearchState, run: RunRecord, verdict: FallbackVerdict, reason: str, kept: Names) -> FallbackRecord:
    whole = max((local.flops for local in state.local), default=0)
    spent = sum(local.flops for local in state.local if local.module in kept)
    modules = [
        ModuleError(
            **local.model_dump(exclude={"largest", "kept"}), kept=covered(local.module, kept) and not local.unnamed
        )
        for local in state.local
    ]
    why = "FP32 itself does not determine its gradient: rounded another way it moves by more than a quarter of the tolerance"
    return FallbackRecord(
        run=run,
        policy=str(state.policy),
        tolerance=state.tolerance,
        verdict=verdict,
        reason=reason,
        kept=list(kept),
        operations=list(state.operations),
        suggested=str(in_fp32(_keeping(state.policy, kept), state.operations)),
        fp32_share=spent / whole if whole else 0.0,
        error_before=state.trials[0].error if state.trials else None,
        error_after=_after(state, kept) if verdict in ("found", "not needed") else None,
        steps=list(state.steps),
        modules=modules,
        verifications=state.trials,
        noise=state.noise,
        ignored=[Reason(what=n, value=f"{e:.2g}", reason=why) for n, e in list(state.ignored.items())[:_MAX_IGNORED]],
        notes=[*_notes(state), *(_in_keras(kept) if kept and not state.has_op_lists else [])],
    )


def _after(state: SearchState, kept: Names) -> float | None:
    of_set = [t for t in state.trials if t.kept == list(kept)]
    most_steps = max((len(t.steps) for t in of_set), default=0)
    return next((t.error for t in of_set if len(t.steps) == most_steps), None)


def _notes(state: SearchState) -> list[Reason]:
    notes = [
        Reason(
            what="weights",
            value="as at the beginning",
            reason="updates are suppressed, so that all runs compute the same; later in training other modules may fail",
        )
    ]
    alone = [local for local in state.local if local.reason]
    if alone:
        value = f"{len(alone)} modules, as {alone[0].module}" if len(alone) > 1 else alone[0].module
        notes.append(Reason(what="not run by themselves", value=value, reason=alone[0].reason))
    return notes


def _in_keras(kept: Names) -> list[Reason]:
    """Return how a Keras script keeps layers in FP32 by itself."""
    why = f"an argument of the layer{'s' * (len(kept) > 1)} {', '.join(kept)}: Keras' way to keep a layer in FP32"
    return [Reason(what="in the script", value='dtype="float32"', reason=why)]
