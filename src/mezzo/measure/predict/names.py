"""What options of predictions name: libraries of models, optimizers, ways to share a training. Imports no torch."""

from __future__ import annotations

from typing import Literal

LIBRARIES = ("timm", "torchvision", "transformers")
OPTIMIZERS = ("adamw", "adam", "sgd", "adagrad", "rmsprop", "adafactor")
Shard = Literal["ddp", "fsdp"]
SHARDS: tuple[Shard, ...] = ("ddp", "fsdp")
