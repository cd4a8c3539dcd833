"""What the thread did, from samples with known times."""

from __future__ import annotations

import sys
import time

import pytest

from helpers_values import existing
from mezzo.measure.host import HostSample, HostSamples, HostShares, line_of


def test_shares_from_samples() -> None:
    host = HostSamples()
    host.samples = [HostSample(t, 0.3 * t, 0.2 * t) for t in (0.0, 1.0, 2.0, 3.0)]
    assert host.shares(0.5, 3.5) == pytest.approx(HostShares(slept=0.5, preempted=0.2))
    assert host.shares(1.5, 3.5) is None  # two samples


def test_a_sleeping_thread_is_seen_asleep_at_its_line() -> None:
    host = HostSamples()
    for _ in range(4):
        host.take()
        time.sleep(0.05)
    shares = existing(host.shares(0.0, time.perf_counter()))
    assert shares.slept > 0.5
    assert [line.partition(":")[0] for line in host.sleeping] == ["test_host.py"]


def test_lines_of_libraries_are_passed_over() -> None:
    assert line_of(sys._getframe()).startswith("test_host.py:")
    frames: list[str] = []
    sorted([1], key=lambda _: frames.append(line_of(sys._getframe())))
    assert frames[0].startswith("test_host.py:")
    assert line_of(None) == ""
