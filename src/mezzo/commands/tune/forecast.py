"""What the predictor says about configurations before any is run: the memory and the speed of each, and which need no run.

Only configurations under a policy that the predictor knows are predicted, and none that is compiled or checkpointed: it does not know what
these change. A configuration that is ruled out has its reason in the record; what the script does now is never ruled out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mezzo.commands.predict.page import beside_text
from mezzo.commands.tune.plan import Configuration
from mezzo.errors import MezzoError
from mezzo.gpus import Gpu
from mezzo.measure.checkpointing.wanted import bytes_text
from mezzo.measure.predict.calibrate import calibration_of
from mezzo.measure.predict.host import host_of
from mezzo.measure.predict.plan import failure, impossible, predict, recorded_as, to_record
from mezzo.measure.predict.script.plan import ScriptPlan, script_plan
from mezzo.measure.predict.tape_memory import predict_memory
from mezzo.policy import PRESETS
from mezzo.records import AS_IS, Note, TuneRow

MEMORY_ERROR = 0.1
"""Share by which a predicted step must exceed the limit to be ruled out: 90% of measured peaks lie within it of their predictions."""
_MEASURED_ON_CPU = ("parameters", "gradients", "optimizer", "activations")
"""The parts of a step that a search counts on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One configuration, predicted."""

    needed_bytes: int
    """What is allocated on a GPU; on a CPU the parts of a step that are counted there."""
    step_ms: float | None = None
    """None on a CPU."""
    rate: float | None = None
    """Samples or steps a second; None on a CPU."""
    rate_low: float = 0.0
    """10th percentile, from the predictor's own errors."""
    rate_high: float = 0.0
    comparable: object = None
    """Rates are compared where these are equal: all rates in samples a second, but in steps a second only those with the same arguments."""


def predictable(configuration: Configuration) -> bool:
    """Return whether the predictor knows what the configuration does."""
    return configuration.policy in PRESETS and not (configuration.compiles or configuration.checkpoint)


def forecasts(
    script: str,
    own: Sequence[str],
    configurations: Sequence[Configuration],
    *,
    gpu: Gpu | None,
    as_module: bool = False,
    in_time: Callable[[], bool] = lambda: True,
) -> tuple[dict[Configuration, Forecast], list[Note]]:
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
    notes: list[Note] = []
    wanted = [one for one in configurations if predictable(one) and not (gpu and impossible(gpu, one.policy))]
    for settings in dict.fromkeys(one.settings for one in wanted):
        alike = [one for one in wanted if one.settings == settings]
        shown = ", ".join(f"{name} {value}" for name, value in settings) or "the script's own options"
        if not in_time():
            notes.append(Note(what="not predicted", value=shown, reason="a fifth of the budget went to predictions"))
            continue
        arguments = [word.replace("{run}", "predict") for word in alike[0].arguments(own)]
        try:
            policies = to_record([one.policy for one in alike])
            traced = script_plan(script, arguments, policies, as_module=as_module, scaled=False, on_gpu=gpu is not None)
            for one in alike:
                if why := failure(one.policy, traced.refused):
                    notes.append(Note(what="not predicted", value=one.name, reason=why))
                else:
                    found[one] = _forecast(traced, one, gpu)
        except MezzoError as error:
            why = error.message.partition("\n")[0]
            notes.append(Note(what="not predicted", value=shown, reason=why))
    if gpu is not None and found:
        notes.append(host_of(gpu).note)
    return found, notes


def _forecast(traced: ScriptPlan, one: Configuration, gpu: Gpu | None) -> Forecast:
    if gpu is None:
        tape = traced.tapes[recorded_as(one.policy)].at(traced.batch)
        kinds = predict_memory(tape, workspace_bytes=0).by_kind_bytes
        return Forecast(needed_bytes=sum(kinds.get(kind, 0) for kind in _MEASURED_ON_CPU))
    tapes = traced.tapes
    if one.channels_last and not traced.channels_last:
        tapes = {policy: pair.stored_channels_last() for policy, pair in tapes.items()}
    prediction = predict(tapes, gpu, one.policy, batch=traced.batch, calibration=calibration_of(gpu), host=host_of(gpu))
    return Forecast(
        needed_bytes=prediction.allocated_bytes,
        step_ms=prediction.step_ms,
        rate=prediction.throughput,
        rate_low=prediction.throughput_low,
        rate_high=prediction.throughput_high,
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
    reasons: dict[Configuration, str] = {}
    for one, forecast in found.items():
        if one != now and limit_bytes is not None and forecast.needed_bytes > limit_bytes * (1 + MEMORY_ERROR):
            reasons[one] = (
                f"predicted to need {bytes_text(forecast.needed_bytes)} on {where}, above the limit of "
                f"{bytes_text(limit_bytes)} by more than the predictor's {MEMORY_ERROR:.0%}"
            )
    fits = {one: forecast for one, forecast in found.items() if one not in reasons and forecast.rate}
    for one, forecast in fits.items():
        rivals = [other for other in fits if fits[other].comparable == forecast.comparable]
        best = max(rivals, key=lambda other: fits[other].rate_low)
        if one != now and forecast.rate_high < fits[best].rate_low:
            times = (forecast.rate or 0.0) / (fits[best].rate or 1.0)
            reasons[one] = (
                f"predicted {times:.2g} times as fast as {best.name} on {where}, and slower even if the best end of its band "
                "meets the worst end of that one's"
            )
    return reasons


def beside(found: Mapping[Configuration, Forecast], rows: Sequence[TuneRow]) -> list[Note]:
    """Return each prediction beside the time of a step that its row measured on the same GPU, the farthest off first."""
    measured = {row.name: row.step_ms for row in rows}
    pairs = [(one, forecast.step_ms, measured.get(one.name)) for one, forecast in found.items()]
    both = [(one, predicted, ms) for one, predicted, ms in pairs if predicted is not None and ms is not None]
    both.sort(key=lambda pair: -abs(pair[1] / pair[2] - 1))
    return [Note(what="prediction", value=one.name, reason=beside_text(predicted, ms)) for one, predicted, ms in both]


def not_predicted(configurations: Sequence[Configuration]) -> list[Note]:
    """Return why some kinds of configurations are never ruled out by predictions."""
    left = {
        AS_IS: any(one.policy == AS_IS for one in configurations),
        "compiled": any(one.compiles for one in configurations),
        "checkpointed": any(one.checkpoint for one in configurations),
    }
    named = [name for name, present in left.items() if present]
    why = "the predictor does not know what the script's own precision, torch.compile or checkpointing from outside change"
    return [Note(what="never ruled out", value=", ".join(named), reason=why)] if named else []
