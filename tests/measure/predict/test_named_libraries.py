"""Libraries of models, whose own operators need not run here."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import pytest
import torch

from mezzo.errors import UsageError
from mezzo.measure.predict.named import import_library, named_model, quiet


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


def test_only_errors_of_libraries_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    with quiet():
        logging.getLogger("library").warning("an optional kernel is missing")
        logging.getLogger("library").error("broken")
    logging.getLogger("library").warning("afterwards")
    assert caplog.messages == ["broken", "afterwards"]
