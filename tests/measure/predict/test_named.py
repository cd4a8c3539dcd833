"""Models by name: what a name builds, and the error for an unknown name."""

from __future__ import annotations

import pytest

from mezzo.errors import UsageError
from mezzo.measure.predict.named import configurations, named_model

transformers = pytest.importorskip("transformers", reason="transformers builds the models")


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("bert-base-uncased", 109.5),
        ("gpt2", 124.4),
        ("distilgpt2", 81.9),
        ("t5-small", 60.5),
        ("mistralai/Mistral-7B-v0.1", 7241.7),
        ("meta-llama/Llama-3.1-8B", 8030.3),
        ("TinyLlama/TinyLlama-1.1B", 1100.0),
        ("Qwen/Qwen2.5-0.5B", 494.0),
    ],
)
def test_parameters_of_known_models(name: str, millions: float) -> None:
    import torch

    with torch.device("meta"):
        model = named_model(f"transformers:{name}").build()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.005)


def test_every_configuration_is_one_of_transformers() -> None:
    for fact in configurations().values():
        made = transformers.AutoConfig.for_model(fact["type"], **fact["config"])
        assert {name: getattr(made, name) for name in fact["config"]} == fact["config"]


def test_the_owner_of_a_model_may_be_left_out() -> None:
    assert named_model("transformers:mistral-7b-v0.1", sequence=512).size == "512 tokens"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("resnet50", {}, "'resnet50' does not name a library and a model"),
        ("hub:gpt2", {}, "'hub:gpt2' does not name a library and a model"),
        ("transformers:gpt3", {}, "no configuration for 'gpt3'\n.*did you mean gpt2"),
        ("transformers:bert-base-uncased", {"sequence": 513}, "--sequence 513 is longer than the 512 positions"),
        ("timm:resnet50", {"sequence": 128}, "--sequence 128 does not belong to timm:resnet50"),
    ],
)
def test_what_is_refused(text: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        named_model(text, **options)
