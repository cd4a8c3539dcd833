"""The states of the random number generators that a training script usually uses: Python's, NumPy's, torch's on every device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


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
    """Restore ``states``, except those of devices whose number has changed."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    for name, device in _devices().items():
        saved = states.get(name, [])
        if len(saved) == device.device_count():
            device.set_rng_state_all(saved)


def _devices() -> dict[str, Any]:
    """Return torch's modules of the accelerators that this process has initialized."""
    modules = {name: getattr(torch, name, None) for name in ("cuda", "xpu")}
    return {name: device for name, device in modules.items() if device is not None and device.is_initialized()}
