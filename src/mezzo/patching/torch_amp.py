"""A loop that calls torch directly, patched by PyTorch's own recipe: ``torch.autocast``, and ``torch.amp.GradScaler`` with FP16."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

from mezzo.formats import DTYPE_ALIASES, FORMATS
from mezzo.patching.checkpoints import autocast_validation
from mezzo.patching.job import PatchJob
from mezzo.patching.reading import Backward, ScriptFacts
from mezzo.patching.regions import Regions
from mezzo.patching.scaler import Scaler, refuse_in_any_library
from mezzo.patching.text import last_line, unclear
from mezzo.patching.tree import arguments_of, bound_within, keyword_of, names_in
from mezzo.policy import PRESETS, Policy

_SCALER_ARGUMENTS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
_LEFT_TO_THE_DEVICE = ("name", "op_lists", *_SCALER_ARGUMENTS)


def why_not_expressed(policy: Policy) -> str:
    """Return the reason why torch.amp cannot express a policy; empty if it can."""
    if policy.casting == "model":
        return "torch.amp keeps weights in FP32; it has no 16-bit weights"
    if policy.in_layers:
        return f"torch.amp has no {policy.compute.upper()}"
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
        for before, after in regions.end_before(self.calls_in):
            bound = set().union(*map(bound_within, before))
            for stmt in after:
                yield from self._arguments(stmt, bound)
        for hoisted in regions.hoisted:
            self._refuse(hoisted.backward.loss)

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

_MAKERS = ("torch.device", "torch.accelerator.current_accelerator", "torch.get_default_device")


class DeviceType:
    """Finds the device that a script moves its model and data to."""

    def __init__(self, script: ScriptFacts) -> None:
        self._script, self._tree = script, script.tree
        self._kinds = self._assigned()
        self._used = self._moved_to()
        self._shared: tuple[str, ast.AST] | None = None

    def share(self, name: str, scope: ast.AST) -> str:
        """Use the variable ``name`` of ``scope`` for the model's device from now on; return the name."""
        self._shared = (name, scope)
        return name

    def at(self, node: ast.AST, *, line: int | None = None) -> str:
        """Return the expression for ``device_type``: the script's own device variable, or its model's device.

        Args:
            node: where the expression will be.
            line: the last line on which its names may be bound; None for the node's.
        """
        for autocast in self._script.autocasts[:1]:
            by_name = re.match(r"torch\.(cuda|cpu)\.", self._tree.dotted(autocast.func))
            if by_name:
                return f'"{by_name[1]}"'
            argument = autocast.args[0] if autocast.args else keyword_of(autocast, "device_type")
            if argument is not None and all(self._visible(name, node, line) for name in names_in(argument)):
                return self._script.text.of(argument)
        for name, _ in self._used.most_common():
            if self._visible(name, node, line):
                return self._type_of(name)
        if self._moves_to_cuda():
            return '"cuda"'
        if self._shared is not None and self._shared[1] in self._tree.scopes(node):
            return self._shared[0]
        models = [m for m in self._with_parameters() if self._visible(m, node, line)]
        if models:
            return f"next({models[0]}.parameters()).device.type"
        return "torch.get_default_device().type"

    def _type_of(self, name: str) -> str:
        kind = self._kinds.get(name) or self._kinds.get(name.rpartition(".")[2], "")
        return {"device": f"{name}.type", "type": name}.get(kind, f"torch.device({name}).type")

    def _assigned(self) -> dict[str, str]:
        """Return the kind of each name's value: a torch device, or the name of a type without an index."""
        kinds: dict[str, str] = {}
        for node in self._tree.nodes:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            kind = self._kind(node.value)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                name = ast.unparse(target)
                kinds[name] = kind if kinds.get(name, kind) == kind else "unknown"
        return {name: kind for name, kind in kinds.items() if kind}

    def _kind(self, value: ast.expr) -> str:
        if isinstance(value, ast.IfExp):
            kinds = {self._kind(value.body), self._kind(value.orelse)}
            return kinds.pop() if len(kinds) == 1 else ""
        if isinstance(value, ast.Call):
            return "device" if self._tree.dotted(value.func) in _MAKERS else ""
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return "type" if re.fullmatch(r"[a-z]+", value.value) else ""
        return ""

    def _moved_to(self) -> Counter[str]:
        """Count the names of devices: arguments of ``x.to(device)`` and ``device=``."""
        used: Counter[str] = Counter()
        for call in self._tree.calls:
            arguments = [keyword_of(call, "device")]
            if isinstance(call.func, ast.Attribute) and call.func.attr == "to":
                arguments += call.args[:1]
            names = [ast.unparse(a) for a in arguments if isinstance(a, (ast.Name, ast.Attribute))]
            used.update(n for n in names if n in self._kinds or re.search(r"(^|[._])(device|dev)$", n))
        return used

    def _moves_to_cuda(self) -> bool:
        """Return whether something is moved to CUDA unconditionally."""
        calls = [call for call, _ in self._tree.method_calls("cuda")]
        return any(not any(isinstance(a, (ast.If, ast.IfExp)) for a in self._tree.ancestors(c)) for c in calls)

    def _with_parameters(self) -> list[str]:
        names = [ast.unparse(owner) for _, owner in self._tree.method_calls("parameters")]
        return [*dict.fromkeys(n for n in names if re.fullmatch(r"[A-Za-z_][\w.]*", n))]

    def _visible(self, name: str, node: ast.AST, line: int | None) -> bool:
        """Return whether a name is bound when a node runs: by an import, by an earlier statement or as a parameter."""
        base = name.split(".")[0]
        if base == "self":
            cls = self._tree.class_of(node)
            attributes = [] if cls is None else [n for n in ast.walk(cls) if isinstance(n, ast.Attribute)]
            return any(name in ast.unparse(n) for n in attributes)
        if base in self._tree.imported:
            return True
        last: int = getattr(node, "lineno", 0) if line is None else line
        for scope in self._tree.scopes(node):
            parameters = arguments_of(scope) if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) else []
            if any(a.arg == base for a in parameters):
                return True
            innermost = scope is self._tree.scopes(node)[0]
            if any(not innermost or s.lineno <= last for s in self._tree.bindings(base, scope)):
                return True
        return False


