"""``mezzo predict``: time, memory and the largest batch of a training on GPUs that are not here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from mezzo.cli import options, results
from mezzo.cli.folders import new_folder
from mezzo.cli.words import typed
from mezzo.errors import MezzoError, UsageError, nearest

if TYPE_CHECKING:
    from mezzo.measure.predict.plan import Tapes
    from mezzo.records import Reason

USUAL = "t4,l4,rtx-4090,a100-80gb,h100-sxm"


def predict(
    target: Annotated[
        str | None, typer.Argument(metavar="[SCRIPT]", help="The training script; leave it out with --model.")
    ] = None,
    arguments: options.Arguments = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="LIBRARY:NAME", help="timm:NAME, torchvision:NAME or transformers:NAME. Nothing is downloaded."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images or sequences in a batch of --model.")] = 32,
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
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="PLANS",
            help="With --model: also predict checkpointed: full, every-2, selective, or what may wait for backward, as 12GiB.",
        ),
    ] = None,
    out: options.Out = None,
    log_to: options.LogTo = None,
    as_json: options.Json = False,
) -> None:
    """Predict throughput, memory and the largest batch of a training on GPUs that you do not have.

    One step of the unedited script, or of a model by name, is traced on this machine without numbers, priced on each GPU by
    formulas fitted on public measurements, and its memory replayed through a simulation of torch's allocator.
    """
    from mezzo.gpus import GPUS, gpu_named
    from mezzo.measure.environment import environment
    from mezzo.measure.predict import named, plan
    from mezzo.records import PredictRecord

    if optimizer not in named.OPTIMIZERS:
        raise UsageError(f"--optimizer {optimizer!r} cannot be predicted", hint=nearest(optimizer, named.OPTIMIZERS))
    wanted = plan.check_policies([name.strip() for name in policies.split(",")])
    cards = (
        list(GPUS.values()) if gpus == "all" else [gpu_named(name.strip(), option="--gpus") for name in gpus.split(",")]
    )
    if (target is None) == (model is None):
        raise UsageError(
            "predict needs a script or a model, and not both", hint="mezzo predict train.py, or --model timm:resnet50"
        )
    if checkpoint is not None and target is not None:
        raise UsageError(
            f"--checkpoint {checkpoint} belongs to --model, and {target} is a script",
            hint="call mezzo.checkpoint(model, sample, ...) in the script: its step is then predicted as it is",
        )
    traced = (
        _of_model(str(model), wanted, batch, (image, sequence), optimizer, channels_last)
        if target is None
        else _of_script(target, arguments or [], wanted)
    )
    made = [
        plan.predict(traced.tapes, gpu, policy, batch=traced.batch, channels_last=channels_last)
        for gpu in cards
        for policy in wanted
    ]
    for kept in [] if checkpoint is None else [name.strip() for name in checkpoint.split(",")]:
        again = _of_model(str(model), wanted, batch, (image, sequence), optimizer, channels_last, kept)
        made += [
            plan.predict(again.tapes, gpu, policy, batch=batch, channels_last=channels_last).model_copy(
                update={"checkpoint": kept}
            )
            for gpu in cards
            for policy in wanted
        ]
    if gpus == "all":
        made.sort(key=lambda one: -one.throughput)
    record = PredictRecord(
        environment=environment("cpu"),
        command=list(typed()),
        model=traced.name,
        input=traced.size,
        unit=traced.unit,
        batch=traced.batch,
        optimizer=traced.optimizer,
        channels_last=channels_last,
        headroom=plan.HEADROOM,
        predictions=made,
        assumptions=[*traced.assumptions, *_assumptions(channels_last, images=traced.unit == "images")],
    )
    results.finish(record, new_folder(out, "predict"), as_json=as_json, log_to=log_to)


@dataclass(frozen=True)
class _Traced:
    """What was traced, by recorded policy."""

    name: str
    size: str
    unit: str
    batch: int
    optimizer: str
    tapes: dict[str, Tapes]
    assumptions: list[Reason]


def _of_model(
    model: str,
    policies: list[str],
    batch: int,
    sizes: tuple[int | None, int | None],
    optimizer: str,
    channels_last: bool,
    checkpoint: str | None = None,
) -> _Traced:
    from mezzo.measure.predict import named, plan

    found = named.named_model(model, image=sizes[0], sequence=sizes[1])
    tapes: dict[str, Tapes] = {}
    for policy in plan.to_record(policies):
        results.note(f"tracing {model} in {policy}" + (f", checkpointed: {checkpoint}" if checkpoint else ""))
        tape_of = partial(
            named.tape_of, found, policy, optimizer=optimizer, channels_last=channels_last, checkpoint=checkpoint
        )
        try:
            tapes[policy] = plan.Tapes.record(tape_of, batch)
        except MezzoError:
            raise
        except Exception as error:  # a library's constructors and forward passes raise what they like
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise UsageError(
                f"one step of {model} cannot be traced without numbers in {policy}: {why}",
                hint="check --image and --sequence; a model whose control flow depends on its data cannot be predicted",
            ) from error
    return _Traced(model, found.size, found.unit, batch, optimizer, tapes, [])


def _of_script(target: str, arguments: list[str], policies: list[str]) -> _Traced:
    from mezzo.measure.predict import plan
    from mezzo.measure.predict.scripted import tape_of_script
    from mezzo.records import Reason

    tapes: dict[str, Tapes] = {}
    for policy in plan.to_record(policies):
        results.note(f"tracing {target} in {policy}")
        tapes[policy] = plan.Tapes(tape_of_script(target, arguments, policy), None)
    stated = Reason(
        what="numbers that the script reads",
        value="1.0, 0 or False",
        reason="traced tensors have no numbers: what depends on a loss or a sample runs as with these",
    )
    return _Traced(target, "the script's own batch", "steps", 1, "the script's optimizer", tapes, [stated])


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
