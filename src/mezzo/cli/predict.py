"""``mezzo predict``: time, memory and the largest batch of a training on GPUs that are not here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mezzo.cli import options, renting, results
from mezzo.cli.folders import new_folder
from mezzo.cli.words import typed
from mezzo.errors import MezzoError, UsageError, nearest

if TYPE_CHECKING:
    from mezzo.measure.predict.plan import Tapes
    from mezzo.records import Prediction, PredictionDetail, Reason

USUAL = "t4,l4,rtx-4090,a100-80gb,h100-sxm"
_BATCH = 32


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
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples in a batch.  [default: the script's own; 32 with --model]"),
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence, with --model.  [default: 128]")
    ] = None,
    image: Annotated[
        int | None, typer.Option(min=1, help="Height and width of images, with --model.  [default: 224]")
    ] = None,
    gpus: Annotated[
        str,
        typer.Option(metavar="NAMES", help="GPUs by name, separated by commas, or all, the fastest first."),
    ] = USUAL,
    policies: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="fp32, tf32, fp16, bf16, fp16-master, bf16-master, fp16-pure, bf16-pure, fp8."
        ),
    ] = "fp32,tf32,bf16,fp16",
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="With --model: adamw, adam, sgd (with momentum), adagrad, rmsprop or adafactor.  [default: adamw]"
        ),
    ] = None,
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="Store images channels-last, which 16-bit convolutions prefer.")
    ] = False,
    price: Annotated[
        str | None,
        typer.Option(
            metavar="PRICE", help="Price of an hour, as 2.10 or h100=2.5,a100=1.3: adds the cost of a million samples."
        ),
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Also print the #SBATCH lines that ask for the fastest GPU.")
    ] = False,
    as_module: options.AsModule = False,
    out: options.Out = None,
    log_to: options.LogTo = None,
    as_json: options.Json = False,
) -> None:
    """Predict throughput, memory and the largest batch of a training on GPUs that you do not have.

    One step of the unedited script, or of a model by name, is traced on this machine without numbers, priced on each GPU by
    formulas fitted on public measurements, and its memory replayed through a simulation of torch's allocator.

    Write {batch} in the script's arguments, as in --batch-size {batch}, if the script makes its batches without a DataLoader.
    """
    from mezzo.gpus import GPUS, gpu_named
    from mezzo.measure.environment import environment
    from mezzo.measure.predict import plan
    from mezzo.records import PredictRecord

    wanted = plan.check_policies([name.strip() for name in policies.split(",")])
    cards = (
        list(GPUS.values()) if gpus == "all" else [gpu_named(name.strip(), option="--gpus") for name in gpus.split(",")]
    )
    cards = list({gpu.name: gpu for gpu in cards}.values())
    prices = renting.prices_of(price, cards)
    _check_target(target, model, sequence=sequence, image=image, optimizer=optimizer, as_module=as_module)
    traced = (
        _of_model(str(model), wanted, batch or _BATCH, (image, sequence), optimizer or "adamw", channels_last)
        if target is None
        else _of_script(target, arguments or [], wanted, batch, as_module)
    )
    own_layout, channels_last = traced.channels_last, channels_last or bool(traced.channels_last)
    made = [
        plan.predict(traced.tapes, gpu, policy, batch=traced.batch, channels_last=channels_last)
        for gpu in cards
        for policy in wanted
    ]
    made = [_priced(one, prices.get(one.gpu)) for one in made]
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
        assumptions=[*traced.assumptions, *_assumptions(channels_last, own_layout, asked=target is None)],
    )
    record = record.model_copy(update=_of_best(record.best, made, traced, channels_last, slurm, record.assumptions))
    results.finish(record, new_folder(out, "predict"), as_json=as_json, log_to=log_to)


def _check_target(
    target: str | None,
    model: str | None,
    *,
    sequence: int | None,
    image: int | None,
    optimizer: str | None,
    as_module: bool,
) -> None:
    """Check that either a script or a model is named, with options that belong to it."""
    from mezzo.measure.predict import named

    if (target is None) == (model is None):
        given = "neither" if target is None else f"the script {target!r} and --model {model!r}"
        raise UsageError(
            f"predict needs a script or a model, and not both; it was given {given}",
            hint="type mezzo predict train.py, or mezzo predict --model timm:resnet50",
        )
    if target is None and as_module:
        raise UsageError(f"-m belongs to a script, not to --model {model}", hint="leave it out")
    if optimizer is not None and optimizer not in named.OPTIMIZERS:
        raise UsageError(
            f"--optimizer {optimizer!r} cannot be predicted; {nearest(optimizer, named.OPTIMIZERS)}",
            hint="type --optimizer adamw, or predict your own script, which has its own optimizer",
        )
    own = {"--sequence": sequence, "--image": image, "--optimizer": optimizer}
    for name, value in own.items():
        if target is not None and value is not None:
            raise UsageError(
                f"{name} {value} belongs to --model; {target} has its own",
                hint=f"leave it out, or put it after {target} if it is the script's own argument",
            )
    if target is not None and not as_module and not Path(target).is_file():
        near = sorted(
            path.name for path in (Path(target).parent if Path(target).parent.is_dir() else Path()).glob("*.py")
        )
        raise UsageError(
            f"there is no script {target!r}; {nearest(Path(target).name, near) if near else 'the folder has no scripts'}",
            hint="check the path; for a model by name, type --model timm:resnet50",
        )


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
    channels_last: bool | None = None
    """Whether images are stored channels-last; None where there are none."""


def _of_model(
    model: str,
    policies: list[str],
    batch: int,
    sizes: tuple[int | None, int | None],
    optimizer: str,
    channels_last: bool,
) -> _Traced:
    from mezzo.measure.predict import named, plan

    found = named.named_model(model, image=sizes[0], sequence=sizes[1])
    tapes: dict[str, Tapes] = {}
    for policy in plan.to_record(policies):
        results.note(f"tracing {model} in {_for(policy, policies)}")
        tape_of = partial(named.tape_of, found, policy, optimizer=optimizer, channels_last=channels_last)
        try:
            tapes[policy] = plan.Tapes.record(tape_of, batch)
        except MezzoError:
            raise
        except Exception as error:  # a library's constructors and forward passes raise what they like
            raise _untraceable(model, policy, error) from error
    layout = channels_last if found.unit == "images" else None
    return _Traced(model, found.size, found.unit, batch, optimizer, tapes, [], layout)


def _for(recorded: str, policies: list[str]) -> str:
    """Return the policies that a trace serves."""
    from mezzo.measure.predict.plan import recorded_as

    return ", ".join([name for name in policies if recorded_as(name) == recorded] or [f"{recorded}, the baseline"])


def _untraceable(model: str, policy: str, error: Exception) -> UsageError:
    why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return UsageError(
            f"{model} does not fit this machine's memory: its constructor reads numbers, so its weights must be made ({why})",
            hint="predict on a machine with more memory, or name a smaller model of the family",
        )
    if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
        why = f"its control flow depends on numbers: {why}"
    return UsageError(
        f"one step of {model} cannot be traced without numbers in {policy}: {why}",
        hint="check --image and --sequence; a model whose control flow depends on its data cannot be predicted",
    )


def _of_script(target: str, arguments: list[str], policies: list[str], batch: int | None, as_module: bool) -> _Traced:
    from mezzo.measure.predict import plan
    from mezzo.measure.predict.script_plan import script_plan

    results.note(f"tracing {target} in {', '.join(policies)}, each at two batch sizes")
    found = script_plan(target, arguments, plan.to_record(policies), batch=batch, as_module=as_module)
    size = "the script's own inputs"
    return _Traced(
        target, size, found.unit, found.batch, found.optimizer, found.tapes, found.assumptions, found.channels_last
    )


def _priced(one: Prediction, price_per_hour: float | None) -> Prediction:
    if price_per_hour is None or not one.possible:
        return one
    return one.model_copy(update={"cost_per_million": renting.cost_per_million(one.throughput, price_per_hour)})


def _of_best(
    best: Prediction | None,
    made: list[Prediction],
    traced: _Traced,
    channels_last: bool,
    slurm: bool,
    assumptions: list[Reason],
) -> dict[str, PredictionDetail | list[str] | list[Reason]]:
    """Return what the record has of its fastest prediction alone."""
    from mezzo.gpus import GPUS
    from mezzo.measure.predict.detail import detail_of

    if best is None:
        return {}
    gpu = GPUS[best.gpu]
    curves = [one for one in made if one.gpu == best.gpu and one.possible and one.largest_batch]
    detail = detail_of(traced.tapes, gpu, best, curves, batch=traced.batch, channels_last=channels_last)
    if not slurm:
        return {"detail": detail}
    lines, assumed = renting.slurm_lines(gpu, best)
    return {"detail": detail, "slurm": lines, "assumptions": [*assumptions, *assumed]}


def _assumptions(channels_last: bool, own_layout: bool | None, *, asked: bool) -> list[Reason]:
    """Return what every prediction assumes; ``asked`` says that the layout is only what the options ask for."""
    from mezzo.measure.predict.memory import DRIVER_BYTES
    from mezzo.records import Reason

    given = "--channels-last was not given" if asked else "as the script stores its images"
    faster = "" if channels_last else "; 16-bit convolutions are faster with --channels-last"
    why = "--channels-last asks for it" if channels_last and (asked or not own_layout) else given + faster
    layout = Reason(what="layout", value="channels-last" if channels_last else "channels-first", reason=why)
    return [
        *([] if own_layout is None else [layout]),
        Reason(
            what="fp32 and tf32",
            value="all products in one of them",
            reason="torch by itself computes convolutions in TF32 and matrix products in FP32, which lies between the two",
        ),
        Reason(what="input pipeline", value="keeps up", reason="its time is not predicted"),
        Reason(
            what="driver and context",
            value=f"{DRIVER_BYTES >> 20} MiB",
            reason="it differs by driver; cuDNN's workspaces come on top, at times 10% to 15% of the memory",
        ),
        Reason(what="step", value="eager, one GPU", reason="torch.compile and several GPUs are not predicted"),
    ]
