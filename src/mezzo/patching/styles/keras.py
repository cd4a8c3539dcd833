"""Keras: its global dtype policy, set before any layer is created."""

from __future__ import annotations

import ast
from typing import NamedTuple

from mezzo.patching.job import PatchJob
from mezzo.patching.outcome import unclear
from mezzo.patching.reading import ScriptFacts

_NAMES = {"fp16": "mixed_float16", "bf16": "mixed_bfloat16"}
_SETS_POLICY = r".*\.(set_global_policy|set_dtype_policy|set_policy)"
_OWN_LOOP = r".*\.(GradientTape|apply_gradients|stateless_apply|train_on_batch_with_gradients)"


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
    """Set the global policy.

    Raises:
        Unclear: Keras has no such policy, the script trains in a loop of its own, or it has the policy already.
    """
    script, written = job.script, keras_in(job.script)
    assert written is not None
    wanted = _NAMES.get(job.preset)
    if wanted is None:
        unclear(
            f"policy {job.policy}: a Keras script can be patched for {' and '.join(_NAMES)}",
            "see docs/keras.md for what Keras can honour",
        )
    if script.backwards:
        unclear(
            "a Keras model is trained by a torch loop",
            "set keras.mixed_precision.set_global_policy by hand, and scale the loss",
        )
    loops = script.calls_to(_OWN_LOOP)
    if loops and job.policy.loss_scale != "none" and not script.calls_to(r".*LossScaleOptimizer"):
        unclear(
            f"line {loops[0].lineno} trains in a loop of its own, in which Keras does not scale the loss",
            "wrap the optimizer in keras.optimizers.LossScaleOptimizer and scale the loss with it, or use bf16",
        )
    calls = script.calls_to(_SETS_POLICY)
    if calls:
        _change(job, calls[0], wanted)
        return
    _add(job, written, wanted)


def _change(job: PatchJob, call: ast.Call, wanted: str) -> None:
    argument = call.args[0] if call.args else None
    if not isinstance(argument, ast.Constant):
        unclear(f"line {call.lineno} takes the policy from elsewhere", f'pass "{wanted}" there')
    if argument.value == wanted:
        unclear(f"already sets the policy {wanted}", "nothing needs to be done", already=True)
    job.editor.replace(argument, f'"{wanted}"')
    job.note(call, wanted, "the global policy of all layers created after it")


def _add(job: PatchJob, written: _Keras, wanted: str) -> None:
    keras = written.name or "keras"
    lines = [f'{keras}.mixed_precision.set_global_policy("{wanted}")']
    if not written.name:
        lines.insert(0, "import keras" if written.root == "keras" else "from tensorflow import keras")
    job.after_imports(written.root, *lines)
    why = "all layers created after it compute in 16 bits and keep FP32 weights"
    job.note("imports", lines[-1], why + ("; compile() scales the loss" if job.policy.loss_scale != "none" else ""))
