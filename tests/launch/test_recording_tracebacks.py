"""What a user sees of a traceback: the script's frames and its libraries', without Mezzo's."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import pytest

import mezzo
from mezzo.launch.recording import print_error

MEZZO = Path(mezzo.__file__).parent
PLACES = [
    # file, whether its frame is shown
    (MEZZO / "launch" / "torch" / "forward.py", False),
    (MEZZO.with_name("mezzo_models") / "layers.py", True),  # another package whose name begins alike
    (Path("/home/me/train.py"), True),
]


@pytest.mark.parametrize(("file", "shown"), PLACES)
def test_frames_of_mezzo_are_not_shown(file: Path, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: printed.extend(traceback.format_exception(*error)))
    try:
        exec(compile("1 / 0", str(file), "exec"), {})
    except ZeroDivisionError as error:
        print_error(error)
    assert (str(file) in "".join(printed)) is shown
