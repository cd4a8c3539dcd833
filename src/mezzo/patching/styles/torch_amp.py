"""A loop that calls torch directly, patched by PyTorch's own recipe: ``torch.autocast``, and ``torch.amp.GradScaler`` with FP16."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from mezzo.patching.device import DeviceType
from mezzo.patching.job import PatchJob
from mezzo.patching.outcome import unclear
from mezzo.patching.reading import Backward, ScriptFacts
from mezzo.patching.regions import Region, Regions
from mezzo.patching.styles.scaler import Scaler, refuse_in_any_library
from mezzo.patching.styles.validation import autocast_validation
from mezzo.patching.text import last_line
from mezzo.patching.tree import bound_within, names_in
from mezzo.policy import PRESETS, Policy

_SCALER_ARGUMENTS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
_LEFT_TO_THE_DEVICE = ("name", "op_lists", *_SCALER_ARGUMENTS)


def why_not_expressed(policy: Policy) -> str:
    """Return the reason why torch.amp cannot express a policy; empty if it can."""
    if policy.casting == "model":
        return "torch.amp keeps weights in FP32; it has no 16-bit weights"
    if policy.compute == "fp8":
        return "torch.amp has no FP8"
    if policy.loss_scale == "static":
        return "torch.amp has no static loss scale"
    preset, given = vars(PRESETS[policy.name]), vars(policy)
    changed = [f for f in given if f not in _LEFT_TO_THE_DEVICE and given[f] != preset[f]]
    if changed == ["arithmetic"] and policy.arithmetic == "native":
        return ""
    return f"torch.amp has no {', '.join(changed)}" if changed else ""


def patch_loop(job: PatchJob, *, with_regions: bool = True) -> None:
    """Put the forward passes under autocast, and scale the loss if the policy does.

    Raises:
        Unclear: the loop cannot be patched without guessing.
    """
    script = job.script
    if job.policy.loss_scale != "none":
        refuse_what_scaling_breaks(job)
    device = DeviceType(script)
    job.imports("torch")
    names: dict[Backward, str] = {}
    scaler = _TorchScaler(job, device) if job.policy.loss_scale != "none" else None
    if scaler is not None:
        scaler.create()

    def opening(stmt: ast.stmt) -> str:
        return f"{job.library}.autocast({device.at(stmt)}, dtype={job.dtype})"

    if with_regions:
        regions, banned = Regions(script, script.backwards), Banned(script)
        for argument in banned.leave_out(regions):
            job.editor.append_to(argument, ".float()")
            job.note(
                argument,
                "the loss outside of autocast",
                "CUDA's autocast refuses binary cross entropy on probabilities",
            )
        names = job.autocast(regions, opening)
        autocast_validation(job, opening, why_not=banned.why_not)
    if scaler is None:
        for backward, name in names.items():
            job.editor.replace(backward.loss, name)
        job.note("loss scale", "none", "BF16 has the range of FP32, so gradients need no scaling")
        return
    scaler.replace_calls(names)


def refuse_what_scaling_breaks(job: PatchJob) -> None:
    """Refuse what does not work with scaled gradients.

    Raises:
        Unclear: names the line and what to do.
    """
    script = job.script
    second = script.calls_to(r"torch\.autograd\.grad")
    if second:
        unclear(
            f"line {second[0].lineno} calls torch.autograd.grad, whose gradients must be scaled and unscaled by hand",
            'use bf16, or follow "Gradient penalty" in the examples of torch.amp',
        )
    refuse_in_any_library(job)


class _TorchScaler(Scaler):
    def __init__(self, job: PatchJob, device: DeviceType) -> None:
        super().__init__(job)
        self._device = device

    def create(self) -> None:
        """Create the scaler after the last optimizer."""
        policy, preset = self._job.policy, PRESETS["fp16"]
        changed = [f for f in _SCALER_ARGUMENTS if getattr(policy, f) != getattr(preset, f)]
        settings = "".join(f", {f}={getattr(policy, f)!r}" for f in changed)
        device = self._device.at(self.home.after, line=last_line(self.home.after))
        lines = []
        if device.startswith("next(") and not self.home.owner:
            variable = self._script.tree.free_name("device_type", "amp_device_type")
            lines.append(f"{variable} = {device}")
            device = self._device.share(variable, self.home.scope)
        assigned = f"{self.home.owner}{self.name} = {self._job.library}.amp.GradScaler({device}{settings})"
        self.created(*lines, assigned)

    def value_of(self, scaler: str) -> str:
        """Return the expression for a scaler's scale."""
        return f"{scaler}.get_scale()"


