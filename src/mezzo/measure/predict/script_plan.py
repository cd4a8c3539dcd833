"""All tapes of one script that predictions need: by policy, at its own batch size and at half of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mezzo.errors import UsageError
from mezzo.formats import FP32
from mezzo.measure.predict.batch_sources import batch_sources
from mezzo.measure.predict.plan import Tapes
from mezzo.measure.predict.script_data import MOST_OPERATIONS
from mezzo.measure.predict.script_gpu import GPU_TOLD
from mezzo.measure.predict.scripted import ScriptTape, TapeRequest, has_batch, recorded_tapes, with_batch
from mezzo.measure.predict.stand_ins import numbers_read
from mezzo.measure.predict.tape import Tape, check_same_steps, grow_unevenly
from mezzo.measure.predict.time import HALF_FORMATS
from mezzo.records import Reason
from mezzo.records.run import BATCH

_SOME = 0.05
"""Share of FLOPs that is worth a word."""
_WRITE_BATCH = f"where an argument sets the size, write {BATCH} in its place, as in --batch-size {BATCH}"


@dataclass(frozen=True, kw_only=True)
class ScriptPlan:
    """What a script trains, by recorded policy."""

    tapes: dict[str, Tapes]
    refused: dict[str, str]
    """The error of the script, by the recorded policy under which it fails."""
    batch: int
    """Samples of one batch; 1 where they are not known."""
    unit: str
    """``samples``, or ``steps`` where the samples of a batch are not known."""
    optimizer: str
    assumptions: list[Reason]
    channels_last: bool | None
    """Whether convolutions have channels-last weights or inputs; None without convolutions."""


def script_plan(
    script: str,
    arguments: Sequence[str],
    policies: Sequence[str],
    *,
    batch: int | None = None,
    as_module: bool = False,
    scaled: bool = True,
    limit_s: float | None = None,
    on_gpu: bool = True,
) -> ScriptPlan:
    """Return the tapes of a script.

    Args:
        script: its path; a module's name with ``as_module``.
        arguments: its own arguments; ``{batch}`` stands for the size of a batch.
        policies: the policies to record.
        batch: the size of a batch to predict; None for the script's own.
        as_module: whether ``script`` is run as ``python -m`` would.
        scaled: whether other batch sizes are to follow, which takes a second tape for each policy.
        limit_s: time after which tracing ends.
        on_gpu: whether a GPU is predicted, and not this machine.

    Raises:
        UsageError: the script cannot be traced, or ``batch`` is no size that it can have.
    """
    if has_batch(arguments) and batch is None:
        raise UsageError(
            f"the script's arguments have {BATCH} and --batch is missing", hint="type: mezzo predict --batch 64 …"
        )
    named = batch if has_batch(arguments) else None
    one = [
        TapeRequest(
            script=script,
            arguments=with_batch(arguments, named),
            policy=policy,
            as_module=as_module,
            gpu_there=on_gpu,
        )
        for policy in policies
    ]
    deadline_s = None if limit_s is None else time.monotonic() + limit_s
    all_found = list(zip(one, recorded_tapes(one, deadline_s=deadline_s), strict=True))
    refused = {asked.policy: made.error for asked, made in all_found if made.error}
    first = [made for _, made in all_found if not made.error]
    known = first[0]
    there = on_gpu and not known.fails_with_gpu
    one = [
        replace(asked, numbers_first=known.numbers_first, gpu_there=there, launched=known.launched)
        for asked, made in all_found
        if not made.error
    ]
    size = named or known.batch
    others, why = (
        _others(one, known, named, arguments, deadline_s=deadline_s)
        if scaled or batch not in (None, size)
        else ([], "it was not asked for")
    )
    tapes: dict[str, Tapes] = {}
    for place, (request, found) in enumerate(zip(one, first, strict=True)):
        other = others[place] if others else None
        found_why, tapes[request.policy] = _paired(found, other, size=named)
        why = why or found_why
    if batch is not None and batch != size and any(pair.other is None for pair in tapes.values()):
        own = f"its own batch has {size} samples" if size is not None else "the size of its own batch is not known"
        raise UsageError(
            f"--batch {batch} cannot be predicted for {script}: {why or 'other sizes do not follow'}; {own}",
            hint=f"leave --batch out; {_WRITE_BATCH}",
        )
    followed = all(pair.other is not None for pair in tapes.values())
    uneven = followed and any(grow_unevenly(pair.one, pair.other) for pair in tapes.values() if pair.other is not None)
    at = others[0].size_at if others else ""
    return ScriptPlan(
        tapes=tapes,
        refused=refused,
        batch=batch or size or 1,
        unit="samples" if size is not None else "steps",
        optimizer=known.optimizer or "no optimizer",
        assumptions=_assumptions(known, named, followed=followed, uneven=uneven, why=why, at=at),
        channels_last=_layout(known),
    )


def _others(
    requests: Sequence[TapeRequest],
    known: ScriptTape,
    named: int | None,
    arguments: Sequence[str],
    *,
    deadline_s: float | None,
) -> tuple[list[ScriptTape], str]:
    """Return the tapes at another batch size, or why there are none."""
    size = named or known.batch
    if size is None:
        return [], "the size of its batches differs within a step"
    other = _other_size(size)
    if named is None and not known.from_loader:
        return _by_its_source(requests, known, size, other, deadline_s=deadline_s)
    made = [
        replace(request, own_batch=size, batch=other, steps=known.num_steps)
        if named is None
        else replace(request, arguments=with_batch(arguments, other), steps=known.num_steps)
        for request in requests
    ]
    try:
        found = _all_recorded(made, deadline_s)
    except UsageError as error:
        return [], f"at batch {other} {error.message}"
    if named is not None:
        _check_sizes(requests[0].script, known, found[0], sizes=sorted((size, other)))
        for one in found:
            if one.tape is not None:
                one.tape.batch = other
    elif found[0].batch != other:
        return _by_its_source(requests, known, size, other, deadline_s=deadline_s)
    return found, ""


def _other_size(size: int) -> int:
    """Return half of a batch; twice its size where half would be one sample, whose tensors need fewer copies."""
    return size // 2 if size > 3 else 2 * size


def _all_recorded(requests: Sequence[TapeRequest], deadline_s: float | None) -> list[ScriptTape]:
    """Return the tapes of ``requests``; they are all there, and the script was told what it was told at its own batch size.

    Raises:
        UsageError: a tape is missing, or was told otherwise.
    """
    found = recorded_tapes(requests, deadline_s=deadline_s)
    for one in found:
        if why := one.error or one.fails_with_gpu:
            raise UsageError(f"{requests[0].script} fails: {why}", hint="predict its own batch size")
    return found


def _by_its_source(
    requests: Sequence[TapeRequest], known: ScriptTape, size: int, other: int, *, deadline_s: float | None
) -> tuple[list[ScriptTape], str]:
    """Return the tapes with another number where the size of the script's batch is set, or that no such place was found."""
    first = requests[0]
    places = batch_sources(
        "" if first.as_module else first.script,
        first.arguments,
        size,
        modules=known.modules,
        configurations=known.configurations,
    )
    failed = ""
    for place in places:
        words = place.arguments(first.arguments, size=size, other=other)
        made = [
            replace(
                request, arguments=words, file=place.file, numbers=place.numbers, batch=other, steps=known.num_steps
            )
            for request in requests
        ]
        try:
            found = _all_recorded(made, deadline_s)
        except UsageError as error:  # the number is not the batch's alone
            if place.argument is not None and not failed:
                failed = f"{place.where} seems to set it, and with {other} in place of {size} {error.message}"
            continue
        if found[0].batch == other and _only_the_batch_differs(known, found[0]):
            return [replace(one, size_at=place.where) for one in found], ""
    read = f", nor in {', '.join(Path(file).name for file in known.configurations)}" if known.configurations else ""
    return [], failed or f"neither a DataLoader nor a number in the script{read} sets the size of its batch"


