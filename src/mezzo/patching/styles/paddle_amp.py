"""A loop that calls Paddle directly, patched by Paddle's own recipe: ``auto_cast``, ``decorate`` at O2, and ``GradScaler`` with FP16."""

from __future__ import annotations

import ast
import json

from mezzo.frameworks.paddle import PaddlePrecision, left_out, to_paddle
from mezzo.patching.job import PatchJob
from mezzo.patching.outcome import unclear
from mezzo.patching.places import Home, common_home
from mezzo.patching.reading import Backward
from mezzo.patching.regions import Regions
from mezzo.patching.styles.scaler import Scaler, refuse_in_any_library
from mezzo.patching.styles.validation import autocast_validation
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
    if policy.compute == "fp8":
        unclear(f"policy {policy}: paddle.amp does not train in FP8", "choose a policy in FP16 or BF16")
    native, missing = to_paddle(policy), left_out(policy)
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
    """Scale the losses and update through a scaler, if the policy scales; ``names`` are those of losses that were moved."""
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
