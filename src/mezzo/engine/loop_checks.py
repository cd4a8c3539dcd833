"""Checks of the loop around a session, for loops that would silently train wrongly.

A wrong loop is wrong from its first step, so only three windows are checked in full: identities, formats and version counters of
tensors, and once the last operations of the loss. Nothing is read from the device, with one exception: if the very last
operation multiplies or divides the loss by one number, that number.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.engine.gradients import parameters_of, trained_by
from mezzo.engine.session_errors import warn
from mezzo.engine.state import NoLoopChecks, OpenRegion, SessionParts
from mezzo.errors import SessionError
from mezzo.formats import FP32

WINDOWS = 3
"""Number of checked windows: mistakes of one window show in the next, and the first update may be skipped."""


class LoopChecks(NoLoopChecks):
    """Checks of the calls of a session's first windows."""

    def __init__(self, session: SessionParts) -> None:
        self._session = session
        self._parameters = parameters_of(session.models)
        self._trained = trained_by(session.optimizers)  # before masters take their places
        self._backwards = self._closed = 0
        self._entered = self._warned = False
        self._other_dtype: torch.dtype | None = None
        """The format of a ``torch.autocast`` of the script's around or inside the session's region, if it differs from the policy's."""
        self._last_gradient: tuple[nn.Parameter, Tensor, int, int] | None = None
        """A parameter, its gradient after this window's last backward pass, and the version counters of both."""

    def region(self, region: OpenRegion) -> OpenRegion:
        """Return the session's region, with its checks."""
        self._entered |= torch.is_grad_enabled()  # an evaluation is no training step
        return region if torch.compiler.is_compiling() else self._checked(region)

    @contextmanager
    def _checked(self, region: OpenRegion) -> Iterator[None]:
        self._check_autocast()
        hooked = [model for model in self._session.models if _takes_hooks(model)]
        handles = [model.register_forward_pre_hook(self._check_autocast) for model in hooked]
        try:
            with region:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _check_autocast(self, *_: Any) -> None:
        kind, policy = self._session.device.type, self._session.policy
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            if not policy.lowers or dtype is not policy.storage.dtype:
                self._other_dtype = dtype

    def before_backward(self, loss: Tensor, *, opens: bool) -> None:
        """Check the state before a backward pass; ``opens`` says whether it is its window's first.

        Raises:
            SessionError: the loop is wrong.
        """
        session = self._session
        if torch.is_autocast_enabled(session.device.type):
            raise SessionError(
                f"backward() while autocast is on for {session.device.type}; allowed: after the `with session.autocast():` block",
                hint="end the block before session.step(loss): casts of weights are reused until it ends, also after an update",
            )
        session.state.ownership.check_formats()
        self._refuse_other_parameters()
        if self._backwards == 0:
            self._check_loss(loss)
        if opens:
            self._refuse_leftovers()
        else:
            self._refuse_dropped()
            self._warn_of_changed_gradients(in_window=True)
        self._backwards += 1

    def after_backward(self) -> None:
        """Record the state after a backward pass."""
        self._last_gradient = next(
            ((p, p.grad, p.grad._version, p._version) for p in self._parameters if p.grad is not None), None
        )

    def gradients_moved(self) -> None:
        """Forget the gradients of the last backward pass: the session set them aside, dropped them or put them back."""
        self._last_gradient = None

    def before_update(self) -> None:
        """Check the gradients before an update; the update of the last checked window ends the checks."""
        self._warn_of_changed_gradients()
        self._last_gradient = None
        self._closed += 1
        if self._closed == WINDOWS:
            self._session.state.end_checks()

    # --- the loss ----------------------------------------------------------------------------------------------------

    def _check_loss(self, loss: Tensor) -> None:
        session, policy = self._session, self._session.policy
        if policy.casting == "ops" and session.casting.way != "none" and not self._entered:
            warn(
                f"the first loss was computed outside session.autocast(): policy {policy!s} cast none of it; "
                "write `with session.autocast():` around the forward pass and the loss",
            )
        if self._other_dtype is not None:
            warn(
                f"session.autocast() and a torch.autocast of {self._other_dtype} are nested, and policy {policy!s} asks for another "
                "format; remove torch.autocast"
            )
        for what, number in _last_factors(loss):
            if what == "MulBackward0" and _is_a_loss_scale(number):
                raise SessionError(
                    f"the loss was multiplied by the {float(number):g} of a GradScaler; allowed: the loss itself",
                    hint="pass loss, not scaler.scale(loss), and remove the scaler from the loop: the session scales by its policy",
                )
        if session.accumulate > 1 and _divided_by(loss, session.accumulate):
            warn(
                f"the loss was divided by {session.accumulate}, and the session averages the {session.accumulate} micro-batches of a "
                "window itself: gradients become too small; pass the loss undivided",
            )

    # --- parameters and gradients --------------------------------------------------------------------------------------

    def _refuse_other_parameters(self) -> None:
        if self._session.processes.sharded:
            return
        now, then = parameters_of(self._session.models), set(self._parameters)
        new = [p for p in now if p not in then and p.requires_grad]
        if new or not then.intersection(self._trained) <= set(now):
            raise SessionError(
                "the model's parameters are not those that it had when the session was built: they would not be trained",
                hint="change the model first (layers, adapters, load_state_dict(assign=True), fully_shard), then build optimizer and "
                "session",
            )

    def _refuse_leftovers(self) -> None:
        if not self._session.scales[0].skips_overflows:
            return  # without a loss scale, existing gradients are added to, as in torch
        for parameter in self._trained:
            if parameter.grad is not None:
                raise SessionError(
                    f"a parameter of shape {tuple(parameter.shape)} has a gradient before the first backward pass of a window, one "
                    "that was not multiplied by this session's loss scale",
                    hint="do not call loss.backward() yourself; give models whose losses reach each other's parameters to one "
                    "session: Session([first, second], [first_optimizer, second_optimizer])",
                )

    def _refuse_dropped(self) -> None:
        if self._last_gradient is None:
            return
        parameter, _, _, version = self._last_gradient
        if parameter.grad is None:
            what = "the gradients of a window's earlier backward passes are gone"
        elif parameter._version != version:
            what = "weights were changed between two backward passes of a window"
        else:
            return
        raise SessionError(
            what,
            hint="remove optimizer.step() and optimizer.zero_grad() from the loop: session.step() and session.update() do both",
        )

    def _warn_of_changed_gradients(self, *, in_window: bool = False) -> None:
        scaled = self._session.scales[0].skips_overflows
        if (
            self._last_gradient is None
            or self._warned
            or self._session.state.window.unscaled
            or not (scaled or in_window)
        ):
            return
        parameter, gradient, version, _ = self._last_gradient
        if parameter.grad is not gradient or gradient._version == version:
            return
        self._warned = True
        if in_window:
            warn(
                "gradients were changed between two backward passes of a window, which adds them up; remove "
                "optimizer.zero_grad() and clipping from the loop, and pass clip_norm="
            )
        else:
            warn(
                "gradients were changed between backward() and update(), while they are multiplied by the loss scale; call "
                "session.unscale() before you clip or change them, or pass clip_norm="
            )


