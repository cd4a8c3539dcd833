"""Optimizers under a level: gradients set aside and unscaled, FP32 masters, skipped steps.

Masters are created at the first backward pass, from the weights at that time, so they include a checkpoint that was loaded
or a broadcast that was done after ``initialize``. From then on the optimizer's groups contain the masters.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.compat.apex.amp.handle import clear_cache, disable_casts
from mezzo.compat.apex.amp.state import LossScaler, _amp_state, maybe_print
from mezzo.engine.casts.conversion import HALF
from mezzo.engine.gradients import put_back, set_aside, trained_by
from mezzo.engine.optimizers.master_weights import MasterWeights
from mezzo.formats import FP32


class HalfMasters(MasterWeights):
    """FP32 masters of parameters that are already in 16 bits."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy the masters from the ``parameters`` that are in 16 bits and are trained."""
        super().__init__([])
        halves = [p for p in parameters if p.requires_grad and p.dtype in HALF]
        self._master_of = {p: nn.Parameter(p.detach().float()) for p in halves}

    def add(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return ``parameters`` with new masters in place of those in 16 bits."""
        listed = list(parameters)
        self._master_of.update(HalfMasters(listed).pairs())
        return [self._master_of.get(p, p) for p in listed]

    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return the parameters, each with its master."""
        return list(self._master_of.items())


class AmpOptimizer:
    """The state that ``amp`` keeps for one optimizer, as its ``_amp_stash``."""

    def __init__(self, optimizer: Any, *, keeps_masters: bool) -> None:
        self.optimizer, self.keeps_masters = optimizer, keeps_masters
        self.lazy_init_called = False
        self.params_have_scaled_gradients = False
        """Whether a backward pass with ``delay_unscale`` left gradients with their scale."""
        self.skipping: str | None = None
        """The message to print when the next step is skipped; None if it is not."""
        self._masters = HalfMasters([])
        self._aside: list[tuple[nn.Parameter, Tensor]] = []

    @property
    def all_fp16_params(self) -> list[nn.Parameter]:
        """The parameters in 16 bits: the model's that have masters, or else the optimizer's own."""
        if self.keeps_masters:
            return [half for half, _ in self._masters.pairs()]
        return [p for p in trained_by([self.optimizer]) if p.dtype in HALF]

    @property
    def all_fp32_from_fp16_params(self) -> list[nn.Parameter]:
        """The masters."""
        return [master for _, master in self._masters.pairs()]

    @property
    def all_fp32_from_fp32_params(self) -> list[nn.Parameter]:
        """The FP32 parameters that are their own masters."""
        return [p for p in self._without_masters() if p.dtype is FP32.dtype]

    def _without_masters(self) -> list[nn.Parameter]:
        """Return the parameters that are updated themselves, without a master."""
        masters = {id(master) for _, master in self._masters.pairs()}
        return [p for p in trained_by([self.optimizer]) if id(p) not in masters]

    def begin(self) -> None:
        """Check the parameters and create the masters, once.

        Raises:
            TypeError: a parameter is in neither FP32 nor 16 bits.
        """
        if self.lazy_init_called:
            return
        self.lazy_init_called = True
        _check_formats(trained_by([self.optimizer]))
        if self.keeps_masters:
            self._masters = HalfMasters(trained_by([self.optimizer]))
            self._masters.begin([self.optimizer])
            self.optimizer.load_state_dict(self.optimizer.state_dict())  # casts state to the format of the masters

    def prepare(self) -> None:
        """Set gradients aside before a backward pass, so that it leaves fresh ones."""
        self.begin()
        for half, _ in self._masters.pairs():
            half.grad = None
        self._aside = set_aside(self._without_masters())

    def restore(self) -> None:
        """Restore the gradients that were set aside, after a backward pass that failed."""
        put_back(self._aside)
        self._aside = []

    def finish(self, scaler: LossScaler) -> None:
        """Unscale the gradients of a backward pass and add those that were set aside."""
        self.begin()
        scaler.unscale_([p.grad for p in self._without_masters() if p.grad is not None])
        pairs = [(half, master) for half, master in self._masters.pairs() if half.grad is not None]
        fresh = scaler.unscaled([half.grad for half, _ in pairs if half.grad is not None])
        for (_, master), gradient in zip(pairs, fresh, strict=True):
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        self.restore()
        self.params_have_scaled_gradients = False

    def skip(self, message: str) -> None:
        """Make the next step do nothing and print ``message``, unless it is to be skipped already."""
        self.skipping = self.skipping or message

    def skipped(self) -> bool:
        """Return whether this step is skipped, and clear the request."""
        if self.skipping is None:
            return False
        maybe_print(self.skipping)
        self.skipping = None
        self.drop_master_gradients()
        return True

    def updated(self) -> None:
        """Round the masters into the model after an update."""
        self._masters.push()
        self.drop_master_gradients()

    def drop_master_gradients(self) -> None:
        """Clear the gradients that ``model.zero_grad()`` does not reach."""
        for _, master in self._masters.pairs():
            master.grad = None

    def clear_gradients(self, *, set_to_none: bool) -> None:
        """Clear the gradients of the model and of the masters."""
        self.begin()
        for parameter in [*self.all_fp16_params, *self._without_masters()]:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad = torch.zeros_like(parameter.grad)
        self.drop_master_gradients()

    def with_masters(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a new parameter group with masters in place of 16-bit parameters.

        Raises:
            TypeError: a parameter is in neither FP32 nor 16 bits, or the parameters are a set, which has no order.
        """
        self.begin()
        group_params = group["params"]
        if isinstance(group_params, set):
            raise TypeError("optimizer parameters are in a set, whose order changes between runs; pass a list")
        params: list[Any] = [group_params] if isinstance(group_params, Tensor) else list(group_params)
        _check_formats(params)
        return {**group, "params": self._masters.add(params) if self.keeps_masters else params}


def process(optimizer: Any, *, keeps_masters: bool) -> None:
    """Give an optimizer its ``_amp_stash``, and methods that use it.

    Raises:
        RuntimeError: it went through ``initialize`` before.
    """
    if hasattr(optimizer, "_amp_stash"):
        raise RuntimeError(
            "A given optimizer should only be passed through amp.initialize once. Build a new one, or pass it only once."
        )
    optimizer._amp_stash = AmpOptimizer(optimizer, keeps_masters=keeps_masters)
    optimizer.step = types.MethodType(_step(optimizer.step), optimizer)
    optimizer.add_param_group = types.MethodType(_add_param_group(optimizer.add_param_group), optimizer)
    if keeps_masters:
        optimizer.zero_grad = types.MethodType(_zero_grad, optimizer)


def _step(original: Any) -> Any:
    @functools.wraps(original)
    def step(self: Any, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        stash: AmpOptimizer = self._amp_stash
        if closure is not None and (stash.keeps_masters or stash.skipping is not None):
            raise RuntimeError(
                "Currently, Amp does not support closure use with optimizers. Run the backward pass under amp.scale_loss "
                "and call step() with no closure."
            )
        if stash.skipped():
            self._opt_called = True  # for schedulers a skipped step counts as called
            return None
        with disable_casts():
            result = original(*(() if closure is None else (closure,)), *args, **kwargs)
            stash.updated()
        clear_cache()
        return result

    return step


def _add_param_group(original: Any) -> Any:
    @functools.wraps(original)
    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        original(self._amp_stash.with_masters(param_group))

    return add_param_group


def _zero_grad(self: Any, set_to_none: bool = True) -> None:
    self._amp_stash.clear_gradients(set_to_none=set_to_none)


def _check_formats(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        if parameter.dtype not in (*HALF, FP32.dtype):
            raise TypeError(
                f"Optimizer's parameters must be FP32, FP16 or BF16. Received {parameter.type()}. "
                "Cast the model to FP32 before amp.initialize, or leave its parameters out."
            )


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yield the loss in FP32 times the loss scale; at the end unscale the gradients of its backward pass.

    Earlier gradients are added unscaled, so accumulation survives a change of the scale.
    Where a gradient is not finite the scale backs off, and the next ``step`` of these optimizers changes nothing.

    Args:
        loss: of any format and shape.
        optimizers: the optimizer or optimizers, from ``initialize``, that the backward pass computes gradients for.
        loss_id: which of the ``num_losses`` loss scales to use.
        model: unused, as in Apex.
        delay_unscale: whether to leave gradients scaled for a later backward pass to unscale with its own.
        delay_overflow_check: whether to leave the scale as it is and skip nothing.

    Raises:
        RuntimeError: ``initialize`` was not called.
    """
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError(
            "amp.scale_loss before amp.initialize: amp has not been initialized. Call "
            "model, optimizer = amp.initialize(model, optimizer, opt_level=...) first."
        )
    if not _amp_state.opt_properties.enabled:
        yield loss
        return
    scaler = _scaler(loss_id)
    stashes = [_stash_of(o) for o in (optimizers if isinstance(optimizers, Iterable) else [optimizers])]
    with ExitStack() as stack:
        for casting in _amp_state.castings:
            stack.enter_context(casting.backward())
        if not _amp_state.opt_properties.master_weights and not scaler.dynamic and scaler.loss_scale() == 1.0:
            yield loss.float()
        else:
            with _unscaled(stashes, scaler, delay=delay_unscale):
                yield scaler.scaled(loss)
            if not delay_unscale and not delay_overflow_check and scaler.update_scale():
                for stash in stashes:
                    stash.skip(
                        f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {scaler.loss_scale()}"
                    )
    clear_cache()


@contextmanager
def _unscaled(stashes: list[AmpOptimizer], scaler: LossScaler, *, delay: bool) -> Iterator[None]:
    if delay:
        yield
        for stash in stashes:
            stash.params_have_scaled_gradients = True
        return
    for stash in stashes:
        if not stash.params_have_scaled_gradients:
            stash.prepare()
    try:
        yield
    except BaseException:
        for stash in stashes:
            stash.restore()
        raise
    scaler.clear_overflow_state()
    for stash in stashes:
        stash.finish(scaler)


def _scaler(loss_id: int) -> LossScaler:
    scalers = _amp_state.loss_scalers
    if not 0 <= loss_id < len(scalers):
        raise IndexError(
            f"loss_id={loss_id}; allowed: 0 to {len(scalers) - 1}. Pass num_losses={loss_id + 1} or more to amp.initialize."
        )
    return scalers[loss_id]


def _stash_of(optimizer: Any) -> AmpOptimizer:
    stash = getattr(optimizer, "_amp_stash", None)
    if not isinstance(stash, AmpOptimizer):
        raise RuntimeError(
            f"amp.scale_loss got a {type(optimizer).__name__} that did not come from amp.initialize. Pass the optimizers that "
            "amp.initialize returned."
        )
    return stash
