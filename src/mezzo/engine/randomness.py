"""Save the states of random generators, and restore them for a computation that must draw the same numbers again."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class HostStates(NamedTuple):
    """The states of Python's and NumPy's generators, which torch does not save."""

    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> HostStates:
        """Return the current states."""
        return cls(random.getstate(), np.random.get_state())

    def set(self) -> None:
        """Restore these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)


class AllStates(NamedTuple):
    """The states of the generators of the host, and of some devices."""

    host: HostStates
    cpu: Tensor
    devices: dict[torch.device, Tensor]

    @classmethod
    def now(cls, devices: set[torch.device]) -> AllStates:
        """Return the current states of the host's generators and those of ``devices``."""
        others = {d: torch.get_device_module(d).get_rng_state(d) for d in devices if d.type != "cpu"}
        return cls(HostStates.now(), torch.get_rng_state(), others)

    def set(self) -> None:
        """Restore these states."""
        self.host.set()
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            torch.get_device_module(device).set_rng_state(state, device)