def _only_the_batch_differs(one: ScriptTape, other: ScriptTape) -> bool:
    """Return whether two tapes train the same weights on inputs that differ in their batch alone.

    A number may set a layer's width or an image's height as well.
    """
    if one.tape is None or other.tape is None or one.batch is None or other.batch is None:
        return False
    if _sizes(one.tape, "parameters", "optimizer") != _sizes(other.tape, "parameters", "optimizer"):
        return False
    inputs = _sizes(one.tape, "inputs"), _sizes(other.tape, "inputs")
    pairs = zip(*inputs, strict=True) if len(inputs[0]) == len(inputs[1]) else [(0, 1)]
    return all(a == b or a * other.batch == b * one.batch for a, b in pairs)


def _sizes(tape: Tape, *kinds: str) -> list[int]:
    return [block.size_bytes for block in tape.blocks if block.kind in kinds]


def _check_sizes(script: str, one: ScriptTape, other: ScriptTape, *, sizes: Sequence[int]) -> None:
    """Raise UsageError where the argument that is to set the size of a batch changes nothing."""
    first, second = one.tape, other.tape
    if first is None or second is None:
        return
    if first.blocks == second.blocks and first.operations == second.operations:
        raise UsageError(
            f"{script} has the same batch with {BATCH} = {sizes[0]} and {sizes[1]}: its arguments do not set the size",
            hint=f"write {BATCH} in place of the argument that sets the size of a batch, as in --batch-size {BATCH}; if there is "
            f"none, leave {BATCH} and --batch out",
        )


