"""The caller of an operation is recognised by file names: each of these files exists."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mezzo
from mezzo.observe import source_lines


def test_the_files_that_callers_are_told_by_exist() -> None:
    named = [Path(place) for place in (*source_lines._PASSED_THROUGH, *source_lines._POLICY)]
    ours = [place for place in named if source_lines._KERAS not in f"{place}/"]  # Keras has an environment of its own
    assert len(ours) > 15
    assert [place for place in ours if not list(place.parent.glob(f"{place.name}*"))] == []


@pytest.mark.parametrize("folder", [Path(torch.__file__).parent, Path(mezzo.__file__).parent], ids=["torch", "mezzo"])
def test_a_folder_whose_name_begins_alike_is_no_part_of_it(folder: Path) -> None:
    """Torchvision is installed next to torch."""
    file = f"{folder}vision/ops.py"
    frame: Any = SimpleNamespace(f_code=SimpleNamespace(co_filename=file, co_name="nms"), f_lineno=3, f_back=None)
    assert source_lines.script_line(frame) == (f"{file}:3", ())
    assert source_lines.caller(frame) == "script"
