"""Paddle scripts, patched by Paddle's own recipe: ``auto_cast``, ``decorate``, ``GradScaler``, or an argument of ``paddle.Model``."""

from __future__ import annotations

import ast
import json

from mezzo.errors import PolicyError
from mezzo.formats import FP16
from mezzo.frameworks.paddle import PaddlePrecision, not_honoured, to_paddle
from mezzo.patching.checkpoints import autocast_validation
from mezzo.patching.job import PatchJob
from mezzo.patching.places import Home, common_home
from mezzo.patching.reading import Backward, ScriptFacts
from mezzo.patching.regions import Regions
from mezzo.patching.scaler import Scaler, refuse_in_any_library
from mezzo.patching.text import unclear
from mezzo.patching.tree import keyword_of

_WRITTEN = ("init_loss_scaling", "incr_every_n_steps", "decr_every_n_nan_or_inf")
"""Arguments of GradScaler that are always written: their defaults differ between versions of Paddle."""
_DEFAULTS = {"use_dynamic_loss_scaling": True, "incr_ratio": 2.0, "decr_ratio": 0.5}
_PARALLEL = r"paddle\.DataParallel|(paddle\.)?(distributed\.)?fleet\.distributed_model"
_LISTS = ("custom_white_list", "custom_black_list")


def settings_of(job: PatchJob) -> PaddlePrecision:
    """Return the policy as arguments of Paddle's functions.

    Raises:
        Unclear: Paddle's functions cannot express it.
    """
    policy = job.policy
    if policy.in_layers:
        unclear(
            f"policy {policy}: paddle.amp does not train in {policy.compute.upper()}", "choose a policy in FP16 or BF16"
        )
    native, missing = to_paddle(policy), not_honoured(policy)
    refused = [left.choice for left in missing if not left.same_steps]
    if refused:
        what = "; ".join(f"{choice.what} {choice.value}, because {choice.reason}" for choice in refused)
        unclear(f"policy {policy}: {what}", "run the script under mezzo run, or choose a policy without it")
    for choice, _ in missing:
        job.note(choice.what, choice.value, choice.reason)
    return native


def patch_loop(job: PatchJob) -> None:
    """Put the forward passes under ``auto_cast``, decorate the model at O2, and scale the loss if the policy does.

    Raises:
        Unclear: the loop cannot be patched without guessing.
    """
    script, settings = job.script, settings_of(job)
    refuse_other_interfaces(job)
    if job.policy.loss_scale != "none":
        refuse_what_scaling_breaks(job)
    job.imports("paddle")
    opening = _written_lists(job, settings)
    if settings.decorate is not None:
        _decorate(job, settings.decorate)
    names = job.autocast(Regions(script, script.backwards), lambda _: opening)
    autocast_validation(job, lambda _: opening, why_not=lambda _: "")
    if settings.decorate is not None:
        _refuse_uncovered(job)
    finish(job, settings, names)


def finish(job: PatchJob, settings: PaddlePrecision, names: dict[Backward, str]) -> None:
    """Scale the losses and update through a scaler, if the policy scales; ``names`` are the losses that were moved."""
    if not settings.grad_scaler["enable"]:
        for backward, name in names.items():
            job.editor.replace(backward.loss, name)
        job.note("loss scale", "none", "BF16 has the range of FP32, so gradients need no scaling")
        return
    scaler = PaddleScaler(job, settings)
    scaler.create()
    scaler.replace_calls(names)


def refuse_other_interfaces(job: PatchJob) -> None:
    """Refuse scripts that do not train eagerly, or whose updates another interface makes.

    Raises:
        Unclear: names the line and what to do.
    """
    static = job.script.calls_to(r"paddle\.(enable_static|static\..*)")
    if static:
        unclear(
            f"line {static[0].lineno} builds a static graph, whose mixed precision is paddle.static.amp's",
            "decorate its optimizer with paddle.static.amp.decorate by hand",
        )
    fleet = job.script.calls_to(r"(paddle\.)?(distributed\.)?fleet\.distributed_optimizer")
    if fleet:
        unclear(
            f"line {fleet[0].lineno} lets fleet update the weights, which needs a scaler of fleet's own",
            "write paddle.amp.auto_cast and fleet.distributed_scaler(paddle.amp.GradScaler()) by hand",
        )


