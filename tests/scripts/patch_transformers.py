"""Hugging Face's Trainer on a model of a few numbers."""

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, inputs, labels):
        found = self.net(inputs)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


torch.manual_seed(0)
examples = [{"inputs": torch.randn(6), "labels": torch.randn(2)} for _ in range(64)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        optim="sgd",
        learning_rate=0.1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    Trainer(model=Regression(), args=arguments, train_dataset=examples).train()
