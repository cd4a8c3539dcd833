"""What is known while somebody's script runs under a policy: the state that the hooks of this folder share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo import oplists
from mezzo.engine import conversion, fp8_torchao
from mezzo.engine.casting import Casting
from mezzo.engine.gradients import not_finite
from mezzo.engine.scaling import NoScale, Scale, scale_for
from mezzo.errors import PolicyError, ScaleFloorError, UnsupportedFormatError
from mezzo.launch.torch.owners import OptimizerOwners
from mezzo.launch.torch.steady_state import Steady, nothing
from mezzo.measure.steps import StepRecorder
from mezzo.observe.lint.observer import Lint
from mezzo.observe.observer import Observer
from mezzo.observe.skips import Update
from mezzo.policy import Policy
from mezzo.records import Reason

_KEPT_UNDER_MASTERS = {"layer_norm", "rms_norm", "group_norm", "batch_norm", "loss", "binary_cross_entropy"}


class ThreadState(threading.local):
    """State of each thread."""

    depth = 0
    """1 inside a module or a compiled function, else 0."""
    outermost: nn.Module | None = None
    """The module that was called from outside any module, while it runs under a policy."""
    autocasts_off = 0
    """How many of the script's autocasts that are open were turned off by the policy."""


_EVERY_NORM = 100
"""Steps at the beginning whose gradient norms are all taken, where no loss scale needs them."""
_NORMS_APART = 10
"""Steps from one norm to the next after that."""


