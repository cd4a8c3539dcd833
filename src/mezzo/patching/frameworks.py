"""Libraries that train: their own argument for mixed precision, added to the call that accepts it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from mezzo.patching import torch_amp
from mezzo.patching.job import PatchJob
from mezzo.patching.reading import ScriptFacts
from mezzo.patching.text import LoopKind, unclear
from mezzo.patching.tree import keyword_of
from mezzo.policy import NAMES_ELSEWHERE

_LIGHTNING = {preset: name for name, preset in NAMES_ELSEWHERE["lightning"].items()}
_ACCELERATE = {"fp16": "fp16", "bf16": "bf16"}


@dataclass(frozen=True)
class Trainer:
    """A library's calls that accept the precision."""

    kind: LoopKind
    calls: tuple[ast.Call, ...]


@dataclass(frozen=True)
class _Library:
    kind: LoopKind
    pattern: str
    """Matches the dotted name of the function that accepts the precision."""
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


def trainer_of(script: ScriptFacts) -> Trainer | None:
    """Return the calls of a library that accept the precision; None for a loop that calls torch directly.

    Raises:
        Unclear: the library reads its arguments from the command line.
    """
    for library in _LIBRARIES:
        calls = tuple(script.calls_to(library.pattern))
        if calls:
            return Trainer(library.kind, calls)
    parsed = script.calls_to(_PARSED)
    if parsed and not script.backwards:
        option = "--trainer.precision 16-mixed" if "LightningCLI" in script.text.of(parsed[0]) else "--fp16 or --bf16"
        unclear(
            f"line {parsed[0].lineno} reads the trainer's arguments from the command line",
            f"run the script with {option}",
        )
    return None


def patch(job: PatchJob, trainer: Trainer) -> None:
    """Add or change the argument.

    Raises:
        Unclear: the library cannot express the policy, or the argument comes from elsewhere.
    """
    library = next(one for one in _LIBRARIES if one.kind == trainer.kind)
    if job.policy.compute == "tf32":
        torch_amp.patch_tf32(job)
        return
    value = library.values.get(job.preset)
    if value is None:
        unclear(
            f"policy {job.policy}: {library.kind} has no such setting; it supports {', '.join(library.values)}",
            f"use Mezzo's engine inside it: {library.docs}",
        )
    changed = [_change(job, call, library, value) for call in trainer.calls]
    if not any(changed):
        setting = f"{library.argument}={value!r}" if library.argument else f"{value}=True"
        unclear(f"already has {setting}", "nothing needs to be done", already=True)


def _change(job: PatchJob, call: ast.Call, library: _Library, value: str) -> bool:
    if library.argument:
        return _set(job, call, library.argument, f'"{value}"', why=f"{library.kind} casts and scales by this argument")
    other = "bf16" if value == "fp16" else "fp16"
    argument = keyword_of(call, other)
    if argument is not None and not isinstance(argument, ast.Constant):
        unclear(
            f"line {argument.lineno} takes {other} from {job.text.of(argument)}",
            f"set {value}=True and {other}=False there",
        )
    if argument is not None and argument.value:
        _set(job, call, other, "False", why="only one of the two may be on")
    return _set(job, call, value, "True", why="the Trainer casts and scales by this argument")


def _set(job: PatchJob, call: ast.Call, name: str, value: str, *, why: str) -> bool:
    """Set a keyword of a call; return whether that changed anything."""
    argument = keyword_of(call, name)
    if argument is not None and not isinstance(argument, ast.Constant):
        unclear(f"line {argument.lineno} takes {name} from {job.text.of(argument)}", _option(job, argument, value))
    if argument is not None:
        if argument.value == ast.literal_eval(value):
            return False
        job.editor.replace(argument, value)
    else:
        _check_unpacked(job, call, name)
        job.editor.add_argument(call, f"{name}={value}")
    job.note(call, f"{name}={value}", why)
    return True


def _option(job: PatchJob, argument: ast.expr, value: str) -> str:
    """Return what to do about an argument that comes from elsewhere: use the script's own option, if it has one."""
    name = (
        argument.attr if isinstance(argument, ast.Attribute) else argument.id if isinstance(argument, ast.Name) else ""
    )
    texts = [n.value for n in job.script.tree.nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    for option in (f"--{name}", f"--{name.replace('_', '-')}"):
        if name and option in texts:
            return f"run the script with {option} {ast.literal_eval(value)}"
    return f"make {job.text.of(argument)} equal to {value} there"


def _check_unpacked(job: PatchJob, call: ast.Call, name: str) -> None:
    """Refuse a call whose unpacked dictionary may have the argument already."""
    unpacked = [k for k in call.keywords if k.arg is None]
    elsewhere: list[ast.expr] = [n for n in job.script.tree.nodes if isinstance(n, ast.Constant) and n.value == name]
    named = [k for c in job.script.tree.calls for k in c.keywords if k.arg == name and c is not call]
    if unpacked and (elsewhere or named):
        line = (elsewhere or [k.value for k in named])[0].lineno
        unclear(f"line {call.lineno} unpacks arguments, and line {line} may set {name} in them", f"set {name} there")