def has_own(script: ScriptFacts) -> bool:
    """Return whether a script has an autocast or a loss scaler."""
    return bool(script.autocasts or script.scalers or script.calls_to(r"apex\.amp\..*"))


def patch_own(job: PatchJob) -> None:
    """Change the formats of the script's own autocast, and turn its loss scaler on or off.

    Raises:
        Unclear: the script already has the policy, or takes its format from elsewhere.
    """
    script, policy = job.script, job.policy
    apex = script.calls_to(r"apex\.amp\..*")
    if apex:
        unclear(f"line {apex[0].lineno} uses apex.amp", "see docs/apex.md, or replace it with torch.amp first")
    why_not = why_not_expressed(policy)
    if why_not or policy.compute == "tf32":
        why = why_not or "TF32 is not a 16-bit format"
        unclear(
            f"the script has mixed precision of its own, which cannot express policy {policy}: {why}",
            "remove its autocast and its GradScaler first",
        )
    if not script.autocasts:
        unclear(
            f"line {script.scalers[0].lineno} creates a GradScaler, but no autocast was found",
            "put the forward pass under torch.autocast first",
        )
    changed = [_retype(job, call) for call in script.autocasts if not _is_off(call)]
    if policy.loss_scale == "none":
        changed += [_turn_off(job, call) for call in script.scalers]
    elif script.scalers:
        changed += [_turn_on(job, call) for call in script.scalers]
    else:
        patch_loop(job, with_regions=False)
        changed.append(True)
    if not any(changed):
        unclear(
            f"already computes in {policy.compute} under its own autocast", "nothing needs to be done", already=True
        )


