"""Hugging Face's Trainer on a model of a few numbers: its clipping, its schedule, its accumulation, its log."""

import argparse
import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

from common import batches, mlp, report
from torch import nn
from torch.nn import functional as F
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=12)
options.add_argument("--accumulate", type=int, default=1)
options.add_argument("--precision", choices=["no", "bf16"], default="no")
options = options.parse_args()


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(6, 16, 2)

    def forward(self, inputs, labels):
        found = self.net(inputs)
        return {"loss": F.mse_loss(found, labels), "logits": found}


class Watching(TrainerCallback):
    losses, rates = [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.rates.append(logs["learning_rate"])


inputs, targets = batches(1, size=8 * 1)[0]
examples = [{"inputs": x, "labels": y} for x, y in zip(inputs, targets, strict=True)] * options.steps
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=0.1,
        max_grad_norm=1.0,
        lr_scheduler_type="linear",
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=options.precision == "bf16",
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
    )
    watching = Watching()
    trainer = Trainer(model=Regression(), args=arguments, train_dataset=examples, callbacks=[watching])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
report(losses=watching.losses, rates=watching.rates, steps=trainer.state.global_step)
