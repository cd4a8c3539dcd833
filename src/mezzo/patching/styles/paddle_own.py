"""A Paddle script with mixed precision of its own: another format, and a loss scale where the format needs one."""

from __future__ import annotations

import ast

from mezzo.formats import FP16
from mezzo.patching.job import PatchJob
from mezzo.patching.outcome import unclear
from mezzo.patching.reading import ScriptFacts
from mezzo.patching.styles import paddle_amp
from mezzo.patching.tree import keyword_of

_DECORATE = r"paddle\.amp\.(auto_cast\.)?(amp_)?decorate"
_POSITIONS: dict[str, tuple[str, ...]] = {
    "auto_cast": ("enable", "custom_white_list", "custom_black_list", "level", "dtype"),
    "decorate": ("models", "optimizers", "level", "dtype"),
}
_LEVEL = "O1"
"""The level of a call that names none."""


def is_there(script: ScriptFacts) -> bool:
    """Return whether a script has mixed precision of Paddle's."""
    return bool(script.autocasts or script.scalers or script.calls_to(_DECORATE))


def patch(job: PatchJob) -> None:
    """Change the formats of the script's own mixed precision, and turn its loss scaler on or off.

    Raises:
        Unclear: the script already has the policy, is at another level, or takes its settings from elsewhere.
    """
    script, settings = job.script, paddle_amp.settings_of(job)
    paddle_amp.refuse_other_interfaces(job)
    regions = [call for call in script.autocasts if not _is(call, "enable", value=False, kind="auto_cast")]
    decorations = script.calls_to(_DECORATE)
    if not regions:
        where = (script.scalers or decorations or script.autocasts)[0].lineno
        unclear(f"line {where} has mixed precision, but no auto_cast is on", "put the forward pass under it first")
    for call, kind in [*((c, "auto_cast") for c in regions), *((c, "decorate") for c in decorations)]:
        _check_level(job, call, kind, settings.auto_cast["level"])
    if settings.decorate is not None and not decorations:
        unclear(
            f"line {regions[0].lineno} is at level O2, and paddle.amp.decorate is not called",
            "decorate the model and the optimizer by hand",
        )
    for call in decorations:
        _check_masters(job, call)
    changed = [_retype(job, call, "auto_cast", settings.auto_cast["dtype"]) for call in regions]
    changed += [_retype(job, call, "decorate", settings.auto_cast["dtype"]) for call in decorations]
    if not settings.grad_scaler["enable"]:
        changed += [_switch(job, call, on=False) for call in script.scalers]
    elif script.scalers:
        changed += [_switch(job, call, on=True) for call in script.scalers]
    else:
        paddle_amp.refuse_what_scaling_breaks(job)
        paddle_amp.finish(job, settings, {})
        changed.append(True)
    if not any(changed):
        unclear(
            f"already computes in {job.policy.compute} under its own auto_cast",
            "nothing needs to be done",
            already=True,
        )


def _argument(call: ast.Call, name: str, kind: str) -> ast.expr | None:
    place = _POSITIONS[kind].index(name)
    return keyword_of(call, name) or (call.args[place] if len(call.args) > place else None)


def _is(call: ast.Call, name: str, *, value: object, kind: str) -> bool:
    argument = _argument(call, name, kind)
    return isinstance(argument, ast.Constant) and argument.value is value


def _constant(call: ast.Call, name: str, kind: str, *, default: str) -> str:
    """Return the value of an argument that must be written in the call."""
    argument = _argument(call, name, kind)
    unpacked = [k for k in call.keywords if k.arg is None]
    if argument is None and unpacked and _holds(unpacked[0].value):
        unclear(f"line {call.lineno} unpacks its arguments", f"set {name} there by hand")
    if argument is None:
        return default
    if not isinstance(argument, ast.Constant):
        unclear(f"line {argument.lineno} takes {name} from {ast.unparse(argument)}", f"set {name} there by hand")
    return str(argument.value)


def _holds(value: ast.expr) -> bool:
    """Return whether unpacked arguments may hold more than lists; a patch's own are the lists."""
    return not (isinstance(value, ast.Name) and value.id in ("amp_lists", "policy_lists"))


def _check_level(job: PatchJob, call: ast.Call, kind: str, wanted: str) -> None:
    level = _constant(call, "level", kind, default=_LEVEL)
    if level != wanted:
        unclear(
            f"line {call.lineno} is at level {level}, and policy {job.policy} is Paddle's {wanted}",
            f"choose a policy of that level, or change it to {wanted} by hand",
        )


def _check_masters(job: PatchJob, call: ast.Call) -> None:
    masters = keyword_of(call, "master_weight")
    keeps = not (isinstance(masters, ast.Constant) and masters.value is False)
    if keeps is not job.policy.master_weights:
        has = "with" if keeps else "without"
        unclear(
            f"line {call.lineno} decorates the model {has} FP32 master weights, unlike policy {job.policy}",
            f"pass master_weight={job.policy.master_weights} there",
        )


def _retype(job: PatchJob, call: ast.Call, kind: str, wanted: str) -> bool:
    """Give a call the policy's format; return whether that changed anything."""
    written = _constant(call, "dtype", kind, default=FP16.dtype_name)
    if written == wanted:
        return False
    argument = _argument(call, "dtype", kind)
    if argument is None:
        job.editor.add_argument(call, f'dtype="{wanted}"')
    else:
        job.editor.replace(argument, f'"{wanted}"')
    job.note(call, f'dtype="{wanted}"', f"the policy's format; it was {written}")
    return True


def _switch(job: PatchJob, call: ast.Call, *, on: bool) -> bool:
    """Turn a scaler on or off; return whether that changed anything."""
    enable = keyword_of(call, "enable") or (call.args[0] if call.args else None)
    if enable is not None and not isinstance(enable, ast.Constant):
        job.note(call, "left as it is", f"its enable={ast.unparse(enable)} decides")
        return False
    if (True if enable is None else bool(enable.value)) is on:
        return False
    if enable is None:
        job.editor.add_argument(call, f"enable={on}")
    else:
        job.editor.replace(enable, str(on))
    why = "FP16 gradients need a loss scale" if on else "BF16 has the range of FP32, so gradients need no scaling"
    job.note(call, f"enable={on}", why)
    return True
