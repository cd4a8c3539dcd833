"""Predict compared policies on GPUs that this machine does not have: trace the comparison's script once, and price it on each GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mezzo.errors import MezzoError
from mezzo.gpus import Gpu
from mezzo.measure.predict.calibration.calibrate import calibration_of, rates_used
from mezzo.measure.predict.plan import PREDICTED, predict, to_record
from mezzo.measure.predict.script.plan import script_plan
from mezzo.policy import Policy
from mezzo.policyfields import DYNAMIC_SCALE
from mezzo.records import AS_IS, RealGpus, Reason

_NOT_PRICED = ("loss_scale", "init_scale", *DYNAMIC_SCALE, "arithmetic")
"""Fields of a policy that change neither its casts nor its storage."""


def real_gpus(
    script: str,
    arguments: Sequence[str],
    policies: Mapping[str, str],
    gpus: Sequence[Gpu],
    *,
    as_module: bool = False,
    limit_s: float | None = None,
) -> RealGpus:
    """Return the predictions, or why there are none; never raises.

    Args:
        script: the path of the script, or a module's name.
        arguments: the script's own arguments.
        policies: the text of each policy by the name to show.
        gpus: the GPUs.
        as_module: whether ``script`` is a module's name.
        limit_s: time after which tracing ends; None for no limit.
    """
    wanted = {shown: name for shown, text in policies.items() if (name := priced_as(text))}
    left_out = [
        Reason(what=shown, value="not predicted", reason=_why_not(text))
        for shown, text in policies.items()
        if shown not in wanted
    ]
    nothing = RealGpus(
        gpus=[gpu.name for gpu in gpus],
        not_predicted=left_out,
        reason="no policy of this comparison can be predicted",
    )
    if not wanted:
        return nothing
    try:
        plan = script_plan(script, arguments, to_record(list(wanted.values())), as_module=as_module, limit_s=limit_s)
        found = [
            predict(
                plan.tapes,
                gpu,
                name,
                batch=plan.batch,
                channels_last=bool(plan.channels_last),
                calibration=calibration_of(gpu),
                refused=plan.refused,
            ).model_copy(update={"policy": shown})
            for gpu in gpus
            for shown, name in wanted.items()
        ]
    except Exception as error:  # the comparison is complete without predictions
        why = error.message if isinstance(error, MezzoError) else f"{type(error).__name__}: {error}"
        return nothing.model_copy(update={"reason": why.partition("\n")[0]})
    return RealGpus(
        gpus=nothing.gpus,
        batch=plan.batch,
        unit=plan.unit,
        predictions=found,
        not_predicted=left_out,
        assumptions=[*plan.assumptions, *rates_used(found)],
    )


def priced_as(text: str) -> str:
    """Return the preset whose prediction is also that of ``text``, the text of a policy in a record; empty if there is none."""
    name = text.split(":")[0]
    if name not in PREDICTED:
        return ""
    preset = Policy.parse(name)
    same = Policy.parse(text).replace(**{field: getattr(preset, field) for field in _NOT_PRICED})
    return name if same == preset else ""


def _why_not(text: str) -> str:
    if text == AS_IS:
        return "the casts of the script's own mixed precision on a GPU do not show on this machine"
    return "only a preset's own casts are predicted"
