"""Predictions from a trace of a model by name or of a script, for ``mezzo predict`` and for the commands that predict what they measure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mezzo.children.signals import Stopped, stoppable
from mezzo.cli import results, values
from mezzo.cli.script import Script, keep_input_for
from mezzo.cli.values import NONE, names_in
from mezzo.cli.words import typed, value_after
from mezzo.error_texts import is_of_full_host
from mezzo.errors import MezzoError, ScriptError, UsageError, nearest
from mezzo.frameworks import framework_called, framework_of

if TYPE_CHECKING:
    from mezzo.cli.script import Script
    from mezzo.gpus import Gpu
    from mezzo.measure.predict.calibrate import Calibration
    from mezzo.measure.predict.named import NamedModel
    from mezzo.measure.predict.plan import Tapes
    from mezzo.measure.predict.sharding import GpuGroup
    from mezzo.records import DataSet, LoaderRate, Note, Prediction, RealGpus, RunRecord


_PYTORCH = "torch"


@dataclass(frozen=True, kw_only=True)
class ByName:
    """A model by name, with options for what a script would decide itself."""

    model: Annotated[
        str | None,
        typer.Option(
            metavar="LIBRARY:NAME",
            callback=values.model,
            help="timm:NAME, torchvision:NAME or transformers:NAME. Nothing is downloaded.",
        ),
    ] = None
    sequence: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens of a sequence, with --model.  [default: 128]")
    ] = None
    image: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Height and width of images, with --model.  [default: 224]")
    ] = None
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="OPTIMIZER",
            callback=values.optimizer,
            help="With --model: adamw, adam, sgd (with momentum), adagrad, rmsprop or adafactor.  [default: adamw]",
        ),
    ] = None
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="PLANS",
            callback=values.plans,
            help="With --model: also predict checkpointed: full, every-2, selective, or the memory to keep for the backward pass, "
            "such as 12GiB.",
        ),
    ] = None

    @property
    def plans(self) -> list[str]:
        """The plans of activation checkpointing to predict in addition to none."""
        return [one.strip() for one in (self.checkpoint or "").split(",") if one.strip()]

    @property
    def trained_by(self) -> str:
        """The optimizer."""
        return self.optimizer or "adamw"

    def built(self) -> NamedModel:
        """Return the model, with tensors that have no numbers.

        Raises:
            UsageError: there is no such model, or a size does not belong to it.
        """
        from mezzo.measure.predict.named import named_model

        return named_model(str(self.model), image=self.image, sequence=self.sequence)


def check_target(target: str | None, by_name: ByName, *, as_module: bool) -> None:
    """Check that either a script or a model is named, with options that belong to it."""
    model = by_name.model
    if (target is None) == (model is None):
        given = "neither" if target is None else f"the script {target!r} and --model {model!r}"
        raise UsageError(
            f"predict needs either a script or a model; it was given {given}",
            hint=_hint_for_both(target),
        )
    if target is None and as_module:
        raise UsageError(f"-m belongs to a script, not to --model {model}", hint="leave it out")
    misplaced = {name: value for name, value in vars(by_name).items() if value is not None and target is not None}
    for name, value in misplaced.items():
        if name == "checkpoint":
            raise UsageError(
                f"--{name} {value} belongs to --model, and {target} is a script",
                hint="call mezzo.checkpoint(model, sample, ...) in the script: its step is then predicted as it is",
            )
        raise UsageError(
            f"--{name} {value} belongs to --model; {target} has its own",
            hint=f"leave it out, or put it after {target} if it is the script's own argument",
        )
    if target is not None and not as_module and not Path(target).is_file():
        near = sorted(
            path.name for path in (Path(target).parent if Path(target).parent.is_dir() else Path()).glob("*.py")
        )
        close = [str(Path(target).with_name(one)) for one in get_close_matches(Path(target).name, near, n=1)]
        raise UsageError(
            f"there is no script {target!r}; {nearest(Path(target).name, near) if near else 'the folder has no scripts'}",
            hint=_instead(target, close)
            if close
            else "check the path; for a model by name, type --model timm:resnet50",
        )


def _hint_for_both(target: str | None) -> str:
    """Return the line with only the script, or with an example of one."""
    words = [word for word in typed() if word != "--model" and not word.startswith("--model=")]
    if target is None:
        return f"type: {shlex.join([*words, 'train.py'])}, or: mezzo predict --model timm:resnet50"
    model = value_after("--model", typed())
    return f"type: {shlex.join(word for word in words if word != model)}, or leave out {target}"


def _instead(target: str, near: Sequence[str]) -> str:
    words = [near[0] if word == target else word for word in typed()]
    return f"type: {shlex.join(words)}"


@dataclass(frozen=True)
class Traced:
    """What was traced: the tapes by recorded policy, and what they are of."""

    name: str
    size: str
    unit: str
    batch: int
    optimizer: str
    tapes: dict[str, Tapes]
    assumptions: list[Note]
    channels_last: bool | None = None
    """Whether images are stored channels-last; None where there are none."""
    checkpoint: str = ""
    """The plan of activation checkpointing; empty where everything is kept."""
    no_other_batch: str = ""
    """Why other batch sizes do not follow from a script's own; empty if they do."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """The error of a script, by the recorded policy under which it fails."""
    data: DataSet | None = None
    """A script's data set; None without a loader."""
    loader: LoaderRate | None = None
    """What a script's loader delivers on this machine."""
    on_cpu: Prediction | None = None
    """The prediction for this machine's CPU, if one was requested."""
    framework: str = "torch"


