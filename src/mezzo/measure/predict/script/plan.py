"""All tapes of a script that predictions need: one for each policy, at its own batch size and at half of it.

A script without a loader gets its batch size from an argument, or from a number in its text or in a file that it reads.
"""

from __future__ import annotations

import ast
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mezzo.errors import MezzoError, ScriptError, UsageError
from mezzo.formats import FP32
from mezzo.gpus import Gpu
from mezzo.measure.predict.calibrate import Calibration, calibration_of, rates_used
from mezzo.measure.predict.host import host_of
from mezzo.measure.predict.placeholder_numbers import numbers_read
from mezzo.measure.predict.plan import Tapes, predict, predict_cpu, to_record
from mezzo.measure.predict.result_sizes import sizes_assumed
from mezzo.measure.predict.script.batches import MOST_OPERATIONS
from mezzo.measure.predict.script.devices import SIMULATED_GPU
from mezzo.measure.predict.script.loaders import at_both_sizes, notes_on
from mezzo.measure.predict.script.observed import other_size
from mezzo.measure.predict.script.tapes import ScriptTape, TapeRequest, has_batch, recorded_tapes, with_batch
from mezzo.measure.predict.tape import TrainingTape, check_same_steps, grow_unevenly
from mezzo.measure.predict.time import HALF_FORMATS
from mezzo.policy import PRESETS, Policy
from mezzo.policyfields import DYNAMIC_SCALE
from mezzo.records import AS_IS, DataSet, LoaderRate, Note, Prediction, RealGpus
from mezzo.records.run import BATCH, OWN_SHARE

WRITE_BATCH = f"where an argument sets the size, write {BATCH} in its place, as in --batch-size {BATCH}"


@dataclass(frozen=True, kw_only=True)
class ScriptPlan:
    """The tapes of a script by recorded policy, and the facts about them."""

    tapes: dict[str, Tapes]
    refused: dict[str, str]
    """The error of the script, by the policy under which it fails: a recorded policy, or its BF16 partner."""
    batch: int
    """Samples of one batch; 1 where they are not known."""
    unit: str
    """``samples``, or ``steps`` where the samples of a batch are not known."""
    optimizer: str
    assumptions: list[Note]
    no_other_batch: str
    """Why other batch sizes do not follow from the script's own; empty if they do."""
    channels_last: bool | None
    """Whether convolutions have channels-last weights or inputs; None without convolutions."""
    data: DataSet | None = None
    """None without a loader."""
    loader: LoaderRate | None = None
    """None without a loader, or if it was not to be timed."""

    @classmethod
    def of(cls, batch: int | None, size: int | None, *, optimizer: str, **facts: Any) -> ScriptPlan:
        """Return the plan for ``batch``, or else for the script's own ``size``; ``facts`` are the other fields."""
        unit = "samples" if size is not None else "steps"
        return cls(batch=batch or size or 1, unit=unit, optimizer=optimizer or "no optimizer", **facts)


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
    times_loader: bool = False,
    on_cpu: bool = False,
) -> ScriptPlan:
    """Return the tapes of a script.

    Args:
        script: its path; a module's name with ``as_module``.
        arguments: its own arguments; ``{batch}`` stands for the size of a batch.
        policies: the policies to record.
        batch: the size of a batch to predict; None for the script's own.
        as_module: whether ``script`` is run as ``python -m`` would.
        scaled: whether to predict other batch sizes too, which takes a second tape for each policy.
        limit_s: time after which tracing ends.
        on_gpu: whether the prediction is for a GPU instead of this machine.
        times_loader: whether to time the script's loader on this machine.
        on_cpu: whether to record the operations of this machine's CPU.

    Raises:
        ScriptError: the script fails, or cannot be traced.
        UsageError: it does not exist, or cannot have batches of size ``batch``.
    """
    if has_batch(arguments) and batch is None:
        raise UsageError(
            f"the script's arguments contain {BATCH}, but --batch is missing", hint="type: mezzo predict --batch 64 …"
        )
    batch_in_arguments = batch if has_batch(arguments) else None
    own: dict[str, Any] = {"arguments": with_batch(arguments, batch_in_arguments), "as_module": as_module}
    own |= {"gpu_present": on_gpu and not on_cpu, "on_cpu": on_cpu}
    requests = [TapeRequest(script=script, policy=policy, **own) for policy in policies]
    requests[-1] = replace(requests[-1], times_loader=times_loader)
    deadline_s = None if limit_s is None else time.monotonic() + limit_s
    recorded = list(zip(requests, recorded_tapes(requests, deadline_s=deadline_s), strict=True))
    script_tapes = [tape for _, tape in recorded if not tape.error]
    known = script_tapes[0]
    now = known.settings | {"gpu_present": requests[0].gpu_present and not known.fails_with_gpu, "times_loader": False}
    requests = [replace(request, **now) for request, tape in recorded if not tape.error]
    size = batch_in_arguments or known.batch
    other_tapes, why = list[ScriptTape](), "they were not requested"
    if scaled or batch not in (None, size):
        other_tapes, why = _tapes_at_other_size(requests, known, batch_in_arguments, arguments, deadline_s=deadline_s)
    tapes: dict[str, Tapes] = {}
    partners: Sequence[ScriptTape | None] = other_tapes or [None] * len(requests)
    for request, found, other in zip(requests, script_tapes, partners, strict=True):
        found_why, tapes[request.policy] = _pair_tapes(found, other, size=batch_in_arguments)
        why = why or found_why
    no_other = other_batches(script, tapes, batch, size, why=why)
    followed = all(pair.second is not None for pair in tapes.values())
    uneven = followed and any(
        grow_unevenly(pair.first, pair.second) for pair in tapes.values() if pair.second is not None
    )
    source = other_tapes[0].size_at if other_tapes else ""
    data = at_both_sizes(known.data, other_tapes[0].data if other_tapes else known.data)
    return ScriptPlan.of(
        batch,
        size,
        tapes=tapes,
        refused=_refused(recorded),
        optimizer=known.optimizer,
        assumptions=[
            *_assumptions(known, batch_in_arguments, no_other=no_other, uneven=uneven, size_at=source),
            *notes_on(data, batch or size or 1),
        ],
        no_other_batch=no_other,
        channels_last=_layout(known),
        data=data,
        loader=None if size is None else next((tape.loader for _, tape in recorded if tape.loader is not None), None),
    )


