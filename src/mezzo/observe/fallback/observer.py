"""Compare the gradients of a script's first steps between precisions: one run of a fallback search.

Updates are suppressed (every optimizer finds no gradients), so that all steps use the script's initial weights: step k
is then the same computation in every run, on batch k, no matter what overflowed before it. The gradients compared are those in
the parameters after a step's last backward pass: unscaled, before any clipping.

There are four kinds of runs. The ``reference`` is in FP32: it keeps its gradients and measures every module on its own. The
``noise`` run is in FP32 with every module's output perturbed by one unit in the last place: if that alone moves the gradients, the
data is in another order, or the training is that unstable. The ``rounding`` run is perturbed by a unit in the last place of the
policy's format: it measures what rounding alone does to each gradient (everything, to a bias before a norm, whose true gradient is
zero). A ``check`` is in lower precision and is compared with the reference.

Comparing a low-precision run with an FP32 run module by module blames everything downstream of the culprit. So the step runs
in FP32, the inputs and output gradients of each module's first call are kept, and afterwards each module runs alone on
them: in FP32, under the policy, and under the policy with its inputs rounded as well (an operation that follows
its input's format loses bits only then). The children of a container always run in FP32, so that the container's error
comes only from what it computes itself. All three runs draw the same dropout masks.

Limits: the first call of a module stands for all its calls; code outside modules is not measured. Costs: a copy of
every module's inputs and output gradients, and about five steps of time per level of the module tree.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from mezzo.engine.casts.conversion import to_format
from mezzo.engine.gradients import put_back, set_aside, trained_by
from mezzo.engine.matrix_units.low_layers import planned
from mezzo.engine.processes.shards import is_shared
from mezzo.formats import FP32, Format
from mezzo.measure.flops import FlopCounter
from mezzo.observe.fallback.evidence import LocalError, LossyProduct, Measurements, scale_alone
from mezzo.observe.observer import ObservedRun, Observer
from mezzo.observe.one_module import OneModule
from mezzo.observe.settings import FallbackSettings, StopScript
from mezzo.observe.source_lines import running_line
from mezzo.observe.tensors import difference, norm
from mezzo.policy import Policy
from mezzo.readable import readable
from mezzo.records import RunRecord

REFERENCE = "reference.pt"
_COMPILED = "_orig_mod"


class Fallback(Observer):
    """An observer of the first steps' gradients, which suppresses updates."""

    def __init__(self, settings: FallbackSettings, run: ObservedRun) -> None:
        super().__init__(run, steps=settings.steps)
        self._settings = settings
        self._handles: list[Any] = []
        self._aside: list[tuple[nn.Parameter, Tensor]] = []
        self._current: dict[str, Tensor] = {}
        """Gradients of the observed step, by parameter."""
        self._recorded: dict[int, dict[str, Tensor]] = {}
        self._reference: dict[int, dict[str, Tensor]] = {}
        self._measured = Measurements(settings, norm=norm, distance=lambda found, exact: difference(found.cpu(), exact))
        self._calls = Calls()
        self._products: LossyProducts | None = None
        self._lossy: LossyProduct | None = None
        self._signs: dict[torch.device, torch.Generator] = {}
        self._probing = False
        self._in_blocks: tuple[int, set[nn.Module]] = (0, set())
        """The layers that the policy computes in blocks, of so many models."""

    # --- observation ------------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin immediately: this observer sets hooks and enters no modes."""
        if self._settings.role != "reference":
            path = Path(self._settings.folder) / REFERENCE
            mapped = readable(str(path)) == str(path)  # torch maps no file whose name this locale has not understood
            self._reference = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
        else:
            self._products = LossyProducts(rounded_outside_layers(self._settings.policy).dtype)
            self._products.__enter__()
        self._begin_immediately()

    def begin(self, step: int) -> None:
        """Set the hooks."""
        self._handles = [
            register_optimizer_step_pre_hook(self._suppress_update),
            register_optimizer_step_post_hook(self._restore_gradients),
        ]
        if self._settings.role == "reference":
            self._handles += [
                register_module_forward_pre_hook(self._entering),
                register_module_forward_hook(self._returned, with_kwargs=True),
            ]
        if self._settings.role in ("noise", "rounding"):
            self._handles.append(register_module_forward_hook(self._perturbed))

    def restart(self) -> None:
        """Discard the gradients: they belonged to the previous step."""
        self._current = {}

    def mark(self) -> None:
        """Do nothing: a step's gradients are those after its last backward pass."""

    def turn(self, step: int) -> None:
        """Keep the step's gradients; end the script if no more are needed."""
        self._keep(step - 1)
        if self._measured.enough:
            self.close()
            raise StopScript

    def end(self) -> None:
        """Remove the hooks and keep the last step's gradients."""
        for handle in self._handles:
            handle.remove()
            # torch's remove() leaves an entry for hooks that take keywords, which torch.compile mistakes for a hook.
            torch.nn.modules.module._global_forward_hooks_with_kwargs.pop(handle.id, None)
        self._handles = []
        if self._products is not None:
            self._products.end()
            self._lossy, self._products = self._products.first, None
        if self._current and self._observing is not None and self._observing in self.watched:
            self._keep(self._observing)

    def record(self, run: RunRecord) -> RunRecord:
        """Write the measurements to the folder; return the run's own record."""
        if self._settings.role == "reference":
            torch.save(self._recorded, Path(self._settings.folder) / REFERENCE)
        self._measured.write(lossy=self._lossy)
        return run

    # --- gradients -------------------------------------------------------------------------------------------------------------

    def backward_begins(self, losses: Sequence[Tensor]) -> None:
        """Inspect no further products: the first forward pass is over."""
        if self._products is not None and not self._probing:
            self._products.pause()

    def backward_ended(self) -> None:
        """Keep the current gradients of all parameters."""
        if self._observing is not None and not self._probing:
            for name, parameter in self._parameters().items():
                if parameter.grad is not None:
                    self._current[name] = _plain(parameter.grad, scale=self.run.update.gradient_scale)
            gradients = [p.grad for p in self._parameters().values() if p.grad is not None]
            if gradients and not list(self.run.objects.optimizers):
                torch._foreach_zero_(gradients)  # the script updates its weights itself: now with zeros
        super().backward_ended()

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the script's models by name; names are the same in every run."""
        found: dict[str, nn.Parameter] = {}
        seen: set[nn.Parameter] = set()
        models = [root for root in self.run.objects.roots if any(True for _ in root.parameters())]
        for number, root in enumerate(models):
            label = "" if number == 0 else f"{type(root).__name__}#{number + 1}."
            for path, module in {"": root, **self.run.objects.tree.named(root)}.items():
                for name, parameter in self.run.objects.tree.parameters(module):
                    if parameter not in seen:
                        seen.add(parameter)
                        found[f"{label}{path}.{name}" if path else f"{label}{name}"] = parameter
        return found

    def _keep(self, step: int) -> None:
        fresh, self._current = self._current, {}
        if self._settings.role == "reference":
            self._recorded[step] = {name: gradient.cpu() for name, gradient in fresh.items()}
            if not self._measured.steps:
                self._measure_modules()
            self._measured.add_reference(step, {name: bool(g.isfinite().all()) for name, g in fresh.items()})
        else:
            self._measured.add(step, fresh, self._reference.get(step, {}))

    def _suppress_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        closures = [a for a in (*args[1:], *kwargs.values()) if callable(a)]
        if any(not getattr(closure, "evaluated", False) for closure in closures):
            self._measured.closure_met(type(optimizer).__name__)
        self._aside += set_aside(trained_by([optimizer]))
        self.run.update.skip()

    def _restore_gradients(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        aside, self._aside = self._aside, []
        put_back(aside)

    # --- modules ---------------------------------------------------------------------------------------------------------------

    def _entering(self, module: nn.Module, args: Any) -> None:
        if not (self._probing or self._measured.steps or torch.compiler.is_compiling()):
            self._calls.entering(module, args)

    def _returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not (self._probing or self._measured.steps or torch.compiler.is_compiling()):
            self._calls.returned(module, args, kwargs, output)

    def _measure_modules(self) -> None:
        """Run every module of the first step on its own, as if in a backward pass, so that the launcher ignores it."""
        calls = [c for c in self._calls.first.values() if any(g is not None for g in c.gradients)]
        self._calls.forget_copies()
        roots = list(self.run.objects.roots)
        names: dict[nn.Module, tuple[str, bool]] = {}
        for root in roots:
            for name, module in self.run.objects.tree.named(root).items():
                if name != _COMPILED:  # the same model again, inside torch.compile's wrapper
                    names.setdefault(module, (name, False))
        for root in roots:
            names.setdefault(root, (type(root).__name__, True))
        self._probing = True
        try:
            for root in roots:
                for name, (_, plan) in planned(root, self._settings.policy).items():
                    self._measured.products.setdefault(name, list(plan.in_blocks))
            bench = Bench(self._settings.policy, self.run.one_module(self._settings.policy))
            with self.run.phase.as_in_backward():
                self._measured.local.extend(bench.measure(calls, names))
        finally:
            self._probing = False
            for added in [root for root in self.run.objects.roots if root not in roots]:
                del self.run.objects.roots[added]
            self._calls = Calls()

    def _perturbed(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return None
        eps = self._unit(module) if self._settings.role == "rounding" else FP32.eps
        return tree_map_only(Tensor, functools.partial(self._perturbed_tensor, eps=eps), output)

    def _unit(self, module: nn.Module) -> float:
        """Return how far rounding moves a module's outputs: by a unit in the last place of its format.

        A product in blocks has the errors of all its operands, not one of its result. They average to less than half a unit of theirs.
        """
        policy = self._settings.policy
        if not policy.in_blocks:
            return policy.required_formats[0].eps
        roots = list(self.run.objects.roots)
        if self._in_blocks[0] != len(roots):
            layers: set[nn.Module] = {layer for root in roots for layer, _ in planned(root, policy).values()}
            self._in_blocks = len(roots), layers
        coarse = module in self._in_blocks[1]
        return policy.required_formats[0].eps / 2 if coarse else rounded_outside_layers(policy).eps

    def _perturbed_tensor(self, tensor: Tensor, *, eps: float) -> Tensor:
        """Return ``tensor`` with every element moved by about ``eps`` of itself, up or down at random.

        Values do not cross 1 and -1, so that probabilities and cosines stay in their range: operations that read them may reject
        others. In a coarser format, what it can represent stays as it is, as it does when it is rounded: counts, indices, masks.
        """
        if not tensor.is_floating_point() or tensor.dtype is not FP32.dtype:
            return tensor
        if tensor.device not in self._signs:  # a generator of its own leaves the script's random numbers unchanged
            self._signs[tensor.device] = torch.Generator(tensor.device)
        size = tensor.detach().abs()
        signs = torch.empty_like(tensor).bernoulli_(generator=self._signs[tensor.device]).mul_(2).sub_(1)
        signs.masked_fill_((size <= 1) & (size * (1 + eps) > 1), -1)
        if self._settings.role == "rounding":
            digits = torch.frexp(size).mantissa * (2 / eps)
            signs.masked_fill_(digits == digits.round(), 0)
        return tensor * signs.mul_(eps).add_(1)


def rounded_outside_layers(policy: Policy) -> Format:
    """Return the format to which ``policy`` rounds the operands of products, outside its layers in blocks."""
    return policy.storage if policy.in_blocks else policy.required_formats[0]


def _plain(gradient: Any, *, scale: float) -> Tensor:
    """Return a dense, unscaled copy in FP32; of a sharded gradient, a copy of all its parts, which its norm needs."""
    if is_shared(gradient):
        gradient = gradient.full_tensor()
    dense: Tensor = gradient.detach().to_dense() if gradient.layout is not torch.strided else gradient.detach().clone()
    return dense.float() if scale == 1.0 else dense.float() / scale


# An error relative to the values themselves does not show it: positions of 65536, 65537, 65538 are all 65536 in BF16, off by less than a
# hundred-thousandth, and equal. So the error is compared with the differences along each dimension.
#
# Limits: products in FP32, in the first forward pass and in the thread that starts the script. Other operations follow the format of
# their operands.
_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "convolution"))
_LOST = 0.5
"""A product is reported if rounding changes its differences by at least this share of them."""
_LEAST = 64 * FP32.eps
"""Differences below this share of the values are rounding errors of FP32 itself."""