def of_model(
    by_name: ByName,
    policies: list[str],
    *,
    batch: int,
    channels_last: bool,
    checkpoint: str | None = None,
    calibration: Calibration | None = None,
) -> Traced:
    """Return the tapes of a model by name, checkpointed by a plan if one is given, and its prediction for a calibrated CPU."""
    from mezzo.measure.predict import named, plan
    from mezzo.measure.predict.placeholder_numbers import numbers_read
    from mezzo.measure.predict.result_sizes import sizes_assumed

    model, optimizer, built = str(by_name.model), by_name.trained_by, by_name.built()
    tapes: dict[str, Tapes] = {}
    for policy in plan.to_record(policies):
        how = f", checkpointed: {checkpoint}" if checkpoint else ""
        results.note(f"tracing {model} in {_for(policy, policies)}{how}")
        tape_of = partial(
            named.tape_of, built, policy, optimizer=optimizer, channels_last=channels_last, checkpoint=checkpoint
        )
        try:
            tapes[policy] = plan.Tapes.record(tape_of, batch)
        except MezzoError:
            raise
        except Exception as error:  # a library's constructors and forward passes raise what they like
            raise _untraceable(model, policy, error) from error
    on_cpu = None
    if calibration is not None:
        tape = named.tape_of(built, "fp32", batch, optimizer=optimizer, channels_last=channels_last, gpu=False)
        on_cpu = plan.predict_cpu(tape, calibration, batch=batch)
    layout = channels_last if built.unit == "images" else None
    firsts = [pair.first for pair in tapes.values()]
    read, sized = (
        list(dict.fromkeys(chain(*lines))) for lines in zip(*((t.read_at, t.sized_at) for t in firsts), strict=True)
    )
    assumed = (
        [*built.notes] + ([numbers_read("model", read)] if read else []) + ([sizes_assumed(sized)] if sized else [])
    )
    facts: dict[str, Any] = {"channels_last": layout, "checkpoint": checkpoint or "", "on_cpu": on_cpu}
    return Traced(model, built.size, built.unit, batch, optimizer, tapes, assumed, **facts)


def _for(recorded: str, policies: list[str]) -> str:
    """Return the policies that a trace serves."""
    from mezzo.measure.predict.plan import recorded_as

    return ", ".join([name for name in policies if recorded_as(name) == recorded] or [f"{recorded}, the baseline"])


