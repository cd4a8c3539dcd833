"""Configurations of transformers' models: by the name of a checkpoint, a type, a file, or what the hub's cache has. Nothing is downloaded.

``models.json`` has the facts of common checkpoints that differ from their type's defaults. Any other model is named by its
``config.json``, or by a folder or a cached checkpoint that has one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from mezzo.errors import UsageError, nearest
from mezzo.records import Note

_FILE = "config.json"
_HEADS = {
    "sequence": "AutoModelForSeq2SeqLM",
    "masked": "AutoModelForMaskedLM",
    "causal": "AutoModelForCausalLM",
    "image": "AutoModelForImageClassification",
}
"""Transformers' classes that build a model for a task, in the order in which a type's first one is taken."""
_OTHER_HEADS = (
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageTextToText",
    "AutoModelForZeroShotImageClassification",
)
"""Tasks whose batches are not known here: a language model or a classifier inside of such a type is taken only if a file names it."""
_OF_A_CHECKPOINT = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path")
"""What a file says of a checkpoint rather than of its model; weights are built in FP32, which the policy casts."""


@dataclass(frozen=True)
class ModelConfiguration:
    """How transformers builds a model, and what its training gets."""

    config: Any
    task: str
    """``sequence`` (to sequence), ``masked``, ``causal`` or ``image``."""
    notes: tuple[Note, ...] = ()
    """What a record says of it."""
    untied: bool = False
    """Whether the last layer has weights of its own."""

    def build(self, transformers: Any) -> Any:
        """Return the model."""
        model = getattr(transformers, _HEADS[self.task]).from_config(self.config)
        last = model.get_output_embeddings() if self.untied else None
        if last is not None and last.weight is model.get_input_embeddings().weight:
            last.weight = type(last.weight)(last.weight.detach().clone())  # transformers 5 ties all T5, also Flan's
        return model


def configurations() -> dict[str, dict[str, Any]]:
    """Return the facts of the checkpoints that are known by name."""
    text = (files("mezzo.measure.predict") / "models.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


def configuration(name: str, transformers: Any) -> ModelConfiguration:
    """Return the configuration that ``name`` means.

    Args:
        name: a checkpoint's name, with or without its owner; a ``config.json`` or a folder that has one; or a type of model.
        transformers: the library.

    Raises:
        UsageError: there is none, or no training of it is known.
    """
    known = configurations()
    by_end = {key.split("/")[-1].lower(): key for key in known}
    if (key := name if name in known else by_end.get(name.split("/")[-1].lower())) is not None:
        facts = known[key]["config"]
        config = transformers.AutoConfig.for_model(known[key]["type"], **facts)
        return ModelConfiguration(config, known[key]["task"], untied=_untied(facts))
    if (path := _file_of(name)) is not None:
        return _of_file(path, transformers)
    if name in transformers.CONFIG_MAPPING:
        task = _task(name, (), transformers)
        why = f"{name} is a type of model, not a checkpoint"
        note = Note(what="configuration", value="the type's defaults in transformers", reason=why)
        return ModelConfiguration(_trainable(transformers.AutoConfig.for_model(name)), task, (note,))
    raise UsageError(
        f"Mezzo has no configuration for {name!r}: it is no file, no type of transformers {transformers.__version__}, and not in the hub's "
        "cache, and nothing is downloaded",
        hint=f"{nearest(name, known, listed=['bert-base-uncased', 't5 (a type)', '…'])}; "
        f"any other model is named by its file: --model transformers:path/to/{_FILE}",
    )


def _file_of(name: str) -> Path | None:
    """Return the file that ``name`` means: itself, the one in a folder, or a checkpoint's in the hub's cache."""
    path = Path(name).expanduser()
    if path.is_dir() and (path / _FILE).is_file():
        return path / _FILE
    if path.is_file():
        return path
    if path.suffix == ".json" or path.is_dir() or name.startswith((".", "~", os.sep)):
        raise UsageError(f"there is no file {str(path if path.suffix else path / _FILE)!r}", hint="check the path")
    with suppress(ImportError, ValueError):  # a name that no checkpoint can have
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, _FILE)
        return Path(cached) if isinstance(cached, str) else None
    return None


def _of_file(path: Path, transformers: Any) -> ModelConfiguration:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint=f"name the {_FILE} of a model") from None
    kind = str(facts.pop("model_type", "")) if isinstance(facts, dict) else ""
    if kind not in transformers.CONFIG_MAPPING:
        raise UsageError(
            f"{path} is of the type {kind!r}, which transformers {transformers.__version__} does not have",
            hint="install the version that has it; a model with code of its own is predicted by a script that builds and trains it",
        )
    if "quantization_config" in facts:
        raise UsageError(
            f"the weights of {path} are quantised, and trainings of such models are not predicted",
            hint="name a copy of the file without quantization_config: the model in the policy's own formats",
        )
    task = _task(kind, facts.get("architectures") or (), transformers)
    made = transformers.AutoConfig.for_model(kind, **{k: v for k, v in facts.items() if k not in _OF_A_CHECKPOINT})
    note = Note(what="configuration", value=str(path), reason=f"of type {kind}")
    return ModelConfiguration(_trainable(made), task, (note,), _untied(facts))


def _untied(facts: Mapping[str, Any]) -> bool:
    return facts.get("tie_word_embeddings") is False


def _task(kind: str, architectures: Any, transformers: Any) -> str:
    """Return the task of a checkpoint by the class that wrote it, or else the first that transformers has for the type."""
    mappings: Mapping[str, Mapping[str, str]] = {task: _classes(transformers, head) for task, head in _HEADS.items()}
    for task, classes in mappings.items():
        if any(one in _names(classes.get(kind)) for one in architectures):
            return task
    other = any(kind in _classes(transformers, head) for head in _OTHER_HEADS)
    for task, classes in mappings.items():
        if kind in classes and not other:
            return task
    raise UsageError(
        f"transformers builds {kind} for none of the trainings that are known by name: language models (causal, masked, sequence to "
        "sequence) and classification of images",
        hint="predict a script that trains it: mezzo predict train.py",
    )


def _classes(transformers: Any, head: str) -> Mapping[str, Any]:
    """Return the classes that ``head`` builds, by type."""
    mapping = getattr(transformers, head)._model_mapping
    found: Mapping[str, Any] = mapping._model_mapping
    return found


def _names(classes: Any) -> tuple[str, ...]:
    return (classes,) if isinstance(classes, str) else tuple(classes or ())


def _trainable(config: Any) -> Any:
    """Return ``config`` with the token that begins an output, from which labels are shifted, if it lacks one."""
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    return config
