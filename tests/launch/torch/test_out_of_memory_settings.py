"""Settings that save memory name the bytes that they save in a unit with three digits."""

from __future__ import annotations

import pytest

from mezzo.launch.torch.out_of_memory import OPTIMIZER, memory_settings

MIB = 2**20


@pytest.mark.parametrize(
    ("optimizer_bytes", "saved"), [(1000 * MIB, "750 MiB"), (1364 * MIB, "0.999 GiB"), (4096 * MIB, "3 GiB")]
)
def test_saved_bytes_have_three_digits(optimizer_bytes: int, saved: str) -> None:
    (setting,) = memory_settings({OPTIMIZER: optimizer_bytes}, lowers=True, step_activations=None)
    assert setting.reason.startswith(f"saves {saved}: ")
