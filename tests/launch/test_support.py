"""Which commands take scripts of which framework, and what the refusals say."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers_values import existing
from mezzo import cli, frameworks
from mezzo.frameworks.keras import stage_on
from mezzo.launch import support
from mezzo.launch.support import LIMITED, refusal, stage_of
from mezzo.records.run import INSPECTING, inspecting

IN: dict[str, str] = {
    "Keras on tensorflow": "import os\nos.environ['KERAS_BACKEND'] = 'tensorflow'\nimport keras\n",
    "Keras on jax": "import os\nos.environ['KERAS_BACKEND'] = 'jax'\nimport keras\n",
    "Paddle": "import paddle\n",
}
OPTIONS = {"--guard": "stop", "--snapshot": "5m", "--resume": "earlier", "--checkpoint": "full"}
OPTIONS |= {"--expect": "precision.toml", "--write-expect": "precision.toml"}
OF_COMMAND = {"--expect": "audit", "--write-expect": "audit", "--per-gemm": "fallback"}
"""The commands of options that ``mezzo run`` does not have."""
OBSERVE = ("mezzo audit", "mezzo diagnose", "mezzo ranges", "mezzo fallback")
TAKEN: list[tuple[str, str]] = [
    ("mezzo audit", "Keras on tensorflow"),
    ("mezzo diagnose", "Keras on tensorflow"),
    *((f, "Paddle") for f in OBSERVE),
]
CASES = [(feature, stage) for feature in LIMITED for stage in IN if (feature, stage) not in TAKEN]


@pytest.mark.parametrize(("feature", "stage"), CASES)
def test_a_refusal_is_one_error_with_one_hint_before_anything_runs(
    feature: str, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(IN[stage] + "open('ran', 'w')\n", encoding="utf-8")
    Path("earlier/snapshots").mkdir(parents=True)
    given = [OPTIONS[feature]] if feature in OPTIONS else []
    command = feature.split()[1:] or [OF_COMMAND.get(feature, "run"), feature, *given]
    assert cli.main([*command, "train.py"]) == 7
    shown = capsys.readouterr().err
    assert shown.count(f"{feature} was given for a {stage} script, and ") == 1
    assert shown.count("hint: ") == 1
    assert not Path("ran").exists()


@pytest.mark.parametrize("feature", [*LIMITED, "mezzo run", "mezzo compare", "mezzo check", "mezzo report"])
def test_pytorch_scripts_are_taken_by_all(feature: str) -> None:
    assert refusal(feature, "PyTorch") is None


@pytest.mark.parametrize(("feature", "stage"), TAKEN)
def test_what_is_taken_is_not_refused(feature: str, stage: str) -> None:
    assert refusal(feature, stage) is None


@pytest.mark.parametrize(
    ("stage", "framework"),
    [
        ("PyTorch", "torch 2.13.0"),
        ("Keras on torch", "keras 3.15.1 on torch 2.13.0"),
        ("Keras on tensorflow", "keras 3.15.1 on tensorflow 2.21.0"),
        ("Keras on jax", "keras 3.15.1 on jax 0.8.0"),
        ("Paddle", "paddle 3.3.0"),
    ],
)
def test_records_and_scripts_agree_on_what_is_inspected(stage: str, framework: str) -> None:
    taken = [name for name in INSPECTING if refusal(f"mezzo {name}", stage) is None]
    assert list(inspecting(framework)) == taken


@pytest.mark.parametrize("feature", OBSERVE)
def test_a_backend_chosen_in_the_run_is_refused_in_the_run(feature: str) -> None:
    assert refusal(feature, "Keras") is None
    refused = existing(refusal(feature, stage_on("jax"), target="train.py"))
    assert refused.hint.startswith(f"KERAS_BACKEND=torch {feature} train.py")


def test_an_unknown_backend_is_left_to_keras(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nos.environ['KERAS_BACKEND'] = 'openvino'\nimport keras\n", encoding="utf-8")
    assert stage_of(str(script), kind="script") == "Keras"


def test_a_new_framework_is_its_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = frameworks.Framework(
        title="New",
        stages={"New": frozenset(("mezzo audit",))},
        stage_of=lambda target, kind: "New",
        check=str,
        training_call="took a step",
        not_seen="others are not seen",
        in_fp32="x",
        lines={},
    )
    monkeypatch.setitem(sys.modules, "mezzo.frameworks.new", SimpleNamespace(FRAMEWORK=new))
    monkeypatch.setattr(frameworks, "IMPORTED_AS", {**frameworks.IMPORTED_AS, "new": ("new.core",)})
    monkeypatch.setattr(support, "IMPORTED_AS", frameworks.IMPORTED_AS)
    script = tmp_path / "train.py"
    script.write_text("import new as n\nn.core.fit()\n", encoding="utf-8")
    assert frameworks.framework_of(str(script), kind="script") == "new"
    assert stage_of(str(script), kind="script") == "New"
    assert refusal("mezzo audit", "New") is None
    refused = existing(refusal("mezzo ranges", "New"))
    assert refused.message.endswith("allowed: PyTorch, Keras on torch, Paddle scripts")
