"""What to type after a prediction: a check of the script for the fastest GPU, and checkpointing where memory is tight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mezzo.records import Prediction, PredictRecord
from mezzo.records.run import BATCH
from mezzo.report.commands import TypedScript

_RUNS = ("fp32", "tf32", "fp16", "bf16", "fp16-master", "bf16-master", "fp16-pure", "bf16-pure", "fp8")
"""Policies of a prediction that ``mezzo run`` accepts under the same name."""
_SPARE = 0.13
"""Share of a GPU's memory to leave free for errors of the prediction."""
_MIN_GIB = 0.1
_MUCH = 0.5
"""Above this share of a GPU's memory, checkpointing is worth a slower step."""


def steps(record: PredictRecord) -> Iterator[tuple[str, str]]:
    """Yield reasons and commands to type after a prediction for a script; nothing for a model by name."""
    script = TypedScript.typed(record.command, record.model)
    if script is None:  # a model by name
        return
    arguments = tuple(word.replace(BATCH, str(record.batch)) for word in script.arguments)
    script = replace(script, arguments=arguments, variables=record.environment.variables)
    best = record.best
    if best is not None:
        why = f"see which policy trains like fp32, answered for {best.gpu}"
        yield why, script.under("check", gpu=best.gpu, **_policies(script))
    tight = [
        prediction
        for prediction in record.predictions
        if prediction.possible and not prediction.fits and prediction.gpu != "cpu"
    ]
    budgets = [(prediction, kept) for prediction in tight if (kept := _left_for_activations(prediction)) is not None]
    if budgets:
        prediction, kept = max(budgets, key=lambda pair: pair[0].throughput)
        why = f"it does not fit on {prediction.gpu} in {prediction.policy}; keep less for the backward pass"
        yield why, script.under("run", policy=prediction.policy, checkpoint=kept)
    elif best is not None and best.policy in _RUNS and best.device_bytes > _MUCH * (best.gpu_bytes or 0):
        why = "see what checkpointing costs and saves on this machine, with the same batch"
        yield why, script.under("compare", policies=best.policy, checkpoint="full")


def _policies(script: TypedScript) -> dict[str, str]:
    """Return the policies as typed, if they include one that a check can compare with FP32."""
    typed = script.options.get("--policies", ("",))[-1]
    return {"policies": typed} if {name.strip() for name in typed.split(",")} - {"", "fp32"} else {}


def _left_for_activations(prediction: Prediction) -> str | None:
    """Return how much may be kept for the backward pass if all else is as predicted; None if no memory is left for that."""
    kept = prediction.memory_bytes.get("activations", 0)
    if prediction.gpu_bytes is None or not kept or prediction.policy not in _RUNS:
        return None
    left = prediction.gpu_bytes * (1 - _SPARE) - (prediction.device_bytes - kept)
    gib = left / 2**30
    return None if gib < _MIN_GIB else f"{gib:.2g}GiB" if gib < 10 else f"{int(gib)}GiB"