def _untraceable(model: str, policy: str, error: Exception) -> UsageError:
    why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if isinstance(error, MemoryError) or is_of_full_host(str(error)):
        return UsageError(
            f"{model} does not fit this machine's memory: its constructor reads numbers, so its weights must be allocated ({why})",
            hint="predict on a machine with more memory, or name a smaller model of the family",
        )
    if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
        why = f"its control flow depends on numbers: {why}"
    return UsageError(
        f"one step of {model} cannot be traced without numbers in {policy}: {why}",
        hint="check --image and --sequence; a model whose control flow depends on its data cannot be predicted",
    )


def of_script(
    target: str,
    arguments: list[str],
    policies: list[str],
    batch: int | None,
    as_module: bool,
    *,
    calibration: Calibration | None = None,
    num_gpus: int = 1,
) -> Traced:
    """Return the tapes of a script, and its prediction for a calibrated CPU.

    Raises:
        UsageError: its framework is not predicted for a CPU, or for several GPUs.
    """
    keep_input_for(target, as_module=as_module)
    framework = framework_of(target, kind="module" if as_module else "script")
    if framework != _PYTORCH and num_gpus > 1:
        raise UsageError(
            f"--gpus-per-job {num_gpus} predicts PyTorch scripts, whose gradients and layers are known; {target} is none",
            hint="leave it out: one GPU of the job computes what this prediction says",
        )
    if framework != _PYTORCH and calibration is not None:
        raise UsageError(
            f"--gpus cpu predicts PyTorch, whose operations the calibration measured; {target} is none",
            hint="leave cpu out; mezzo run measures the script on this machine",
        )
    if framework != _PYTORCH:
        return _of_other_framework(target, arguments, policies, batch, as_module, framework=framework)
    results.note(f"tracing {target} in {', '.join(policies)}, each at two batch sizes")
    with stoppable() as stop, stop.at_once(), tracing(target, as_module=as_module):
        from mezzo.measure.predict import plan  # these import torch, as the other process does at the same time
        from mezzo.measure.predict.script.plan import script_on_cpu, script_plan
        from mezzo.measure.predict.script.tapes import hint_under

        script_tapes = script_plan(
            target, arguments, plan.to_record(policies), batch=batch, as_module=as_module, times_loader=True
        )
        on_cpu = None
        if calibration is not None:
            on_cpu = script_on_cpu(target, arguments, calibration, batch=batch, as_module=as_module)
            slower = plan.slower_than(on_cpu.throughput, math.inf, script_tapes.loader)
            on_cpu = on_cpu.model_copy(update={"slower": slower})
    failures = [plan.failure(policy, script_tapes.refused) for policy in policies]
    if all(failures):
        raise ScriptError(f"{target} {failures[0]}", hint=hint_under(policies[0]))
    return Traced(name=target, size="the script's own inputs", on_cpu=on_cpu, **vars(script_tapes))


def _of_other_framework(
    target: str, arguments: list[str], policies: list[str], batch: int | None, as_module: bool, *, framework: str
) -> Traced:
    """Return the tapes of a Keras or Paddle script, which one real step in each of two formats shows."""
    from mezzo.commands.predict.observed import observed_plan
    from mezzo.measure.predict.plan import failure, to_record
    from mezzo.policy import Policy

    for policy in policies:
        framework_called(framework).check(Policy.parse(policy))
    recorded = to_record(policies)
    results.note(
        f"running {target} for two steps, {'twice' if len(recorded) > 1 else 'once'}, to see the operations of a step"
    )
    plan = observed_plan(target, arguments, recorded, batch=batch, as_module=as_module)
    failures = [failure(policy, plan.refused) for policy in policies]
    if all(failures):
        raise ScriptError(f"{target} {failures[0]}", hint="predict it in FP32: --policies fp32,tf32")
    return Traced(name=target, size="the script's own inputs", framework=framework, **vars(plan))


def tracing(target: str, *, as_module: bool) -> AbstractContextManager[None]:
    """Let all traces of a script inside share their imports, which begin now."""
    from mezzo.measure.predict.script.tapes import shared_imports

    return shared_imports(target, kind="module" if as_module else "script")


