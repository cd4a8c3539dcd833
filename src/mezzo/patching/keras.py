"""Keras: its global dtype policy, set before any layer is created."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from mezzo.frameworks.keras import dtype_policy_name
from mezzo.patching.job import PatchJob
from mezzo.patching.reading import ScriptFacts
from mezzo.patching.text import unclear
from mezzo.patching.tree import bound_within, calls_in, flat, keyword_of

SCALER = r".*\.LossScaleOptimizer"
_STATELESS = r".*\.(stateless_apply|stateless_call)"
_OPTIMIZER = r".*\boptimizers\.(\w+\.)*(?!schedules)[A-Z]\w*"
_OLD_CALLS = ("get_scaled_loss", "get_unscaled_gradients")
_BY_HAND = "wrap the optimizer in keras.optimizers.LossScaleOptimizer and scale the loss with it, or use bf16"


@dataclass(frozen=True)
class _Gradient:
    """One differentiation on a tape, and the update that applies its gradients."""

    call: ast.Call
    loss: ast.Name
    after: ast.stmt
    """The statement on the tape that computes the loss."""
    apply: ast.Call

    @property
    def optimizer(self) -> ast.expr:
        assert isinstance(self.apply.func, ast.Attribute)
        return self.apply.func.value


def scale(job: PatchJob, keras: str) -> None:
    """Scale the loss in every loop of the script's own; ``keras`` is the expression for Keras.

    Raises:
        Unclear: names the line of what cannot be patched without guessing.
    """
    script = job.script
    stateless = script.calls_to(_STATELESS)
    if stateless:
        _give_up(stateless[0], "trains in a loop of its own, in which Keras does not scale the loss")
    if script.tree.method_calls("scale_loss"):
        return  # the script scales its losses itself
    taped = script.calls_to(r"tensorflow\.GradientTape")
    tapes = {ast.unparse(i.optional_vars) for i in _items(script) if i.context_expr in taped and i.optional_vars}
    calls = [call for call, tape in script.tree.method_calls("gradient") if call.args and ast.unparse(tape) in tapes]
    if taped and not calls:
        _give_up(taped[0], "opens a tape, and no gradient of a loss is taken from it")
    found = [_gradient(script, call) for call in calls]
    for optimizer in dict.fromkeys(ast.unparse(one.optimizer) for one in found):
        _wrap(job, keras, optimizer, next(one for one in found if ast.unparse(one.optimizer) == optimizer))
    for one in found:
        name = script.tree.free_name(f"scaled_{one.loss.id}", f"{one.loss.id}_scaled")
        optimizer = job.text.of(one.optimizer)
        job.editor.line_after(one.after, f"{name} = {optimizer}.scale_loss({job.text.of(one.loss)})")
        job.editor.replace(one.loss, name)
        why = "without it, small FP16 gradients would become zero; the optimizer divides them by the scale again"
        job.note(f"line {one.after.end_lineno}", "its loss scaled after it", why)
        job.note(one.call, "gradients of the scaled loss", why)


def refuse_old(script: ScriptFacts) -> None:
    """Refuse a loss scale that Keras 3 no longer has.

    Raises:
        Unclear: names the line and what to write.
    """
    old = script.tree.method_calls(*_OLD_CALLS)
    if old:
        call = old[0][0]
        assert isinstance(call.func, ast.Attribute)
        unclear(
            f"line {call.lineno} calls {call.func.attr}(), which Keras 3 no longer has",
            "write optimizer.scale_loss(loss) for get_scaled_loss, and leave get_unscaled_gradients out: apply_gradients divides them",
        )


def _give_up(node: ast.expr | ast.stmt, why: str) -> NoReturn:
    unclear(f"line {node.lineno} {why}", _BY_HAND)


def _gradient(script: ScriptFacts, call: ast.Call) -> _Gradient:
    """Return what belongs to a differentiation.

    Raises:
        Unclear: it is not in the file, or the gradients are read on their way to the update.
    """
    assert isinstance(call.func, ast.Attribute)
    tape, loss = ast.unparse(call.func.value), call.args[0]
    function = script.tree.function(call) or script.tree.module
    blocks = [n for n in ast.walk(function) if isinstance(n, ast.With) and _binds(n, tape)]
    if not isinstance(loss, ast.Name) or not blocks:
        _give_up(call, f"differentiates {ast.unparse(loss)}, and the tape's statement that computes it is not clear")
    before = [block for block in blocks if block.lineno <= call.lineno]
    computing = [
        s for block in before[-1:] for s in block.body if loss.id in bound_within(s) and s.lineno < call.lineno
    ]
    if not computing:
        _give_up(call, f"differentiates {loss.id}, which no statement on its tape computes")
    return _Gradient(call, loss, computing[-1], _applied(script, call, function))


def _items(script: ScriptFacts) -> list[ast.withitem]:
    return [item for n in script.tree.nodes if isinstance(n, ast.With) for item in n.items]


def _binds(stmt: ast.With, name: str) -> bool:
    return any(i.optional_vars is not None and ast.unparse(i.optional_vars) == name for i in stmt.items)


def _applied(script: ScriptFacts, call: ast.Call, function: ast.AST) -> ast.Call:
    """Return the call that updates with the gradients of ``call``."""
    applies = [c for c, _ in script.tree.method_calls("apply", "apply_gradients") if c in calls_in(function)]
    around = [c for c in applies if call in calls_in(c)]
    if around:
        return around[0]
    stmt = script.tree.statement(call)
    targets = flat(stmt.targets[0]) if isinstance(stmt, ast.Assign) and stmt.value is call else []
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    reads = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id in names and isinstance(n.ctx, ast.Load)]
    after = sorted((n for n in reads if n.lineno >= call.lineno), key=lambda n: (n.lineno, n.col_offset))
    passed = [c for c in applies if {*after} & {*ast.walk(c)}]
    if not passed:
        _give_up(call, "takes gradients, and what applies them is not clear")
    others = [n for n in after if n not in {*ast.walk(passed[0])}]
    if others:
        unclear(
            f"line {others[0].lineno} reads gradients that would be scaled",
            "clip by the optimizer's global_clipnorm, which sees them unscaled, or use bf16",
        )
    return passed[0]


def _wrap(job: PatchJob, keras: str, optimizer: str, one: _Gradient) -> None:
    """Wrap an optimizer where it is created; ``compile`` wraps its argument."""
    script = job.script
    compiles = [call for call, _ in script.tree.method_calls("compile")]
    off = [k.value for call in compiles for k in call.keywords if k.arg == "auto_scale_loss"]
    if off:
        unclear(f"line {off[0].lineno} sets auto_scale_loss", "leave it out, so that compile() wraps the optimizer")
    if optimizer == "self.optimizer":
        if compiles:
            return
        _give_up(one.apply, "updates with self.optimizer, which no compile() in this file is passed")
    created = [call for name, call in script.assigned_calls if name == optimizer]
    if len(created) != 1 or created[0] not in script.calls_to(f"{_OPTIMIZER}|{SCALER}"):
        _give_up(one.apply, f"updates with {optimizer}, which this file does not create in one place")
    if created[0] in script.calls_to(SCALER):
        return
    passed = [call for call in compiles if optimizer in (ast.unparse(a) for a in [*call.args, *_optimizer(call)])]
    if passed:
        _give_up(passed[0], f"passes {optimizer} to compile(), and the script updates with it itself")
    job.editor.insert(job.text.span(created[0])[0], f"{keras}.optimizers.LossScaleOptimizer(")
    job.editor.append_to(created[0], ")")
    job.note(
        created[0], "LossScaleOptimizer", "divides the gradients by the loss scale, and skips an update that overflowed"
    )


def _optimizer(call: ast.Call) -> list[ast.expr]:
    argument = keyword_of(call, "optimizer")
    return [] if argument is None else [argument]


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
        scale(job, written.name or "keras")
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
    refuse_old(script)


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
    for call in job.script.calls_to(SCALER):
        job.note(call, "left as it is", "BF16 needs no loss scale, and one by powers of two changes no gradient")


def _add(job: PatchJob, written: _Keras, wanted: str) -> None:
    keras = written.name or "keras"
    lines = [f'{keras}.mixed_precision.set_global_policy("{wanted}")']
    if not written.name:
        lines.insert(0, "import keras" if written.root == "keras" else "from tensorflow import keras")
    job.after_imports(written.root, *lines)
    why = "all layers created after it compute in 16 bits and keep FP32 weights"
    job.note("imports", lines[-1], why + ("; compile() scales the loss" if job.policy.loss_scale != "none" else ""))