class Run:
    """A run's policy, loss scale and steps, and what could not be switched."""

    def __init__(self, policy: Policy | None) -> None:
        """Begin a run; ``policy`` is None where the script's own precision is left alone."""
        self.policy = policy
        self.applied = None if policy is None else _for_scripts(policy)
        self.recorder = StepRecorder()
        self.scale: Scale = NoScale()
        self.inner_scale: Scale = NoScale()
        """The scale of gradients that the script computes with, as in a penalty."""
        self.device_type: str | None = None
        self.in_backward = False
        self.recomputing = False
        """Whether activation checkpointing computes something again."""
        self.in_compiled = False
        """Whether a compiled function is running, outermost."""
        self.inside: Any = None
        """The outermost node of the graph that is making a backward pass of its own."""
        self.left_alone: dict[str, Reason] = {}
        # Weak: a script that trains one model after the other must not have them all kept.
        self.roots: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        """Modules that were called from outside any module, in order."""
        self.optimizers: WeakKeyDictionary[torch.optim.Optimizer, None] = WeakKeyDictionary()
        self.owners = OptimizerOwners()
        self.local = ThreadState()
        self.lint = Lint(self)
        """What tells misuse of the script's own mixed precision."""
        self.watchers: list[Any] = []
        self.observer: Observer | None = None
        self.compiles = False
        """Whether the script has called torch.compile."""
        self.before_compiling: list[Callable[[], Any]] = []
        """What to do once, before the script first compiles code with torch.compile."""
        self.script_scaler: Any = None
        """The script's own GradScaler, where it is left alone."""
        self.scaled_by_script = False
        """Whether losses are being multiplied by the scale of ``script_scaler``."""
        self._castings: dict[tuple[str, int], Casting] = {}
        self._scale_device = torch.device("cpu")
        self._unmatched = set(() if policy is None else policy.fp32_modules)
        self.in_closure = False
        """Whether an optimizer is calling its closure: the backward passes in it belong to one update."""
        self.skips = False
        """Whether the last update that an optimizer made was one to skip."""
        self.updates: list[Update] = []
        """What the open update is made of."""
        self._met: tuple[Any, Any, torch.device] = (nothing, nothing, torch.device("cpu"))
        """The module that was met last, its first parameter, and where that was: a module is mostly called again and again."""
        self.steady = Steady(self)
        self.stepped = False
        """Whether the open update has been made, so that the next backward pass closes it."""
        self.made_by: set[int] = set()
        """The optimizers that made the open update, by number."""
        self._cast_by_us = WeakTensorKeyDictionary()
        self._lock = threading.Lock()
        self._found: Tensor | None = None
        self._skipped: bool | Tensor = False
        """Whether the open update is one that was skipped; a tensor, above 0 if so, where only the device knows."""

    # --- forward ---------------------------------------------------------------------------------------------------------------

    def casting(self, device_type: str) -> Casting | None:
        """Return how the policy is applied on a device in this thread, or None where it casts nothing."""
        # A casting keeps casts of weights while a region is open: another thread's region must not keep stale ones for this one.
        key = (device_type, threading.get_ident())
        found = self._castings.get(key)
        if found is None and self.applied is not None and self.applied.lowers:
            found = self._castings[key] = Casting.of(self.applied, device_type)
        return found

    @property
    def main_casting(self) -> Casting | None:
        """Return the casting on the device that the script trains on."""
        return None if self.device_type is None else self.casting(self.device_type)

    @property
    def emulates(self) -> bool:
        """Return whether the policy's formats are emulated; False where the device cannot do what the policy asks for at all."""
        try:
            casting = self.main_casting
        except UnsupportedFormatError:  # the error that the script's first region has ended with
            return False
        return casting is not None and casting.emulates

    def meet(self, module: nn.Module, args: Any) -> str:
        """Record a module called from outside any module; return the device type it runs on."""
        known, known_parameter, device = self._met
        if known() is module:
            parameter = known_parameter()
            if parameter is not None and parameter.device == device:
                return device.type
        parameter = next(module.parameters(), None)
        sample = parameter if parameter is not None else next((a for a in args if isinstance(a, Tensor)), None)
        if sample is None:
            return self.device_type or "cpu"
        with self._lock:  # another thread must not call a module that is half prepared
            if parameter is not None:
                self.begin_on(parameter.device)
                if module not in self.roots:
                    self._prepare(module, parameter.device)
            self.roots[module] = None
        if parameter is not None:
            self._met = ref(module), ref(parameter), parameter.device
        return sample.device.type

    def begin_on(self, device: torch.device) -> None:
        """Take ``device`` as the one the script trains on: the first, or the first that is no CPU; not after the first update."""
        known = self.device_type
        if known == device.type or len(self.recorder) or (known is not None and device.type == "cpu"):
            return
        self.device_type, self._scale_device = device.type, device
        self.recorder.clock.device = device
        if self.applied is not None:
            self.scale, self.inner_scale = scale_for(self.applied, device), scale_for(self.applied, device)

    def _prepare(self, module: nn.Module, device: torch.device) -> None:
        if self.applied is None:
            return
        self._note_dtypes(module, lowers=self.applied.lowers)
        if not self.applied.lowers:
            return
        self._leave_sparse_embeddings(module)
        matched = conversion.matching_patterns(module, self.applied.fp32_modules)
        self._unmatched -= matched
        policy = self.applied.replace(fp32_modules=tuple(matched))
        self._use_fp8_units(module, policy, device.type)
        if policy.casting == "model":
            conversion.cast_model(module, policy, device.type)
            self._cast_by_us.update(dict.fromkeys(module.parameters()))
        else:
            conversion.keep_fp32(module, policy, device.type)

    def _use_fp8_units(self, module: nn.Module, policy: Policy, device_type: str) -> None:
        casting = self.casting(device_type)
        if policy.compute == "fp8" and casting is not None and not casting.emulates:
            fp8_torchao.convert([module], policy)
            for choice in fp8_torchao.layer_choices([module], policy, emulated=False)[1:]:
                self.leave(choice.what, choice.value, choice.reason)

    def _note_dtypes(self, module: nn.Module, *, lowers: bool) -> None:
        own = [p for p in module.parameters() if p not in self._cast_by_us]
        dtypes = {p.dtype for p in own if p.is_floating_point()}
        name = type(module).__name__
        if lowers and any(p.is_complex() for p in own):
            self.leave("complex64", name, "its weights are complex, and complex numbers are never cast")
        if lowers and torch.double in dtypes:
            self.leave("float64", name, "its weights are float64, and float64 is never cast")
        if any(dtype.itemsize == 2 for dtype in dtypes):
            self.leave("16-bit weights", name, "the script itself keeps its weights in 16 bits")

    def _leave_sparse_embeddings(self, module: nn.Module) -> None:
        sparse = any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse for m in module.modules())
        if self.applied is not None and sparse and "embedding" in self.applied.lower:
            self.applied = self.applied.replace(lower=tuple(f for f in self.applied.lower if f != "embedding"))
            self._castings.clear()
            why = "torch cannot cast a sparse gradient, so its weight is looked up in FP32"
            self.leave("sparse embedding", type(module).__name__, why)

    def check_patterns(self) -> None:
        """Refuse patterns of the policy that matched no module by the time of the first update."""
        if self._unmatched:
            pattern = sorted(self._unmatched)[0]
            names = [n for root in self.roots for n in conversion.module_names(root)]
            raise conversion.no_such_module(pattern, names)

    def leave(self, what: str, value: str, reason: str) -> None:
        """Record something that could not be switched."""
        self.left_alone.setdefault(f"{what} {value}", Reason(what=what, value=value, reason=reason))

    # --- updates ---------------------------------------------------------------------------------------------------------------

    def owns(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether an optimizer of the script holds one of ``parameters``."""
        held = {id(p) for o in self.optimizers for g in o.param_groups for p in g["params"]}
        return any(id(p) in held for p in parameters)

    def updated(self, norm: Tensor | None) -> bool:
        """Record an update with gradients of this norm; return whether to skip it.

        Reads one flag from the device where the loss is scaled, the only one of a step.
        """
        self.evaluated(norm)
        self.skips = False
        if norm is not None and self.scale.checks:
            found = not_finite(norm)
            self._found = found if self._found is None else torch.maximum(self._found, found.to(self._found.device))
            self.skips = bool(found)
            self._skipped = self._skipped or self.skips
        return self.skips

    @property
    def takes_norm(self) -> bool:
        """Return whether the norm of the open update's gradients is taken: reading all gradients takes 2 to 4% of a small model's step."""
        if self.scale.checks or self.observer is not None:
            return True
        step = self.recorder.num_closed + 1
        return step <= _EVERY_NORM or step % _NORMS_APART == 0

    @property
    def num_updates(self) -> int:
        """Return how many updates were made, the open one included."""
        return len(self.recorder) + self.stepped

    def evaluated(self, norm: Tensor | None) -> None:
        """Record an update whose gradients have this norm and need no check."""
        if self._unmatched:
            self.check_patterns()
        self.stepped = True
        if norm is not None:
            self.recorder.norm(norm)

    def stepping(self) -> None:
        """Record that an optimizer is about to change the weights."""
        if self.observer is not None:
            self.observer.stepping()

    def update_made(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Take the time of an update that is over; None where no optimizer object made it."""
        self.recorder.updated()
        if optimizer is not None:
            self.steady.update_made(optimizer)
            if (number := self.owners.number(optimizer)) is not None:
                self.made_by.add(number)
        for watcher in tuple(self.watchers):
            watcher.updated(optimizer)

    def script_stepped(self, scaler: Any, optimizer: torch.optim.Optimizer, *, skipped: bool | Tensor) -> None:
        """Record that the script's own GradScaler made or skipped an optimizer's step.

        Args:
            scaler: the GradScaler.
            optimizer: the optimizer.
            skipped: whether the step was skipped; a tensor, above 0 if so, where only the device knows.
        """
        if self.observer is not None:  # weighs each skip as it comes
            skipped = bool(skipped)
        if isinstance(skipped, Tensor):
            self.stepped = True
            if isinstance(self._skipped, Tensor):
                self._skipped = self._skipped + skipped.to(self._skipped.device)
            else:
                self._skipped = self._skipped or skipped
        elif skipped:
            self.stepped = self._skipped = True
        if self.observer is not None:
            self.updates.append(Update(scaler=id(scaler), optimizer=id(optimizer), skipped=bool(skipped)))

    def meet_scaler(self, scaler: Any) -> None:
        """Record that the script's own GradScaler is about to scale a loss."""
        self.steady.end()
        if self.script_scaler is not scaler:
            self.script_scaler = scaler
            if self.observer is not None:
                self.observer.scaler_met(scaler)
        self.scaled_by_script = True

    def close_update(self) -> None:
        """Close the update that is open, if one is: all optimizer steps between two backward passes are one update."""
        if not self.stepped or self.in_closure:
            return
        if self.steady.close():
            self.stepped = False
            self.made_by.clear()
            return
        floor_error = None
        scale = None if self.script_scaler is None else scale_on_device(self.script_scaler)
        if self.scale.checks:
            floor_error = self.floor_error() if self._skipped and self.scale.at_floor() else None
            if self._found is not None:
                self.back_off_or_grow(self._found)
            scale = self.scale.on_device()
        self.recorder.close(skipped=self._skipped, scale=scale, made_by=frozenset(self.made_by))
        self.stepped, self._found, self._skipped = False, None, False
        self.made_by.clear()
        for watcher in tuple(self.watchers):
            watcher.step_closed(len(self.recorder))
        self.updates = []
        self.steady.begin()
        if floor_error is not None:
            raise floor_error

    def scaled(self, gradient: Tensor, scale: Scale) -> Tensor:
        """Return ``gradient`` times a loss scale of this run."""
        return scale.scale(gradient)

    def back_off_or_grow(self, found: Tensor, scale: Scale | None = None) -> None:
        """Let a loss scale of this run learn whether a gradient was not finite."""
        (scale or self.scale).update(found.to(self._scale_device))

    def floor_error(self) -> ScaleFloorError:
        """Return the error of gradients that overflow at the scale's floor."""
        return ScaleFloorError(
            f"gradients overflow at the loss scale's floor of {self.scale.value():g}, update {len(self.recorder)}",
            hint="try --policy bf16, which has FP32's range, or keep modules in FP32 (fp32_modules=...)",
        )


def scale_on_device(scaler: Any) -> Tensor | float:
    """Return the scale of a script's GradScaler without waiting for the device, where it has one there."""
    held = getattr(scaler, "_scale", None)
    scale: Tensor | float = held if isinstance(held, Tensor) else scaler.get_scale()
    return scale


def _for_scripts(policy: Policy) -> Policy:
    """Return the policy as it is applied to a script whose parameters stay its own.

    Master weights: a script's clipping and logging read FP32 gradients off its parameters, which 16-bit parameters cannot hold.
    So the script's FP32 parameters are the masters, and everything but norms and losses is listed to run in 16 bits.
    """
    if not policy.master_weights:
        return policy
    named = {*policy.fp32, *policy.widest, *policy.lower, *_KEPT_UNDER_MASTERS}
    lower = (*policy.lower, *(f.name for f in oplists.FAMILIES if f.name not in named))
    try:
        return policy.replace(casting="ops", master_weights=False, lower=lower)
    except PolicyError as error:  # an operation of a family was named by itself
        raise PolicyError(error.message, hint="under a -master policy name whole families") from None