# --- Binary cross entropy on probabilities, which CUDA's autocast refuses: such a loss stays outside autocast, on FP32 inputs ---

# Probabilities near 0 and 1 have no 16-bit neighbours, so torch demands the loss on logits instead; but a patch does not change the model.

_CLASS, _FUNCTION = "torch.nn.BCELoss", "torch.nn.functional.binary_cross_entropy"


class Banned:
    """The calls of a script that autocast refuses."""

    def __init__(self, script: ScriptFacts) -> None:
        self._script = script
        self._criteria = {name for name, call in script.assigned_calls if script.tree.dotted(call.func) == _CLASS}

    def calls_in(self, node: ast.AST) -> list[ast.Call]:
        """Return the calls in a node that compute such a loss, directly or in a function of this file."""
        return [n for n in ast.walk(node) if isinstance(n, ast.Call) and self._computes(n, depth=3)]

    def _computes(self, call: ast.Call, *, depth: int) -> bool:
        if ast.unparse(call.func) in self._criteria or self._script.tree.dotted(call.func) == _FUNCTION:
            return True
        called = self._script.functions_called(call) if depth else []
        inner = (n for function in called for n in ast.walk(function) if isinstance(n, ast.Call))
        return any(self._computes(n, depth=depth - 1) for n in inner)

    def why_not(self, node: ast.AST) -> str:
        """Return why a statement cannot be put under autocast; empty if it can."""
        found = self.calls_in(node)
        why = "computes binary cross entropy on probabilities, which CUDA's autocast refuses"
        return f"line {found[0].lineno} {why}" if found else ""

    def leave_out(self, regions: Regions) -> Iterator[ast.expr]:
        """End regions before such a loss; yield its arguments that are computed under autocast, for a cast to FP32.

        Raises:
            Unclear: the loss and the model are called in one expression.
        """
        kept = []
        for region in regions.plain:
            block = self._script.tree.block(region.first)
            inside = block[block.index(region.first) : block.index(region.last) + 1]
            number = next((n for n, stmt in enumerate(inside) if self.calls_in(stmt)), None)
            if number is None:
                kept.append(region)
                continue
            before, after = inside[:number], inside[number:]
            bound = set().union(*map(bound_within, before))
            for stmt in after:
                yield from self._arguments(stmt, bound)
            if before:
                kept.append(Region(before[0], before[-1], cache=region.cache))
        for hoisted in regions.hoisted:
            self._refuse(hoisted.backward.loss)
        regions.plain = kept

    def _arguments(self, stmt: ast.stmt, bound: set[str]) -> Iterator[ast.expr]:
        calls = self.calls_in(stmt)
        outside = [n for n in ast.walk(stmt) if isinstance(n, ast.Call) and n not in calls]
        if any(self._script.runs_forward(n, functional=False) for n in outside) or hasattr(stmt, "body"):
            self._refuse(stmt)
            unclear(f"line {stmt.lineno} calls a model after a loss that torch.autocast refuses", _BY_HAND)
        for call in calls:
            for argument in (*call.args, *(k.value for k in call.keywords)):
                if names_in(argument) & bound:
                    if not isinstance(argument, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
                        self._refuse(stmt)
                    yield argument

    def _refuse(self, node: ast.AST) -> None:
        found = self.calls_in(node)
        if found:
            unclear(
                f"line {found[0].lineno} uses binary cross entropy on probabilities, which torch.autocast refuses on CUDA: "
                "probabilities near 0 and 1 have no 16-bit neighbours",
                _BY_HAND,
                only_in_style=True,
            )


_BY_HAND = "use BCEWithLogitsLoss and drop the sigmoid, or compute this loss on .float() inputs outside autocast"