def refuse_what_scaling_breaks(job: PatchJob) -> None:
    """Refuse what does not work with Paddle's scaled gradients.

    Raises:
        Unclear: names the line and what to do.
    """
    script = job.script
    several = script.calls_to(r"paddle\.autograd\.backward")
    if several:
        unclear(
            f"line {several[0].lineno} differentiates a list of losses, and GradScaler scales one",
            "call backward() of their sum, or use bf16",
        )
    second = script.calls_to(r"paddle\.(autograd\.)?(grad|jacobian|hessian)")
    if second:
        unclear(
            f"line {second[0].lineno} calls paddle.grad, whose gradients must be scaled and unscaled by hand",
            "use bf16, which needs no loss scale",
        )
    refuse_in_any_library(job)
    optimizers = sorted({step.name for step in script.steps})
    if len(optimizers) > 1:
        unclear(
            f"the script updates {' and '.join(optimizers)}, and Paddle's GradScaler forgets an overflow of one of them "
            "when the next one steps",
            "use bf16, or give each optimizer a GradScaler of its own by hand",
        )


def _written_lists(job: PatchJob, settings: PaddlePrecision) -> str:
    """Write the policy's lists after the imports; return the expression for a region."""
    given = settings.auto_cast
    lists = {name: given[name] for name in _LISTS if given[name]}
    arguments = f'level="{given["level"]}", dtype="{given["dtype"]}"'
    if lists:
        name = job.script.tree.free_name("amp_lists", "policy_lists")
        entries = [f'    "{key}": {literal(values)},' for key, values in lists.items()]
        job.after_imports("paddle", f"{name} = {{", *entries, "}")
        why = "what the policy's op lists have in 16 bits and in FP32 besides Paddle's own lists"
        job.note("imports", f"{name} after them", why)
        arguments += f", **{name}"
    return f"{job.library}.amp.auto_cast({arguments})"


def _refuse_uncovered(job: PatchJob) -> None:
    """Refuse a forward pass outside ``auto_cast`` whose weights are in 16 bits, and its inputs are not."""
    script = job.script
    for stmt in (n for n in script.tree.nodes if isinstance(n, ast.stmt) and not hasattr(n, "body")):
        cls = script.tree.class_of(stmt)
        in_model = cls is not None and cls.name in script.module_classes
        if not in_model and script.runs_forward(stmt, functional=False, depth=0) and not job.is_covered(stmt):
            unclear(
                f"line {stmt.lineno} calls a model outside of auto_cast, which its 16-bit weights at level O2 do not allow",
                "put that line under paddle.amp.auto_cast by hand, or choose fp16 or bf16, which keep FP32 weights",
            )


def _decorate(job: PatchJob, arguments: dict[str, object]) -> None:
    """Decorate the model and its optimizers, right after the last of them is created."""
    script = job.script
    names = list(dict.fromkeys(step.name for step in script.steps))
    if not names:
        unclear("no update was found: no call to an optimizer's step()", "call paddle.amp.decorate by hand")
    homes = [job.places.home(step.name, step.stmt) for step in script.steps]
    several = "the script has several training loops, whose optimizers are created in different functions"
    home = common_home(homes, several, "call paddle.amp.decorate in each by hand")
    here = list(dict.fromkeys(one.name for one in homes if one.name))
    models = list(dict.fromkeys(m for name in here for m in _models_of(job, name, home)))
    if not models or len(here) < len({one.name for one in homes}):
        unclear(
            f"the model of {names[0]} cannot be told from the call that creates it",
            f"write paddle.amp.decorate(models=..., optimizers=..., level={arguments['level']!r}) by hand",
        )
    parallel = [c for name, c in script.assigned_calls if name in models and c in script.calls_to(_PARALLEL)]
    if parallel and parallel[0].lineno < home.after.lineno:
        unclear(
            f"line {parallel[0].lineno} makes the model parallel before line {home.after.lineno} creates the optimizer, and "
            "paddle.amp.decorate takes a model only before that",
            "call paddle.amp.decorate(models=..., level='O2') before it by hand, or choose fp16 or bf16",
        )
    model, optimizer = (_one_or_list(some) for some in (models, here))
    written = ", ".join(f"{key}={literal(value)}" for key, value in arguments.items())
    call = f"{job.library}.amp.decorate(models={model}, optimizers={optimizer}, {written})"
    line = f"{model.strip('[]')}, {optimizer.strip('[]')} = {call}"
    if len(models) > 1 or len(here) > 1:
        line = call  # which changes the models and the optimizers themselves
    job.editor.line_after(home.after, line)
    masters = "the optimizer updates FP32 copies of them" if arguments["master_weight"] else "there are no FP32 copies"
    job.note(home.after, "paddle.amp.decorate after it", f"the weights become {arguments['dtype']}; {masters}")


