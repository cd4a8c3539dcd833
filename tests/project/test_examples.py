"""Every example runs and trains."""

from __future__ import annotations

import re
import runpy
import sys

import pytest

from paths import ROOT

EXAMPLES = ROOT / "examples"
RUNS = {
    # script: arguments, what the last figure of each kind has to reach
    "digits.py": (["--epochs", "3"], {"acc": (0.9, 1.0)}),
    "session_digits.py": (["--epochs", "3"], {"acc": (0.9, 1.0), "skipped": (0, 3)}),
    "session_gan.py": ([], {"generator": (0.2, 2.0), "skipped": (0, 3)}),
    "stdlib_gpt.py": (["--steps", "20"], {"loss": (1.0, 4.5)}),
}
PLAIN = sorted(path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("session_"))


@pytest.mark.parametrize("name", RUNS)
def test_example(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, figures = RUNS[name]
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    for word, (low, high) in figures.items():
        found = re.findall(rf"\b{word} +([0-9.]+)", printed)
        assert found, f"{name} prints no {word}: {printed!r}"
        assert low <= float(found[-1]) <= high


@pytest.mark.parametrize("name", PLAIN)
def test_plain_scripts_never_mention_mezzo(name: str) -> None:
    assert "mezzo" not in (EXAMPLES / name).read_text(encoding="utf-8").lower()