def _refused(recorded: Sequence[tuple[TapeRequest, ScriptTape]]) -> dict[str, str]:
    """Return the errors of a script by the policy under which it fails: a recorded policy, or its BF16 partner."""
    failed = {request.policy: tape.error for request, tape in recorded if tape.error}
    refused = {request.policy.replace("fp16", "bf16"): tape.refused_in_bf16 for request, tape in recorded}
    return failed | {policy: error for policy, error in refused.items() if error}


def other_batches(script: str, tapes: Mapping[str, Tapes], batch: int | None, size: int | None, *, why: str) -> str:
    """Return why other batch sizes than a script's own do not follow from its tapes; empty if they do.

    Args:
        script: its path.
        tapes: by recorded policy.
        batch: the size of a batch to predict; None for the script's own.
        size: the script's own; None if it is not known.
        why: the reason, if there is one.

    Raises:
        UsageError: ``batch`` is another size, and does not follow.
    """
    followed = all(pair.second is not None for pair in tapes.values())
    if batch is not None and batch != size and not followed:
        own = f"its own batch has {size} samples" if size is not None else "the size of its own batch is not known"
        raise UsageError(
            f"--batch {batch} cannot be predicted for {script}: {why or 'other sizes do not follow'}; {own}",
            hint=f"leave --batch out; {WRITE_BATCH}",
        )
    return "" if followed or size is None else f"{why}; {WRITE_BATCH}"