def assumptions(channels_last: bool, traced: Traced, job: GpuGroup, *, only_options: bool) -> list[Note]:
    """Return what every prediction assumes.

    Args:
        channels_last: whether predictions are for channels-last images.
        traced: the traced script or model.
        job: how many GPUs train together.
        only_options: whether only the options decide the layout.
    """
    from mezzo.measure.predict.tape_memory import DRIVER_BYTES
    from mezzo.records import Note

    default = "--channels-last was not given" if only_options else "as the script stores its images"
    faster = "" if channels_last else "; 16-bit convolutions are faster with --channels-last"
    own_layout = traced.channels_last
    why = "requested by --channels-last" if channels_last and (only_options or not own_layout) else default + faster
    layout = Note(what="layout", value="channels-last" if channels_last else "channels-first", reason=why)
    by_default = {
        _PYTORCH: "torch's default is convolutions in TF32 and matrix products in FP32, which is between the two"
    }
    common = [
        *([] if own_layout is None else [layout]),
        Note(
            what="fp32 and tf32",
            value="all products in one of them",
            reason=by_default.get(traced.framework, "the framework's default is TF32 on a GPU that has it"),
        ),
        _input_pipeline(traced),
    ]
    if traced.framework != _PYTORCH:
        return common
    return [
        *common,
        Note(
            what="driver and context",
            value=f"{DRIVER_BYTES >> 20} MiB",
            reason="it depends on the driver; of cuDNN's workspaces, only copies of channels-first operands are counted",
        ),
        _sharing(job),
    ]


def _input_pipeline(traced: Traced) -> Note:
    from mezzo.records import Note
    from mezzo.report.formatting import rate_text

    loader, what = traced.loader, "input pipeline"
    if loader is None or loader.samples_per_s is None:
        why = f"its loader was not timed: {loader.reason}" if loader is not None else "its time is not predicted"
        return Note(what=what, value="keeps up", reason=why)
    workers = f"{loader.workers} workers" if loader.workers else "no workers"
    return Note(
        what=what,
        value=f"{'less than ' if loader.is_bound else ''}{rate_text(loader.samples_per_s)} samples/s",
        reason=f"what the loader alone delivers on this machine with {workers}, in {loader.batches} batches; another host differs",
    )


def _sharing(job: GpuGroup) -> Note:
    from mezzo.measure.predict.sharding import LINK_SHARE
    from mezzo.records import Note

    if job.num_gpus == 1:
        return Note(what="step", value="eager, one GPU", reason="torch.compile is not predicted")
    return Note(
        what="step",
        value=f"eager, {job.num_gpus} GPUs of one machine, {job.shard}",
        reason=f"links reach {LINK_SHARE:.0%} of their speed, an assumption: no measured job confirms it",
    )


_USUAL = ("t4", "a100-80gb", "h100-sxm", "rtx-4090")
"""The GPUs to predict if none is named."""


def named_gpus(text: str | None) -> list[Gpu] | None:
    """Return the GPUs of ``--gpus``; None for the usual ones.

    Raises:
        UsageError: a GPU is unknown.
    """
    from mezzo.gpus import gpu_named

    if text is None:
        return None
    if text.lower() == NONE:
        return []
    gpus = [gpu_named(name, option="--gpus") for name in names_in(text)]
    return list({gpu.name: gpu for gpu in gpus}.values())


