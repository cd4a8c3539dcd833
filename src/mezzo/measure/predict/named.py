"""Models by name, built from their architecture alone: ``timm:resnet50``, ``torchvision:vgg16``, ``transformers:gpt2``.

Nothing is downloaded. ``configurations`` says what a name of transformers means; names of images may be written as other tables write
them (``se-resnext101-32x4d``).
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo.errors import UsageError, nearest
from mezzo.measure.predict.configurations import configuration
from mezzo.measure.predict.names import MODEL_LIBRARIES
from mezzo.measure.predict.tape import TrainingTape
from mezzo.measure.predict.training import record_training
from mezzo.policy import Policy
from mezzo.records import Note

_IMAGE, _SEQUENCE = 224, 128


@dataclass(frozen=True)
class NamedModel:
    """A model, its inputs and its loss."""

    name: str
    unit: str
    """What throughput counts: ``images`` or ``sequences``."""
    size: str
    """The size of one input, such as ``224x224`` or ``128 tokens``."""
    build: Callable[[], nn.Module]
    batch_of: Callable[[int], dict[str, Tensor]]
    loss_of: Callable[[nn.Module, Mapping[str, Tensor]], tuple[Tensor, Any]]
    notes: tuple[Note, ...] = ()
    """What a record says of how the name was read."""


def named_model(text: str, *, image: int | None = None, sequence: int | None = None) -> NamedModel:
    """Return the model that ``text`` names.

    Args:
        text: ``library:name``.
        image: height and width of images; None for 224.
        sequence: tokens of a sequence; None for 128.

    Raises:
        UsageError: there is no such library or model, or the size does not belong to it.
    """
    library, _, name = text.partition(":")
    if library not in MODEL_LIBRARIES or not name:
        raise UsageError(
            f"--model {text!r} does not name a library and a model",
            hint="write timm:resnet50, torchvision:vgg16 or transformers:gpt2",
        )
    if library == "transformers":
        return _transformer(text, name, image, sequence)
    if sequence is not None:
        raise UsageError(f"--sequence {sequence} does not belong to {text}, a model of images", hint="leave it out")
    return _image_model(text, library, name, image or _IMAGE)


def _image_model(text: str, library: str, name: str, size: int) -> NamedModel:
    if library == "timm":
        timm = import_library("timm")
        known, build = timm.list_models(), timm.create_model
    else:
        models = import_library("torchvision").models
        known = models.list_models(module=models)
        build = partial(models.get_model, weights=None)
    own = own_name(name, known)
    if own is None:
        raise UsageError(f"{library} has no model {name!r}", hint=nearest(name, known, listed=[*known[:2], "…"]))
    notes = () if own == name else (Note(what="model", value=own, reason=f"{library}'s name for {name}"),)
    return NamedModel(text, "images", f"{size}x{size}", partial(build, own), partial(_images, size), _class_loss, notes)


def own_name(name: str, known: Sequence[str]) -> str | None:
    """Return a library's name of a model that others write with dashes, capitals or the tag of its weights; None if there is none."""
    plain = name.partition(".")[0] if name.partition(".")[0] in known else name
    written = {re.sub(r"[^a-z0-9]", "", one.lower()): one for one in known}
    return plain if plain in known else written.get(re.sub(r"[^a-z0-9]", "", name.lower()))


def _images(size: int, n: int) -> dict[str, Tensor]:
    return {"x": torch.empty(n, 3, size, size), "y": torch.empty(n, dtype=torch.long)}


def _class_loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    outputs = model(inputs["x"])
    if isinstance(outputs, tuple):  # networks with auxiliary heads return their outputs as well
        losses = [F.cross_entropy(o, inputs["y"]) for o in outputs if isinstance(o, Tensor)]
        return torch.stack(losses).sum(), outputs
    return F.cross_entropy(outputs, inputs["y"]), outputs


def _transformer(text: str, name: str, image: int | None, sequence: int | None) -> NamedModel:
    transformers = import_library("transformers")
    found = configuration(name, transformers)
    config, build = found.config, partial(found.build, transformers)
    if found.task == "image":
        own = getattr(config, "image_size", None)
        size = image or (own if isinstance(own, int) else _IMAGE)
        return NamedModel(text, "images", f"{size}x{size}", build, partial(_pixels, size), _model_loss, found.notes)
    length = sequence or _SEQUENCE
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int) and 0 < most < length:
        raise UsageError(f"--sequence {length} is longer than the {most} positions of {name}", hint="shorten it")
    return NamedModel(text, "sequences", f"{length} tokens", build, partial(_tokens, length), _model_loss, found.notes)


def _pixels(size: int, n: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.empty(n, 3, size, size), "labels": torch.empty(n, dtype=torch.long)}


def _tokens(length: int, n: int) -> dict[str, Tensor]:
    return {name: torch.empty(n, length, dtype=torch.long) for name in ("input_ids", "labels")}


def _model_loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    outputs = model(**inputs)
    return outputs.loss, outputs


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adafactor": torch.optim.Adafactor,
}
"""With torch's defaults, which matter to neither time nor memory; SGD with momentum."""


def tape_of(
    model: NamedModel,
    policy: str,
    batch: int,
    *,
    optimizer: str,
    channels_last: bool,
    gpu: bool = True,
    checkpoint: str | None = None,
) -> TrainingTape:
    """Return the tape of ``model``'s training under ``policy``.

    Args:
        model: the model.
        policy: one of the policies that are recorded.
        batch: the batch size.
        optimizer: one of ``OPTIMIZERS``.
        channels_last: whether images are stored channels-last.
        gpu: whether the operations are a GPU's or a CPU's.
        checkpoint: a plan of ``mezzo.checkpoint`` by name, or its budget; None to keep everything.
    """

    def build() -> nn.Module:
        with quiet():
            built = model.build()
        return built.to(memory_format=torch.channels_last) if channels_last else built  # type: ignore[call-overload]

    def prepared(tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=torch.channels_last) if channels_last and tensor.dim() == 4 else tensor

    return record_training(
        build,
        lambda n: {name: prepared(tensor) for name, tensor in model.batch_of(n).items()},
        model.loss_of,
        batch=batch,
        optimizer=OPTIMIZERS[optimizer],
        policy=Policy.parse(policy),
        gpu=gpu,
        checkpoint=checkpoint,
    )


def import_library(library: str) -> Any:
    """Return a library of models.

    torchvision's wheel lacks its operators if torch comes from another build, and timm and transformers import torchvision if
    it is installed; so its operators are declared here.

    Raises:
        UsageError: the library is not installed, or cannot be imported.
    """
    _declare_operators()
    try:
        return import_module(library)
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"--model {library}:… needs the package {library}, which cannot be imported: {str(error).splitlines()[0]}",
            hint=f"pip install {library}, in the version that belongs to your torch",
        ) from None


@contextmanager
def quiet() -> Iterator[None]:
    """Let libraries log errors only: warnings that an optional kernel is missing do not matter to a model that never runs."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _declare_operators() -> None:
    spec = find_spec("torchvision") if "torchvision" not in sys.modules else None
    if spec is None or spec.origin is None:
        return
    try:
        import_module("torchvision")
        return
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
    text = Path(spec.origin).with_name("_meta_registrations.py").read_text(encoding="utf-8")
    declared = re.findall(r'register_(?:meta|fake)\("(?:torchvision::)?(\w+)"\)', text)
    for name in sorted({"nms", "qnms", *declared}):
        if not hasattr(torch.ops.torchvision, name):
            _OPERATORS.define(f"{name}() -> ()")


_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
"""Declares the operators, which live as long as this object."""