def _tapes_at_other_size(
    requests: Sequence[TapeRequest],
    known: ScriptTape,
    batch_in_arguments: int | None,
    arguments: Sequence[str],
    *,
    deadline_s: float | None,
) -> tuple[list[ScriptTape], str]:
    """Return the tapes at another batch size, or why there are none."""
    size = batch_in_arguments or known.batch
    if size is None:
        return [], "the sizes of its batches differ within a step"
    other = other_size(size)
    if batch_in_arguments is None and not known.from_loader:
        return _tapes_by_source(requests, known, size, other, deadline_s=deadline_s)
    changes: dict[str, Any] = {"own_batch": size, "batch": other}
    if batch_in_arguments is not None:
        changes = {"arguments": with_batch(arguments, other)}
    other_requests = [replace(request, steps=known.num_steps, **changes) for request in requests]
    try:
        tapes = _all_recorded(other_requests, deadline_s)
    except ScriptError as error:
        return [], f"at batch {other} {error.message}"
    if batch_in_arguments is not None:
        _check_sizes(requests[0].script, known.tape, tapes[0].tape, sizes=sorted((size, other)))
        tapes = [one if one.tape is None else replace(one, tape=replace(one.tape, batch=other)) for one in tapes]
    elif tapes[0].batch != other:
        return _tapes_by_source(requests, known, size, other, deadline_s=deadline_s)
    return tapes, ""


def _all_recorded(requests: Sequence[TapeRequest], deadline_s: float | None) -> list[ScriptTape]:
    """Return the tapes of ``requests``, none of which failed or needed to be traced without the simulated GPU.

    Raises:
        ScriptError: one did.
    """
    tapes = recorded_tapes(requests, deadline_s=deadline_s)
    for one in tapes:
        if why := one.error or one.fails_with_gpu:
            raise ScriptError(f"{requests[0].script} fails: {why}", hint="predict its own batch size")
    return tapes


def _tapes_by_source(
    requests: Sequence[TapeRequest], known: ScriptTape, size: int, other: int, *, deadline_s: float | None
) -> tuple[list[ScriptTape], str]:
    """Return the tapes with another number where the script sets its batch size, or why there are none."""
    first = requests[0]
    script, failed = "" if first.as_module else first.script, ""
    files = {"modules": known.modules, "configurations": known.configurations}
    for source in batch_sources(script, first.arguments, size, **files):
        new_arguments = source.arguments(first.arguments, size=size, other=other)
        changes: dict[str, Any] = {
            "arguments": new_arguments,
            "file": source.file,
            "numbers": source.numbers,
            "batch": other,
        }
        try:
            tapes = _all_recorded([replace(one, steps=known.num_steps, **changes) for one in requests], deadline_s)
        except ScriptError as error:  # the number sets more than the batch
            if source.argument is not None and not failed:
                failed = f"{source.where} seems to set it, but with {other} in place of {size} {error.message}"
            continue
        if tapes[0].batch == other and _only_the_batch_differs(known, tapes[0]):
            return [replace(one, size_at=source.where) for one in tapes], ""
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


def _sizes(tape: TrainingTape, *kinds: str) -> list[int]:
    return [block.size_bytes for block in tape.blocks if block.kind in kinds]


def _check_sizes(script: str, one: TrainingTape | None, other: TrainingTape | None, *, sizes: Sequence[int]) -> None:
    """Raise UsageError if the argument that should set the size of a batch changes nothing."""
    if one is not None and other is not None and (one.blocks, one.operations) == (other.blocks, other.operations):
        raise UsageError(
            f"{script} has the same batch with {BATCH} = {sizes[0]} and {sizes[1]}: its arguments do not set the size",
            hint=f"write {BATCH} in place of the argument that sets the size of a batch, as in --batch-size {BATCH}; if there is "
            f"none, leave {BATCH} and --batch out",
        )


def _pair_tapes(one: ScriptTape, other: ScriptTape | None, *, size: int | None) -> tuple[str, Tapes]:
    assert one.tape is not None  # recorded_tapes raises otherwise
    first = one.tape if size is None else replace(one.tape, batch=size)
    why, second = "", None if other is None else other.tape
    if second is not None:
        try:
            check_same_steps(first, second)
        except UsageError:
            why, second = f"it runs other operations at batch {second.batch} than at batch {first.batch}", None
    return why, Tapes(first, second, num_batches=one.num_batches)


