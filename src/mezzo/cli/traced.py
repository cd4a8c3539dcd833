"""What ``mezzo predict`` traces: a model by name, or a script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mezzo.cli import results
from mezzo.cli.script import keep_input_for
from mezzo.errors import MezzoError, UsageError, nearest

if TYPE_CHECKING:
    from mezzo.measure.predict.plan import Tapes
    from mezzo.records import Reason


def check_target(
    target: str | None,
    model: str | None,
    *,
    own: Mapping[str, str | int | None],
    as_module: bool,
) -> None:
    """Check that either a script or a model is named, with options that belong to it; ``own`` are those of models."""
    from mezzo.measure.predict import named

    if (target is None) == (model is None):
        given = "neither" if target is None else f"the script {target!r} and --model {model!r}"
        raise UsageError(
            f"predict needs a script or a model, and not both; it was given {given}",
            hint="type mezzo predict train.py, or mezzo predict --model timm:resnet50",
        )
    if target is None and as_module:
        raise UsageError(f"-m belongs to a script, not to --model {model}", hint="leave it out")
    optimizer = own["--optimizer"]
    if isinstance(optimizer, str) and optimizer not in named.OPTIMIZERS:
        raise UsageError(
            f"--optimizer {optimizer!r} cannot be predicted; {nearest(optimizer, named.OPTIMIZERS)}",
            hint="type --optimizer adamw, or predict your own script, which has its own optimizer",
        )
    for name, value in own.items():
        if target is not None and value is not None and name == "--checkpoint":
            raise UsageError(
                f"{name} {value} belongs to --model, and {target} is a script",
                hint="call mezzo.checkpoint(model, sample, ...) in the script: its step is then predicted as it is",
            )
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
class Traced:
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
    checkpoint: str = ""
    """The plan of activation checkpointing; empty where everything is kept."""


def of_model(
    model: str,
    policies: list[str],
    *,
    batch: int,
    sizes: tuple[int | None, int | None],
    optimizer: str,
    channels_last: bool,
    checkpoint: str | None = None,
) -> Traced:
    """Return the tapes of a model by name, checkpointed by a plan if one is given; ``sizes`` are those of images and sequences."""
    from mezzo.measure.predict import named, plan

    found = named.named_model(model, image=sizes[0], sequence=sizes[1])
    tapes: dict[str, Tapes] = {}
    for policy in plan.to_record(policies):
        how = f", checkpointed: {checkpoint}" if checkpoint else ""
        results.note(f"tracing {model} in {_for(policy, policies)}{how}")
        tape_of = partial(
            named.tape_of, found, policy, optimizer=optimizer, channels_last=channels_last, checkpoint=checkpoint
        )
        try:
            tapes[policy] = plan.Tapes.record(tape_of, batch)
        except MezzoError:
            raise
        except Exception as error:  # a library's constructors and forward passes raise what they like
            raise _untraceable(model, policy, error) from error
    layout = channels_last if found.unit == "images" else None
    return Traced(model, found.size, found.unit, batch, optimizer, tapes, [], layout, checkpoint or "")


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


def of_script(target: str, arguments: list[str], policies: list[str], batch: int | None, as_module: bool) -> Traced:
    """Return the tapes of a script."""
    from mezzo.measure.predict import plan
    from mezzo.measure.predict.script_plan import script_plan

    keep_input_for(target, as_module=as_module)
    results.note(f"tracing {target} in {', '.join(policies)}, each at two batch sizes")
    found = script_plan(target, arguments, plan.to_record(policies), batch=batch, as_module=as_module)
    size = "the script's own inputs"
    return Traced(
        target, size, found.unit, found.batch, found.optimizer, found.tapes, found.assumptions, found.channels_last
    )
