"""What would fit after a script has run out of a GPU's memory: the largest batch that is predicted for its policy, and for bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mezzo.cli import results
from mezzo.commands.predict.traced import tracing
from mezzo.errors import MezzoError
from mezzo.launch.signals import stoppable

if TYPE_CHECKING:
    from mezzo.cli.script import Script
    from mezzo.gpus import Gpu
    from mezzo.records import Reason, RunRecord

_WHAT = "largest batch"


def with_fits(record: RunRecord, script: Script, policy: str) -> RunRecord:
    """Return ``record`` with the largest batch that fits; unchanged if memory did not run out.

    Args:
        record: the record of a run that has ended.
        script: the script, as it was typed.
        policy: the policy as typed.
    """
    oom = record.out_of_memory
    if oom is None:
        return record
    settings, why = _fits(record, script, policy)
    not_known = [*oom.not_known, *([_reason("not predicted", why)] if why else [])]
    oom = oom.model_copy(update={"settings": [*settings, *oom.settings], "not_known": not_known})
    return record.model_copy(update={"out_of_memory": oom})


def _fits(record: RunRecord, script: Script, policy: str) -> tuple[list[Reason], str]:
    """Return the largest batches, or why there are none."""
    from mezzo.gpus import find_gpu
    from mezzo.measure.predict.plan import PREDICTED
    from mezzo.policy import canonical

    here = record.environment
    gpu = find_gpu(here.gpu) if here.gpu is not None and here.device != "cpu" else None
    if gpu is None:
        return [], f"the predictor does not know the memory of {here.gpu if here.device != 'cpu' else 'a CPU'}"
    policies = [name for name in dict.fromkeys((canonical(policy), "bf16")) if name in PREDICTED]
    results.note(f"memory ran out; tracing {script.target} to find what would fit, which may take a few minutes")
    try:
        return _predicted(gpu, script, policies), ""
    except MezzoError as error:
        return [], error.message


def _predicted(gpu: Gpu, script: Script, policies: list[str]) -> list[Reason]:
    from mezzo.measure.predict import plan
    from mezzo.measure.predict.script.plan import script_plan

    with stoppable() as stop, stop.at_once(), tracing(script.target, as_module=script.as_module):
        traced = script_plan(
            script.target, script.arguments or [], plan.to_record(policies), as_module=script.as_module
        )
    reasons = []
    for policy in policies:
        prediction = plan.predict(
            traced.tapes,
            gpu,
            policy,
            batch=traced.batch,
            channels_last=bool(traced.channels_last),
            refused=traced.refused,
        )
        if not prediction.possible or prediction.largest_batch is None:
            reasons.append(
                _reason(
                    f"under {policy} not known",
                    prediction.reason or "other batch sizes do not follow from the script's own",
                )
            )
        elif prediction.largest_batch:
            why = f"predicted for {gpu.name}, {plan.HEADROOM:.0%} of its memory left free; the script's own is {traced.batch}"
            reasons.append(_reason(f"{prediction.largest_batch} {traced.unit} under {policy}", why))
        else:
            reasons.append(_reason(f"none under {policy}", f"predicted for {gpu.name}: not even one sample fits"))
    return reasons


def _reason(value: str, why: str) -> Reason:
    from mezzo.records import Reason

    return Reason(what=_WHAT, value=value, reason=why)
