"""What the predictor says of configurations before any is run: what each needs and how fast it is, and which need no run.

Predicted are configurations under a policy that the predictor knows, neither compiled nor checkpointed: what these change, it does not
know. What is ruled out is left out for a reason in the record; what the script does now never is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mezzo.errors import MezzoError
from mezzo.gpus import Gpu
from mezzo.measure.checkpointing.wanted import bytes_text
from mezzo.measure.predict.calibration.calibrate import calibration_of
from mezzo.measure.predict.memory.of_tape import predict_memory
from mezzo.measure.predict.plan import PREDICTED, failure, impossible, predict, recorded_as, to_record
from mezzo.measure.predict.script.plan import ScriptPlan, script_plan
from mezzo.measure.tune.configurations import Configuration
from mezzo.records import AS_IS, Reason

MEMORY_ERROR = 0.1
"""By how much more than the limit a step must be predicted to need: 90% of measured peaks lie within that of their predictions."""
_MEASURED_ON_CPU = ("parameters", "gradients", "optimizer", "activations")
"""What a search counts of a step on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One configuration, predicted."""

    needed_bytes: int
    """Allocated on a GPU; on a CPU what is counted there of a step."""
    rate: float | None = None
    """Samples or steps a second; None on a CPU."""
    rate_low: float = 0.0
    """10th percentile, from the predictor's own errors."""
    rate_high: float = 0.0
    comparable: object = None
    """Rates are compared where these are equal: in samples a second all, in steps a second those with the same arguments."""


def predictable(configuration: Configuration) -> bool:
    """Return whether the predictor knows what the configuration does."""
    return configuration.policy in PREDICTED and not (configuration.compiles or configuration.checkpoint)


def forecasts(
    script: str,
    own: Sequence[str],
    configurations: Sequence[Configuration],
    *,
    gpu: Gpu | None,
    as_module: bool = False,
    in_time: Callable[[], bool] = lambda: True,
) -> tuple[dict[Configuration, Forecast], list[Reason]]:
    """Return predictions by configuration, and what could not be predicted; nothing is run.

    Args:
        script: the path of the script, or a module's name.
        own: its arguments as typed.
        configurations: all of a search.
        gpu: the GPU; None for this machine's CPU, whose time is not predicted for scripts.
        as_module: whether ``script`` is a module's name.
        in_time: whether there is time for one more trace.
    """
    found: dict[Configuration, Forecast] = {}
    notes: list[Reason] = []
    wanted = [one for one in configurations if predictable(one) and not (gpu and impossible(gpu, one.policy))]
    for settings in dict.fromkeys(one.settings for one in wanted):
        playing = [one for one in wanted if one.settings == settings]
        shown = ", ".join(f"{name} {value}" for name, value in settings) or "the script's own options"
        if not in_time():
            notes.append(Reason(what="not predicted", value=shown, reason="a fifth of the budget went to predictions"))
            continue
        arguments = [word.replace("{run}", "predict") for word in playing[0].arguments(own)]
        try:
            policies = to_record([one.policy for one in playing])
            traced = script_plan(script, arguments, policies, as_module=as_module, scaled=False, on_gpu=gpu is not None)
            for one in playing:
                if why := failure(one.policy, traced.refused):
                    notes.append(Reason(what="not predicted", value=one.name, reason=why))
                else:
                    found[one] = _forecast(traced, one, gpu)
        except MezzoError as error:
            why = error.message.partition("\n")[0]
            notes.append(Reason(what="not predicted", value=shown, reason=why))
    return found, notes


def _forecast(traced: ScriptPlan, one: Configuration, gpu: Gpu | None) -> Forecast:
    if gpu is None:
        tape = traced.tapes[recorded_as(one.policy)].at(traced.batch)
        kinds = predict_memory(tape, workspace_bytes=0).by_kind_bytes
        return Forecast(needed_bytes=sum(kinds.get(kind, 0) for kind in _MEASURED_ON_CPU))
    made = predict(
        traced.tapes,
        gpu,
        one.policy,
        batch=traced.batch,
        channels_last=one.channels_last or bool(traced.channels_last),
        calibration=calibration_of(gpu),
    )
    return Forecast(
        needed_bytes=made.allocated_bytes,
        rate=made.throughput,
        rate_low=made.throughput_low,
        rate_high=made.throughput_high,
        comparable="" if traced.unit == "samples" else one.settings,
    )


def ruled_out(
    found: Mapping[Configuration, Forecast], *, limit_bytes: int | None, where: str, now: Configuration
) -> dict[Configuration, str]:
    """Return the configurations that need no run, each with the reason.

    Args:
        found: predictions by configuration.
        limit_bytes: the most that a step may take; None for no limit.
        where: the name of the GPU or CPU, for the reasons.
        now: what the script does now, which is never ruled out.
    """
    out: dict[Configuration, str] = {}
    for one, forecast in found.items():
        if one != now and limit_bytes is not None and forecast.needed_bytes > limit_bytes * (1 + MEMORY_ERROR):
            out[one] = (
                f"predicted to need {bytes_text(forecast.needed_bytes)} on {where}, above the limit of "
                f"{bytes_text(limit_bytes)} by more than the predictor's {MEMORY_ERROR:.0%}"
            )
    fits = {one: forecast for one, forecast in found.items() if one not in out and forecast.rate}
    for one, forecast in fits.items():
        rivals = [other for other in fits if fits[other].comparable == forecast.comparable]
        best = max(rivals, key=lambda other: fits[other].rate_low)
        if one != now and forecast.rate_high < fits[best].rate_low:
            times = (forecast.rate or 0.0) / (fits[best].rate or 1.0)
            out[one] = (
                f"predicted {times:.2g} times as fast as {best.name} on {where}, and slower even at the best end of its band "
                "and the worst of that one's"
            )
    return out


def not_predicted(configurations: Sequence[Configuration]) -> list[Reason]:
    """Return why some kinds of configurations are never ruled out by predictions."""
    left = {
        AS_IS: any(one.policy == AS_IS for one in configurations),
        "compiled": any(one.compiles for one in configurations),
        "checkpointed": any(one.checkpoint for one in configurations),
    }
    named = [name for name, present in left.items() if present]
    why = "the predictor does not know what the script's own precision, torch.compile or checkpointing from outside change"
    return [Reason(what="never ruled out", value=", ".join(named), reason=why)] if named else []
