"""Hook a script's optimizers and schedulers: skip an update that overflowed, pause the schedule, repeat closures.

A hook before every optimizer step computes the norm of its gradients and, if the loss is scaled, reads one flag: on
overflow the gradients are set to None while the optimizer steps, so that a torch optimizer does nothing, not even
increase its step count. Other optimizers may read a gradient without checking that it exists: then their step is not called,
as under a GradScaler.

torch's optimizers call their closure once, before they read the gradients. So the closure runs before the step, and the gradients are
checked in between. A closure that draws random numbers, accumulates or logs (Lightning's does all three) behaves as it does without a
loss scale. LBFGS and optimizers that are not torch's call their closure at any time; an evaluation that overflows is repeated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from mezzo.engine.gradients import all_finite, set_aside, total_norm
from mezzo.engine.processes.shards import is_shared, norm_of_all
from mezzo.launch.patches import Patches
from mezzo.launch.torch.state import TorchRun
from mezzo.launch.torch.steady_state import EVERY_NORM
from mezzo.measure.steps import STEPS_BETWEEN_NORMS, STEPS_PER_CPU_READING
from mezzo.observe.observer import Update

Optimizer = torch.optim.Optimizer
_MAX_EVALUATIONS = 64  # halving from 2**24 reaches the smallest floor sooner


class Evaluated:
    """A closure that has already run."""

    evaluated = True
    """A mark for watchers: the step itself runs no backward passes."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def __call__(self) -> Any:
        """Return what the closure returned."""
        return self._result