def predicted_for(
    script: Script,
    runs: Sequence[RunRecord],
    gpus: list[Gpu] | None,
    say: Callable[[str], None] = results.note,
    *,
    limit_s: float | None = None,
) -> RealGpus | None:
    """Return predictions for the policies of ``runs``; None if none were requested, a signal stopped it, or the runs were on a GPU.

    Args:
        script: the script of the runs.
        runs: the measured runs.
        gpus: the GPUs; None for the usual ones, if no run was on a GPU in its own formats.
        say: prints a line.
        limit_s: time after which tracing ends; None for no limit.
    """
    from mezzo.gpus import GPUS, find_gpu

    trained = [run for run in runs if len(run.steps) and run.error is None]
    measured = any(run.environment.device == "cuda" and not run.effective.emulated for run in trained)
    if not trained or gpus == [] or (gpus is None and measured):
        return None
    library = trained[0].library

    cards = gpus or [GPUS[name] for name in _USUAL]
    if library != _PYTORCH and len(trained[0].ranks) > 1:
        from mezzo.records import RealGpus

        why = f"a step in {library} is observed in one process, and this job has {len(trained[0].ranks)}"
        return RealGpus(gpus=[gpu.name for gpu in cards], reason=why)
    how = (
        "tracing the script without computing its numbers"
        if library == _PYTORCH
        else "from the operations of one real step"
    )
    say(f"predicting a step on {', '.join(gpu.name for gpu in cards)}: {how}")
    arguments = [word.replace("{run}", "predict") for word in script.arguments or ()]
    policies = {run.policy_shown: run.policy for run in trained if not run.checkpoint}
    settings: dict[str, Any] = {"as_module": script.as_module, "limit_s": limit_s}
    if library != _PYTORCH:
        from mezzo.commands.predict.observed import observed_plan
        from mezzo.measure.predict.script.plan import real_gpus

        with stoppable() as stop, suppress(Stopped):
            predicted = real_gpus(script.target, arguments, policies, cards, plan_of=observed_plan, **settings)
            return None if stop.stopped else predicted.model_copy(update={"observed": True})
        return None
    with stoppable() as stop, suppress(Stopped), stop.at_once(), tracing(script.target, as_module=script.as_module):
        # these import torch, as the other process does at the same time
        from mezzo.measure.predict.calibrate import device_name, saved_calibration
        from mezzo.measure.predict.script.plan import real_gpus

        here = trained[0].environment
        own = saved_calibration(device_name("cpu")) if here.device == "cpu" else None
        calibration = own if own is not None and own.threads == here.threads else None
        predicted = real_gpus(script.target, arguments, policies, cards, calibration=calibration, **settings)
        gpu = find_gpu(here.gpu) if here.gpu and here.device != "cpu" else None
        if gpu is not None and gpu.name in predicted.gpus:
            predicted = predicted.model_copy(update={"own_gpu": gpu.name})
        return None if stop.stopped else predicted
    return None


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


def _fits(record: RunRecord, script: Script, policy: str) -> tuple[list[Note], str]:
    """Return the largest batches, or why there are none."""
    from mezzo.gpus import find_gpu
    from mezzo.policy import PRESETS, canonical

    here = record.environment
    gpu = find_gpu(here.gpu) if here.gpu is not None and here.device != "cpu" else None
    if gpu is None:
        return [], f"the predictor does not know the memory of {here.gpu if here.device != 'cpu' else 'a CPU'}"
    policies = [name for name in dict.fromkeys((canonical(policy), "bf16")) if name in PRESETS]
    results.note(f"memory ran out; tracing {script.target} to find what would fit, which may take a few minutes")
    try:
        return _predicted(gpu, script, policies), ""
    except MezzoError as error:
        return [], error.message


def _predicted(gpu: Gpu, script: Script, policies: list[str]) -> list[Note]:
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
            refused=traced.refused,
            data=traced.data,
        )
        if not prediction.possible or prediction.largest_batch is None:
            reasons.append(
                _reason(
                    f"under {policy} not known",
                    prediction.reason or "other batch sizes do not follow from the script's own",
                )
            )
        elif prediction.largest_batch:
            limits = {"data set": "; these are all of the data set", "measured": "; larger ones fit as well"}
            free = f"{plan.MEMORY_HEADROOM:.0%} of its memory left free{limits.get(prediction.largest_limit, '')}"
            why = f"predicted for {gpu.name}, {free}; the script's own is {traced.batch}"
            reasons.append(_reason(f"{prediction.largest_batch} {traced.unit} under {policy}", why))
        else:
            reasons.append(_reason(f"none under {policy}", f"predicted for {gpu.name}: not even one sample fits"))
    return reasons


def _reason(value: str, why: str) -> Note:
    from mezzo.records import Note

    return Note(what=_WHAT, value=value, reason=why)
