"""Keras' backend, read from a script's text, its environment and Keras' own file."""

from __future__ import annotations

from pathlib import Path

import pytest

from mezzo.frameworks.keras import backend_of

SET = "import os\nos.environ['KERAS_BACKEND'] = {}\n"
CASES = [
    # the script's first lines, KERAS_BACKEND, keras.json, the backend
    ("", None, None, "tensorflow"),
    ("", None, '{"backend": "jax"}', "jax"),
    ("", None, "no JSON", "tensorflow"),
    ("", None, "[]", "tensorflow"),
    ("", "torch", '{"backend": "jax"}', "torch"),
    (SET.format("'torch'"), "jax", None, "torch"),
    (SET.format("name"), "jax", None, None),
    ("import os\nos.environ.setdefault('KERAS_BACKEND', 'torch')\n", None, None, "torch"),
    ("import os\nos.environ.setdefault('KERAS_BACKEND', 'torch')\n", "jax", None, "jax"),
    ("import os\nif os.getenv('X'):\n    os.environ['KERAS_BACKEND'] = 'torch'\n", None, None, None),
    ("import os\nos.environ.update({'KERAS_BACKEND': 'torch'})\n", None, None, None),
    ("import os\nprint(os.environ['KERAS_BACKEND'], os.environ.get('KERAS_BACKEND'))\n", "jax", None, "jax"),
    ("import keras\nkeras.config.set_backend('torch')\n", "jax", None, None),
    (SET.format("'torch'") + SET.format("'jax'"), None, None, None),
    ("import other\n", None, None, "jax"),
]


@pytest.mark.parametrize(("lines", "variable", "file", "backend"), CASES)
def test_the_backend(lines: str, variable: str | None, file: str | None, backend: str | None, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(SET.format("'jax'"))
    script = tmp_path / "train.py"
    script.write_text(lines + "import keras\n")
    environment = {"HOME": str(tmp_path)} | ({} if variable is None else {"KERAS_BACKEND": variable})
    if file is not None:
        (tmp_path / ".keras").mkdir()
        (tmp_path / ".keras" / "keras.json").write_text(file)
    assert backend_of(str(script), kind="script", environment=environment) == backend