class Updates:
    """Hooks before and after every optimizer step of a script."""

    def __init__(self, run: TorchRun) -> None:
        self._run = run
        self._stepping: Optimizer | None = None
        self._aside: list[tuple[torch.nn.Parameter, Tensor]] = []
        self._counts: WeakKeyDictionary[Optimizer, list[int]] = WeakKeyDictionary()
        """Number of updates of each optimizer, and how many of them were skipped."""
        self._last_counts = [0, 0]
        """The counts of the last optimizer whose step was recorded in full."""
        self._schedules = run.follow_schedules(self._updates_of)
        self._casting_stopped = False
        """Whether casting is turned off for the running step."""
        self._closure_runs_first: set[type] = set()
        """Classes of optimizers whose closures run before the step."""
        self._skips_by_itself: set[type] = set()
        """Classes of optimizers whose step is not called in a skipped update."""

    def install(self, patches: Patches) -> None:
        """Set the hooks until ``patches`` are undone."""
        handles = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]

        def remove() -> None:
            for handle in handles:
                handle.remove()

        def shield() -> None:  # a compiled optimizer must not trace the hooks: they read the device
            remove()
            handles[:] = [
                register_optimizer_step_pre_hook(torch.compiler.disable(self._before)),
                register_optimizer_step_post_hook(torch.compiler.disable(self._after)),
            ]

        patches.on_undo(remove)
        self._run.phase.before_compiling.append(shield)
        patches.around(Optimizer, "__init__", functools.partial(self._record_optimizer, patches))
        if self._run.precision.effective is not None and self._run.precision.effective.loss_scale != "none":
            patches.wrap(clip_grad, "_get_total_norm", functools.partial(_tolerating_overflow, self._run))
        self._schedules.install(patches, LRScheduler)

    def _record_optimizer(
        self, patches: Patches, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        self._run.optimizer_created(optimizer)
        self._leave_out_step(patches, _stepping_class(optimizer))
        original(optimizer, *args, **kwargs)
        self._run.objects.numbers.created(optimizer)
        stepping = _stepping_class(optimizer)
        once = stepping.__module__.startswith("torch.optim") and not isinstance(optimizer, torch.optim.LBFGS)
        if once and stepping not in self._closure_runs_first:
            self._closure_runs_first.add(stepping)
            patches.wrap(stepping, "step", _closure_first)

    def _leave_out_step(self, patches: Patches, stepping: type) -> None:
        """Let the step of an optimizer that is not torch's be left out in a skipped update; call this before torch hooks the step."""
        hooked = hasattr(vars(stepping)["step"], "hooked")
        if hooked or stepping in self._skips_by_itself or stepping.__module__.startswith("torch."):
            return
        self._skips_by_itself.add(stepping)
        run = self._run

        def step(original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if run.update.skips and _closure_of((optimizer, *args), kwargs) is None:
                return None
            return original(optimizer, *args, **kwargs)

        patches.around(stepping, "step", step)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        run = self._run
        if run.phase.not_training:
            run.graphs.note_training()
            return None
        if self._stepping is not None and self._stepping is not optimizer:
            return None  # the step of a wrapper around other optimizers: a single update
        self._stepping, self._casting_stopped = optimizer, False
        run.phase.local.stepping = True
        if run.update.transformed:
            run.begin_transformed()
        if run.phase.local.depth and _closure_of(args, kwargs) is None:
            self._stop_casting()
        finite: bool | None = None
        if run.steady_state.optimizer() is optimizer and not kwargs and (len(args) == 1 or args[1:] == (None,)):
            step = run.update.recorder.num_closed + 1
            finite = run.steady_state.batched.finite(optimizer) if run.precision.scale.skips_overflows else True
            if finite and step > EVERY_NORM:  # the same as below, without the calls
                if step % STEPS_BETWEEN_NORMS == 0 and (norm := _norm(optimizer)) is not None:
                    run.update.recorder.norm(norm)
                run.update.stepped = True
                run.update.skips = False
                run.update.overflowed = False
                self._last_counts[0] += 1
                return None
        if optimizer not in self._counts:
            run.steady_state.end()
            run.objects.optimizers[optimizer] = None  # for a copied or unpickled optimizer, __init__ never ran
            self._counts[optimizer] = [0, 0]
        self._last_counts = self._counts[optimizer]
        closure = _closure_of(args, kwargs)
        run.losses.stepping()
        if closure is None or isinstance(closure, Evaluated):
            run.lint.step_begins(optimizer)
            self._decide(optimizer, finite if run.precision.scale.skips_overflows else None)
            run.stepping()
            return None
        run.close_update()
        run.update.begin_closure()
        repeating = self._until_finite(optimizer, closure)
        rest = tuple(repeating if a is closure else a for a in args)
        run.stepping()
        return rest, {k: repeating if v is closure else v for k, v in kwargs.items()}

    def _stop_casting(self) -> None:
        """Turn casting off for a step inside a module's forward pass: a -master policy casts nearly all operations, the optimizer's too.

        If the step raises, the end of the module's region restores autocast's state.
        """
        kind = self._run.precision.device_type
        if self._run.precision.effective is not None and kind is not None and torch.is_autocast_enabled(kind):
            torch.set_autocast_enabled(kind, False)
            self._casting_stopped = True

    def _decide(self, optimizer: Optimizer, finite: bool | None) -> None:
        """Check an optimizer's gradients unless they are known to be finite or not; set them aside if the update is to be skipped."""
        run = self._run
        if run.dropped_updates.overflowed(optimizer):
            finite = False
        norm = _norm(optimizer) if (run.precision.scale.skips_overflows and finite is None) or run.takes_norm else None
        if norm is not None and finite is False:
            norm = norm - norm  # NaN, as it is if the hooks on the leaves detected the overflow
        skip = run.updated(norm, finite=finite)
        if skip:
            self._aside = set_aside(p for group in optimizer.param_groups for p in group["params"])
        if run.listeners.observer is not None:
            run.update.parts.append(Update(scaler=0, optimizer=id(optimizer), skipped=skip))
        counts = self._counts[optimizer]
        counts[0] += 1
        counts[1] += skip

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepping is not optimizer:
            return
        self._stepping = None
        run = self._run
        run.phase.local.stepping = False
        if self._casting_stopped:
            torch.set_autocast_enabled(run.precision.device_type or "cpu", True)
        if run.steady_state.optimizer() is optimizer and not (run.update.in_closure or run.update.skips):
            clock = run.update.recorder.clock
            if run.precision.device_type == "cuda" or run.update.recorder.num_closed % STEPS_PER_CPU_READING == 0:
                clock.mark()
            else:  # the same without the CPU time and two calls
                clock.ended = (perf_counter(), None, None)
            return
        if run.update.in_closure:
            run.lint.closure_ended(optimizer)
            run.update.end_closure()
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside = []
        run.lint.step_ended(optimizer)
        run.update_made(optimizer)

    def _until_finite(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that lowers the loss scale and evaluates again until the gradients are finite.

        The first evaluation that counts is recorded for the update: its loss is what an optimizer returns.
        """
        run = self._run

        before = run.update.recorder.num_open

        def evaluate() -> Any:
            for _ in range(_MAX_EVALUATIONS):
                if run.update.recorder.measures:
                    run.update.recorder.forget(keep=before)
                    run.losses.forget(keep=before)
                loss = closure()
                # A loss that is itself infinite is left to the optimizer: a line search went too far.
                loss_infinite = isinstance(loss, Tensor) and not bool(loss.isfinite().all())
                gradients = _gradients(optimizer)
                if not run.precision.scale.skips_overflows or loss_infinite or all_finite(gradients):
                    break
                if run.precision.scale.at_floor():
                    raise run.floor_error()
                run.precision.scale.updated(skipped=True)
            if run.update.recorder.measures:
                record = run.evaluated if loss_infinite else run.updated
                record(_norm(optimizer))
                run.update.recorder.measure_no_more()
            return loss

        return evaluate

    def _updates_of(self, scheduler: Any) -> tuple[int, int]:
        """Return how many updates a scheduler's optimizer made and skipped, even if another library wrapped the optimizer."""
        optimizer: Any = getattr(scheduler, "optimizer", None)
        while optimizer not in self._counts and isinstance(getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = optimizer.optimizer  # its name in Fabric's and Accelerate's wrappers
        if optimizer not in self._counts:
            return 0, 0
        made, skipped = self._counts[optimizer]
        return made, skipped


def _stepping_class(optimizer: Optimizer) -> type:
    """Return the class that defines an optimizer's ``step``."""
    return next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind))


def _closure_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run a closure before the step, but not in a pre-step hook: the closure itself may set hooks."""

    @functools.wraps(original)
    def step(optimizer: Optimizer, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        if closure is None and not args and not kwargs:
            return original(optimizer)  # the usual call: the hooks then have no arguments to search
        if closure is None or isinstance(closure, Evaluated) or torch.compiler.is_compiling():
            return original(optimizer, closure, *args, **kwargs)
        with torch.enable_grad():
            result = closure()
        return original(optimizer, Evaluated(result), *args, **kwargs)

    return step


def _tolerating_overflow(run: TorchRun, original: Callable[..., Any]) -> Callable[..., Any]:
    """Clip overflowed gradients without the error that a script may request: their update is skipped."""

    @functools.wraps(original)
    def norm(tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: Any = None) -> Any:
        return original(tensors, norm_type, error_if_nonfinite and run.precision.change is not None, foreach)

    return norm


def _closure_of(args: Any, kwargs: Any) -> Any:
    """Return the closure among the arguments of a step; None if there is none."""
    return kwargs.get("closure") or next((a for a in args[1:] if callable(a)), None)


def _norm(optimizer: Optimizer) -> Tensor | None:
    """Return the norm of an optimizer's gradients, unscaled if a fused optimizer is to unscale them itself."""
    if torch._C._len_torch_dispatch_stack():  # observers: nothing of the training is computed from the norm
        with _disable_current_modes():
            return _norm(optimizer)
    gradients = _gradients(optimizer)
    if not gradients:
        return None
    shared = True in [type(g) is not Tensor and is_shared(g) for g in gradients]
    norm = norm_of_all(gradients, total_norm) if shared else total_norm(gradients)
    scale = getattr(optimizer, "grad_scale", None)
    return norm if scale is None else norm / scale


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    gradients = [g for group in optimizer.param_groups for p in group["params"] if (g := p.grad) is not None]
    if True in [g.is_sparse for g in gradients]:
        return [g.coalesce().values() if g.is_sparse else g for g in gradients]
    return gradients
