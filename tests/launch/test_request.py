"""A request as one word of a command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers_launch import request_for
from mezzo.launch.request import Request


@pytest.mark.parametrize(
    ("name", "in_a_file"),
    [("a", False), ("数据", True), ("a" * 8, True)],  # the second has 75,000 characters, in 135,000 bytes
)
def test_a_request_beyond_the_systems_limit_is_in_a_file(name: str, in_a_file: bool, tmp_path: Path) -> None:
    request = request_for(tmp_path, "train.py", policy=None, arguments=(name,) * 15_000)
    word = request.packed()
    assert word.startswith("@") is in_a_file
    assert len(word.encode()) < 131_072
    assert Request.unpacked(word) == request


def test_a_name_that_the_locale_does_not_understand_stays_the_same_path(tmp_path: Path) -> None:
    name = "训.py".encode().decode("ascii", "surrogateescape")  # as in the C locale
    request = request_for(tmp_path, name, policy=None)
    assert request.packed().isascii()
    assert Request.unpacked(request.packed()) == request
