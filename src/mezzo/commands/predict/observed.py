"""Tapes of Keras and Paddle scripts, each from one real step on this machine: the script runs unmodified, and is ended after its second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from mezzo.errors import ScriptError, UsageError
from mezzo.frameworks import framework_called, framework_of
from mezzo.measure.predict.plan import Tapes
from mezzo.measure.predict.script.observed import ObservedTape, other_size
from mezzo.measure.predict.script.plan import WRITE_BATCH, ScriptPlan, other_batches
from mezzo.measure.predict.script.tapes import has_batch, with_batch
from mezzo.measure.predict.tape import TrainingTape, check_same_steps
from mezzo.records import Note, RunRecord
from mezzo.records.run import BATCH
from mezzo.temporary import temporary_folder

_LARGEST = 8
"""The largest batch at which a script runs whose arguments set it: a real step on a CPU takes its time, and others follow."""


class _Case(NamedTuple):
    """A script with its own arguments."""

    target: str
    arguments: Sequence[str]
    as_module: bool
    framework: str


def observed_plan(
    target: str,
    arguments: Sequence[str],
    policies: Sequence[str],
    *,
    batch: int | None = None,
    as_module: bool = False,
    limit_s: float | None = None,
) -> ScriptPlan:
    """Return the tapes of a script in Keras or Paddle.

    Args:
        target: its path; a module's name with ``as_module``.
        arguments: its own arguments; ``{batch}`` stands for the size of a batch.
        policies: the policies to record, FP32 first.
        batch: the size of a batch to predict; None for the script's own.
        as_module: whether ``target`` is run as ``python -m`` would.
        limit_s: time for all runs; None for no limit.

    Raises:
        ScriptError: the script fails, or its framework does not show its step.
        UsageError: it cannot have batches of size ``batch``.
    """
    if has_batch(arguments) and batch is None:
        raise UsageError(
            f"the script's arguments contain {BATCH}, but --batch is missing", hint="type: mezzo predict --batch 64 …"
        )
    in_arguments = min(int(batch or 0), _LARGEST) if has_batch(arguments) else None
    framework = framework_of(target, kind="module" if as_module else "script")
    end_s = None if limit_s is None else time.monotonic() + limit_s
    case = _Case(target, with_batch(arguments, in_arguments), as_module, framework)
    found: dict[str, ObservedTape] = {}
    tapes: dict[str, Tapes] = {}
    refused: dict[str, str] = {}
    for policy in policies:
        one = _observed(case, policy, end_s)
        if one.error and policy == policies[0]:
            raise ScriptError(
                f"{target} cannot be predicted: {one.error}", hint="run it by itself first; mezzo run measures it"
            )
        if one.error:
            refused[policy] = one.error
            continue
        if in_arguments is not None and len(one.tapes) < 2:
            other = _observed(case._replace(arguments=with_batch(arguments, other_size(in_arguments))), policy, end_s)
            second = [replace(tape, batch=other_size(in_arguments)) for tape in other.tapes[:1]]
            one = replace(one, tapes=[replace(one.tapes[0], batch=in_arguments), *second], known_batch=True)
        found[policy], tapes[policy] = one, _pair(one)
    return _plan(target, found, tapes, refused, batch=batch, in_arguments=in_arguments, framework=framework)


def _plan(
    target: str,
    found: dict[str, ObservedTape],
    tapes: dict[str, Tapes],
    refused: dict[str, str],
    *,
    batch: int | None,
    in_arguments: int | None,
    framework: str,
) -> ScriptPlan:
    known = next(iter(found.values()))
    size = in_arguments or (known.tapes[0].batch if known.known_batch else None)
    why = known.no_other_batch or "its steps run other operations at another batch"
    no_other = other_batches(target, tapes, batch, size, why=why)
    has_images = any(op.name == "convolution" for op in known.tapes[0].operations)
    notes = _assumptions(known, size, framework=framework, in_arguments=in_arguments is not None, no_other=no_other)
    return ScriptPlan.of(
        batch,
        size,
        optimizer=known.optimizer,
        channels_last=known.channels_last if has_images else None,
        assumptions=notes,
        no_other_batch=no_other,
        tapes=tapes,
        refused=refused,
    )


def _pair(one: ObservedTape) -> Tapes:
    first, second = one.tapes[0], one.tapes[1] if len(one.tapes) > 1 else None
    first = replace(first, is_compiled=one.fuses)
    if second is not None and not _same_steps(first, second):
        second = None
    found = Tapes(first, second, num_batches=one.num_batches, of_measured_framework=False, no_memory=one.no_memory)
    return found.stored_channels_last() if one.channels_last else found


def _same_steps(first: TrainingTape, second: TrainingTape) -> bool:
    try:
        check_same_steps(first, second)
    except UsageError:
        return False
    return True


def _observed(case: _Case, policy: str, end_s: float | None) -> ObservedTape:
    """Run a script under a policy until it has shown a step, and return that."""
    from mezzo.launch.request import Request
    from mezzo.launch.runner import run_alone
    from mezzo.policy import Policy

    with temporary_folder() as folder:
        tape = folder / "tape"
        request = Request(
            target=case.target,
            kind="module" if case.as_module else "script",
            arguments=tuple(case.arguments),
            framework=case.framework,
            # BF16 stands for both 16-bit formats, whose steps move the same bytes: it needs no loss scale
            policy=Policy.parse(policy.replace("fp16", "bf16")),
            record_path=str(folder / "record.json"),
            command=(),
            tape_file=str(tape),
        )
        limit_s = None if end_s is None else max(0.1, end_s - time.monotonic())
        record = run_alone(request, output=folder / "output", limit_s=limit_s)
        found = ObservedTape.read(tape)
        if found is not None and not found.error:
            return found
        failed = isinstance(record, RunRecord) and record.exit_code and record.error
        return ObservedTape(error=str(failed or (found and found.error) or "it never imported its framework"))


def _assumptions(
    known: ObservedTape, size: int | None, *, framework: str, in_arguments: bool, no_other: str
) -> list[Note]:
    title = framework_called(framework).title
    backward = {
        "observed": "its backward pass is the one that the framework ran or traced",
        "derived": "its backward pass follows from its forward pass, one rule for each kind of operation: it runs in C++, unseen",
    }[known.backward]
    notes = [Note(what="operations", value=f"of one real step of {title} on this machine", reason=backward)]
    if known.fuses:
        why = "XLA may join further operations across layers, which makes a step faster"
        notes.append(Note(what="fusion", value="within each layer", reason=why))
    if known.no_memory:
        notes.append(Note(what="memory", value="not predicted", reason=known.no_memory))
    if size is None:
        why = f"speed is in steps a second; {WRITE_BATCH}"
        return [*notes, Note(what="batch", value="not known", reason=why)]
    many = f", {known.num_batches} of them an update" if known.num_batches > 1 else ""
    origin = "set by --batch" if in_arguments else "the first dimension of the step's data"
    notes.append(Note(what="batch", value=f"{size} samples{many}", reason=origin))
    if no_other:
        return [*notes, Note(what="other batch sizes", value="do not follow", reason=no_other)]
    sizes = " to ".join(map(str, sorted((size, other_size(size)))))
    how = f"each operation's cost grows evenly with the batch, as from {sizes}"
    return [*notes, Note(what="other batch sizes", value="follow", reason=how)]