def _own_precision(tape: TrainingTape | None) -> list[Note]:
    """Return a note on a script that computes in 16 bits even under FP32, because it casts by itself."""
    flops = Counter[str]()
    for operation in tape.operations if tape is not None else ():
        flops[operation.format] += operation.flops
    found = [
        f"{share:.0%} of the FLOPs in {name}"
        for name in sorted(HALF_FORMATS)
        if (share := flops[name] / max(1, flops.total())) > OWN_SHARE
    ]
    why = "it casts its model or its data itself, and no policy undoes that; the rows of fp32 and tf32 are affected as well"
    return [Note(what="the script's own precision", value=", ".join(found), reason=why)] if found else []


def _layout(known: ScriptTape) -> bool | None:
    operations = known.tape.operations if known.tape is not None else []
    return known.channels_last if any(op.name == "convolution" for op in operations) else None


def _assumptions(
    known: ScriptTape, batch_in_arguments: int | None, *, no_other: str, uneven: bool, size_at: str
) -> list[Note]:
    size, num_batches = batch_in_arguments or known.batch, known.num_batches
    assumptions = [numbers_read("script", known.read_at, whole=known.whole_number)]

    def add(what: str, value: str, reason: str) -> None:
        assumptions.append(Note(what=what, value=value, reason=reason))

    if known.numbers_first:
        slow = f"it runs over {MOST_OPERATIONS:,} operations before its first module: too slow without numbers"
        sized = f"a size depends on them, at {known.sized_by}"
        add("data that the script prepares", "with numbers", sized if known.sized_by else slow)
    if known.fails_with_gpu:
        failure = f"where it is True, the script fails on this machine: {known.fails_with_gpu}"
        add("torch.cuda.is_available()", "this machine's", failure)
    elif known.gpu_queries:
        add("the GPU that the script sees", SIMULATED_GPU, f"it queries {', '.join(known.gpu_queries)}")
    if known.launched:
        each = "it reads a launcher's variables; each further GPU has a batch of its own"
        add("processes", "the only one of its job", each)
    if known.compiles:
        add(", ".join(known.compiles), "left out", "compiled steps are not predicted")
    assumptions += _own_precision(known.tape) if known.policy == FP32.name else []
    if known.sized_at:
        assumptions.append(sizes_assumed(known.sized_at))
    if size is None:
        add("batch", "not known", f"speed is in steps a second; {WRITE_BATCH}")
        return assumptions
    origin = "set by --batch" if batch_in_arguments else "what the DataLoader yields"
    if not batch_in_arguments and not known.from_loader:
        origin = "the first dimension of the model's inputs"
    many = f", {num_batches} of them an update" if num_batches > 1 else ""
    add("batch", f"{size} samples{many}", origin)
    if not no_other:
        where = f"set by {size_at}; " if size_at else ""
        sizes = " to ".join(map(str, sorted((size, other_size(size)))))
        how = f"{where}each operation's cost and each tensor's bytes grow evenly with the batch, as from {sizes}"
        if uneven:
            how += "; tensors that compare samples with each other grow with its square"
        add("other batch sizes", "follow", how)
    else:
        add("other batch sizes", "do not follow", no_other)
    return assumptions


# A source is a guess until the script is traced with another number there: it sets the batch size only if the batch changes and the
# model does not. Reads text and imports no torch.

_NAMED = re.compile(r"batch|(^|_)bs($|_)|^B$|(^|_)bsz($|_)", re.IGNORECASE)
_SETTING = re.compile(r"""([A-Za-z_][\w.-]*)["']?\s*[:=]\s*["']?(\d+)(?![\w.])""")
"""A setting of a whole number in JSON, YAML, TOML or an INI file, with its name."""
_LEAST = 2
"""Smaller numbers are counts and flags in most places."""


@dataclass(frozen=True, kw_only=True)
class BatchSource:
    """A place in the script that may set the size of a batch."""

    where: str
    """For a reader: ``--batch-size``, ``train.py:12``, or ``config.json:3``."""
    argument: int | None = None
    """Index of the script's argument."""
    file: str = ""
    """The file of the numbers."""
    numbers: tuple[tuple[int, int], ...] = ()
    """Line and column of each number in a Python file; from and to, in characters, of each in a configuration."""

    def arguments(self, arguments: Sequence[str], *, size: int, other: int) -> list[str]:
        """Return the script's arguments with ``other`` in place of ``size``."""
        words = list(arguments)
        if self.argument is not None:
            head, _, _ = words[self.argument].rpartition(str(size))
            words[self.argument] = head + str(other)
        return words


