"""Libraries of models, whose own operators need not run here."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import pytest
import torch

from mezzo.errors import UsageError
from mezzo.measure.predict.named import import_library, named_model, own_name, quiet


def test_a_library_that_is_not_installed_is_named() -> None:
    with pytest.raises(UsageError, match="needs the package no_such_library"):
        import_library("no_such_library")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("timm:resnet50", 25_557_032), ("torchvision:resnet50", 25_557_032), ("torchvision:vgg16", 138_357_544)],
)
def test_models_of_images(name: str, parameters: int) -> None:
    library = name.partition(":")[0]
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: it does not belong to the development environment")
    with torch.device("meta"):
        model = named_model(name).build()
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("written", "own"),
    [
        ("timm:se-resnext101-32x4d", "seresnext101_32x4d"),
        ("timm:efficientnet-b4", "efficientnet_b4"),
        ("timm:ResNet50", "resnet50"),
        ("timm:resnet50.a1_in1k", "resnet50"),
        ("torchvision:MobileNetV3Large", "mobilenet_v3_large"),
    ],
)
def test_a_name_may_be_written_as_other_tables_do(written: str, own: str) -> None:
    library, _, name = written.partition(":")
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: it does not belong to the development environment")
    (note,) = named_model(written).notes
    assert (note.value, note.reason) == (own, f"{library}'s name for {name}")


@pytest.mark.parametrize(
    ("written", "own"),
    [
        ("se-resnext101-32x4d", "seresnext101_32x4d"),
        ("resnet-50.a1_in1k", None),
        ("resnet50.a1_in1k", "resnet50"),
        ("resnet51", None),
    ],
)
def test_a_name_in_other_letters_is_found(written: str, own: str | None) -> None:
    assert own_name(written, ["resnet50", "seresnext101_32x4d"]) == own


def test_only_errors_of_libraries_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    with quiet():
        logging.getLogger("library").warning("an optional kernel is missing")
        logging.getLogger("library").error("broken")
    logging.getLogger("library").warning("afterwards")
    assert caplog.messages == ["broken", "afterwards"]
