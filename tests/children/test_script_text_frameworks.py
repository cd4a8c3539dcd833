"""Which framework a script is found to train in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mezzo.children.script_text import needs, own_sources, spec_of
from mezzo.errors import ScriptError
from mezzo.frameworks import framework_of
from mezzo.launch.keras import observed_keras
from mezzo.launch.keras.state import KerasRun
from mezzo.launch.request import Request
from mezzo.launch.runner import run_child
from mezzo.observe.settings import AnySettings, AuditSettings, DiagnoseSettings, FallbackSettings, RangesSettings
from mezzo.records import read_record


@pytest.mark.parametrize(
    ("source", "framework"),
    [
        ("import torch", "torch"),
        ("print('no framework')", "torch"),
        ("import keras", "keras"),
        ("from keras import layers", "keras"),
        ("import torch\nimport keras", "keras"),
        ("import keras.layers as layers", "keras"),
        ("from tensorflow import keras", "keras"),
        ("from tensorflow.keras import layers", "keras"),
        ("import tensorflow as tf\nmodel = tf.keras.Sequential()", "keras"),
        ("import tensorflow\nmodel = tensorflow.keras.Sequential()", "keras"),
        ("import tensorflow as tf\nimport torch\ndata = tf.data.Dataset.range(3)", "torch"),
        ("import paddle", "paddle"),
        ("import paddle.nn as nn\nimport torch", "paddle"),
        ("def main():\n    import paddle", "paddle"),
        ("from model import Net", "keras"),
        ("import package.net", "paddle"),
        ("from package import net", "paddle"),
        ("import looped", "torch"),
        ("this is no python", "torch"),
        ("# keras, paddle\nname = 'keras'", "torch"),
        ("import kerasish, paddleocr", "torch"),
    ],
)
def test_framework_is_what_the_scripts_own_files_import(tmp_path: Path, source: str, framework: str) -> None:
    (tmp_path / "model.py").write_text("import keras\n")
    (tmp_path / "looped.py").write_text("import looped, train\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "net.py").write_text("from paddle import nn\n")
    script = tmp_path / "train.py"
    script.write_text(source)
    assert framework_of(str(script), kind="script") == framework


def test_a_scripts_own_files_are_in_its_folder(tmp_path: Path) -> None:
    """``project.py`` beside the folder ``project`` is another program, though ``import torch`` might name the folder's parent."""
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    (tmp_path / "project.py").write_text("import keras")
    (folder / "train.py").write_text("import torch\nfrom models import Net\nfrom data.digits import load")
    (folder / "models.py").write_text("NAME = 'models'")
    (folder / "data" / "digits.py").write_text("NAME = 'digits'")
    read = [*own_sources(str(folder / "train.py"), kind="script")]
    last = sorted(text.splitlines()[-1] for text in read)
    assert last == ["NAME = 'digits'", "NAME = 'models'", "from data.digits import load"]
    assert framework_of(str(folder / "train.py"), kind="script") == "torch"


