"""Libraries that train: their own argument for mixed precision, added to the call that takes it."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass

from mezzo.patching.job import Job
from mezzo.patching.outcome import Kind, unclear
from mezzo.patching.reading import Script
from mezzo.patching.styles import tf32
from mezzo.policy import PRESETS

_LIGHTNING = {"fp16": "16-mixed", "bf16": "bf16-mixed", "fp16-pure": "16-true", "bf16-pure": "bf16-true"}
_ACCELERATE = {"fp16": "fp16", "bf16": "bf16"}


@dataclass(frozen=True)
class Trainer:
    """A library's call that takes the precision."""

    kind: Kind
    calls: tuple[ast.Call, ...]


@dataclass(frozen=True)
class _Library:
    kind: Kind
    pattern: str
    """Matches the dotted name of what takes the precision."""
    argument: str
    values: Mapping[str, str]
    """The argument's value by the name of a preset."""
    docs: str


_LIBRARIES = (
    _Library(
        "lightning",
        r"(lightning(\.pytorch)?|pytorch_lightning)\.(trainer\.)?Trainer",
        "precision",
        _LIGHTNING,
        "docs/lightning.md",
    ),
    _Library(
        "fabric", r"(lightning(\.fabric)?|lightning_fabric)\.Fabric", "precision", _LIGHTNING, "docs/lightning.md"
    ),
    _Library(
        "accelerate", r"accelerate\.(accelerator\.)?Accelerator", "mixed_precision", _ACCELERATE, "docs/accelerate.md"
    ),
    _Library("transformers", r"transformers\.(\w+\.)*\w*TrainingArguments", "", _ACCELERATE, "docs/transformers.md"),
)
_PARSED = r"(transformers\.(\w+\.)*HfArgumentParser|(lightning(\.pytorch)?|pytorch_lightning)\.cli\.LightningCLI)"


def trainer_of(script: Script) -> Trainer | None:
    """Return the call of a library that takes the precision; None for a loop that calls torch directly.

    Raises:
        Unclear: the library reads its arguments from the command line.
    """
    for library in _LIBRARIES:
        calls = tuple(script.calls_to(library.pattern))
        if calls:
            return Trainer(library.kind, calls)
    parsed = script.calls_to(_PARSED)
    if parsed and not script.backwards:
        words = "--trainer.precision 16-mixed" if "LightningCLI" in script.text.of(parsed[0]) else "--fp16 or --bf16"
        unclear(
            f"line {parsed[0].lineno} reads the trainer's arguments from the command line",
            f"run the script with {words}",
        )
    return None


def patch(job: Job, trainer: Trainer) -> None:
    """Add or change the argument.

    Raises:
        Unclear: the library cannot express the policy, or the argument comes from elsewhere.
    """
    library = next(one for one in _LIBRARIES if one.kind == trainer.kind)
    if job.policy.compute == "tf32":
        tf32.patch(job)
        return
    value = library.values.get(job.policy.name)
    if value is None or job.policy.replace(arithmetic="auto", op_lists="portable") != PRESETS[job.policy.name]:
        unclear(
            f"policy {job.policy}: {library.kind} has no such setting; it knows {', '.join(library.values)}",
            f"use Mezzo's engine inside it: {library.docs}",
        )
    changed = [_change(job, call, library, value) for call in trainer.calls]
    if not any(changed):
        argument = library.argument or value
        unclear(
            f"already has {argument}={'True' if not library.argument else repr(value)}",
            "nothing needs to be done",
            already=True,
        )


def _change(job: Job, call: ast.Call, library: _Library, value: str) -> bool:
    if library.argument:
        return _set(job, call, library.argument, f'"{value}"', why=f"{library.kind} casts and scales by this argument")
    other = "bf16" if value == "fp16" else "fp16"
    given = {k.arg: k.value for k in call.keywords}
    if other in given and not isinstance(given[other], ast.Constant):
        unclear(
            f"line {given[other].lineno} takes {other} from {job.text.of(given[other])}",
            f"set {value}=True and {other}=False there",
        )
    if other in given and getattr(given[other], "value", None):
        _set(job, call, other, "False", why="only one of the two may be on")
    return _set(job, call, value, "True", why="the Trainer casts and scales by this argument")


def _set(job: Job, call: ast.Call, name: str, value: str, *, why: str) -> bool:
    """Set a keyword of a call; return whether that changed anything."""
    found = [k for k in call.keywords if k.arg == name]
    if found and not isinstance(found[0].value, ast.Constant):
        written = job.text.of(found[0].value)
        unclear(f"line {found[0].value.lineno} takes {name} from {written}", _option(job, found[0].value, value))
    if found:
        if ast.unparse(found[0].value) == ast.unparse(ast.parse(value, mode="eval")):
            return False
        job.editor.replace(found[0].value, value)
    else:
        _check_unpacked(job, call, name)
        _append(job, call, f"{name}={value}")
    job.note(call, f"{name}={value}", why)
    return True


def _option(job: Job, given: ast.expr, value: str) -> str:
    """Return what to do about an argument that comes from elsewhere: the script's own option, where it has one."""
    name = given.attr if isinstance(given, ast.Attribute) else given.id if isinstance(given, ast.Name) else ""
    texts = [n.value for n in job.script.tree.nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    for option in (f"--{name}", f"--{name.replace('_', '-')}"):
        if name and option in texts:
            return f"run the script with {option} {ast.literal_eval(value)}"
    return f"make {job.text.of(given)} equal to {value} there"


def _check_unpacked(job: Job, call: ast.Call, name: str) -> None:
    """Refuse a call whose unpacked dictionary may have the argument already."""
    unpacked = [k for k in call.keywords if k.arg is None]
    elsewhere: list[ast.expr] = [n for n in job.script.tree.nodes if isinstance(n, ast.Constant) and n.value == name]
    named = [k for c in job.script.tree.calls for k in c.keywords if k.arg == name and c is not call]
    if unpacked and (elsewhere or named):
        line = (elsewhere or [k.value for k in named])[0].lineno
        unclear(f"line {call.lineno} unpacks arguments, and line {line} may set {name} in them", f"set {name} there")


def _append(job: Job, call: ast.Call, words: str) -> None:
    """Add an argument after the last one, on a line of its own where the arguments have lines of their own."""
    text = job.text
    given: list[ast.expr | ast.keyword] = sorted([*call.args, *call.keywords], key=lambda a: (a.lineno, a.col_offset))
    if not given:
        job.editor.insert(text.span(call)[1] - 1, words)
        return
    line = text.lines[given[-1].lineno - 1]
    begins = re.match(r"\s*", line)
    own_line = len(line[: len(line) - len(line.lstrip())].encode()) == given[-1].col_offset
    between = f",{text.newline}{begins.group()}" if own_line and begins else ", "
    job.editor.append_to(given[-1], between + words)
