"""Which session trains a model: one at a time, with the model in the format and on the device that it had."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from weakref import WeakSet

from torch import nn

from mezzo.engine.gradients import parameters_of
from mezzo.errors import SessionError

_LIVE: WeakSet[Ownership] = WeakSet()
_format_of = operator.attrgetter("dtype")


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
        first = (next((p for p in model.parameters() if p.is_floating_point()), None) for model in models)
        self._places = [(p, p.device) for p in first if p is not None]
        """One parameter of each model: moving a model affects all of them."""
        self._all = parameters_of(models)
        self._formats = list(map(_format_of, self._all))

    def check_formats(self) -> None:
        """Refuse a model that was cast or moved since the session was built.

        Raises:
            SessionError: a model was cast or moved.
        """
        if list(map(_format_of, self._all)) != self._formats:  # some 30 ns for each
            one, before = next((p, f) for p, f in zip(self._all, self._formats, strict=True) if p.dtype is not f)
            raise SessionError(
                f"weights of shape {tuple(one.shape)} are {one.dtype}, and were {before} when the session was built",
                hint="remove model.half() and the like: the policy casts; evaluate a copy (copy.deepcopy(model).half())",
            )
        for parameter, device in self._places:
            if parameter.device != device:
                raise SessionError(
                    f"the model is on {parameter.device}, and was on {device} when the session was built",
                    hint="move the model first, then build optimizer and session",
                )
