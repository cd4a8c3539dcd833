"""The region that a model's calls run in, stored with the model: a copy of the model has its own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from mezzo.engine.casting import Casting
from mezzo.policy import Policy


class ModelRegion:
    """The region of whoever trains the model or, for a copy of the model, one of the policy alone.

    A copy is another model: it does not train with this one, and pickles without its optimizers.
    """

    def __init__(self, policy: Policy, owner: Any = None) -> None:
        """Open the ``region()`` of ``owner``; None for a copy."""
        self.policy, self.owner = policy, owner

    def __call__(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the region for a call of ``model``."""
        if self.owner is None:
            self.owner = Casting.of(self.policy, next((p.device.type for p in model.parameters()), "cpu"))
        return self.owner.region()  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[type[ModelRegion], tuple[Policy]]:
        return ModelRegion, (self.policy,)
