"""Configurations of transformers' models: from names, types, files and the hub's cache, and the refusals of others."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from mezzo.errors import UsageError
from mezzo.measure.predict.configurations import configuration, configurations
from mezzo.measure.predict.named import named_model, tape_of

transformers = pytest.importorskip("transformers", reason="transformers builds the models")
SMALL = {"model_type": "t5", "d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 99}
MILLIONS = {
    "bert-base-uncased": 109.5, "gpt2": 124.4, "distilgpt2": 81.9, "t5-small": 60.5, "t5-base": 222.9, "t5-large": 737.7, "t5-3b": 2851.6,
    "google/flan-t5-small": 77.0, "google/flan-t5-base": 247.6, "google/flan-t5-large": 783.2, "google/flan-t5-xl": 2849.8,
    "google/mt5-small": 300.2, "google/mt5-base": 582.4, "facebook/bart-base": 139.4, "facebook/bart-large": 406.3,
    "facebook/mbart-large-cc25": 610.9, "facebook/mbart-large-50": 610.9, "google/pegasus-large": 570.8, "opus-mt-en-de": 74.4,
    "facebook/opt-350m": 331.2, "cerebras/Cerebras-GPT-111M": 111.0, "mistralai/Mistral-7B-v0.1": 7241.7,
    "meta-llama/Llama-3.1-8B": 8030.3, "TinyLlama/TinyLlama-1.1B": 1100.0, "Qwen/Qwen2.5-0.5B": 494.0,
}  # fmt: skip


def written(folder: Path, **changed: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(SMALL | changed), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", MILLIONS)
def test_parameters_of_known_checkpoints(name: str) -> None:
    with torch.device("meta"):
        model = named_model(f"transformers:{name}").build()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(MILLIONS[name], rel=0.005)


def test_every_configuration_is_one_of_transformers() -> None:
    for fact in configurations().values():
        made = transformers.AutoConfig.for_model(fact["type"], **fact["config"])
        facts = {name: value for name, value in fact["config"].items() if name != "tie_word_embeddings"}
        assert {name: getattr(made, name) for name in facts} == facts


def test_a_file_or_its_folder_is_a_model(tmp_path: Path) -> None:
    """Weights in the checkpoint's format, or a class that does not train, change nothing."""
    path = written(tmp_path, dtype="bfloat16", architectures=["T5EncoderModel"])
    for name in (path, str(tmp_path)):
        model = named_model(f"transformers:{name}", sequence=16)
        tape = tape_of(model, "fp32", 2, optimizer="adamw", channels_last=False)
        assert (model.unit, model.notes[0].value) == ("sequences", path)
        assert {op.format for op in tape.operations if op.flops} == {"fp32"}


@pytest.mark.parametrize(
    ("changed", "task"),
    [
        ({}, "sequence"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "masked"),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, "causal"),
        ({"model_type": "bart", "architectures": ["BartForCausalLM"]}, "causal"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "image"),
        ({"model_type": "llama"}, "causal"),
    ],
)
def test_the_task_is_that_of_the_class_that_wrote_the_file(changed: dict[str, Any], task: str, tmp_path: Path) -> None:
    assert configuration(written(tmp_path, **changed), transformers).task == task


def test_a_type_has_its_defaults_and_the_record_says_so() -> None:
    model = named_model("transformers:pegasus")
    (note,) = model.notes
    assert (note.value, model.unit) == ("the type's defaults in transformers", "sequences")


def test_a_cached_checkpoint_is_read_and_nothing_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = import_module("huggingface_hub")  # transformers needs it
    snapshot = tmp_path / "models--somebody--small" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--somebody--small" / "refs").mkdir()
    (tmp_path / "models--somebody--small" / "refs" / "main").write_text("abc")
    written(snapshot)
    monkeypatch.setattr(hub.file_download, "HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert configuration("somebody/small", transformers).config.d_model == SMALL["d_model"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt3", "no configuration for 'gpt3'.*nothing is downloaded\n.*did you mean gpt2.*path/to/config.json"),
        ("transfo-xl-wt103", "no configuration for 'transfo-xl-wt103'"),
        ("./nowhere", "there is no file '.*nowhere/config.json'"),
        ("whisper", "transformers builds whisper for none of the trainings.*\n.*mezzo predict train.py"),
    ],
)
def test_other_names_are_refused_with_what_to_do(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        named_model(f"transformers:{name}")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "transfo-xl"}, "is of the type 'transfo-xl', which transformers .* does not have"),
        ({"quantization_config": {"bits": 4}}, "are quantised.*\n.*without quantization_config"),
    ],
)
def test_a_file_that_cannot_be_trained_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        named_model(f"transformers:{written(tmp_path, **changed)}")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        named_model(f"transformers:{tmp_path / 'broken.json'}")