def _models_of(job: PatchJob, optimizer: str, home: Home) -> list[str]:
    """Return the models whose parameters an optimizer is created with."""
    calls = [call for name, call in job.script.assigned_calls if name == optimizer and call.lineno <= home.after.lineno]
    found: list[str] = []
    for call in calls:
        given = keyword_of(call, "parameters")
        inside = [] if given is None else [n for n in ast.walk(given) if isinstance(n, ast.Call)]
        owners = [n.func.value for n in inside if isinstance(n.func, ast.Attribute) and n.func.attr == "parameters"]
        found += [job.text.of(owner) for owner in owners]
    return found


def _one_or_list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"


def literal(value: object) -> str:
    """Return a value of a setting as it is written in a script, with double quotes."""
    return json.dumps(value) if isinstance(value, (str, list)) else repr(value)


class PaddleScaler(Scaler):
    """Paddle's GradScaler."""

    def __init__(self, job: PatchJob, settings: PaddlePrecision) -> None:
        super().__init__(job)
        self._settings = settings.grad_scaler

    def create(self) -> None:
        """Create the scaler after the last optimizer."""
        given = self._settings
        written = [k for k in given if k in _WRITTEN or given[k] != _DEFAULTS.get(k, given[k])]
        arguments = ", ".join(f"{key}={given[key]!r}" for key in written)
        self.created(f"{self.home.owner}{self.name} = {self._job.library}.amp.GradScaler({arguments})")

    def value_of(self, scaler: str) -> str:
        """Return the expression for a scaler's scale; on a CPU, where the scaler is off, it has none."""
        return f'{scaler}.state_dict().get("scale", 1.0)'


_DECORATE = r"paddle\.amp\.(auto_cast\.)?(amp_)?decorate"
_POSITIONS: dict[str, tuple[str, ...]] = {
    "auto_cast": ("enable", "custom_white_list", "custom_black_list", "level", "dtype"),
    "decorate": ("models", "optimizers", "level", "dtype"),
}
_LEVEL = "O1"
"""The level of a call that names none."""


def has_own(script: ScriptFacts) -> bool:
    """Return whether a script has mixed precision of Paddle's."""
    return bool(script.autocasts or script.scalers or script.calls_to(_DECORATE))


def patch_own(job: PatchJob) -> None:
    """Change the formats of the script's own mixed precision, and turn its loss scaler on or off.

    Raises:
        Unclear: the script already has the policy, is at another level, or takes its settings from elsewhere.
    """
    script, settings = job.script, settings_of(job)
    refuse_other_interfaces(job)
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
        refuse_what_scaling_breaks(job)
        finish(job, settings, {})
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


_EVALUATES = ("evaluate", "predict", "eval_batch", "predict_batch")
_PLACE = 3
"""The position of ``amp_configs`` in ``prepare``."""


def preparations(script: ScriptFacts) -> list[ast.Call]:
    """Return the calls of ``paddle.Model.prepare`` that are passed an optimizer."""
    models = {name for name, call in script.assigned_calls if script.tree.dotted(call.func) == "paddle.Model"}
    calls = script.tree.method_calls("prepare")
    return [call for call, owner in calls if ast.unparse(owner) in models and (call.args or call.keywords)]


def patch_fit(job: PatchJob) -> None:
    """Pass the policy to ``prepare``.

    Raises:
        Unclear: ``paddle.Model`` cannot express it, or the script passes a policy of its own.
    """
    settings = settings_of(job)
    refuse_other_interfaces(job)
    try:
        configs = settings.amp_configs
    except PolicyError as error:
        unclear(error.message, error.hint)
    if settings.decorate is not None:
        _refuse_evaluation(job)
    defaults = {"use_dynamic_loss_scaling": True, "incr_ratio": 2.0, "decr_ratio": 0.5}
    entries = {k: v for k, v in configs.items() if v != defaults.get(k) and v != []}
    wanted = ", ".join(f'"{key}": {literal(value)}' for key, value in entries.items())
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
