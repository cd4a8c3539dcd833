"""Keras: its global dtype policy, set before any layer is created."""

from __future__ import annotations

import ast
from typing import NamedTuple

from mezzo.frameworks.keras import dtype_policy_name
from mezzo.patching.job import PatchJob
from mezzo.patching.outcome import unclear
from mezzo.patching.reading import ScriptFacts
from mezzo.patching.styles import keras_loops
from mezzo.patching.tree import keyword_of

_PATCHED = ("fp16", "bf16")
_SETS_POLICY = r".*\.(set_global_policy|set_dtype_policy)"
_POLICY = r".*\.(Policy|DTypePolicy|FloatDTypePolicy)"
_OLD = r".*\.mixed_precision\.experimental\..*"
_REWRITE = r"tensorflow\..*enable_mixed_precision_graph_rewrite"
_REWRITE_VARIABLE = "TF_ENABLE_AUTO_MIXED_PRECISION"


class _Keras(NamedTuple):
    name: str
    """The expression for Keras in the script."""
    root: str
    """The package that is imported for it."""


def keras_in(script: ScriptFacts) -> _Keras | None:
    """Return the expression for Keras in a script; None if the script does not import Keras."""
    imported = script.tree.imported
    for name, stands_for in imported.items():
        if stands_for in ("keras", "tensorflow.keras"):
            return _Keras(name, stands_for.split(".")[0])
    tensorflow = [name for name, stands_for in imported.items() if stands_for == "tensorflow"]
    attributes = [n for n in script.tree.nodes if isinstance(n, ast.Attribute)]
    if tensorflow and any(script.tree.dotted(n) == "tensorflow.keras" for n in attributes):
        return _Keras(f"{tensorflow[0]}.keras", "tensorflow")
    parts = [stands_for for stands_for in imported.values() if stands_for.startswith(("keras.", "tensorflow.keras."))]
    return _Keras("", parts[0].split(".")[0]) if parts else None


def patch(job: PatchJob) -> None:
    """Set the global policy, and scale the loss of the script's own loops.

    Raises:
        Unclear: Keras has no such policy, a loop cannot be patched without guessing, or the script has the policy already.
    """
    script, written = job.script, keras_in(job.script)
    assert written is not None
    if job.preset not in _PATCHED:
        unclear(
            f"policy {job.policy}: a Keras script can be patched for {' and '.join(_PATCHED)}",
            "see docs/keras.md for what Keras can honour",
        )
    wanted = dtype_policy_name(job.policy)
    if script.backwards:
        unclear(
            "a Keras model is trained by a torch loop",
            "set keras.mixed_precision.set_global_policy by hand, and scale the loss",
        )
    _refuse_other_ways(script, wanted)
    calls = script.calls_to(_SETS_POLICY)
    if calls:
        _change(job, calls, wanted)
    if job.policy.loss_scale == "none":
        _leave_scaling(job)
    else:
        keras_loops.scale(job, written.name or "keras")
    if not calls:
        _add(job, written, wanted)


def _refuse_other_ways(script: ScriptFacts, wanted: str) -> None:
    """Refuse what turned on mixed precision before Keras had dtype policies.

    Raises:
        Unclear: names the line and what to write.
    """
    instead = f'remove it and write keras.mixed_precision.set_global_policy("{wanted}")'
    old = script.calls_to(_OLD)
    if old:
        unclear(f"line {old[0].lineno} calls mixed_precision.experimental, which TensorFlow no longer has", instead)
    texts = [n for n in script.tree.nodes if isinstance(n, ast.Constant) and n.value == _REWRITE_VARIABLE]
    options = [n for n in script.tree.nodes if isinstance(n, ast.Constant) and n.value == "auto_mixed_precision"]
    rewrites: list[ast.expr] = [*script.calls_to(_REWRITE), *texts, *options]
    if rewrites:
        unclear(f"line {rewrites[0].lineno} lets TensorFlow rewrite its graphs for mixed precision", instead)
    keras_loops.refuse_old(script)


def _change(job: PatchJob, calls: list[ast.Call], wanted: str) -> None:
    """Change the policy that the script sets itself."""
    call = calls[0]
    if len(calls) > 1:
        unclear(
            f"lines {calls[0].lineno} and {calls[1].lineno} set the policy",
            f'pass "{wanted}" where the model is created',
        )
    argument = _name_in(job.script, call.args[0] if call.args else call.keywords[0].value if call.keywords else None)
    if argument is None:
        unclear(f"line {call.lineno} takes the policy from elsewhere", f'pass "{wanted}" there')
    if argument.value == wanted:
        unclear(f"already sets the policy {wanted}", "nothing needs to be done", already=True)
    job.editor.replace(argument, f'"{wanted}"')
    job.note(argument, wanted, "the global policy of all layers created after it")


def _name_in(script: ScriptFacts, value: ast.expr | None, *, depth: int = 2) -> ast.Constant | None:
    """Return the name of a policy, in an object of Keras or in the one assignment of a variable; None if it is not written there."""
    if isinstance(value, ast.Constant):
        return value
    if isinstance(value, ast.Call) and value in script.calls_to(_POLICY):
        return _name_in(script, value.args[0] if value.args else keyword_of(value, "name"), depth=depth)
    if isinstance(value, ast.Name) and depth:
        bound = [s for scope in script.tree.scopes(value) for s in script.tree.bindings(value.id, scope)]
        if len(bound) == 1 and isinstance(bound[0], ast.Assign) and isinstance(bound[0].targets[0], ast.Name):
            return _name_in(script, bound[0].value, depth=depth - 1)
    return None


def _leave_scaling(job: PatchJob) -> None:
    for call in job.script.calls_to(keras_loops.SCALER):
        job.note(call, "left as it is", "BF16 needs no loss scale, and one by powers of two changes no gradient")


def _add(job: PatchJob, written: _Keras, wanted: str) -> None:
    keras = written.name or "keras"
    lines = [f'{keras}.mixed_precision.set_global_policy("{wanted}")']
    if not written.name:
        lines.insert(0, "import keras" if written.root == "keras" else "from tensorflow import keras")
    job.after_imports(written.root, *lines)
    why = "all layers created after it compute in 16 bits and keep FP32 weights"
    job.note("imports", lines[-1], why + ("; compile() scales the loss" if job.policy.loss_scale != "none" else ""))
