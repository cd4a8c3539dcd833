"""``mezzo predict``: time, memory and the largest batch of a training on GPUs that this machine does not have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from mezzo.cli import options, results, values
from mezzo.cli.first_word import check_first_word
from mezzo.cli.folders import new_folder
from mezzo.cli.shown_help import HelpPage
from mezzo.cli.words import typed, with_value
from mezzo.commands.predict.traced import ByName, Traced, assumptions, check_target, of_model, of_script
from mezzo.errors import UsageError, nearest

if TYPE_CHECKING:
    from mezzo.gpus import Gpu
    from mezzo.measure.predict.calibrate import Calibration
    from mezzo.measure.predict.host import Host
    from mezzo.measure.predict.sharding import GpuGroup
    from mezzo.measure.predict.step import Conditions
    from mezzo.records import Environment, Note, Prediction, PredictRecord

HELP = HelpPage(
    group="plan",
    says="predict time and memory on GPUs that you do not have",
    example="mezzo predict --gpus rtx-4090,a100-80gb train.py",
    shown=("--gpus", "--policies", "--batch", "--model", "--gpus-per-job", "--price", "--out", "-m"),
)


USUAL = "t4,l4,rtx-4090,a100-80gb,h100-sxm"
_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How the GPUs of one machine share a training."""

    gpus_per_job: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="GPUs of one machine that train together, each on a batch of its own."),
    ] = 1
    shard: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            callback=values.shard,
            help="How the GPUs share the training: ddp (each holds the whole model) or fsdp (each holds a shard).",
        ),
    ] = "ddp"


PredictTarget: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="[SCRIPT]", callback=check_first_word, help="The training script; leave it out with --model."
    ),
]


PredictBatch: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Samples in a batch.  [default: the script's own; 32 with --model]"),
]
PredictGpus: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="GPUS",
        callback=values.gpus_all_or_cpu,
        help="GPUs by name, separated by commas; all for every known GPU, the fastest first; cpu for this machine's, once calibrated.",
    ),
]
PredictPolicies: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="POLICIES",
        callback=values.presets,
        help=options.PRESETS_HELP,
    ),
]
PredictChannelsLast: TypeAlias = Annotated[
    bool, typer.Option("--channels-last", help="Store images channels-last, which 16-bit convolutions prefer.")
]
PredictPrice: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="PRICE",
        help="Price of an hour, such as 2.10 or h100=2.5,a100=1.3: adds the cost of a million samples.",
    ),
]
PredictSlurm: TypeAlias = Annotated[
    bool, typer.Option("--slurm", help="Also print the #SBATCH lines that request the fastest GPU.")
]
PredictHost: TypeAlias = Annotated[
    str,
    typer.Option(
        "--host",
        metavar="HOST",
        help="What the host takes for each operation: server, here (measured on this machine), or microseconds.",
    ),
]
PredictCalibrate: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--calibrate", help="Measure the rates of this machine's GPU, or CPU, for two minutes, and save them."
    ),
]


