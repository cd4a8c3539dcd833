"""The port of a job's store: one that is free, and that no outgoing connection is given before the store is opened."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from mezzo.launch.ranks import leading
from mezzo.launch.ranks.leading import free_port


def test_it_is_below_those_of_outgoing_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tmp_path / "range"
    given.write_text("20000\t60999\n")
    monkeypatch.setattr(leading, "_RANGE", given)
    assert all(10_240 <= free_port() < 20_000 for _ in range(50))


@pytest.mark.parametrize("text", [None, "", "none"])
def test_where_the_system_does_not_say_its_range_the_usual_one_counts(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "range").write_text(text)
    monkeypatch.setattr(leading, "_RANGE", tmp_path / "range")
    assert 10_240 <= free_port() < 32_768


def test_one_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", free_port()))
        number = taken.getsockname()[1]
        other = free_port()
        drawn = iter([number, number, other])
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda self, low, high: next(drawn))
        assert free_port() == other


def test_where_connections_may_have_any_port_the_system_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text("1024 65535")
    monkeypatch.setattr(leading, "_RANGE", tmp_path / "range")
    assert free_port() >= 1024
