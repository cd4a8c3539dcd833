"""What options of predictions name: libraries of models, optimizers, ways to share a training. Imports no torch."""

from __future__ import annotations

from typing import Literal

MODEL_LIBRARIES = ("timm", "torchvision", "transformers")
OPTIMIZER_NAMES = ("adamw", "adam", "sgd", "adagrad", "rmsprop", "adafactor")
Sharding = Literal["ddp", "fsdp"]
SHARDS: tuple[Sharding, ...] = ("ddp", "fsdp")
