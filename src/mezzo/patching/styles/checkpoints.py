"""Where a script saves and loads its optimizer's state: the loss scaler's state is saved and loaded with it."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from mezzo.patching.places import indentation
from mezzo.patching.reading import ScriptFacts
from mezzo.patching.text import Editor

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
