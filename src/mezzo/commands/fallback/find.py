"""Find the modules that must stay in FP32, or products in BF16, given a way to run a few training steps.

The order of runs: the FP32 reference, FP32 with its last bit changed, FP32 rounded as coarsely as the policy rounds, the policy with
nothing kept on all batches, then the search on the first batch, then the set that it found on all batches. How large an error may be is
decided in ``allowed``.

Under a policy in blocks single products of linear layers are searched for like modules (``per_gemm``); they stay in BF16. FP32 remains
the reference: what BF16 itself does to a gradient counts, so a set that passes trains like FP32, and the errors of both searches compare.

The verdict is ``not needed`` where the policy alone passes, and where rounding in all modules together explains its error; a set
with most of the FLOPs ``does not pay``, and a run under BF16 decides what to use instead.

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
from typing import Any

from mezzo.commands.fallback.search import (
    LOST_IN_ROUNDING,
    Allowed,
    Measure,
    ModuleSet,
    expected,
    guesses_for,
    in_fp32,
    name_of,
    needed,
    search,
    stand_out,
)
from mezzo.errors import PolicyError, ScriptError, SessionError
from mezzo.observe.fallback.evidence import (
    LocalError,
    LossyProduct,
    Measured,
    StepErrors,
    fitting_scale,
    product_errors,
)
from mezzo.observe.module_names import covered, outermost
from mezzo.observe.settings import ROUNDOFFS, FallbackSettings
from mezzo.policy import PRESETS, Policy
from mezzo.records import (
    FORMAT_KEPT,
    FallbackRecord,
    FallbackVerdict,
    ModuleError,
    Note,
    RunRecord,
    Searched,
    Verification,
)

_MAX_TOLERANCE = 0.5
_MOVED = 0.1  # share of a gradient: if FP32's last bit moves most of them by more, the runs do not compute the same
_PAYS_UP_TO = 0.5  # of the FLOPs in FP32: beyond that, the rest cannot make a step twice as fast
_INSTEAD = Policy.parse("bf16")
_EXPENSIVE = 0.1  # of the FLOPs: a container with more is opened, in case parts of it suffice
_MAX_IGNORED = 200


@dataclass(kw_only=True)
class SearchState:
    """The state of a search for modules, or for products."""

    policy: Policy
    tolerance: float
    measure: Measure
    folder: str
    steps: tuple[int, ...]
    note: Callable[[str], None]
    per_gemm: bool = False
    """Whether products are searched for."""
    is_strict: bool = False
    """Whether the tolerance was given, so that it alone decides."""
    local: list[LocalError] = field(default_factory=list)
    """The errors of modules, or of products, by themselves."""
    ignored: dict[str, float] = field(default_factory=dict)
    noise: float = 0.0
    rounding: dict[str, float] = field(default_factory=dict)
    """What rounding alone does to each gradient that is judged."""
    instead: str = ""
    tried_instead: float = 0.0
    """The largest error under the policy that was tried instead; 0 if none was."""
    trials: list[Verification] = field(default_factory=list)
    reference: tuple[Measured, RunRecord] | None = None
    """The run in FP32 that all others are compared with."""
    answers: list[Measured] = field(default_factory=list)
    """The measurements of all runs after the reference."""
    has_op_lists: bool = True
    """Whether the framework can keep single operations in FP32."""
    operations: ModuleSet = ()
    """Operations, or families of them, that must run in FP32 if no set of modules helps."""

    @property
    def allowed(self) -> Allowed:
        """The largest error of each gradient that passes."""
        return Allowed(tolerance=self.tolerance, rounding={} if self.is_strict else self.rounding)

    @property
    def searched(self) -> Searched:
        """What the search is for."""
        return "products" if self.per_gemm else "modules"

    @property
    def higher(self) -> str:
        """The format in which they stay."""
        return FORMAT_KEPT[self.searched].upper()


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
    per_gemm: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> FallbackRecord:
    """Return which modules must stay in FP32 under ``policy``, or which products in BF16.

    Args:
        measure: runs the first steps of the training, the same ones each time.
        policy: the policy to judge; modules and products that it already keeps stay where they are.
        folder: where runs write their measurements.
        tolerance: the largest relative error of a parameter's gradient that passes; None for what the format's rounding explains.
        fresh: how many more batches the set is checked on.
        per_gemm: whether to search for products of layers in blocks.
        note: called with each line of progress.

    Raises:
        PolicyError: the policy computes nothing below FP32, or with ``per_gemm`` no layer in blocks.
        SessionError: the tolerance or the number of batches is out of range.
        ScriptError: the training cannot be run, or its gradients cannot be compared.
    """
    _check(policy, tolerance, fresh, per_gemm=per_gemm)
    state = SearchState(
        policy=policy,
        tolerance=default_tolerance(policy) if tolerance is None else tolerance,
        measure=measure,
        folder=folder,
        steps=tuple(range(1, fresh + 2)),
        note=note,
        per_gemm=per_gemm,
        is_strict=tolerance is not None,
    )
    verdict, reason, kept, run = _judge(state)
    return _record(state, run, verdict, reason, kept)


def _check(policy: Policy, tolerance: float | None, fresh: int, *, per_gemm: bool) -> None:
    if not policy.lowers:
        raise PolicyError(
            f"policy {policy!s} computes everything in FP32 or TF32; there is nothing to keep in FP32",
            hint="choose a policy that lowers, such as fp16, bf16 or fp8",
        )
    if per_gemm and not policy.in_blocks:
        allowed = ", ".join(name for name, preset in PRESETS.items() if preset.in_blocks)
        raise PolicyError(
            f"per-gemm asks for products in blocks, and policy {policy!s} computes none; allowed: {allowed}",
            hint="choose one of them, or leave per-gemm out, which searches for modules to keep in FP32",
        )
    if tolerance is not None and not 0 < tolerance < 1:
        raise SessionError(
            f"tolerance={tolerance!r}; allowed: above 0 and below 1",
            hint="leave it out: it then suits the format (fp16 0.02, bf16 0.16)",
        )
    if not 0 <= fresh <= 100:
        raise SessionError(f"fresh={fresh!r}; allowed: 0 to 100 batches", hint="check on two fresh batches: fresh=2")


def _judge(state: SearchState) -> tuple[FallbackVerdict, str, ModuleSet, RunRecord]:
    state.note("FP32, every module by itself")
    settings = FallbackSettings(steps=state.steps, policy=state.policy, folder=state.folder)
    reference, run = state.measure(Policy.parse("fp32"), settings, tuple)
    state.reference = reference, run
    state.has_op_lists = run.library != "keras"
    state.local = _ranked(product_errors(reference) if state.per_gemm else reference.local, state.policy)
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
    if state.per_gemm and all(local.unnamed for local in state.local):
        raise ScriptError(
            f"no product of {run.script} that has a name computes in blocks under {state.policy!s}",
            hint=f"mezzo run --policy {state.policy!s} says why each layer stays in BF16; end_layers=compute includes first and last",
        )
    return *_after_reference(state), run


def _after_reference(state: SearchState) -> tuple[FallbackVerdict, str, ModuleSet]:
    if unsteady := _judge_noise(state):
        return "not repeatable", unsteady, ()
    if coarse := _judge_rounding(state):
        return "undecided", coarse, ()
    return _searched(state)


def _measured(state: SearchState, policy: Policy, settings: FallbackSettings) -> Measured:
    """Run the training; runs that the search may request next, whatever the outcome of this one, may run at the same time."""
    assert state.reference is not None
    first, run = state.reference

    def replay(measure: Measure) -> object:
        clean: dict[str, Any] = {"ignored": {}, "rounding": {}, "trials": [], "operations": (), "answers": []}
        fresh = replace(state, measure=measure, note=lambda _: None, noise=0.0, instead="", tried_instead=0.0, **clean)
        return _after_reference(fresh)

    known = [*state.answers]
    measured, _ = state.measure(policy, settings, lambda: expected(replay, known, run, guesses_for(first)))
    state.answers.append(measured)
    return measured


def _judge_noise(state: SearchState) -> str:
    """Return why the runs cannot be compared, or an empty string: FP32 with its last bit changed should compute nearly the same."""
    state.note("FP32 again, its last bit changed")
    settings = FallbackSettings(role="noise", steps=state.steps, folder=state.folder, name="noise")
    worst = _largest(_measured(state, Policy.parse("fp32"), settings).steps)
    moved = [name for name, error in worst.items() if not error <= _MOVED]
    state.noise = max((error for name, error in worst.items() if name not in moved), default=0.0)
    if not worst:
        return "a second run in FP32 has no gradients to compare"
    if 2 * len(moved) <= len(worst):
        return ""
    name = max(moved, key=lambda n: worst[n])
    return (
        f"a second run in FP32, each output moved by its last bit, changes {len(moved)} of {len(worst)} gradients by "
        f"more than {_MOVED:.2g} ({name}: {worst[name]:.2g}). The runs differ in data or random numbers, "
        "or the training is unstable; precision cannot be judged"
    )


def _judge_rounding(state: SearchState) -> str:
    """Measure what rounding alone does to each gradient; return why none can be judged, or an empty string."""
    coarse = state.policy.compute if state.policy.in_blocks else state.policy.required_formats[0].name
    state.note(f"FP32 again, rounded as coarsely as {coarse}")
    settings = FallbackSettings(
        role="rounding", steps=state.steps, policy=state.policy, folder=state.folder, name="rounding"
    )
    worst = _largest(_measured(state, Policy.parse("fp32"), settings).steps)
    state.ignored = {name: error for name, error in worst.items() if not error <= LOST_IN_ROUNDING}
    state.rounding = {name: error for name, error in worst.items() if name not in state.ignored}
    if 2 * len(state.ignored) <= len(worst):
        return ""
    return (
        f"rounding each module's output as coarsely as {coarse} changes {len(state.ignored)} of {len(worst)} gradients by more than "
        f"{LOST_IN_ROUNDING:.2g}, in FP32 too: what rounding does to them hides what a module does"
    )


def _largest(steps: Sequence[StepErrors]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for step in steps:
        for name, error in step.errors.items():
            worst[name] = max(worst.get(name, 0.0), error)
    return worst


def _searched(state: SearchState) -> tuple[FallbackVerdict, str, ModuleSet]:
    judged, on_first = _without_any(state)
    before = state.trials[0]
    where = f"on {len(state.steps)} batches" if len(state.steps) > 1 else "on one batch"
    if before.passed:
        return _passed(state, where)
    if (rounding := _as_rounding(state, judged, where)) is not None:
        return rounding
    names = [local.module for local in state.local if not local.unnamed]
    costs = {local.module: float(local.flops) for local in state.local}
    search_modules = functools.partial(search, names, tolerance=1.0, costs=costs, whole=_not_opened(state))
    first = search_modules(functools.partial(_verify, state), known={(): on_first})
    if first is None:
        return _elsewhere(state)
    if len(state.steps) < 2:
        return _found(state, judged, first, "there was no fresh batch to check the set on")
    error = _verify(state, first, all_steps=True) if first else before.excess
    if error <= 1.0:
        return _found(state, judged, first, f"checked on {len(state.steps) - 1} fresh batches")
    state.note("a fresh batch needs more: the search continues over all batches")
    known = {(): before.excess, first: error}
    again = search_modules(functools.partial(_verify, state, all_steps=True), base=first, known=known)
    if again is None:
        return _elsewhere(state)
    return _found(state, judged, again, f"searched {where}, since the set of the first failed on another")


def _as_rounding(
    state: SearchState, judged: Sequence[StepErrors], where: str, kept: ModuleSet | None = None
) -> tuple[FallbackVerdict, str, ModuleSet] | None:
    """Return the verdict where no module (of ``kept``) makes more than rounding on its own; None if rounding does not explain the error."""
    if state.is_strict or not judged or stand_out(state.local, state.tolerance, inside=kept):
        return None
    explained, before = state.allowed.is_rounding(judged), state.trials[0]
    shared = (
        f"the gradient of {before.tensor} is off by {before.error:.2g}, {where}, but no {state.searched[:-1]} that was run by itself makes "
        "more than rounding"
    )
    if explained is None:
        return (
            "undecided",
            f"{shared}; rounding alone moves gradients as much, so whether one is lost cannot be told",
            (),
        )
    remedy = f"all of them together make the error, and keeping some in {state.higher} is no remedy"
    return ("not needed", f"{shared}: {remedy}", ()) if explained else None


_CHANGED_NOTHING = "the policy lowers nothing in these steps, or no value that it rounds, so this says nothing about it"


def _not_opened(state: SearchState) -> set[str]:
    """Return the containers that are not opened, because their own computation fails; an expensive one is opened anyway."""
    most = _EXPENSIVE * max((local.flops for local in state.local), default=0)
    return {local.module for local in state.local if _suspicion(local) > state.tolerance and local.flops <= most}


def _passed(state: SearchState, where: str) -> tuple[FallbackVerdict, str, ModuleSet]:
    if state.trials[0].error == 0:
        return "not needed", f"every gradient is the same to the bit as in FP32, {where}: {_CHANGED_NOTHING}", ()
    return (
        "not needed",
        f"with nothing kept in {state.higher} no gradient is off by more than rounding explains, {where}",
        (),
    )


def _found(
    state: SearchState, judged: Sequence[StepErrors], kept: ModuleSet, how: str
) -> tuple[FallbackVerdict, str, ModuleSet]:
    if (rounding := _as_rounding(state, judged, how, kept)) is not None:
        return rounding
    why = f"with fewer {state.searched} a gradient is off by more than is allowed; {how}"
    if _kept_share(state, kept) > _PAYS_UP_TO:
        _find_instead(state)
        return "does not pay", why, kept
    return "found", why, kept


def _kept_share(state: SearchState, kept: ModuleSet) -> float:
    """Return the share of all models' FLOPs that ``kept`` has."""
    models = sum(local.flops for local in state.local if local.unnamed)
    flops = {local.module: local.flops for local in state.local if not local.unnamed}
    whole = max(models, sum(flops[name] for name in outermost(flops)))  # a model may not run by itself
    return sum(flops.get(name, 0) for name in kept) / whole if whole else 0.0