class LossyProducts(TorchDispatchMode):
    """A mode that computes each product of a forward pass again, with operands and result rounded, until one loses its digits."""

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.first: LossyProduct | None = None
        self._low, self._over = low, False
        self._thread = threading.get_ident()

    def end(self) -> None:
        """Leave the mode; in another thread it only passes operations on from now on."""
        self._over = True
        if self._thread == threading.get_ident():
            self.__exit__(None, None, None)

    def pause(self) -> None:
        """Stop inspecting: the forward pass is over."""
        self._over = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation and inspect it."""
        result = func(*args, **(kwargs or {}))
        wanted = not self._over and self.first is None and func.overloadpacket.__name__ in _PRODUCTS
        if wanted and torch._C._current_autograd_node() is None and result.dtype is FP32.dtype:
            with torch.no_grad(), _disable_current_modes():
                share = lost(result, self._rounded(func, args, kwargs or {}))
            if share >= _LOST:
                self.first = LossyProduct(line=running_line(), lost=share)
        return result

    def _rounded(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        def low(tensor: Tensor) -> Tensor:
            return tensor.to(self._low).float() if tensor.dtype is FP32.dtype else tensor

        rounded: Tensor = func(*tree_map_only(Tensor, low, args), **tree_map_only(Tensor, low, kwargs))
        return low(rounded)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allow torch.compile under this mode."""
        return True