def batch_sources(
    script: str, arguments: Sequence[str], size: int, *, modules: Sequence[str] = (), configurations: Sequence[str] = ()
) -> Iterator[BatchSource]:
    """Yield the places that may set a batch of ``size``, the likeliest first.

    Args:
        script: its path; empty if it is run as a module, which is then among ``modules``.
        arguments: its own arguments.
        size: the size.
        modules: the Python files that it imports.
        configurations: other files of settings that it reads.
    """
    in_arguments = [*_in_arguments(arguments, size)]
    yield from in_arguments
    if in_arguments or size < _LEAST:
        return
    texts = {file: _numbers(file, size) for file in dict.fromkeys([*([script] if script else []), *modules])}
    for file, (named, _) in texts.items():
        if named:
            yield _source(file, named)
    for file in configurations:
        yield from _in_configuration(file, size)
    numbers = texts[script][1] if script else []
    if numbers:
        yield _source(script, numbers)


def _numbers(file: str, size: int) -> tuple[list[ast.expr], list[ast.expr]]:
    """Return the numbers ``size`` in a Python file: those whose names speak of a batch, and all."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return [], []
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    numbers: list[ast.expr] = [node for node in constants if type(node.value) is int and node.value == size]
    return [node for node in _named(tree) if node in numbers], numbers


def _in_configuration(file: str, size: int) -> Iterator[BatchSource]:
    """Yield the settings of a configuration whose names speak of a batch: all at once, then each."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return
    settings = [setting for setting in _SETTING.finditer(text) if _NAMED.search(setting[1]) and int(setting[2]) == size]
    for chosen in (settings, *([setting] for setting in settings if len(settings) > 1)):
        if chosen:
            lines = sorted({text.count("\n", 0, setting.start(2)) + 1 for setting in chosen})
            where = ", ".join(f"{Path(file).name}:{line}" for line in lines)
            yield BatchSource(where=where, file=file, numbers=tuple(setting.span(2) for setting in chosen))


def _in_arguments(arguments: Sequence[str], size: int) -> Iterator[BatchSource]:
    for index, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        if equals and value == str(size) and _NAMED.search(option):
            yield BatchSource(where=option, argument=index)
        elif word == str(size) and index and arguments[index - 1].startswith("-") and _is_batch(arguments[index - 1]):
            yield BatchSource(where=arguments[index - 1], argument=index)


def _is_batch(option: str) -> bool:
    return bool(_NAMED.search(option.lstrip("-").replace("-", "_"))) or option == "-b"


