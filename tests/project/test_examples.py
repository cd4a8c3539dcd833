"""Every example runs and trains."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

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


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "stdlib_gpt.py" else n for n in RUNS])
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


@pytest.mark.parametrize("name", ["keras_mobilenetv3.py", "paddle_mobilenetv3.py"])
def test_pictures_are_read_whatever_the_case_of_their_endings(name: str, tmp_path: Path) -> None:
    files = [("dog", "n01.JPEG"), ("cat", "n02.jpg"), ("cat", "n03.jpeg")]  # ImageNet's own files end in .JPEG
    for folder, file in files:
        (tmp_path / folder).mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / folder / file)
    tree = ast.parse((EXAMPLES / name).read_text(encoding="utf-8"))  # its framework is not installed here
    tree.body = [node for node in tree.body if getattr(node, "name", "") == "read_set"]
    names = {"np": np, "Image": Image, "Path": Path}
    exec(compile(tree, name, "exec"), names)

    images, labels = names["read_set"](tmp_path, 4)
    assert len(images) == 3
    assert labels.tolist() == [0, 0, 1]
