"""Where a script saves and loads its optimizer's state, so that the loss scale's goes with it."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from mezzo.patching.editing import Editor
from mezzo.patching.places import indentation
from mezzo.patching.reading import Script

KEY = "scaler"


@dataclass(frozen=True)
class Saved:
    """A place that saves or loads an optimizer's state."""

    call: ast.Call
    stmt: ast.stmt
    optimizer: str


def calls_of(script: Script, method: str) -> list[Saved]:
    """Return the calls of a method of the optimizers: ``state_dict``, ``load_state_dict``."""
    found = [
        Saved(c, script.tree.statement(c), ast.unparse(c.func.value))
        for c in script.tree.calls
        if isinstance(c.func, ast.Attribute) and c.func.attr == method
    ]
    return [saved for saved in found if saved.optimizer in script.optimizers]


def add_to_save(script: Script, editor: Editor, saved: Saved, scaler: str) -> bool:
    """Save the scaler's state beside the optimizer's; return whether the place is one that can be extended."""
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


def _between(script: Script, above: ast.Dict, key: ast.expr) -> str:
    """Return what stands between two entries of a dictionary: a space, or a line break and the indentation."""
    if any(k is not None and k is not key and k.lineno == key.lineno for k in above.keys) or above.lineno == key.lineno:
        return " "
    line = script.text.lines[key.lineno - 1]
    return script.text.newline + line[: len(line) - len(line.lstrip())]


def add_to_load(script: Script, editor: Editor, loaded: Saved, scaler: str) -> bool:
    """Load the scaler's state after the optimizer's, if the checkpoint has one; return whether it could be found there."""
    given = loaded.call.args[0] if loaded.call.args else None
    if not isinstance(loaded.stmt, ast.Expr) or not isinstance(given, ast.Subscript):
        return False
    checkpoint, unit = script.text.of(given.value), indentation(script, loaded.stmt)
    editor.line_after(
        loaded.stmt,
        f'if "{KEY}" in {checkpoint}:  # checkpoints from before mixed precision have none',
        f'{unit}{scaler}.load_state_dict({checkpoint}["{KEY}"])',
    )
    return True