def _find_instead(state: SearchState) -> None:
    """Find out what to use in the place of a set that does not pay: BF16 if it passes on the same batches, else FP32."""
    state.instead = "fp32"
    if state.policy.required_formats[0] in _INSTEAD.required_formats:
        return
    state.note("a set with most of the FLOPs does not pay: bf16 instead")
    settings = FallbackSettings(
        role="check", steps=state.steps, folder=state.folder, name="instead", ignored=tuple(state.ignored)
    )
    steps = _measured(state, _INSTEAD, settings).steps
    tolerance = state.tolerance if state.is_strict else default_tolerance(_INSTEAD)
    state.tried_instead = max((step.worst[0] for step in steps), default=math.inf)
    if state.tried_instead <= tolerance:
        state.instead = str(_INSTEAD)


def _elsewhere(state: SearchState) -> tuple[FallbackVerdict, str, ModuleSet]:
    """Return the verdict that no set of modules helps, and whether operations in FP32 do."""
    least = min(state.trials, key=lambda trial: trial.excess)
    error = f"a gradient's error is still too large ({least.tensor or 'no gradient'}: {least.error:.2g})"
    if state.per_gemm:
        return "elsewhere", f"with every product in BF16 {error}. What computes in BF16 in any case makes it", ()
    outcome = _operations_in_fp32(state) if state.has_op_lists else "Keras cannot keep single operations in FP32"
    where = "The cause is in the model's own forward or in the script, or it is not precision"
    return "elsewhere", f"with all named modules in FP32 {error}. {where}; {outcome}", ()