def lost(exact: Tensor, found: Tensor) -> float:
    """Return the largest share of the differences along a dimension that is wrong; 0 where they are rounding errors of FP32."""
    error, whole = found - exact, float(exact.norm())
    if not exact.isfinite().all() or not error.isfinite().all():  # range, not digits
        return 0.0
    shares = [0.0]
    for dim in (d for d in range(exact.dim()) if exact.shape[d] > 1):
        differences = float((exact - exact.mean(dim, keepdim=True)).norm())
        if differences > _LEAST * whole:
            shares.append(float((error - error.mean(dim, keepdim=True)).norm()) / differences)
    return max(shares)


@dataclass(eq=False)
class FirstCall:
    """The inputs of a module's first call, and the gradients of its outputs."""

    module: nn.Module
    args: Any
    kwargs: Any = field(default_factory=dict)
    gradients: list[Tensor | None] = field(default_factory=list)
    """One per output that has a gradient, in order."""
    pass_number: int = 0
    """Number of the call of an outermost module in which this call took place."""


class Calls:
    """The first call of every module in a forward pass that has a backward pass.

    A script may call its model before it trains it, to learn the shape of its output. So a call without gradients is replaced by one in a
    later forward pass, that is, a later call of an outermost module.
    """

    def __init__(self) -> None:
        self.first: dict[nn.Module, FirstCall] = {}
        self._thread = threading.local()
        self._passes = 0
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}

    def entering(self, module: nn.Module, args: Any) -> None:
        """Copy the inputs of a module that is being called, before it can change them in place."""
        outermost = self._thread.__dict__.setdefault("outermost", None)
        if outermost is None or outermost is module:
            self._thread.outermost = module
            self._passes += 1
        if self._is_wanted(module) and torch.is_grad_enabled():
            waiting = self._thread.__dict__.setdefault("calls", {})
            waiting.setdefault(module, FirstCall(module, self._copied(args), pass_number=self._passes))

    def returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Hook the outputs of a module to keep their gradients."""
        if self._thread.__dict__.get("outermost") is module:
            self._thread.outermost = None
        call = self._thread.__dict__.get("calls", {}).pop(module, None)
        if call is None or not self._is_wanted(module, before=call.pass_number):
            return
        call.kwargs = self._copied(kwargs)
        outputs = differentiable(output)
        if any(not tensor.is_leaf for tensor in outputs):
            self.first[module] = call
            call.gradients = [None] * len(outputs)
            for index, tensor in enumerate(outputs):
                tensor.register_hook(functools.partial(_keep_gradient, call, index))

    def _is_wanted(self, module: nn.Module, *, before: int = 0) -> bool:
        """Return whether no call of a module is known, or only one of an earlier pass that got no gradients."""
        known = self.first.get(module)
        if known is None:
            return True
        return known.pass_number < (before or self._passes) and all(g is None for g in known.gradients)

    def forget_copies(self) -> None:
        """Release tensors that were kept only to avoid a second copy."""
        self._copies = {}

    def _copied(self, values: Any) -> Any:
        def copy(tensor: Tensor) -> Tensor:
            known = self._copies.get(id(tensor))
            if known is None or known[1] != tensor._version:
                clone = tensor.detach().clone().requires_grad_(tensor.requires_grad)
                known = self._copies[id(tensor)] = (tensor, tensor._version, clone)
            return known[2]

        return tree_map_only(Tensor, copy, values)


def _keep_gradient(call: FirstCall, index: int, gradient: Tensor) -> None:
    if call.gradients[index] is None:
        call.gradients[index] = gradient.detach().clone()


def differentiable(values: Any) -> list[Tensor]:
    """Return the tensors in ``values`` from which a backward pass can start."""
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.requires_grad]


class ModuleRun(NamedTuple):
    """The outputs of one run of a module, and the gradients of its inputs and weights."""

    output: list[Tensor]
    dgrad: list[Tensor]
    wgrad: list[Tensor]


class Bench:
    """Runs modules on their own and measures their errors."""

    def __init__(self, policy: Policy, alone: OneModule) -> None:
        self._alone = alone
        self._low = policy.storage.dtype
        self._policy, self._scale = policy, 1.0

    def measure(self, calls: Sequence[FirstCall], names: dict[nn.Module, tuple[str, bool]]) -> list[LocalError]:
        """Return the errors of the modules of ``calls``.

        Args:
            calls: calls of modules, each with its inputs and gradients.
            names: each module's name, and whether it is a whole model, which a pattern cannot name.
        """
        self._scale = scale_alone(self._policy, map(self._largest, calls))
        found = []
        for call in calls:
            name, unnamed = names.get(call.module, (type(call.module).__name__, True))
            found.append(self._local(call, name).model_copy(update={"unnamed": unnamed}))
        return found

    def _largest(self, call: FirstCall) -> float:
        """Return the largest magnitude of the gradients that a module reads or computes; 0 if it cannot run on its own."""
        try:
            exact = self._run(call)
        except Exception:  # ``_local`` runs it again and keeps the reason
            return 0.0
        return _largest([*(g for g in call.gradients if g is not None), *exact.dgrad, *exact.wgrad])

    def _local(self, call: FirstCall, name: str) -> LocalError:
        kind = type(call.module).__name__
        counter = FlopCounter(in_region=lambda: True)
        try:
            with counter:
                exact = self._run(call)
            low, rounded = self._run(call, low=True), self._run(call, low=True, rounds=True)
        except Exception as error:  # the script's module: it may fail on its own for any reason
            return LocalError(module=name, type=kind, reason=f"{type(error).__name__}: {error}".splitlines()[0])
        output, dgrad, wgrad = (relative_error(a, b) if a else None for a, b in zip(exact, low, strict=True))
        of_outputs = [g for g in call.gradients if g is not None]
        return LocalError(
            module=name,
            type=kind,
            output=output,
            dgrad=dgrad,
            wgrad=wgrad,
            rounded=max((relative_error(a, b) for a, b in zip(exact, rounded, strict=True) if a), default=0.0),
            flops=sum(counter.by_format.values()),
            largest=_largest([*of_outputs, *exact.dgrad, *exact.wgrad]),
        )

    def _run(self, call: FirstCall, *, low: bool = False, rounds: bool = False) -> ModuleRun:
        scale = self._scale if low else 1.0
        alone, inner = self._alone, self._low if rounds else None
        lowered = alone.lowered(call.module, inner=inner) if low else nullcontext()
        forward, backward = (alone.forward(), alone.backward()) if low else (nullcontext(), nullcontext())
        inputs = [t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        weights = alone.weights(call.module)
        args, kwargs = call.args, call.kwargs
        with torch.enable_grad(), alone.unchanged(call.module), lowered:
            if rounds:
                args, kwargs = to_format(args, self._low), to_format(kwargs, self._low)
            # Copies in the graph: a module that works in place must not change the kept inputs or a leaf.
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.clone(), (args, kwargs))
            with forward:
                output = call.module(*args, **kwargs)
            outputs = differentiable(output)
            pairs = [(t, g) for t, g in zip(outputs, call.gradients, strict=True) if g is not None]
            with backward:
                found = torch.autograd.grad(
                    [t for t, _ in pairs],
                    [*inputs, *weights],
                    [(g * scale).to(t.dtype) for t, g in pairs],
                    allow_unused=True,
                )
        gradients = [
            torch.zeros_like(t) if g is None else g.float() / scale
            for t, g in zip([*inputs, *weights], found, strict=True)
        ]
        values = [t.detach().float() for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
        return ModuleRun(output=values, dgrad=gradients[: len(inputs)], wgrad=gradients[len(inputs) :])


def relative_error(exact: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Return the norm of the difference over the norm of ``exact``, over all tensors together; waits for the device.

    Infinite if ``found`` is not finite, or differs from an ``exact`` that is zero.
    """
    norms = [norm(t) for t in exact]
    differences = [norm(b - a) for a, b in zip(exact, found, strict=True)]
    whole, difference = math.hypot(*norms), math.hypot(*differences)
    if not math.isfinite(difference):
        return math.inf
    if whole == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / whole


def _largest(tensors: Sequence[Tensor]) -> float:
    return max((t.detach().abs().max().item() for t in tensors if t.numel()), default=0.0)
