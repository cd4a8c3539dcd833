"""Run one Keras layer on its own under the dtype policy of a policy, without changing the layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.frameworks.keras import dtype_policy_name
from mezzo.observe.observer import ModuleTree
from mezzo.observe.one_module import for_single_modules, same_random_numbers
from mezzo.policy import Policy


class OneLayer:
    """How a single layer runs (``mezzo.observe.one_module.OneModule``)."""

    def __init__(self, policy: Policy, tree: ModuleTree, returned: dict[int, torch.dtype]) -> None:
        self._name = dtype_policy_name(for_single_modules(policy))
        self._tree, self._returned = tree, returned

    def weights(self, module: nn.Module) -> list[Tensor]:
        """Return the trained parameters in ``module``."""
        parameters = (p for _, m in self._tree.modules(module) for _, p in self._tree.parameters(m))
        return [p for p in {id(p): p for p in parameters}.values() if p.requires_grad]

    @contextmanager
    def unchanged(self, module: nn.Module) -> Iterator[None]:
        """Run with copies of the variables that a call changes: running statistics, and the state of seed generators."""
        variables = [v for v in getattr(module, "variables", []) if not v.trainable and v._value is not None]
        original = [(variable, variable._value) for variable in variables]
        try:
            for variable, value in original:
                variable._value = nn.Parameter(value.detach().clone(), requires_grad=False)
            with same_random_numbers():
                yield
        finally:
            for variable, value in original:
                variable._value = value

    @contextmanager
    def lowered(self, module: nn.Module, *, inner: torch.dtype | None) -> Iterator[None]:
        """Give the layer the policy's dtype policy; the layers inside keep FP32 and return ``inner``."""
        import keras

        if not isinstance(module, keras.Layer):
            raise TypeError(f"{type(module).__name__} is a module of PyTorch, which Keras does not cast")
        before = module._dtype_policy
        inside = [id(layer) for _, layer in self._tree.modules(module) if layer is not module]
        try:
            module._dtype_policy = keras.DTypePolicy(self._name)
            if inner is not None:
                self._returned.update(dict.fromkeys(inside, inner))
            yield
        finally:
            module._dtype_policy = before
            for identity in inside:
                self._returned.pop(identity, None)

    def forward(self) -> AbstractContextManager[Any]:
        """Return an empty context: layers cast by themselves."""
        return nullcontext()

    def backward(self) -> AbstractContextManager[Any]:
        """Return an empty context."""
        return nullcontext()