def _operations_in_fp32(state: SearchState) -> str:
    """Search for operations that help; return how that ended."""
    state.note("no set of modules helps: operations in FP32, wherever they run")
    verify = functools.partial(_verify, state, ())
    state.operations = needed(
        state.policy,
        lambda names: verify(operations=names),
        tolerance=1.0,
        without=state.trials[0].excess,
    )
    named = ", ".join(state.operations)
    outcome = f"with {named} in FP32 wherever they run it passes" if named else "nor does any operation in FP32 help"
    lossy = state.reference[0].lossy if state.reference is not None else None
    return outcome if lossy is None else f"{outcome}; {_lossy(lossy, state.policy)}"


def _lossy(product: LossyProduct, policy: Policy) -> str:
    form = (policy.storage if policy.in_blocks else policy.required_formats[0]).name.upper()
    return (
        f"the first product that {form} cannot hold is at {product.line}: it makes {min(1.0, product.lost):.0%} of the "
        "differences between its rows wrong, as of positions that round to one number"
    )


def _verify(state: SearchState, kept: ModuleSet, *, operations: ModuleSet = (), all_steps: bool = False) -> float:
    """Run the training with modules or operations in FP32 as well; return the furthest error as a multiple of what is allowed."""
    steps, init_scale = _run_check(state, kept, operations=operations, all_steps=all_steps)
    return _add_trial(state, kept, steps if all_steps else steps[:1], init_scale=init_scale, operations=operations)


