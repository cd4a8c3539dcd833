"""``paddle.Model``, which trains by itself: its own argument for mixed precision."""

from __future__ import annotations

import ast

from mezzo.errors import PolicyError
from mezzo.patching.job import PatchJob
from mezzo.patching.outcome import unclear
from mezzo.patching.reading import ScriptFacts
from mezzo.patching.styles import paddle_amp
from mezzo.patching.tree import keyword_of

_EVALUATES = ("evaluate", "predict", "eval_batch", "predict_batch")
_PLACE = 3
"""The position of ``amp_configs`` in ``prepare``."""


def preparations(script: ScriptFacts) -> list[ast.Call]:
    """Return the calls of ``paddle.Model.prepare`` that are passed an optimizer."""
    models = {name for name, call in script.assigned_calls if script.tree.dotted(call.func) == "paddle.Model"}
    calls = script.tree.method_calls("prepare")
    return [call for call, owner in calls if ast.unparse(owner) in models and (call.args or call.keywords)]


def patch(job: PatchJob) -> None:
    """Pass the policy to ``prepare``.

    Raises:
        Unclear: ``paddle.Model`` cannot express it, or the script passes a policy of its own.
    """
    settings = paddle_amp.settings_of(job)
    paddle_amp.refuse_other_interfaces(job)
    try:
        configs = settings.amp_configs
    except PolicyError as error:
        unclear(error.message, error.hint)
    if settings.decorate is not None:
        _refuse_evaluation(job)
    defaults = {"use_dynamic_loss_scaling": True, "incr_ratio": 2.0, "decr_ratio": 0.5}
    entries = {k: v for k, v in configs.items() if v != defaults.get(k) and v != []}
    wanted = ", ".join(f'"{key}": {paddle_amp.literal(value)}' for key, value in entries.items())
    for call in preparations(job.script):
        given = keyword_of(call, "amp_configs") or (call.args[_PLACE] if len(call.args) > _PLACE else None)
        if given is None:
            job.editor.add_argument(call, f"amp_configs={{{wanted}}}")
        elif _equals(given, entries):
            unclear(
                f"line {call.lineno} already passes the policy to prepare", "nothing needs to be done", already=True
            )
        elif isinstance(given, ast.Constant) and given.value in (None, "O0"):
            job.editor.replace(given, f"{{{wanted}}}")
        else:
            unclear(
                f"line {given.lineno} passes amp_configs of the script's own",
                f"make them {{{wanted}}}",
                already=isinstance(given, ast.Constant) and given.value == configs["level"],
            )
        job.note(
            call,
            "the loss outside of auto_cast",
            "paddle.Model computes it there, so it is as wide as the model's output",
        )
        job.note(call, f"amp_configs at level {configs['level']}", "paddle.Model casts and scales by this argument")


def _refuse_evaluation(job: PatchJob) -> None:
    """Refuse a model with 16-bit weights that ``paddle.Model`` evaluates outside of ``auto_cast``."""
    evaluates = [call for call, _ in job.script.tree.method_calls(*_EVALUATES)]
    fits = [call for call, _ in job.script.tree.method_calls("fit")]
    evaluates += [call for call in fits if keyword_of(call, "eval_data") is not None or len(call.args) > 1]
    if evaluates:
        unclear(
            f"line {evaluates[0].lineno} evaluates the model, which paddle.Model does outside of auto_cast: 16-bit weights at "
            "level O2 do not allow that",
            "choose fp16, which keeps FP32 weights",
        )


def _equals(given: ast.expr, entries: dict[str, object]) -> bool:
    try:
        return bool(ast.literal_eval(given) == entries)
    except ValueError:
        return False
