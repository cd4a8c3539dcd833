"""What is changed in a script's models from outside, beside their precision. Imports no torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ModelChanges(BaseModel):
    """What to do with every model of the script at its first call."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    channels_last: bool = False
    """Store convolution weights and images channels-last."""
    compiles: bool = False
    """Compile the model with ``torch.compile``."""
    checkpoint: str = ""
    """Checkpoint each model by this plan, or within so many bytes, at its first call in training; empty for not at all."""
    counts_inputs: bool = False
    """Count what each step is given, so that steps on batches of different sizes can be compared."""
