"""Forward passes without gradients: validation and inference, put under autocast for speed unless there is a reason not to."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from mezzo.patching.job import Opening, PatchJob
from mezzo.patching.places import indentation
from mezzo.patching.text import first_line, last_line

_WHY = "validation in the formats of training, for its speed"


def autocast_validation(job: PatchJob, opening: Opening, *, why_not: Callable[[ast.stmt], str]) -> None:
    """Put the forward passes of ``torch.no_grad()`` blocks and functions under autocast, unless ``why_not`` returns a reason."""
    done: list[ast.AST] = []
    for node in job.script.tree.nodes:
        if not isinstance(node, ast.stmt) or not job.script.grads_off(node):
            continue
        if not job.script.runs_forward(node, functional=False):
            continue
        if any(node in ast.walk(other) for other in done) or _is_module_code(job, node):
            continue
        reason = _why_not(job, node) or why_not(node)
        if reason:
            job.note(node, "validation left as it is", reason)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            job.editor.append_to(node.items[-1].context_expr, f", {opening(node)}")
            job.covered.append((first_line(node), last_line(node)))
            job.note(node, "under autocast", _WHY)
        else:
            _wrap_function(job, node, opening)
        done.append(node)


def _is_module_code(job: PatchJob, node: ast.stmt) -> bool:
    """Return whether code is part of a model, which autocast reaches through its callers."""
    cls = job.script.tree.class_of(node)
    return cls is not None and cls.name in job.script.module_classes


def _why_not(job: PatchJob, node: ast.stmt) -> str:
    if any(b.stmt in ast.walk(node) for b in job.script.backwards):
        return "it has a backward pass in it"
    if job.is_covered(node):
        return "it is part of a training step that is under autocast already"
    numpy = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr == "numpy"]
    if numpy:
        return f"line {numpy[0].lineno} creates a NumPy array, but NumPy has no BF16, and FP16 would round its numbers"
    if isinstance(node, (ast.With, ast.AsyncWith)) and node.items[-1].optional_vars is not None:
        return "its with statement binds a name"
    return ""


def _wrap_function(job: PatchJob, function: ast.stmt, opening: Opening) -> None:
    """Wrap the innermost statements of a function that call a model, consecutive ones together."""
    for run in _runs(job, getattr(function, "body", [])):
        unit = indentation(job.script, run[0])
        job.editor.wrap(run[0], run[-1], f"with {opening(run[0])}:", unit=unit)
        job.covered.append((first_line(run[0]), last_line(run[-1])))
        job.note(run[0], "under autocast", _WHY)


def _runs(job: PatchJob, block: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    run: list[ast.stmt] = []
    for stmt in block:
        inner = [b for b in (getattr(stmt, "body", None), getattr(stmt, "orelse", None)) if isinstance(b, list) and b]
        if inner or not job.script.runs_forward(stmt, functional=False):
            if run:
                yield run
            run = []
            for one in inner:
                yield from _runs(job, one)
        else:
            run.append(stmt)
    if run:
        yield run
