"""Operations and bytes of a step, against hand counts."""

from __future__ import annotations

import torch

from mezzo.measure.bottleneck import OperationTimes, cpu_rates


def test_operations_and_bytes_by_hand() -> None:
    a, b = torch.ones(4, 8), torch.ones(8, 2)
    with OperationTimes() as times:
        a @ b
        a.t()
        a + a
    assert [(o.flops, o.bytes) for o in times.operations] == [(2 * 4 * 8 * 2, 4 * (32 + 16 + 8)), (0, 0), (0, 4 * 64)]
    assert all(o.cpu_s >= 0 for o in times.operations)


def test_a_machine_multiplies_faster_than_it_moves() -> None:
    rates = cpu_rates(torch.get_num_threads())
    assert rates.flops_per_s > rates.bytes_per_s > 1e7
