"""The state of each thread of a script: the module that it is in, and the one it called last."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from mezzo.engine.casts.casting import Casting
from mezzo.policy import Policy


class Root(NamedTuple):
    """A module called from outside any module, and what its next call in the same thread needs."""

    module: ref[nn.Module]
    parameter: ref[nn.Parameter]
    """Its first parameter; for a module without parameters a dead reference, so that every call looks its device up again."""
    device: torch.device | None
    """That parameter's device."""
    policy: Policy | None
    """The policy as applied to the script at that call."""
    casting: Casting | None
    region: AbstractContextManager[Any] | None


class OwnSwitch(NamedTuple):
    """The script's outermost autocast, which is off: its own switch if it calls a model that it trains inside."""

    device_type: str
    regions: list[AbstractContextManager[Any] | None]
    """The regions that the autocast closes at its end, one for each time that it was entered."""

    def turn_on(self, casting: Casting) -> None:
        """Open the policy's region until the autocast ends."""
        region = casting.region()
        region.__enter__()
        self.regions[-1] = region


class ThreadState(threading.local):
    """The state of one thread."""

    depth = 0
    """1 inside a module or a compiled function, else 0."""
    outermost: nn.Module | None = None
    """The module that was called from outside any module, while it runs under a policy."""
    root: Root | None = None
    """The module that was last called from outside any module: usually the next call is of the same one."""
    stepping = False
    """Whether an optimizer is stepping."""
    own_switch: OwnSwitch | None = None
    """The script's outermost autocast, if that is off."""
    keeps_format = False
    """Whether the result of the outermost module keeps its format, because the script's own autocast is on around it."""
    autocasts_off = 0
    """Number of the script's open autocasts that the policy turned off."""