def _is_off(call: ast.Call) -> bool:
    enabled = keyword_of(call, "enabled")
    return isinstance(enabled, ast.Constant) and enabled.value is False


def _retype(job: PatchJob, call: ast.Call) -> bool:
    """Give an autocast the policy's dtype; return whether that changed anything."""
    name = job.script.tree.dotted(call.func)
    argument = keyword_of(call, "dtype") or (call.args[1] if len(call.args) > 1 else None)
    if argument is None:
        return _add_dtype(job, call, name)
    dtype = re.fullmatch(r"torch\.(\w+)", job.script.tree.dotted(argument))
    if dtype is None:
        unclear(
            f"line {argument.lineno} takes autocast's format from {ast.unparse(argument)}", f"make that {job.dtype}"
        )
    if DTYPE_ALIASES.get(dtype.group(1), dtype.group(1)) == FORMATS[job.policy.compute].dtype_name:
        return False
    job.editor.replace(argument, job.dtype)
    job.note(call, f"dtype={job.dtype}", f"the policy's format; it was {ast.unparse(argument)}")
    return True


def _add_dtype(job: PatchJob, call: ast.Call, name: str) -> bool:
    """Write the format, unless autocast chooses it by itself; return whether that changed anything."""
    device = call.args[0] if call.args else keyword_of(call, "device_type")
    on_cuda = ".cuda." in name or (isinstance(device, ast.Constant) and device.value == "cuda")
    on_cpu = ".cpu." in name or (isinstance(device, ast.Constant) and device.value == "cpu")
    if (on_cuda and job.policy.compute == "fp16") or (on_cpu and job.policy.compute == "bf16"):
        return False
    words = f"dtype={job.dtype}"
    job.editor.add_argument(call, words)
    job.note(call, words, "without it, autocast chooses by the device: FP16 on CUDA, BF16 on a CPU")
    return True


def _turn_off(job: PatchJob, call: ast.Call) -> bool:
    enabled = keyword_of(call, "enabled")
    if _is_off(call):
        return False
    if enabled is not None and not isinstance(enabled, ast.Constant):
        job.note(call, "left as it is", f"its enabled={ast.unparse(enabled)} decides; BF16 needs no loss scale")
        return False
    if enabled is not None:
        job.editor.replace(enabled, "False")
    else:
        job.editor.add_argument(call, "enabled=False")
    job.note(
        call,
        "enabled=False",
        "BF16 has the range of FP32, so gradients need no scaling; a disabled scaler passes everything through",
    )
    return True


def _turn_on(job: PatchJob, call: ast.Call) -> bool:
    enabled = keyword_of(call, "enabled")
    if enabled is not None and _is_off(call):
        job.editor.replace(enabled, "True")
        job.note(call, "enabled=True", "FP16 gradients need a loss scale")
        return True
    if job.policy != PRESETS["fp16"]:
        job.note(call, "left as it is", "its own loss-scale settings are kept")
    return False


_SWITCHES = ("allow_tf32", "fp32_precision")


def patch_tf32(job: PatchJob) -> None:
    """Set the switches.

    Raises:
        Unclear: the script sets them itself.
    """
    script = job.script
    switches: list[ast.AST] = [n for n in script.tree.nodes if isinstance(n, ast.Attribute) and n.attr in _SWITCHES]
    switches += script.calls_to(r"torch\.set_float32_matmul_precision")
    if switches:
        unclear(
            f"line {getattr(switches[0], 'lineno', '?')} sets the precision of FP32 products already",
            "check that it allows TF32",
            already=True,
        )
    job.imports("torch")
    job.after_imports(
        "torch",
        f"{job.library}.backends.cuda.matmul.allow_tf32 = True",
        f"{job.library}.backends.cudnn.allow_tf32 = True",
    )
    why = "FP32 products and convolutions read 10 bits of the mantissa on NVIDIA GPUs since Ampere"
    job.note("imports", "allow_tf32 = True after them", why)
