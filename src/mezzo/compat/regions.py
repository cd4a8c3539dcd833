"""The region in which a model's calls run, stored with the model: a copy of the model has its own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from mezzo.engine.casts.casting import Casting
from mezzo.policy import Policy


class ModelRegion:
    """The region of the model's owner, which trains it; for a copy of the model, a region of the policy alone.

    A copy does not train with the original, and pickles without the original's optimizers.
    """

    def __init__(self, policy: Policy, owner: Any = None) -> None:
        """Use the ``region()`` of ``owner``; None for a copy of the model."""
        self.policy, self.owner = policy, owner

    def __call__(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the region for a call of ``model``."""
        if self.owner is None:
            self.owner = Casting.of(self.policy, next((p.device.type for p in model.parameters()), "cpu"))
        return self.owner.region()  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[type[ModelRegion], tuple[Policy]]:
        return ModelRegion, (self.policy,)
