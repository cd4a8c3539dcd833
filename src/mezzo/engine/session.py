"""One training step, its order written once.

::

    backward   loss * share * scale, backward; gradients add up over the micro-batches of a window
    update     norm of the scaled gradients            one read of every gradient
               factor = clip / (scale * share)         one number: unscale, average and clip together
               gradients *= factor                     one pass
               optimizers step, or all are skipped     one host read of one flag, where the loss is scaled
               masters are rounded into the model, schedulers step (not after a skip), gradients are dropped
               the loss scale backs off or grows

The norm of the scaled gradients is not finite exactly when a gradient is not finite, or when their squares leave
FP32's range; the second case is detected before anything is skipped. Scales are powers of two unless you choose others,
so multiplying by one factor gives the same bits as unscaling and then clipping.

Host reads: the loss once, at the very first ``backward``; the values that you read (``loss_scale``, ``grad_norm``); and, if an
optimizer is not Mezzo's, the flag once per update (only with a loss scale). Nothing else waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.engine import arguments, session_errors
from mezzo.engine.arguments import choose_update, explained, listed, prepare
from mezzo.engine.captured_step import CapturedStep, StepCalls
from mezzo.engine.casts.casting import Casting
from mezzo.engine.gradients import (
    DirectPasses,
    all_parameters,
    clamp,
    clip_factor,
    drop_gradients,
    multiply,
    put_back,
    set_aside,
    total_norm,
    trained_by,
    wide,
)
from mezzo.engine.loop_checks import LoopChecks
from mezzo.engine.micro_batches import MicroBatch, MicroBatches, TrainingCalls
from mezzo.engine.optimizers.one_pass import OnePass, norm_by_kernels
from mezzo.engine.processes.distributed import processes_for
from mezzo.engine.scaling import scale_for
from mezzo.engine.session_guard import SessionGuard
from mezzo.engine.snapshots.background import Snapshots
from mezzo.engine.snapshots.position import Position
from mezzo.engine.snapshots.resumable import Resumable
from mezzo.engine.state import NoLoopChecks, Ownership, Progress, Schedules, SessionState, close_window, open_window
from mezzo.engine.window import Reduction, ScaleFlags, Window
from mezzo.explain import Choices
from mezzo.policy import Policy
from mezzo.records import GuardAction, Guardrails


class Session(Resumable):
    """A model's training under a precision policy.

    ::

        session = Session(model, optimizer, policy="fp16", accumulate=4, clip_norm=1.0, scheduler=scheduler)
        for inputs, targets in loader:
            with session.autocast():
                loss = criterion(model(inputs), targets)
            session.step(loss)

    ``step`` is ``backward`` and, after ``accumulate`` micro-batches, ``update``. With several losses call these two yourself.

    Args:
        model: a module, or several.
        optimizer: any torch optimizer that needs no closure, or several without a parameter in common.
        policy: a ``Policy``, a policy text, or the path of a policy file.
        accumulate: micro-batches in a window. Their gradients are averaged by the weights given to ``step`` or ``backward``.
        clip_norm: largest norm of the gradients of one update, over all parameters of the optimizers updated.
        clip_value: largest magnitude of a gradient's element.
        scheduler: a learning rate scheduler, or several; stepped once per update of its optimizer, but not after a skipped one.
        num_losses: number of losses with their own scale; ``backward(loss, loss_id=k)`` chooses one.
        guard: the reaction when the training goes wrong: "note", "stop", or "rewind" to a snapshot of ``save``; None for no guard.
        micro_batch: for ``train_batch``, the most samples in a part, or "auto"; halved when memory runs out. None for whole batches.

    Raises:
        PolicyError: the policy cannot be read, or names a module that the model lacks.
        UnsupportedFormatError: the device can neither compute in the format nor emulate it.
        SessionError: the model, optimizers or settings cannot be trained together.
    """

    _SETTABLE: tuple[str, ...] = ("accumulate", "clip_norm")
    """Public attributes that may change between two windows."""
    is_whole_loop = True
    """Whether only the session calls optimizers and changes gradients, so that the first windows can be checked."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        policy: Policy | str = "fp16",
        accumulate: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        scheduler: Any = None,
        num_losses: int = 1,
        micro_batch: MicroBatch = None,
        guard: GuardAction | None = None,
    ) -> None:
        self.policy = Policy.of(policy)
        self.models = listed(model)
        self.optimizers: list[Optimizer] = listed(optimizer)
        self.schedulers: list[Any] = [] if scheduler is None else listed(scheduler)
        self.accumulate, self.clip_norm, self.clip_value = accumulate, clip_norm, clip_value
        arguments.check_counts(accumulate=accumulate, num_losses=num_losses)
        arguments.check_limits(clip_norm=clip_norm, clip_value=clip_value)
        self.device = self._check_parts()
        trained = all_parameters(self.models, self.optimizers)
        self.processes = processes_for(self.models, trained, self.policy, accumulate=accumulate, num_losses=num_losses)
        self.casting = Casting.of(self.policy, self.device.type)
        self._one_pass, self._update_choice = choose_update(self.optimizers, self.device, clip_value, self.policy)
        self.scales = [scale_for(self.policy, self.device, known=not self._one_pass) for _ in range(num_losses)]
        loop_checks = LoopChecks(self) if self.is_whole_loop else NoLoopChecks()
        self.masters = prepare(self.models, self.optimizers, self.policy, self.device.type, one_pass=self._one_pass)
        self.processes.reduce_in(self.policy)
        self._passes, self._backward_region = DirectPasses(torch.autograd.backward), self.casting.backward()
        self.state = SessionState(
            window=Window(),
            progress=Progress(self.device, several=self.processes.several),
            schedules=Schedules(self.schedulers, self.device),
            position=Position(),
            snapshots=Snapshots(),
            loop_checks=loop_checks,
            ownership=Ownership(self.models),
        )
        self._zero, self._one = torch.zeros((), device=self.device), torch.ones((), device=self.device)
        self.train_batch = MicroBatches(self, TrainingCalls(self.autocast, self.backward, self.update), micro_batch)
        open_window(self)
        self._guard = None if guard is None else SessionGuard(self, guard)
        self._watch_rounding = session_errors.may_lose_updates(self.policy, self.optimizers)
        self._is_built = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Set ``accumulate`` or ``clip_norm`` for the windows to come; refuse any other public attribute of a session that is built."""
        if self._is_built and name[0] != "_":
            arguments.check_attribute(self, name, value, settable=self._SETTABLE)
        super().__setattr__(name, value)

    def _check_parts(self) -> torch.device:
        """Refuse models, optimizers and schedulers that do not fit together; return the models' device."""
        return arguments.check_parts(self.models, self.optimizers, self.schedulers, self.policy)

    def explain(self) -> Choices:
        """Return what the policy does here, each choice with its reason; the result prints as a table."""
        choices = [*self.policy.explain(self.device.type), *explained(self.models, self.casting), self._update_choice]
        choices += [
            choice for optimizer in self.optimizers if isinstance(optimizer, OnePass) for choice in optimizer.explain()
        ]
        return Choices([*choices, *self.processes.explain(), *self.train_batch.explain()])

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which the forward pass and the loss are computed."""
        return self.state.loop_checks.region(self.casting.region())

    def step(self, loss: Tensor, *, weight: float | None = None, loss_id: int = 0) -> None:
        """Run a micro-batch's backward pass, and the update at the end of the window.

        Args:
            loss: the micro-batch's mean loss, no dimensions.
            weight: the number of samples or tokens in the mean: its weight in the window's average. 1 if left out.
            loss_id: which of ``num_losses`` scales to use.
        """
        self.backward(loss, weight=weight, loss_id=loss_id)
        if self.state.window.calls >= self.state.window.accumulate:  # of the open window: a change counts from the next
            self.update()

    def backward(
        self, loss: Tensor, *, weight: float | None = None, loss_id: int = 0, retain_graph: bool = False
    ) -> None:
        """Run a backward pass and add its gradients to the window's.

        The arguments are ``step``'s, and ``retain_graph`` for several losses that share a part of the forward pass. In a window,
        calls with one ``loss_id`` are averaged by weight if ``accumulate`` is above 1 or weights are given; otherwise, and
        between different losses, gradients add up as in torch.

        Raises:
            NonFiniteLossError: the loss is not finite before the first update.
            SessionError: the loss cannot be differentiated, the scale is unknown, or the gradients were unscaled already.
        """
        if self.state.ownership.lost:
            raise session_errors.taken_over()
        self.processes.check_loss(loss, first=self.state.progress.updates_closed + self.state.window.calls == 0)
        if self.state.window.calls == 0 and self.state.window.accumulate != self.accumulate:
            open_window(self)
        self.state.loop_checks.before_backward(loss, opens=self.state.window.calls == 0)
        if weight is not None or loss_id or self.state.window.unscaled:
            session_errors.check_backward(
                weight, loss_id, len(self.scales), unscaled=self.state.window.unscaled is not None
            )
        share = self.state.window.share(weight, loss_id, unit=self.processes.unit(weight))
        if self._guard is not None:
            self._guard.backward(loss, share)
        trained = all_parameters(self.models, self.optimizers) if len(self.scales) > 1 else []
        aside = set_aside(trained) if trained else []
        try:
            self._differentiate(loss, share, loss_id=loss_id, retain_graph=retain_graph)
        except BaseException as error:  # the script may catch it: out of memory, a key of the keyboard
            self._discard_window(num_lost=self.state.window.calls - 1)
            if session_errors.is_of_freed_graph(error):
                raise session_errors.used_twice() from error
            raise
        if trained:
            self.state.window.rescale_to_first(loss_id, self.processes.gradients(trained), self.scales)
            put_back(aside)
        self.processes.ran(self.state.window.calls)
        self.state.loop_checks.after_backward()

    def _differentiate(self, loss: Tensor, share: float, *, loss_id: int = 0, retain_graph: bool = False) -> None:
        scaled = self.scales[loss_id].scale(loss if share == 1.0 else loss * share)
        if self.casting.table is None:  # nothing to set, and a context is five calls
            self._passes.from_loss(scaled, retain_graph=retain_graph)
            return
        with self._backward_region:
            self._passes.from_loss(scaled, retain_graph=retain_graph)

    def capture(
        self, compute_loss: Callable[..., Any], *examples: Any, other_shapes: Literal["error", "eager"] = "error"
    ) -> CapturedStep:
        """Capture forward pass, backward pass and update as CUDA graphs; the result trains on a micro-batch when called.

        Args:
            compute_loss: takes a micro-batch and returns its loss, or a tuple that begins with it; ``autocast`` is on in it.
            *examples: a micro-batch: its shapes and formats are captured, its values are not used.
            other_shapes: whether a micro-batch of other shapes raises an error, or runs without a graph.

        Raises:
            SessionError: the device has no graphs, the step waits for the host, or a step of this kind cannot be captured.
        """
        self.state.end_checks()  # gradients stay where the graphs know them, also between windows
        calls = StepCalls(self.autocast, self.step, self._differentiate, self._update_on_device, self._close)
        settings: dict[str, Any] = {"other_shapes": other_shapes, "update_choice": self._update_choice}
        return CapturedStep(self, calls, compute_loss, examples, **settings)

    def unscale(self) -> None:
        """Unscale and average the gradients now, to inspect or change them before ``update``.

        Raises:
            SessionError: there was no backward pass, or the gradients were unscaled already.
        """
        session_errors.check_unscale(calls=self.state.window.calls, unscaled=self.state.window.unscaled is not None)
        gradients = self._gradients(self.optimizers)
        session_errors.refuse_half_gradients(gradients)
        reduced = self._reduce(gradients)
        self.state.window.unscale(gradients, reduced)
        self.state.progress.measured(reduced.norm, reduced.factor)

    def update(self, *optimizers: Optimizer) -> None:
        """Close the window: clip, step the optimizers or skip, step the schedulers, drop the gradients.

        Args:
            *optimizers: the optimizers to update; all if none is named. Gradients of the others are dropped.

        Raises:
            SessionError: there was no backward pass since the last update, or an optimizer is not the session's.
            ScaleFloorError: the loss scale is at its floor and gradients still overflow; names the worst.
        """
        if self.state.window.calls == 0:
            raise session_errors.no_backward()
        self.state.ownership.check_formats()
        session_errors.check_rates(self.optimizers)
        self.state.loop_checks.before_update()
        if self.schedulers:
            self.state.schedules.settle()
        chosen = session_errors.check_chosen(optimizers, self.optimizers) if optimizers else self.optimizers
        before = session_errors.weight_copies(self.models) if self._watch_rounding else None
        try:
            skipped = self._update_on_device(chosen)
        except BaseException:  # a hook of the script; a plain loop's next zero_grad drops the gradients
            self._discard_window(num_lost=0)
            raise
        self._close(chosen, skipped)
        if before is not None and not bool(skipped):
            self._watch_rounding = False
            session_errors.warn_of_lost_updates(before, self.models, self.policy)

    def _update_on_device(self, chosen: list[Optimizer], *, rehearsal: bool = False) -> Tensor | bool:
        """Enqueue a whole update; return a value above 0 if it is skipped, as every update of a rehearsal is."""
        gradients = self._gradients(chosen)
        if not gradients and self.is_whole_loop:
            raise session_errors.no_gradients()
        reduced = self.state.window.unscaled
        if reduced is None:
            reduced = self._reduce(gradients)
            norm, factor = reduced.norm, reduced.factor
        else:  # the gradients may have changed since, or include some that are not updated
            norm, factor = self.processes.norm(gradients, self._norm_here), None
        self.state.progress.measured(norm, factor)
        if self.clip_norm is not None:
            factor = clip_factor(self.state.progress.norm, self.clip_norm, factor)
        flags = self.state.window.scale_flags(self.scales, reduced.found_inf)
        if reduced.overflowed is None:
            found_inf = self._zero if reduced.found_inf is None else reduced.found_inf
            skips = self._one if rehearsal else found_inf
            self._run_kernels(chosen, factor, skips, flags)
            skipped: Tensor | bool = skips
        elif reduced.overflowed:
            skipped = True
            self._skip(chosen, flags)
        else:
            skipped = False
            self._run_steps(chosen, gradients, factor)
        self.state.window.update_scales(flags, skipped)
        return skipped

    def _close(self, chosen: list[Optimizer], skipped: Tensor | bool, *, keep_gradients: bool = False) -> None:
        """Finish an update on the host: schedules, the floor of the scale, gradients, the next window, the guard."""
        if self.schedulers:
            self.state.schedules.follow(chosen, skipped)
        if isinstance(skipped, Tensor) and self.scales[0].skips_overflows and self.state.progress.floor.reached():
            raise session_errors.floor_error(self.policy, self.models, self.masters)
        if not keep_gradients:
            drop_gradients(self.optimizers)
        close_window(self)
        if self._guard is not None:
            self._guard.updated(skipped)

    def _run_kernels(self, chosen: list[Optimizer], factor: Tensor | None, skips: Tensor, flags: ScaleFlags) -> None:
        """Update by the kernels, which receive factor and flag: the host reads neither."""
        for optimizer in chosen:
            assert isinstance(optimizer, OnePass)
            optimizer.update(self._one if factor is None else factor.float(), skips)
        self.masters.push()
        if self.scales[0].skips_overflows:
            self.state.progress.note(skips, flags)

    def _skip(self, chosen: list[Optimizer], flags: ScaleFlags) -> None:
        self.state.progress.note(1, ())
        self.state.schedules.skipped(chosen, window=self.state.progress.updates_closed)
        if any(bool(found_inf) and scale.at_floor() for scale, found_inf in flags):
            raise session_errors.floor_error(self.policy, self.models, self.masters)

    def _run_steps(self, chosen: list[Optimizer], gradients: list[Tensor], factor: Tensor | None) -> None:
        """Unscale and clip the gradients, and call the optimizers' own steps."""
        multiply(gradients, factor)
        if self.clip_value is not None:
            clamp(gradients, self.clip_value)
        for optimizer in chosen:
            optimizer.step()
        self.masters.push()

    @property
    def guardrails(self) -> Guardrails | None:
        """The guard's observations and actions; None without a guard."""
        return None if self._guard is None else self._guard.noticed

    @property
    def loss_scale(self) -> float:
        """The first loss's scale; waits for the device."""
        return self.scales[0].value()

    @property
    def grad_norm(self) -> float:
        """The norm of the last update's gradients, unscaled and before clipping; waits for the device. NaN before any update."""
        return float(self.state.progress.norm)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise session_errors.no_copy()

    def _discard_window(self, *, num_lost: int) -> None:
        """Drop the gradients of a backward pass or an update that failed, and with them the window's: part of them was added."""
        if self.train_batch.is_running:  # which restores the session itself
            return
        if num_lost:
            session_errors.warn_of_lost_window(num_lost)
        drop_gradients(self.optimizers)
        for parameter in all_parameters(self.models, self.optimizers):  # masters are not the models' own parameters
            parameter.grad = None
        self.state.loop_checks.gradients_moved()
        open_window(self)

    def _gradients(self, optimizers: Iterable[Optimizer]) -> list[Tensor]:
        self.processes.collect()
        self.masters.pull_gradients()
        return self.processes.gradients(trained_by(optimizers))

    def _reduce(self, gradients: list[Tensor]) -> Reduction:
        """Read all gradients once."""
        norm = self.processes.norm(gradients, self._norm_here, self.state.window)
        on_device = self._one_pass and not session_errors.shown_to_hooks(self.optimizers, gradients)
        found_inf, overflowed = None, None if on_device else False
        if self.scales[0].skips_overflows and (on_device or self.state.window.found_inf):
            found_inf = self.state.window.overflowed(norm)
        if self.scales[0].skips_overflows and not on_device:
            # The only host read of an update, at the point where GradScaler also waits.
            overflowed = not math.isfinite(norm.item()) if found_inf is None else bool(found_inf)
            if overflowed and self.processes.all_finite(gradients):
                overflowed = False  # only the sum of squares left FP32's range
                norm = self.processes.norm([wide(g) for g in gradients], total_norm)
            found_inf = self._one if overflowed else self._zero
        share, inverse = self.state.window.total(), self.scales[0].inverse()
        factor = inverse if share is None else (self._one if inverse is None else inverse).to(norm.dtype) / share
        return Reduction(norm, factor, found_inf, overflowed)

    def _norm_here(self, gradients: list[Tensor]) -> Tensor:
        if not gradients:
            return self._zero
        return norm_by_kernels(gradients, self.device) if self._one_pass else total_norm(gradients).to(self.device)
