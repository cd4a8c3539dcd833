"""Settings that a loop has changed are found, and made again."""

from __future__ import annotations

import decimal
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mezzo.launch.torch.snapshots.reachable import apply_settings, changed_since, settings_now

CHANGES: dict[str, Callable[[], Any]] = {
    "torch.get_default_dtype()": lambda: torch.set_default_dtype(torch.float64),
    "torch.get_default_device()": lambda: torch.set_default_device("meta"),
    "torch.are_deterministic_algorithms_enabled()": lambda: torch.use_deterministic_algorithms(True),
    "torch.is_anomaly_enabled()": lambda: torch.autograd.set_detect_anomaly(True),
    "torch.get_num_threads()": lambda: torch.set_num_threads(3),
    "torch.backends.cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "torch.backends.cudnn.deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "numpy.geterr()": lambda: np.seterr(over="ignore"),
    "decimal.getcontext().prec": lambda: setattr(decimal.getcontext(), "prec", 7),
    "sys.getrecursionlimit()": lambda: sys.setrecursionlimit(5000),
    "gc.isenabled()": gc.disable,
    "os.getcwd()": lambda: os.chdir("/"),
}


def test_every_setting_is_tried() -> None:
    assert list(settings_now()) == list(CHANGES)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_setting_that_changed_is_made_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = settings_now()
    try:
        CHANGES[name]()
        changed = changed_since(before)
        assert list(changed) == [name]
        apply_settings({name: before[name]})
        assert changed_since(before) == {}
        apply_settings(changed)
        assert changed_since(before) == changed
    finally:
        apply_settings(before)
        torch.set_default_device(None)
