"""What trains in a script, from its text alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from mezzo.commands.diagnose.plan import caller_of
from mezzo.commands.diagnose.words import TrainingStyle
from paths import SCRIPTS


@pytest.mark.parametrize(
    ("script", "caller"),
    [
        ("patch_plain", "loop"),
        ("patch_own_amp", "own_amp"),
        ("patch_lightning", "lightning"),
        ("patch_fabric", "fabric"),
        ("patch_accelerate", "accelerate"),
        ("patch_transformers", "transformers"),
    ],
)
def test_a_script_shows_what_trains_in_it(script: str, caller: TrainingStyle) -> None:
    assert caller_of(str(SCRIPTS / f"{script}.py"), kind="script") == caller


def test_a_session_and_a_loop_beside_the_script_are_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import loop\nloop.train()\n")
    (tmp_path / "loop.py").write_text("import mezzo\ndef train():\n    s = mezzo.Session(m, o, policy='fp16')\n")
    assert caller_of(str(tmp_path / "train.py"), kind="script") == "session"
    (tmp_path / "loop.py").write_text("this is not python")
    assert caller_of(str(tmp_path / "train.py"), kind="script") == "loop"
    assert caller_of(str(tmp_path / "missing.py"), kind="script") == "loop"
