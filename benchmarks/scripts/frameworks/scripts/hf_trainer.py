"""Hugging Face's Trainer on a small BERT, resumed from its last checkpoint."""

import logging
import sys
from pathlib import Path

import torch
from digits_data import digest
from tiny_text import sentences, tokenizer
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

logging.disable(logging.WARNING)
set_seed(0)
words = tokenizer()
texts = sentences(96)
data = [{**words(text), "labels": int("cat" in text)} for text in texts]
config = BertConfig(
    vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=16,
)  # fmt: skip
model = BertForSequenceClassification(config)
arguments = TrainingArguments(
    sys.argv[1], per_device_train_batch_size=8, num_train_epochs=2, learning_rate=3e-3, logging_steps=4,
    save_strategy="steps", save_steps=6, report_to="none", disable_tqdm=True, use_cpu=True,
)  # fmt: skip
last = get_last_checkpoint(sys.argv[1]) if Path(sys.argv[1]).is_dir() else None
trainer = Trainer(model, arguments, train_dataset=data, processing_class=words)
trainer.train(resume_from_checkpoint=last)
batch = words(texts, return_tensors="pt")
with torch.no_grad():
    correct = model(**batch).logits.argmax(1) == torch.tensor([row["labels"] for row in data])
print(f"acc {correct.float().mean():.4f}")
print("weights", digest([p.detach() for p in model.parameters()]))
