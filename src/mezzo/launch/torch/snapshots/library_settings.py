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

_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.get_default_dtype()": (lambda: str(torch.get_default_dtype()).removeprefix("torch."), lambda v: torch.set_default_dtype(getattr(torch, v))),
    "torch.get_default_device()": (lambda: str(torch.get_default_device()), lambda v: torch.set_default_device(v)),
    "torch.are_deterministic_algorithms_enabled()": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "torch.is_anomaly_enabled()": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads),
    "torch.backends.cudnn.benchmark": (lambda: torch.backends.cudnn.benchmark, lambda v: setattr(torch.backends.cudnn, "benchmark", v)),
    "torch.backends.cudnn.deterministic": (lambda: torch.backends.cudnn.deterministic, lambda v: setattr(torch.backends.cudnn, "deterministic", v)),
    "numpy.geterr()": (np.geterr, lambda v: np.seterr(**v)),
    "decimal.getcontext().prec": (lambda: decimal.getcontext().prec, lambda v: setattr(decimal.getcontext(), "prec", v)),
    "sys.getrecursionlimit()": (sys.getrecursionlimit, sys.setrecursionlimit),
    "gc.isenabled()": (gc.isenabled, lambda v: gc.enable() if v else gc.disable()),
    "os.getcwd()": (os.getcwd, os.chdir),
}  # fmt: skip


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
