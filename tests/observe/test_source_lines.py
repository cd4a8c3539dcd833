"""Who calls an operation is told by files' names: each of them exists."""

from __future__ import annotations

from pathlib import Path

import mezzo
from mezzo.observe import source_lines

ENGINE = Path(mezzo.__file__).parent / "engine"


def test_the_files_that_callers_are_told_by_exist() -> None:
    named = [
        *source_lines._PASSED_THROUGH,
        *source_lines._OF_POLICIES,
        *(ENGINE / name for name in source_lines._POLICY),
    ]
    ours = [
        place for place in named if not str(place).startswith(source_lines._KERAS)
    ]  # Keras has an environment of its own
    assert [place for place in ours if not Path(place).exists()] == []
