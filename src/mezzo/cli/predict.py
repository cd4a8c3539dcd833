"""``mezzo predict``: time, memory and the largest batch of a training on GPUs that are not here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mezzo.cli import options, results
from mezzo.cli.folders import new_folder
from mezzo.cli.words import typed
from mezzo.errors import UsageError, nearest

if TYPE_CHECKING:
    from mezzo.records import Reason

USUAL = "t4,l4,rtx-4090,a100-80gb,h100-sxm"


def predict(
    model: Annotated[
        str,
        typer.Option(
            metavar="LIBRARY:NAME", help="timm:NAME, torchvision:NAME or transformers:NAME. Nothing is downloaded."
        ),
    ],
    batch: Annotated[int, typer.Option(min=1, help="Images or sequences in a batch.")] = 32,
    sequence: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence.  [default: 128]")] = None,
    image: Annotated[int | None, typer.Option(min=1, help="Height and width of images.  [default: 224]")] = None,
    gpus: Annotated[str, typer.Option(metavar="NAMES", help="GPUs by name, separated by commas, or all.")] = USUAL,
    policies: Annotated[
        str, typer.Option(metavar="NAMES", help="fp32, tf32, fp16, bf16, fp16-pure, bf16-pure.")
    ] = "fp32,tf32,bf16,fp16",
    optimizer: Annotated[
        str, typer.Option(help="adamw, adam, sgd (with momentum), adagrad, rmsprop or adafactor.")
    ] = "adamw",
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="Store images channels-last, which 16-bit convolutions prefer.")
    ] = False,
    out: options.Out = None,
    as_json: options.Json = False,
) -> None:
    """Predict throughput, memory and the largest batch of a model's training on GPUs that you do not have.

    One step is traced on this machine without numbers, priced on each GPU by formulas fitted on public measurements, and
    its memory replayed through a simulation of torch's allocator.
    """
    from mezzo.gpus import GPUS, gpu_named
    from mezzo.measure.environment import environment
    from mezzo.measure.predict import named, plan
    from mezzo.records import PredictRecord

    if optimizer not in named.OPTIMIZERS:
        raise UsageError(f"--optimizer {optimizer!r} cannot be predicted", hint=nearest(optimizer, named.OPTIMIZERS))
    wanted = plan.check_policies([name.strip() for name in policies.split(",")])
    cards = list(GPUS.values()) if gpus == "all" else [gpu_named(name.strip()) for name in gpus.split(",")]
    found = named.named_model(model, image=image, sequence=sequence)
    tapes: dict[str, plan.Tapes] = {}
    for policy in dict.fromkeys(["fp32", *map(plan.recorded_as, wanted)]):
        results.note(f"tracing {model} in {policy}")
        tapes[policy] = plan.Tapes.record(
            lambda n, policy=policy: named.tape_of(  # type: ignore[misc]
                found, policy, n, optimizer=optimizer, channels_last=channels_last
            ),
            batch,
        )
    made = [
        plan.predict(tapes, gpu, policy, batch=batch, channels_last=channels_last) for gpu in cards for policy in wanted
    ]
    if gpus == "all":
        made.sort(key=lambda one: -one.throughput)
    record = PredictRecord(
        environment=environment("cpu"),
        command=list(typed()),
        model=model,
        input=found.size,
        unit=found.unit,
        batch=batch,
        optimizer=optimizer,
        channels_last=channels_last,
        headroom=plan.HEADROOM,
        predictions=made,
        assumptions=_assumptions(channels_last, images=found.unit == "images"),
    )
    results.finish(record, new_folder(out, "predict"), as_json=as_json, tensorboard=None)


def _assumptions(channels_last: bool, *, images: bool) -> list[Reason]:
    from mezzo.measure.predict.memory import DRIVER_BYTES
    from mezzo.records import Reason

    layout = Reason(
        what="layout",
        value="channels-last" if channels_last else "channels-first",
        reason="as asked for" if channels_last else "16-bit convolutions are faster with --channels-last",
    )
    return [
        *([layout] if images else []),
        Reason(what="input pipeline", value="keeps up", reason="its time is not predicted"),
        Reason(
            what="driver and context",
            value=f"{DRIVER_BYTES >> 20} MiB",
            reason="it differs by driver; cuDNN's workspaces come on top, at times 10% to 15% of the memory",
        ),
        Reason(what="step", value="eager, one GPU", reason="torch.compile and several GPUs are not predicted"),
    ]
