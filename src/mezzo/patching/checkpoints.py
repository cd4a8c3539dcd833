"""Parts of a script outside its updates: validation, which autocast makes faster; saved state, to which a loss scale belongs."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mezzo.patching.job import Opening, PatchJob
from mezzo.patching.places import indentation
from mezzo.patching.reading import ScriptFacts
from mezzo.patching.text import Editor, first_line, last_line

KEY = "scaler"


@dataclass(frozen=True)
class StateCall:
    """A call that saves or loads an optimizer's state."""

    call: ast.Call
    stmt: ast.stmt


def calls_of(script: ScriptFacts, method: str) -> list[StateCall]:
    """Return the first call in each statement of a method of an optimizer: ``state_dict``, ``load_state_dict``."""
    found: dict[ast.stmt, StateCall] = {}
    for call, owner in script.tree.method_calls(method):
        if ast.unparse(owner) in script.optimizers:
            stmt = script.tree.statement(call)
            found.setdefault(stmt, StateCall(call, stmt))
    return list(found.values())


def add_to_save(script: ScriptFacts, editor: Editor, saved: StateCall, scaler: str) -> bool:
    """Save the scaler's state with the optimizer's; return whether that can be written where the call is."""
    above = script.tree.parent[saved.call]
    if isinstance(above, ast.Dict):
        key = above.keys[above.values.index(saved.call)]
        if key is None:
            return False
        written = script.text.of(key)
        quote = written[0] if written[0] in "'\"" else '"'
        editor.append_to(saved.call, f",{_between(script, above, key)}{quote}{KEY}{quote}: {scaler}.state_dict()")
        return True
    if isinstance(above, ast.keyword):
        editor.append_to(above, f", {KEY}={scaler}.state_dict()")
        return True
    if isinstance(saved.stmt, ast.Assign) and saved.stmt.value is saved.call:
        target = saved.stmt.targets[0]
        if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            editor.line_after(saved.stmt, f'{ast.unparse(target.value)}["{KEY}"] = {scaler}.state_dict()')
            return True
    return False


def _between(script: ScriptFacts, above: ast.Dict, key: ast.expr) -> str:
    """Return what separates two entries of a dictionary: a space, or a line break and the indentation."""
    if any(k is not None and k is not key and k.lineno == key.lineno for k in above.keys) or above.lineno == key.lineno:
        return " "
    line = script.text.lines[key.lineno - 1]
    return script.text.newline + line[: len(line) - len(line.lstrip())]


def add_to_load(script: ScriptFacts, editor: Editor, loaded: StateCall, scaler: str) -> bool:
    """Load the scaler's state after the optimizer's, if the checkpoint has one; return whether that can be written where the call is."""
    argument = loaded.call.args[0] if loaded.call.args else None
    if not isinstance(loaded.stmt, ast.Expr) or not isinstance(argument, ast.Subscript):
        return False
    checkpoint, unit = script.text.of(argument.value), indentation(script, loaded.stmt)
    editor.line_after(
        loaded.stmt,
        f'if "{KEY}" in {checkpoint}:  # checkpoints from before mixed precision have none',
        f'{unit}{scaler}.load_state_dict({checkpoint}["{KEY}"])',
    )
    return True


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
