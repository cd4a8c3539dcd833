"""Models by name: what a name builds, and the error for an unknown name."""

from __future__ import annotations

import pytest

from mezzo.errors import UsageError
from mezzo.measure.predict.named import named_model

pytest.importorskip("transformers", reason="transformers builds the models")


def test_the_owner_of_a_model_may_be_left_out() -> None:
    assert named_model("transformers:mistral-7b-v0.1", sequence=512).size == "512 tokens"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("resnet50", {}, "'resnet50' does not name a library and a model"),
        ("hub:gpt2", {}, "'hub:gpt2' does not name a library and a model"),
        ("transformers:bert-base-uncased", {"sequence": 513}, "--sequence 513 is longer than the 512 positions"),
        ("timm:resnet50", {"sequence": 128}, "--sequence 128 does not belong to timm:resnet50"),
    ],
)
def test_what_is_refused(text: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        named_model(text, **options)
