"""Accelerate under a precision policy: ``MezzoAccelerator(policy="fp16")`` in place of ``Accelerator(mixed_precision=...)``.

The loop stays as it is: ``prepare``, ``accumulate``, ``backward``, ``clip_grad_norm_``, ``save_state``. A step belongs to a
session: one unscale and one decision for all optimizers, a short last window averaged over its micro-batches, FP32 masters under
``-master`` policies. Prepared schedulers wait on skipped updates.

Limits: no DeepSpeed, FSDP or Megatron, which have mixed precision of their own; several processes under ``DistributedDataParallel``
only, and without policies that cast weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn

from mezzo.compat.driven import Driven, ModelRegion
from mezzo.engine.casts.conversion import to_format, unwrap, wrap, wrapped_by
from mezzo.errors import SessionError
from mezzo.formats import FP32
from mezzo.policy import Policy
from mezzo.records import RunRecord

_REPLICATED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Kinds of training in which every process has the whole model, and Accelerate averages the gradients."""


class MezzoAccelerator(accelerate.Accelerator):
    """An ``Accelerator`` that prepares and trains under a precision policy.

    Args:
        policy: a ``Policy``, a policy text, or the path of a policy file.
        **settings: arguments of ``Accelerator``, without ``mixed_precision``.

    Raises:
        SessionError: ``mixed_precision`` was passed, or processes have parts of the model.
    """

    driven: Driven

    def __init__(self, *, policy: Policy | str = "fp16", **settings: Any) -> None:
        if settings.get("mixed_precision") not in (None, "no"):
            raise SessionError(
                f"mixed_precision={settings['mixed_precision']!r} together with policy={policy!s}; allowed: one of the two",
                hint=f"leave mixed_precision out and pass policy={settings['mixed_precision']!r} for the same precision",
            )
        super().__init__(**{**settings, "mixed_precision": "no"})
        self.use_policy(policy)

    def use_policy(self, policy: Policy | str) -> None:
        """Train under a policy from now on; for an accelerator that another library created."""
        if self.distributed_type not in _REPLICATED:
            allowed = ", ".join(str(kind).rpartition(".")[2] for kind in _REPLICATED)
            raise SessionError(
                f"MezzoAccelerator runs as {self.distributed_type}; allowed: {allowed}",
                hint="use mezzo.Session with torch's DistributedDataParallel or fully_shard",
            )
        self.driven = Driven(policy)
        self._micro_batches = 0
        self._unwrapped: list[nn.Module] = []
        """Models whose calls no longer run under the policy."""
        self.register_for_checkpointing(self.driven)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Prepare a model so that its calls run under the policy."""
        model = super().prepare_model(model, *args, **kwargs)
        if not any(model is known for known in self.driven.models):
            self.driven.add(model)
            unwrap(model, _under_policy)  # an earlier accelerator's
            _wrap(model, self.driven)
        elif any(model is unwrapped for unwrapped in self._unwrapped):
            _wrap(model, self.driven)
        self._unwrapped = [unwrapped for unwrapped in self._unwrapped if unwrapped is not model]
        return model

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the model itself; ``keep_fp32_wrapper=False`` ends the policy for its calls until it is prepared again."""
        bare: nn.Module = super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
        if not keep_fp32_wrapper and wrapped_by(bare, _under_policy) is not None:
            unwrap(bare, _under_policy)
            self._unwrapped.append(bare)
        return bare

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer whose step is the session's."""
        prepared = super().prepare_optimizer(optimizer, device_placement=device_placement)
        if isinstance(prepared, AcceleratedOptimizer) and not isinstance(prepared, MezzoOptimizer):
            prepared.__class__ = MezzoOptimizer
            prepared.accelerator = self
        elif isinstance(prepared, MezzoOptimizer) and prepared.accelerator is None:  # a copy
            prepared.accelerator = self
        return prepared

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        """Return a context under the policy."""
        return self.driven.region()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run a backward pass; the loss is divided for its window as Accelerate does.

        Raises:
            SessionError: a model was unwrapped with ``keep_fp32_wrapper=False``.
        """
        if self._unwrapped:
            raise SessionError(
                "backward() after unwrap_model(model, keep_fp32_wrapper=False): the model's calls no longer run under the policy",
                hint="leave keep_fp32_wrapper out, unwrap a copy, or call accelerator.prepare(model) again",
            )
        steps = self.gradient_accumulation_steps
        self.driven.backward(loss if steps == 1 else loss / steps, **kwargs)

    def _do_sync(self) -> None:
        self._micro_batches += 1
        super()._do_sync()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of all optimizers, once per window."""
        self._note_short_window()
        self.driven.unscale()

    def _note_short_window(self) -> None:
        steps = self.gradient_accumulation_steps
        if 0 < self._micro_batches < steps:
            self.driven.short = steps / self._micro_batches

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the unscaled gradients, of master weights where there are any; return their norm."""
        self.unscale_gradients()
        tensors = self.driven.updated_tensors(parameters)
        norm: Tensor = torch.nn.utils.clip_grad_norm_(tensors, max_norm, norm_type=norm_type)
        return norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip the unscaled gradients, of master weights where there are any."""
        self.unscale_gradients()
        torch.nn.utils.clip_grad_value_(self.driven.updated_tensors(parameters), clip_value)

    def record(self) -> RunRecord:
        """Return the record of the training so far: ``mezzo.records.write_record`` keeps it, ``mezzo report`` shows it."""
        return self.driven.record(f"accelerate {accelerate.__version__}")


class MezzoOptimizer(AcceleratedOptimizer):
    """An optimizer that steps at the end of a window, or skips."""

    accelerator: MezzoAccelerator | None
    """None in a copy, which no accelerator has prepared yet."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "accelerator": None}

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update, if gradients are to be synchronized.

        Raises:
            SessionError: a closure was passed, or this is a copy.
        """
        if self.accelerator is None:
            raise SessionError(
                "step() of a copy of a prepared optimizer; allowed: of the prepared optimizer itself",
                hint="pass it to accelerator.prepare(optimizer) first, with a copy of the model",
            )
        if closure is not None:
            raise SessionError(
                "optimizer.step() got a closure; allowed: none",
                hint="call accelerator.backward(loss) first, then optimizer.step()",
            )
        if not self.gradient_state.sync_gradients:
            return
        accelerator = self.accelerator
        accelerator._note_short_window()
        accelerator._micro_batches = 0
        accelerator.driven.step(self.optimizer, self.optimizer.step)
        self._is_overflow = accelerator.driven.skipped

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients at the end of a window."""
        if self.gradient_state.sync_gradients:
            self.optimizer.zero_grad(set_to_none=set_to_none is not False)


def _wrap(model: nn.Module, driven: Driven) -> None:
    wrap(model, _under_policy, ModelRegion(driven.policy, driven), model)


def _under_policy(call: Callable[..., Any], region: ModelRegion, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    driven = region.owner
    if isinstance(driven, Driven) and not driven.began:
        for other in driven.models:
            unwrap(other, _under_policy)
        _ = driven.session  # casts the models, if the policy does: its wrappers have to be inside ours
        for other in driven.models:
            _wrap(other, driven)
        return model(*args, **kwargs)
    with region(model):
        output = call(*args, **kwargs)
    return to_format(output, FP32.dtype)