def _without_any(state: SearchState) -> tuple[list[StepErrors], float]:
    """Run the training with nothing kept, on all batches; return the errors, and the furthest beyond what is allowed on the first batch."""
    steps, init_scale = _run_check(state, (), all_steps=True)
    _add_trial(state, (), steps, init_scale=init_scale)
    error, tensor = state.allowed.furthest(steps[:1])
    return steps, error / state.allowed.of(tensor)


def _run_check(
    state: SearchState, kept: ModuleSet, *, operations: ModuleSet = (), all_steps: bool
) -> tuple[list[StepErrors], float]:
    """Run the training with modules or operations in FP32 as well; return the errors by step, and the initial loss scale."""
    policy = in_fp32(_keeping(state, kept), operations)
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
    steps = _measured(state, policy, settings).steps
    # The first batches may overflow while the loss scale settles; an overflow after a finite batch fails.
    first = next((n for n, step in enumerate(steps) if math.isfinite(step.worst[0])), 0)
    return steps[first:], policy.init_scale if policy.loss_scale != "none" else 1.0


def _add_trial(
    state: SearchState, kept: ModuleSet, steps: Sequence[StepErrors], *, init_scale: float, operations: ModuleSet = ()
) -> float:
    error, tensor = state.allowed.furthest(steps)
    trial = Verification(
        kept=list(kept),
        operations=list(operations),
        error=error,
        tensor=tensor,
        allowed=state.allowed.of(tensor),
        init_scale=init_scale,
        steps=[step.step for step in steps] if any(math.isfinite(step.worst[0]) for step in steps) else [],
        passed=error <= state.allowed.of(tensor),
    )
    state.trials.append(trial)
    num, kind = (len(operations), "operation") if operations else (len(kept), state.searched[:-1])
    what = f"{num} {kind}{'' if num == 1 else 's'} in {state.higher}" if num else f"nothing in {state.higher}"
    state.note(f"{what}: {tensor} is off by {error:.2g}" if tensor else f"{what}: it fails")
    return trial.excess


