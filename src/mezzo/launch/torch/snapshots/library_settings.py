"""Settings of Python and of libraries that a training loop may change: a resumed run gets those that were changed.

Set-up makes its own settings again. The format of matrix products (TF32) is not among them: the run's policy sets it.
"""

from __future__ import annotations

import decimal
import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_CUDNN: Any = torch.backends.cudnn
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.get_default_dtype()": (
        lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda name: torch.set_default_dtype(getattr(torch, name)),
    ),
    "torch.get_default_device()": (lambda: str(torch.get_default_device()), torch.set_default_device),
    "torch.are_deterministic_algorithms_enabled()": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "torch.is_anomaly_enabled()": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads),
    "torch.backends.cudnn.benchmark": (lambda: _CUDNN.benchmark, lambda on: setattr(_CUDNN, "benchmark", on)),
    "torch.backends.cudnn.deterministic": (
        lambda: _CUDNN.deterministic,
        lambda on: setattr(_CUDNN, "deterministic", on),
    ),
    "numpy.geterr()": (np.geterr, lambda handling: np.seterr(**handling)),
    "decimal.getcontext().prec": (
        lambda: decimal.getcontext().prec,
        lambda digits: setattr(decimal.getcontext(), "prec", digits),
    ),
    "sys.getrecursionlimit()": (sys.getrecursionlimit, sys.setrecursionlimit),
    "gc.isenabled()": (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    "os.getcwd()": (os.getcwd, os.chdir),
}


def settings_now() -> dict[str, Any]:
    """Return each setting as numbers and texts."""
    return {name: get() for name, (get, _) in _SETTINGS.items()}


def changed_since(before: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from those of ``before``."""
    return {name: value for name, value in settings_now().items() if value != before[name]}


def apply_settings(settings: dict[str, Any]) -> None:
    """Make settings as ``settings_now`` returned them."""
    for name, value in settings.items():
        _SETTINGS[name][1](value)