def predict(
    target: PredictTarget = None,
    arguments: options.Arguments = None,
    *,
    by_name: ByName,
    batch: PredictBatch = None,
    gpus: PredictGpus = USUAL,
    policies: PredictPolicies = "fp32,tf32,bf16,fp16",
    channels_last: PredictChannelsLast = False,
    host: PredictHost = "server",
    price: PredictPrice = None,
    slurm: PredictSlurm = False,
    as_module: options.AsModule = False,
    sharing: Sharing,
    calibrate: PredictCalibrate = False,
    out: options.Out = None,
    log_to: options.LogTo = None,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Predict throughput, memory and the largest batch of a training on GPUs that you do not have.

    One step of the unedited script, or of a model by name, is traced on this machine without computing its numbers. Formulas fitted
    to public measurements give its time on each GPU; a simulation of torch's allocator gives its memory.

    Write {batch} in the script's arguments, as in --batch-size {batch}, if the script makes its batches without a DataLoader.
    """
    if target is not None or by_name.model is not None or not calibrate:
        check_target(target, by_name, as_module=as_module)
    cards, with_cpu = _cards(gpus)
    prices = prices_of(price, cards)

    from mezzo.measure.environment import environment
    from mezzo.measure.predict import plan
    from mezzo.measure.predict.calibrate import rates_used
    from mezzo.measure.predict.sharding import check_job

    job = check_job(sharing.gpus_per_job, sharing.shard)
    here = environment("cpu")  # before model libraries set environment variables of their own
    wanted = plan.check_policies(values.names_in(policies))
    if calibrate:
        _calibrate()
        if target is None and by_name.model is None:
            return
    size = batch or _BATCH
    own = _cpu_calibration() if with_cpu else None
    trace_model = partial(of_model, by_name, wanted, batch=size, channels_last=channels_last)
    trace_script = partial(of_script, str(target), arguments or [], wanted, batch, as_module, num_gpus=job.num_gpus)
    traced = trace_model(calibration=own) if target is None else trace_script(calibration=own)
    plans = [traced, *(trace_model(checkpoint=one) for one in by_name.plans)]
    if channels_last and not traced.channels_last:
        tapes = {policy: pair.stored_channels_last() for policy, pair in traced.tapes.items()}
        plans = [replace(traced, tapes=tapes), *plans[1:]]
    channels_last = channels_last or bool(traced.channels_last)
    driver = _host(host)
    conditions = [_conditions(gpu, job, driver) for gpu in cards]
    cases = product(plans, conditions, wanted)
    predictions = [_predicted(one, where, policy, prices.get(where.gpu.name)) for one, where, policy in cases]
    predictions += [] if traced.on_cpu is None else [traced.on_cpu]
    if gpus.lower() == values.ALL:
        predictions.sort(key=lambda prediction: -prediction.throughput)
    notes = [
        driver.note,
        *rates_used(predictions),
        *assumptions(channels_last, traced, job, only_options=target is None),
    ]
    record = _record(here, traced, job, predictions, notes, channels_last=channels_last)
    record = _with_best(record, plans, conditions, slurm)
    results.finish(record, new_folder(out, "predict"), as_json=as_json, log_to=log_to, verbose=verbose)


def _cards(gpus: str) -> tuple[list[Gpu], bool]:
    """Return the GPUs of ``--gpus``, and whether this machine's CPU is among the names."""
    from mezzo.gpus import GPUS, gpu_named

    names = list(GPUS) if gpus.lower() == values.ALL else values.names_in(gpus)
    listed = (gpu_named(one, option="--gpus") for one in names if one.lower() != values.CPU)
    return list({gpu.name: gpu for gpu in listed}.values()), values.CPU in map(str.lower, names)


def _record(
    here: Environment,
    traced: Traced,
    job: GpuGroup,
    predictions: list[Prediction],
    notes: list[Note],
    *,
    channels_last: bool,
) -> PredictRecord:
    from mezzo.measure.predict.plan import MEMORY_HEADROOM
    from mezzo.records import PredictRecord

    return PredictRecord(
        environment=here,
        command=list(typed()),
        model=traced.name,
        input=traced.size,
        unit=traced.unit,
        batch=traced.batch,
        gpus_per_job=job.num_gpus,
        shard=job.shard if job.num_gpus > 1 else "",
        optimizer=traced.optimizer,
        channels_last=channels_last,
        headroom=MEMORY_HEADROOM,
        predictions=predictions,
        assumptions=[*traced.assumptions, *notes],
        no_other_batch=traced.no_other_batch,
        data=traced.data,
        loader=traced.loader,
    )


def _conditions(gpu: Gpu, job: GpuGroup, host: Host) -> Conditions:
    from mezzo.measure.predict.calibrate import calibration_of
    from mezzo.measure.predict.step import Conditions

    return Conditions(gpu=gpu, job=job, calibration=calibration_of(gpu), host=host)


def _host(text: str) -> Host:
    """Return the host that ``--host`` names.

    Raises:
        UsageError: it names none.
    """
    from mezzo.measure.predict.host import SERVER, Host, measured

    if text == "server":
        return SERVER
    if text == "here":
        return measured()
    try:
        microseconds = float(text)
    except ValueError:
        microseconds = math.nan
    if not 0 < microseconds < math.inf:
        raise UsageError(
            f"--host {text!r} names no host; allowed: server, here, or microseconds for each operation, above 0",
            hint=f"type: {with_value('--host', 'here')}",
        )
    return Host(operation_s=microseconds * 1e-6, source="requested by --host")


def _predicted(traced: Traced, where: Conditions, policy: str, price_per_hour: float | None) -> Prediction:
    """Return the prediction for ``policy``, with its cost where the price of one GPU is known."""
    from mezzo.measure.predict import plan

    prediction = plan.predict(
        traced.tapes,
        where.gpu,
        policy,
        batch=traced.batch,
        job=where.job,
        calibration=where.calibration,
        host=where.host,
        refused=traced.refused,
        data=traced.data,
        loader=traced.loader,
    )
    if traced.checkpoint:  # no row that was fitted to has it
        unmeasured = {"validated": False, "not_validated": "measurements"}
        prediction = prediction.model_copy(update={"checkpoint": traced.checkpoint, **unmeasured})
    if price_per_hour is None or not prediction.possible:
        return prediction
    cost = cost_per_million(prediction.throughput, price_per_hour * where.job.num_gpus)
    return prediction.model_copy(update={"cost_per_million": cost})


def _with_best(record: PredictRecord, plans: list[Traced], conditions: list[Conditions], slurm: bool) -> PredictRecord:
    """Return the record with the details of the fastest GPU that fits."""
    from mezzo.measure.predict.plan import detail_of

    on_gpus = [one for one in record.predictions if one.gpu != values.CPU]
    best = record.model_copy(update={"predictions": on_gpus}).best
    if best is None:
        return record
    where = next(one for one in conditions if one.gpu.name == best.gpu)
    traced = next(one for one in plans if one.checkpoint == best.checkpoint)
    same = [one for one in record.predictions if (one.gpu, one.checkpoint) == (best.gpu, best.checkpoint)]
    curves = [one for one in same if one.possible and one.largest_batch]
    detail = detail_of(traced.tapes, best, curves, batch=traced.batch, conditions=where)
    if not slurm:
        return record.model_copy(update={"detail": detail})
    lines, assumed = slurm_lines(where.gpu, best, num_gpus=where.job.num_gpus)
    return record.model_copy(update={"detail": detail, "slurm": lines, "assumptions": [*record.assumptions, *assumed]})


def _calibrate() -> None:
    """Measure this machine's rates, save them, and note where."""
    from mezzo.measure.predict.calibrate import calibrate, this_kind

    calibration = calibrate(this_kind(), note=results.note)
    calibration.save()
    results.note(
        f"{calibration.device}: steps of the probes ran at {calibration.low:.0%} to {calibration.high:.0%} of the predicted speed; "
        f"saved in {calibration.path}"
    )


def _cpu_calibration() -> Calibration:
    from mezzo.measure.predict.calibrate import device_name, saved_calibration

    calibration = saved_calibration(device_name("cpu"))
    if calibration is None:
        raise UsageError(f"{device_name('cpu')}: not calibrated", hint="run mezzo predict --calibrate once")
    return calibration


_CPUS = 8
_SPARE_GIB = 8
_MILLION, _HOUR_S = 1e6, 3600.0


def prices_of(text: str | None, gpus: Sequence[Gpu]) -> dict[str, float]:
    """Return the price of an hour of each GPU by name, from ``2.10`` or ``h100=2.5,a100-80gb=1.3``.

    Raises:
        UsageError: a price is not a positive number, or is for a GPU that is not predicted.
    """
    from mezzo.gpus import gpu_named

    if text is None:
        return {}
    if "=" not in text:
        return dict.fromkeys([gpu.name for gpu in gpus], _price(text, text))
    prices: dict[str, float] = {}
    names = [gpu.name for gpu in gpus]
    for part in text.split(","):
        name, _, price = part.partition("=")
        gpu = gpu_named(name.strip(), option="--price")
        if gpu.name not in names:
            raise UsageError(
                f"--price {text!r} has a price for {gpu.name}, which --gpus does not name; {nearest(gpu.name, names)}",
                hint=f"type: {with_value('--gpus', ','.join([*names, gpu.name]))}",
            )
        prices[gpu.name] = _price(price, text)
    return prices


def _price(text: str, whole: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not price > 0 or math.isinf(price):
        raise UsageError(
            f"--price {whole!r} has {text!r} where a price for an hour belongs; allowed: a number above 0",
            hint=f"type: {with_value('--price', '2.10')}; by GPU: --price h100=2.5,a100-80gb=1.3",
        )
    return price


def cost_per_million(throughput: float, price_per_hour: float) -> float:
    """Return the price of a million samples."""
    return price_per_hour * _MILLION / throughput / _HOUR_S


def slurm_lines(gpu: Gpu, prediction: Prediction, *, num_gpus: int = 1) -> tuple[list[str], list[Note]]:
    """Return the lines of a batch script that request ``num_gpus`` of ``gpu`` on one machine, and what they assume."""
    from mezzo.records import Note

    needs = (
        "memory, which is not predicted,"
        if prediction.no_memory
        else f"{prediction.device_bytes / 2**30:.1f} GiB of GPU memory"
    )
    gib = max(16, 8 * math.ceil(num_gpus * (prediction.device_bytes / 2**30 + _SPARE_GIB) / 8))
    kind = (
        gpu.name.split("-")[0] if gpu.name.startswith(("a100", "h100", "h200", "v100")) else gpu.name.replace("-", "_")
    )
    each = "" if num_gpus == 1 else f", for each of {num_gpus} GPUs"
    lines = [
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks=1",
        f"#SBATCH --gres=gpu:{kind}:{num_gpus}",
        f"#SBATCH --cpus-per-task={_CPUS * num_gpus}",
        f"#SBATCH --mem={gib}G",
    ]
    assumed = [
        Note(
            what="--gres",
            value=f"gpu:{kind}:{num_gpus}",
            reason="each cluster names its GPUs: sinfo -o '%G' lists its names",
        ),
        Note(
            what="--mem",
            value=f"{gib}G",
            reason=f"the step's {needs} and {_SPARE_GIB} GiB for data{each}, in steps of 8",
        ),
        Note(what="--cpus-per-task", value=str(_CPUS * num_gpus), reason="for loading data; its time is not predicted"),
        Note(what="--time", value="not set", reason="Mezzo does not know how many steps you train"),
    ]
    return lines, assumed
