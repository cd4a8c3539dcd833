"""Run one module on its own, as it would run in a model under a policy, without side effects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mezzo.engine.casts.casting import Casting
from mezzo.engine.casts.conversion import in_fp32, to_format, wrap
from mezzo.engine.matrix_units.block_linear import LayerPlan
from mezzo.engine.matrix_units.low_layers import planned, use_blocks
from mezzo.policy import Policy


class OneModule(Protocol):
    """How a framework runs a single module."""

    def weights(self, module: nn.Module) -> list[Tensor]:
        """Return the trained parameters in ``module``."""

    def unchanged(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context that restores the module's state, and in which equal calls draw equal random numbers."""

    def lowered(self, module: nn.Module, *, inner: torch.dtype | None) -> AbstractContextManager[None]:
        """Return a context for a whole run of ``module`` under the policy, with the modules inside it in FP32.

        Args:
            module: the module.
            inner: the format that the modules inside return; None for FP32.
        """

    def forward(self) -> AbstractContextManager[Any]:
        """Return a context for the call in a lowered run."""

    def backward(self) -> AbstractContextManager[Any]:
        """Return a context for the backward pass of a lowered run."""


def for_single_modules(policy: Policy) -> Policy:
    """Return ``policy`` as applied to a single module: operations are cast, weights left alone, and no module is named."""
    alone: dict[str, Any] = {"norms": "fp32", "master_weights": False, "fp32_modules": (), "bf16_products": ()}
    alone.update(gradients="auto", reduce="auto", gather="auto", world=1, reduce_order="ring")
    if policy.lowers:
        alone["casting"] = "ops"
    if policy.in_layers:  # native FP8 layers are modules of their own, not operations
        alone.update(arithmetic="emulated", op_lists="portable")
    return policy.replace(**alone)


class TorchModule:
    """A module of PyTorch under a policy's autocast (``OneModule``), in blocks if it is a layer that the policy computes in blocks."""

    def __init__(self, policy: Policy, device_type: str, *, models: Iterable[nn.Module]) -> None:
        """Find out which layers of ``models``, unconverted ones, compute in blocks."""
        self._device_type, self._policy = device_type, policy
        self._casting = Casting.of(for_single_modules(policy), device_type)
        self._plans: dict[nn.Module, LayerPlan] = {}
        for model in models:
            self._plans.update(planned(model, policy).values())

    def weights(self, module: nn.Module) -> list[Tensor]:
        """Return the trained parameters in ``module``."""
        return [p for p in module.parameters() if p.requires_grad]

    @contextmanager
    def unchanged(self, module: nn.Module) -> Iterator[None]:
        """Run with copies of the buffers: the graph of the script's next step may have saved the running statistics."""
        originals = [(m._buffers, name, b) for m in module.modules() for name, b in m._buffers.items() if b is not None]
        try:
            for buffers, name, buffer in originals:
                buffers[name] = buffer.detach().clone()
            with same_random_numbers():
                yield
        finally:
            for buffers, name, buffer in originals:
                buffers[name] = buffer

    @contextmanager
    def lowered(self, module: nn.Module, *, inner: torch.dtype | None) -> Iterator[None]:
        """Let the modules inside run in FP32, and the module in blocks if it has a plan."""
        forwards = [(child, child.__dict__.get("forward")) for child in module.modules()]
        plan = self._plans.get(module)
        try:
            for child, _ in forwards:
                if child is not module:
                    wrap(child, _exactly, self._device_type, inner)
            if plan is not None and isinstance(module, nn.Linear):
                use_blocks(module, plan, self._policy)
            yield
        finally:
            for child, forward in forwards:
                if forward is None:
                    vars(child).pop("forward", None)
                else:
                    child.forward = forward

    def forward(self) -> AbstractContextManager[Any]:
        """Return the casting's region."""
        return self._casting.region()

    def backward(self) -> AbstractContextManager[Any]:
        """Return the casting's context for a backward pass."""
        return self._casting.backward()


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Seed torch's generators with a fixed number inside, and restore them."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=list(devices)):
        torch.default_generator.manual_seed(0)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(0)
        yield


def _exactly(call: Any, device_type: str, low: torch.dtype | None, *args: Any, **kwargs: Any) -> Any:
    # Inside another child autocast is off: only outputs that the container itself reads are rounded.
    if not torch.is_autocast_enabled(device_type):
        return call(*args, **kwargs)
    output = in_fp32(call, device_type, *args, **kwargs)
    return output if low is None else to_format(output, low)