def _takes_hooks(model: nn.Module) -> bool:
    """Return whether ``model`` can have a hook without torch.compile compiling it again."""
    compiled = hasattr(model, "_orig_mod") or model._compiled_call_impl is not None
    return not compiled and not isinstance(model, torch.jit.ScriptModule)


def _last_factors(loss: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the numbers that the loss's last operation multiplied or divided by, with the operation's name."""
    node = loss.grad_fn
    if node is None or node.name() not in ("MulBackward0", "DivBackward0"):
        return
    for name in ("_saved_self", "_saved_other"):
        saved = getattr(node, name, None)
        if isinstance(saved, Tensor) and saved.dim() == 0 and not saved.requires_grad:
            yield node.name(), saved


def _is_a_loss_scale(number: Tensor) -> bool:
    """Return whether ``number`` is the tensor that a GradScaler multiplies losses by; searches the heap."""
    if number.dtype is not FP32.dtype:  # a Python number, as in `loss * 0.1`
        return False
    scalers: list[Any] = [found for found in gc.get_objects() if issubclass(type(found), torch.amp.GradScaler)]
    scales = [scaler._get_scale_async() for scaler in scalers if scaler.is_enabled()]
    return any(scale is not None and scale.data_ptr() == number.data_ptr() for scale in scales)


def _divided_by(loss: Tensor, count: int) -> bool:
    node = loss.grad_fn
    for what, number in _last_factors(loss):
        if number.device.type != "cpu" or node is None:  # a Python number is on the CPU
            continue
        expected = count if what == "DivBackward0" else 1 / count
        inner = [following for following, _ in node.next_functions if following is not None]
        # Half a square is a common loss, and a factor of one half is more often a weight than a division.
        is_weight = count == 2 and (what == "MulBackward0" or any(map(_is_a_square, inner)))
        if float(number) == expected and not is_weight and not any(map(_is_a_sum, inner)):
            return True
    return False


def _is_a_square(node: Any) -> bool:
    """Return whether an operation ends a mean or sum of squares."""
    before = [following.name() for following, _ in node.next_functions if following is not None]
    return bool(node.name().startswith("MseLoss") or any(name.startswith("Pow") for name in before))


def _is_a_sum(node: Any) -> bool:
    """Return whether an operation sums over samples, so that dividing by their number makes a mean."""
    return bool(node.name().startswith("SumBackward") or getattr(node, "_saved_reduction", 1) == 2)


def in_fp32(construct: Callable[..., None]) -> Callable[..., None]:
    """Return a session's constructor that creates an FP32 session without checks: any autocast that it saw would not be the script's."""

    @functools.wraps(construct)
    def init(session: SessionParts, *args: Any, **settings: Any) -> None:
        construct(session, *args, **{**settings, "policy": "fp32"})
        session.state.end_checks()

    return init
