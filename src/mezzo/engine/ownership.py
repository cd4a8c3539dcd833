"""One session per model: a session detects that another session has its model, or that the model was cast or moved."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

from torch import nn

from mezzo.engine.parameters import parameters_of
from mezzo.errors import SessionError

_LIVE: WeakSet[Ownership] = WeakSet()


class Ownership:
    """The parameters with which a session was built, which no other session may train, and the models' formats and devices."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Take the parameters over from any session that has them.

        That is an error only if the other session continues to train: rerunning a notebook cell builds its session again.
        """
        self.lost = False
        """Whether another session has the model now."""
        self._parameters = {p for p in parameters_of(models) if p.requires_grad}  # a frozen part may serve several
        for other in list(_LIVE):
            if not self._parameters.isdisjoint(other._parameters):
                other.lost = True
        _LIVE.add(self)
        floating = ([p for p in model.parameters() if p.is_floating_point()] for model in models)
        self._first = [(held[0], held[0].dtype, held[0].device) for held in floating if held]
        """One parameter of each model: casting or moving a model affects all of them."""

    def check_formats(self) -> None:
        """Refuse a model that was cast or moved since the session was built.

        Raises:
            SessionError: it was.
        """
        for parameter, dtype, device in self._first:
            if parameter.dtype is not dtype:
                raise SessionError(
                    f"the model's weights are {parameter.dtype}, and were {dtype} when the session was built",
                    hint="remove model.half() and the like: the policy casts; evaluate a copy (copy.deepcopy(model).half())",
                )
            if parameter.device != device:
                raise SessionError(
                    f"the model is on {parameter.device}, and was on {device} when the session was built",
                    hint="move the model first, then build optimizer and session",
                )
