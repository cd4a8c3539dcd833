"""Run one module on its own, as it would run in a model under a policy, without side effects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mezzo.engine.casts.casting import Casting
from mezzo.engine.casts.conversion import in_fp32, to_format, wrap
from mezzo.policy import Policy

_KEPT_FIELDS = ("lower", "fp32", "widest", "arithmetic", "op_lists", "loss_scale", "init_scale", "accumulate")


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
    """Return ``policy`` as applied to a single module: operations are cast, weights left alone."""
    kept = {name: getattr(policy, name) for name in _KEPT_FIELDS}
    if policy.in_layers:
        kept["arithmetic"] = "emulated"  # native FP8 layers are modules of their own, not operations
    return Policy.parse(policy.compute).replace(**kept)


class TorchModule:
    """A module of PyTorch under a policy's autocast (``OneModule``)."""

    def __init__(self, policy: Policy, device_type: str) -> None:
        self._device_type = device_type
        self._casting = Casting.of(for_single_modules(policy), device_type)

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
        """Let the modules inside run in FP32."""
        forwards = [(child, child.__dict__.get("forward")) for child in module.modules() if child is not module]
        try:
            for child, _ in forwards:
                wrap(child, _exactly, self._device_type, inner)
            yield
        finally:
            for child, forward in forwards:
                if forward is None:
                    del child.forward
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