def _named(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield what is assigned to, or passed or defaulted as, a name that speaks of a batch."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.keyword)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
            names = [getattr(one, key, None) or "" for one in targets for key in ("id", "attr", "arg")]
            if any(map(_NAMED.search, names)):
                yield node.value
        if isinstance(node, ast.Call) and any(_says_batch(one) for one in node.args):
            yield from (keyword.value for keyword in node.keywords if keyword.arg == "default")
        if isinstance(node, ast.arguments):
            positional = [*node.posonlyargs, *node.args]
            late = positional[len(positional) - len(node.defaults) :]
            pairs = [*zip(late, node.defaults, strict=True), *zip(node.kwonlyargs, node.kw_defaults, strict=True)]
            yield from (value for one, value in pairs if value is not None and _NAMED.search(one.arg))


def _says_batch(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_batch(node.value)


def _source(script: str, nodes: Sequence[ast.expr]) -> BatchSource:
    lines = sorted({node.lineno for node in nodes})
    where = ", ".join(f"{Path(script).name}:{line}" for line in lines)
    return BatchSource(where=where, file=script, numbers=tuple((node.lineno, node.col_offset) for node in nodes))


_NOT_PRICED = ("loss_scale", "init_scale", *DYNAMIC_SCALE, "arithmetic", "accumulate")
"""Fields of a policy that change neither its casts nor its storage."""


def script_on_cpu(
    script: str,
    arguments: Sequence[str],
    calibration: Calibration,
    *,
    batch: int | None = None,
    as_module: bool = False,
    limit_s: float | None = None,
) -> Prediction:
    """Return the prediction of a script in FP32 on this machine's CPU, as ``script_plan`` traces it."""
    plan = script_plan(
        script, arguments, [FP32.name], batch=batch, as_module=as_module, scaled=False, limit_s=limit_s, on_cpu=True
    )
    pair = plan.tapes[FP32.name]
    return predict_cpu(pair.at(plan.batch), calibration, batch=plan.batch * pair.num_batches)


def real_gpus(
    script: str,
    arguments: Sequence[str],
    policies: Mapping[str, str],
    gpus: Sequence[Gpu],
    *,
    as_module: bool = False,
    limit_s: float | None = None,
    calibration: Calibration | None = None,
    plan_of: Callable[..., ScriptPlan] | None = None,
) -> RealGpus:
    """Return the predictions, or why there are none; never raises.

    Args:
        script: the path of the script, or a module's name.
        arguments: the script's own arguments.
        policies: the text of each policy by the name to show.
        gpus: the GPUs.
        as_module: whether ``script`` is a module's name.
        limit_s: time after which tracing ends; None for no limit.
        calibration: rates of this machine's CPU, to predict FP32 on it too; None to leave it out.
        plan_of: returns the tapes, in place of ``script_plan``, for another framework than PyTorch.
    """
    wanted = {shown: name for shown, text in policies.items() if (name := priced_as(text))}
    not_predicted = [
        Note(what=shown, value="not predicted", reason=_why_not(text))
        for shown, text in policies.items()
        if shown not in wanted
    ]
    nothing = RealGpus(
        gpus=[gpu.name for gpu in gpus],
        not_predicted=not_predicted,
        reason="no policy of this comparison can be predicted",
    )
    if not wanted:
        return nothing
    begun_s = time.monotonic()
    try:
        plan = (plan_of or script_plan)(
            script, arguments, to_record(list(wanted.values())), as_module=as_module, limit_s=limit_s
        )
        found = [
            predict(
                plan.tapes,
                gpu,
                name,
                batch=plan.batch,
                calibration=calibration_of(gpu),
                host=host_of(gpu),
                refused=plan.refused,
                data=plan.data,
            ).model_copy(update={"policy": shown})
            for gpu in gpus
            for shown, name in wanted.items()
        ]
    except Exception as error:  # the comparison is complete without predictions
        why = error.message if isinstance(error, MezzoError) else f"{type(error).__name__}: {error}"
        return nothing.model_copy(update={"reason": why.partition("\n")[0]})
    here = None
    left_s = None if limit_s is None else limit_s - (time.monotonic() - begun_s)
    if calibration is not None and (left_s is None or left_s > 0):
        with suppress(MezzoError):  # what the comparison measured stands without it
            how: dict[str, Any] = {"as_module": as_module, "limit_s": left_s}
            here = script_on_cpu(script, arguments, calibration, **how)
    return RealGpus(
        here=here,
        gpus=nothing.gpus,
        batch=plan.batch,
        unit=plan.unit,
        predictions=found,
        not_predicted=not_predicted,
        assumptions=[
            *plan.assumptions,
            *rates_used([*found, *([here] if here is not None else [])]),
            *dict.fromkeys(host_of(gpu).note for gpu in gpus),
        ],
    )


def priced_as(text: str) -> str:
    """Return the preset that predicts ``text``, a policy in a record, as well; empty if there is none."""
    name = text.split(":")[0]
    if name not in PRESETS:
        return ""
    preset = Policy.parse(name)
    same = Policy.parse(text).replace(**{field: getattr(preset, field) for field in _NOT_PRICED})
    return name if same == preset else ""


def _why_not(text: str) -> str:
    if text == AS_IS:
        return "the casts of the script's own mixed precision on a GPU do not show on this machine"
    return "only a preset's own casts are predicted"