def _keeping(state: SearchState, kept: Sequence[str]) -> Policy:
    name = "bf16_products" if state.per_gemm else "fp32_modules"
    return state.policy.replace(**{name: tuple(dict.fromkeys((*getattr(state.policy, name), *kept)))})


def _scale(state: SearchState, policy: Policy, kept: ModuleSet) -> float:
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


def _record(
    state: SearchState, run: RunRecord, verdict: FallbackVerdict, reason: str, kept: ModuleSet
) -> FallbackRecord:
    modules = [
        ModuleError(
            **local.model_dump(exclude={"largest", "kept"}), kept=covered(local.module, kept) and not local.unnamed
        )
        for local in state.local
    ]
    why = f"rounding alone moves its gradient by more than {LOST_IN_ROUNDING:.2g}, so it says nothing about a precision"
    return FallbackRecord(
        run=run,
        policy=str(state.policy),
        tolerance=state.tolerance,
        verdict=verdict,
        reason=reason,
        kept=list(kept),
        searched=state.searched,
        operations=list(state.operations),
        suggested=str(in_fp32(_keeping(state, kept), state.operations)),
        instead=state.instead,
        fp32_share=0.0 if state.per_gemm else _kept_share(state, kept),
        bf16_share=_kept_share(state, kept) if state.per_gemm else None,
        error_before=state.trials[0].error if state.trials else None,
        error_after=_after(state, kept) if verdict in ("found", "does not pay", "not needed") else None,
        steps=list(state.steps),
        modules=modules,
        verifications=state.trials,
        noise=state.noise,
        rounding=max(state.rounding.values(), default=None),
        ignored=[Note(what=n, value=f"{e:.2g}", reason=why) for n, e in list(state.ignored.items())[:_MAX_IGNORED]],
        notes=[*_notes(state), *(_in_keras(kept) if kept and not state.has_op_lists else [])],
    )


def _after(state: SearchState, kept: ModuleSet) -> float | None:
    of_set = [t for t in state.trials if t.kept == list(kept)]
    most_steps = max((len(t.steps) for t in of_set), default=0)
    return next((t.error for t in of_set if len(t.steps) == most_steps), None)


def _notes(state: SearchState) -> list[Note]:
    notes = [
        Note(
            what="weights",
            value="as at the beginning",
            reason="updates are suppressed, so that all runs compute the same; later in training other modules may fail",
        )
    ]
    if state.instead:
        tried = f"under {_INSTEAD}, on the same batches, a gradient is off by {state.tried_instead:.2g}"
        notes.append(
            Note(
                what="instead",
                value=state.instead,
                reason=tried if state.tried_instead else f"{state.policy.name} keeps too few digits",
            )
        )
    alone = [local for local in state.local if local.reason]
    if alone:
        value = f"{len(alone)} {state.searched}, as {alone[0].module}" if len(alone) > 1 else alone[0].module
        notes.append(Note(what="not run by themselves", value=value, reason=alone[0].reason))
    return notes


def _in_keras(kept: ModuleSet) -> list[Note]:
    """Return how a Keras script keeps layers in FP32 by itself."""
    why = f"an argument of the layer{'s' * (len(kept) > 1)} {', '.join(kept)}: Keras' way to keep a layer in FP32"
    return [Note(what="in the script", value='dtype="float32"', reason=why)]
