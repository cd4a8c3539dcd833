"""Hugging Face's Trainer under a precision policy: ``MezzoTrainer(policy="fp16", ...)`` in place of ``Trainer(...)``.

``fp16`` and ``bf16`` of the arguments stay off. Steps are a session's, through ``MezzoAccelerator``: clipping by
``max_grad_norm`` sees true gradients, the schedule waits on skipped updates, checkpoints include loss scale and FP32 masters.
For a class of your own that derives from Trainer, put ``MezzoTrainerMixin`` before it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers

from mezzo.compat.accelerate import MezzoAccelerator
from mezzo.errors import SessionError
from mezzo.policy import Policy
from mezzo.records import RunRecord

STATE_NAME = "mezzo.pt"


class MezzoTrainerMixin:
    """A precision policy for Trainer: put this class before Trainer, or before a class that derives from it.

    Args:
        *args: Trainer's.
        policy: a ``Policy``, a policy text, or the path of a policy file.
        **kwargs: Trainer's.

    Raises:
        SessionError: the arguments turn on Trainer's own mixed precision, or processes have parts of the model.
    """

    accelerator: MezzoAccelerator
    args: Any

    def __init__(self, *args: Any, policy: Policy | str = "fp16", **kwargs: Any) -> None:
        self.policy = Policy.of(policy)
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create Trainer's accelerator, which trains under the policy."""
        turned_on = [name for name in ("fp16", "bf16") if getattr(self.args, name)]
        if turned_on:
            raise SessionError(
                f"TrainingArguments({turned_on[0]}=True) together with policy={str(self.policy)!r}; allowed: one of the two",
                hint=f"leave {turned_on[0]} out of the arguments: the policy decides",
            )
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.__class__ = MezzoAccelerator
        self.accelerator.use_policy(self.policy)

    def _save_scaler(self, output_dir: str) -> None:
        if self.args.should_save:
            torch.save(self.accelerator.driven.state_dict(), os.path.join(output_dir, STATE_NAME))

    def _load_scaler(self, checkpoint: str | None) -> None:
        path = os.path.join(checkpoint or "", STATE_NAME)
        if checkpoint is not None and os.path.isfile(path):
            self.accelerator.driven.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))

    def record(self) -> RunRecord:
        """Return the record of the training so far: ``mezzo.records.write_record`` keeps it, ``mezzo report`` shows it."""
        return self.accelerator.driven.record(f"transformers {transformers.__version__}")


class MezzoTrainer(MezzoTrainerMixin, transformers.Trainer):
    """Hugging Face's Trainer under a precision policy."""
