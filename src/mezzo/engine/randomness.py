"""The states of random generators, saved to draw the same numbers again."""

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
        """Return the current states of the generators of the host and of ``devices``."""
        others = {d: torch.get_device_module(d).get_rng_state(d) for d in devices if d.type != "cpu"}
        return cls(HostStates.now(), torch.get_rng_state(), others)

    def set(self) -> None:
        """Restore these states."""
        self.host.set()
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            torch.get_device_module(device).set_rng_state(state, device)


_LARGEST_OF_A_DEVICE = 64
"""Bytes: a generator of a device has 16, one of the host thousands."""
_WORDS = 624
"""Words of a Mersenne Twister."""


def random_states() -> dict[str, Any]:
    """Return the states, for devices only those in use."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    for name, device in _devices().items():
        states[name] = device.get_rng_state_all()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Restore ``states``, except for devices whose number has changed."""
    random.setstate(states["python"])
    _set_numpy(states["numpy"])
    torch.set_rng_state(states["torch"])
    for name, device in _devices().items():
        saved = states.get(name, [])
        if len(saved) == device.device_count():
            device.set_rng_state_all(saved)


def check_generators(position: dict[str, Any]) -> None:
    """Try the generators of a position in the data, which are used only later; changes the process's own.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: one has no valid state, or the counts are none.
    """
    if not all(type(position[name]) is int and position[name] >= 0 for name in ("epoch", "batch")):
        raise ValueError("the position in the data is no pair of counts")
    began = position["began"]
    if began is not None:
        set_random_states(began)
    for state in [*position["generators"], *(began["generators"] if began is not None else [])]:
        if state.numel() > _LARGEST_OF_A_DEVICE:
            torch.Generator().set_state(state)


def _set_numpy(state: Any) -> None:
    if not 0 <= int(state[2]) <= _WORDS:  # NumPy would read memory behind its state
        raise ValueError(f"NumPy's generator is at word {state[2]} of {_WORDS}")
    np.random.set_state(state)


def _devices() -> dict[str, Any]:
    """Return torch's modules of the accelerators that this process has initialized."""
    modules = {name: getattr(torch, name, None) for name in ("cuda", "xpu")}
    return {name: device for name, device in modules.items() if device is not None and device.is_initialized()}
