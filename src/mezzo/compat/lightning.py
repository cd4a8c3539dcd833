"""Lightning's precision plugins: ``Trainer(plugins=MezzoPrecision("fp16"))``, ``Fabric(plugins=MezzoFabricPrecision("fp16"))``.

Forward passes run under the policy, and a step is a session's: one unscale and one decision for all optimizers,
schedules that wait on a skipped update (Trainer; in Fabric by ``plugin.hold(scheduler)``), a short last window averaged over its
micro-batches, FP32 masters under ``-master`` policies. The Trainer's checkpoints contain the loss scale, and masters if there are any.

Limits: one device per process; several processes under ``DistributedDataParallel`` only (``strategy="ddp"``); LBFGS is refused;
Lightning's ``global_step`` counts skipped updates, as it does with its own mixed precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch import LightningModule as _Module
from lightning.pytorch.plugins.precision import Precision as TrainerPrecision
from lightning.pytorch.trainer import call
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from mezzo.compat.driven import Driven
from mezzo.engine.casts.conversion import cast_ends, fp32_modules, to_format, wrap
from mezzo.engine.processes.shards import bare
from mezzo.errors import SessionError
from mezzo.formats import FP32
from mezzo.policy import Policy
from mezzo.records import RunRecord

_HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
_IDLE = lightning.Callback.on_before_optimizer_step


class _Plugin:
    """The part of a plugin that is the same for Fabric and the Trainer."""

    def __init__(self, policy: Policy | str = "fp16") -> None:
        self.driven = Driven(policy)
        self.precision: Any = str(self.driven.policy)  # what Lightning prints

    def record(self) -> RunRecord:
        """Return the record of the training so far: ``mezzo.records.write_record`` keeps it, ``mezzo report`` shows it."""
        return self.driven.record(f"lightning {lightning.__version__}")

    def hold(self, scheduler: Any) -> Any:
        """Make a learning rate scheduler wait on skipped updates, and return it."""
        return self.driven.hold(scheduler)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass, and of a step of training, validation, test or prediction."""
        return self.driven.region()

    def state_dict(self) -> dict[str, Any]:
        """Return loss scale, counts and masters; pass the plugin to ``fabric.save`` within its state to save them."""
        return self.driven.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scale and masters of a ``state_dict``."""
        self.driven.load_state_dict(state_dict)


class MezzoFabricPrecision(_Plugin, FabricPrecision):
    """A Fabric plugin that trains under a precision policy.

    Args:
        policy: a ``Policy``, a policy text, or the path of a policy file.
    """

    def __init__(self, policy: Policy | str = "fp16") -> None:
        super().__init__(policy)
        self._lowers, self._low = self.driven.policy.lowers, self.driven.policy.storage.dtype
        # Attributes, not methods: one more Python call per step than Fabric's own mixed precision would be measurable.
        self.backward = self.driven.backward
        self.unscale_gradients = self.driven.unscale

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Add a module; if the policy casts models, it is cast at its first call."""
        self.driven.add(module)
        return module

    def convert_input(self, data: Any) -> Any:
        """Return a module's inputs in the policy's format, as Fabric's own mixed precision does."""
        if not self._lowers:
            return data
        return apply_to_collection(data, Tensor, _to, self._low)

    def convert_output(self, data: Any) -> Any:
        """Return a module's outputs in FP32."""
        if isinstance(data, Tensor) and data.dtype is self._low:
            return data.float()
        return to_format(data, FP32.dtype)

    def main_params(self, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        """Yield the parameters that Fabric clips, or a zero if the update will be skipped.

        By default Fabric raises an error on gradients that are not finite, which a skipped update does not need.
        """
        if self.driven.overflowed:
            nothing = nn.Parameter(torch.zeros(()))
            nothing.grad = torch.zeros(())
            yield nothing
            return
        for group in optimizer.param_groups:
            yield from group["params"]

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step an optimizer, or skip."""
        if not kwargs:
            return self.driven.step(optimizer, optimizer.step)
        _refuse_closure(kwargs)
        return self.driven.step(optimizer, functools.partial(optimizer.step, **kwargs))


class MezzoPrecision(_Plugin, TrainerPrecision):
    """A plugin for Lightning's Trainer that trains under a precision policy.

    Args:
        policy: a ``Policy``, a policy text, or the path of a policy file.
    """

    def __init__(self, policy: Policy | str = "fp16") -> None:
        super().__init__(policy)
        self._calls = 0
        self._idle: set[str] = set()
        """Hooks that the module has not overridden: they do nothing, and Lightning makes some thirty calls for each."""
        self._changed = False
        """Whether a hook may change gradients before they are clipped, so that their norm has to be computed first."""

    def connect(
        self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Any], list[Any]]:
        """Start or continue with a module, and make its schedules wait on skipped updates."""
        driven = self.driven
        module: Any = bare(model)  # under strategy="ddp" the model is wrapped by now
        _refuse_own_backward(module)
        if not any(module is known for known in driven.models):
            self.driven = driven = Driven(driven.policy)  # another fit, of another module
            driven.add(module)
            _ = driven.session
            _cast_parts(module, driven.policy)
        else:  # a callback may have put an average into the model at the end of the last fit
            driven.session.masters.restart(module.parameters())
        self._idle = {
            n for n in _HOOKS if n not in vars(module) and getattr(type(module), n, None) is getattr(_Module, n)
        }
        before_step = {type(c).on_before_optimizer_step for c in module.trainer.callbacks}
        self._changed = bool(before_step - {_IDLE}) or not self._idle.issuperset(_HOOKS[2:])
        for optimizer in optimizers:
            _refuse_lbfgs(optimizer)
            driven.add_optimizer(optimizer)
        for config in lr_schedulers:
            driven.hold(config.scheduler)
        return model, optimizers, lr_schedulers

    train_step_context = val_step_context = test_step_context = predict_step_context = _Plugin.forward_context

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass; gradients are unscaled when ``on_before_optimizer_step`` is called."""
        self._calls += 1
        self.driven.backward(tensor, model, *args, **kwargs)

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Call hooks with the loss, not scaled yet."""
        call._call_callback_hooks(module.trainer, "on_before_backward", tensor)
        self._call_module_hook(module, "on_before_backward", tensor)
        return tensor

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Call hooks after a backward pass."""
        call._call_callback_hooks(module.trainer, "on_after_backward")
        self._call_module_hook(module, "on_after_backward")
        return tensor.detach()

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        trainer = model.trainer
        call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
        self._call_module_hook(model, "on_before_optimizer_step", optimizer)
        if trainer.gradient_clip_val is not None or "configure_gradient_clipping" not in self._idle:
            self._clip_gradients(model, optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)

    def _call_module_hook(self, model: Any, hook: str, *args: Any) -> None:
        if hook not in self._idle:
            call._call_lightning_module_hook(model.trainer, hook, *args)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, pass gradients to hooks, clip them and step the optimizer, or skip; return the result of step or closure.

        The module's own ``optimizer_step`` may have run the closure already, and there may be no backward pass:
        ``training_step`` returned no loss, or weight averaging passes over the data again. So backward passes are counted.
        """
        result, driven = closure(), self.driven
        if self._calls == 0 and model.automatic_optimization:
            self._after_closure(model, optimizer)
            return result
        accumulated = model.trainer.accumulate_grad_batches
        if self._calls < accumulated and model.automatic_optimization:
            driven.short = accumulated / self._calls
        self._calls = 0
        driven.settle()
        if self._changed:
            driven.measure_norm()
        self._after_closure(model, optimizer)
        stepped = driven.step(optimizer, functools.partial(optimizer.step, **kwargs) if kwargs else optimizer.step)
        return result if stepped is None else stepped

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip unscaled gradients by their norm, also in manual optimization."""
        self.driven.clip(self.main_params(optimizer), clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Clip the elements of unscaled gradients, also in manual optimization."""
        self.driven.unscale()
        super().clip_grad_by_value(optimizer, clip_val)


def _to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _refuse_own_backward(model: nn.Module) -> None:
    if getattr(type(model), "backward", None) is not _Module.backward:
        raise SessionError(
            f"{type(model).__name__} has a backward() of its own; a session runs the backward pass itself",
            hint="leave it out, or use manual optimization and self.manual_backward(loss)",
        )


def _refuse_lbfgs(optimizer: Any) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise SessionError(
            "LBFGS evaluates the loss several times per update; a session has one backward pass",
            hint="train with another optimizer, or in precision 32-true without this plugin",
        )


def _refuse_closure(kwargs: dict[str, Any]) -> None:
    if kwargs.get("closure") is not None:
        raise SessionError(
            "optimizer.step() got a closure; allowed: none",
            hint="call fabric.backward(loss) first, then optimizer.step()",
        )


def _cast_parts(model: nn.Module, policy: Policy) -> None:
    """Make the parts of a LightningModule with 16-bit weights cast their inputs and return FP32: its steps call them."""
    if policy.casting != "model":
        return
    low, kept = policy.storage.dtype, set(fp32_modules(model, policy))
    for part in model.children():
        if part not in kept and any(p.dtype is low for p in part.parameters()):
            wrap(part, cast_ends, low)