def test_framework_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mezzo_test_trainer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("import paddle\n")
    (package / "train.py").write_text("import keras\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert framework_of("mezzo_test_trainer", kind="module") == "paddle"
    assert framework_of("mezzo_test_trainer.train", kind="module") == "keras"


@pytest.mark.parametrize(
    ("source", "needed"),
    [
        ("import torch", "no"),
        ("import apex", "surely"),
        ("from apex import amp", "surely"),
        ("from apex.parallel import DistributedDataParallel as DDP", "surely"),
        ("import own", "surely"),
        ("def main():\n    from apex import amp", "perhaps"),
        ("if '--fp16' in sys.argv:\n    from apex import amp", "perhaps"),
        ("class Trainer:\n    def train(self):\n        from apex import amp", "perhaps"),
        ("import apexpy", "no"),
        ("from .apex import amp", "no"),
        ("try:\n    from apex import amp\nexcept ImportError:\n    amp = None", "no"),
        ("try:\n    import apex\nexcept (ValueError, ModuleNotFoundError):\n    pass", "no"),
        ("try:\n    import apex\nexcept:\n    pass", "no"),
        ("try:\n    import apex\nexcept Exception as error:\n    print(error)", "no"),
        ("try:\n    from torch.cuda import amp\nexcept ImportError:\n    from apex import amp", "no"),
        ("try:\n    import apex\nexcept ValueError:\n    pass", "surely"),
        ("try:\n    import apex\nexcept ImportError:\n    raise ImportError('install apex') from None", "surely"),
        (
            "def f():\n    try:\n        import apex\n    except ImportError:\n        raise ImportError('no')",
            "perhaps",
        ),
        ("try:\n    import apex\nfinally:\n    pass", "surely"),
        ("try:\n    import torch\nexcept ImportError:\n    pass\nelse:\n    import apex", "surely"),
    ],
)
def test_whether_a_script_needs_a_package(tmp_path: Path, source: str, needed: str) -> None:
    (tmp_path / "own.py").write_text("from apex import amp\n")
    (tmp_path / "train.py").write_text(source)
    assert needs("apex", str(tmp_path / "train.py"), kind="script") == needed


def test_a_module_is_found_without_running_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("outer", "outer/inner"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('it ran')\n")
    (tmp_path / "outer" / "inner" / "leaf.py").touch()
    (tmp_path / "spaced" / "below").mkdir(parents=True)
    (tmp_path / "spaced" / "below" / "leaf.py").touch()
    monkeypatch.chdir(tmp_path)
    found = {name: spec_of(name) for name in ("outer", "outer.inner.leaf", "spaced.below.leaf", "json.tool")}
    assert all(spec is not None for spec in found.values())
    leaf = found["outer.inner.leaf"]
    assert leaf is not None
    assert leaf.origin == str(tmp_path / "outer" / "inner" / "leaf.py")
    for name in ("outer.none", "none.outer", "outer.inner.leaf.more", "outer..leaf", ""):
        assert spec_of(name) is None
    assert not {"outer", "outer.inner", "spaced"} & set(sys.modules)


def test_finding_the_framework_imports_none() -> None:
    code = "import sys, mezzo.frameworks; print({'torch', 'keras', 'paddle', 'tensorflow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("settings", [AuditSettings(), RangesSettings(), DiagnoseSettings(), FallbackSettings()])
def test_keras_is_not_observed_on_jax(settings: AnySettings) -> None:
    with pytest.raises(ScriptError) as refused:
        observed_keras(KerasRun(None), settings, "jax")
    expected = f"mezzo {settings.kind} was given for a Keras on jax script, and compiled steps hide their "
    assert refused.value.message.startswith(expected)
    hint = f"KERAS_BACKEND=torch mezzo {settings.kind} ... runs the same script on PyTorch"
    assert refused.value.hint.startswith(hint)


def request_of(target: str, framework: Any, folder: Path) -> Request:
    more: dict[str, Any] = {"policy": "fp16", "record_path": str(folder / "record.json"), "command": ("mezzo",)}
    return Request(target=target, kind="script", framework=framework, **more)


def test_a_script_that_hangs_is_stopped_and_its_record_says_so(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text("import time\ntime.sleep(3600)\n")
    record = run_child(request_of(str(script), "torch", tmp_path), output=tmp_path / "output.log", limit_s=0.5)
    assert (record.error, record.stopped_at_limit) == ("it was stopped at its limit of 0.5 s", True)
    assert (record.exit_code, record.policy, len(record.steps)) == (137, "fp16", 0)


def test_a_framework_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    record = run_child(request_of("train.py", "paddle", tmp_path))
    assert record.error == f"the script imports paddle, which is not installed for {sys.executable}"
    assert (record.framework, record.exit_code) == ("paddle", 1)
    assert read_record(tmp_path / "record.json") == record