def _paired(one: ScriptTape, other: ScriptTape | None, *, size: int | None) -> tuple[str, Tapes]:
    assert one.tape is not None  # recorded_tapes raises otherwise
    if size is not None:
        one.tape.batch = size
    if other is None or other.tape is None:
        return "", Tapes(one.tape, None, num_batches=one.num_batches)
    try:
        check_same_steps(one.tape, other.tape)
    except UsageError:
        why = f"it runs other operations at batch {other.tape.batch} than at batch {one.tape.batch}"
        return why, Tapes(one.tape, None, num_batches=one.num_batches)
    return "", Tapes(one.tape, other.tape, num_batches=one.num_batches)


def _own_precision(tape: Tape | None) -> list[Reason]:
    """Return what is said of a script that computes in 16 bits under FP32, by casts of its own."""
    flops: dict[str, int] = {}
    for operation in tape.operations if tape is not None else ():
        flops[operation.format] = flops.get(operation.format, 0) + operation.flops
    found = [
        f"{share:.0%} of the FLOPs in {name}"
        for name in sorted(HALF_FORMATS)
        if (share := flops.get(name, 0) / max(1, sum(flops.values()))) > _SOME
    ]
    why = "it casts its model or its data itself, and no policy takes that back: the rows of fp32 and tf32 have it as well"
    return [Reason(what="the script's own precision", value=", ".join(found), reason=why)] if found else []


def _layout(known: ScriptTape) -> bool | None:
    operations = known.tape.operations if known.tape is not None else []
    return known.channels_last if any(op.name == "convolution" for op in operations) else None


def _assumptions(
    known: ScriptTape, named: int | None, *, followed: bool, uneven: bool, why: str, at: str
) -> list[Reason]:
    size, num = named or known.batch, known.num_batches
    found = [numbers_read("script", known.read_at)]
    if known.numbers_first:
        why_first = f"it runs over {MOST_OPERATIONS:,} operations before its first module: too slow without numbers"
        found.append(Reason(what="data that the script prepares", value="with numbers", reason=why_first))
    if known.fails_with_gpu:
        why_not = f"where it is True, the script fails on this machine: {known.fails_with_gpu}"
        found.append(Reason(what="torch.cuda.is_available()", value="this machine's", reason=why_not))
    elif known.told_of_gpu:
        told = ", ".join(known.told_of_gpu)
        found.append(Reason(what="what the script is told of its GPU", value=GPU_TOLD, reason=f"it asks {told}"))
    if known.launched:
        why = "it reads a launcher's variables; each further GPU has a batch of its own"
        found.append(Reason(what="processes", value="the only one of its job", reason=why))
    if known.compiles:
        found.append(
            Reason(what=", ".join(known.compiles), value="left out", reason="compiled steps are not predicted")
        )
    found += _own_precision(known.tape) if known.policy == FP32.name else []
    if known.sized_at:
        lines = ", ".join(filter(None, known.sized_at)) or "in a library"
        why = (
            f"a condition selects everything, and values are all different: less memory and time where not, at {lines}"
        )
        found.append(Reason(what="sizes that numbers decide", value="the largest possible", reason=why))
    if size is None:
        found.append(Reason(what="batch", value="not known", reason=f"speed is in steps a second; {_WRITE_BATCH}"))
        return found
    source = "as --batch names it" if named else "what the DataLoader yields"
    if not named and not known.from_loader:
        source = "the first dimension of what the model is called with"
    many = f", {num} of them an update" if num > 1 else ""
    found.append(Reason(what="batch", value=f"{size} samples{many}", reason=source))
    if followed:
        where = f"set by {at}; " if at else ""
        sizes = " to ".join(map(str, sorted((size, _other_size(size)))))
        how = f"{where}each operation's cost and each tensor's bytes grow evenly with the batch, as from {sizes}"
        if uneven:
            how += "; those of tensors that compare samples with each other, with its square"
        found.append(Reason(what="other batch sizes", value="follow", reason=how))
    else:
        found.append(Reason(what="other batch sizes", value="do not follow", reason=f"{why}; {_WRITE_BATCH}"))
    return found
