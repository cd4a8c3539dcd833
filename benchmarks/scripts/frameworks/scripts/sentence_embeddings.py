"""sentence-transformers' trainer on a small BERT."""

import logging
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from digits_data import digest
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from tiny_text import sentences, tokenizer
from transformers import BertConfig, BertModel, set_seed
from transformers.trainer_utils import get_last_checkpoint

logging.disable(logging.WARNING)
set_seed(0)
words = tokenizer()
config = BertConfig(
    vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=32,
)  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    BertModel(config).save_pretrained(folder)
    words.save_pretrained(folder)
    encoder = models.Transformer(folder, max_seq_length=16)
model = SentenceTransformer(modules=[encoder, models.Pooling(32)], device="cpu")
texts = sentences(192)
data = Dataset.from_dict({"anchor": texts[:96], "positive": texts[96:]})
arguments = SentenceTransformerTrainingArguments(
    sys.argv[1], per_device_train_batch_size=8, num_train_epochs=2, learning_rate=3e-3, logging_steps=4,
    save_strategy="steps", save_steps=6, report_to="none", disable_tqdm=True, use_cpu=True,
)  # fmt: skip
last = get_last_checkpoint(sys.argv[1]) if Path(sys.argv[1]).is_dir() else None
trainer = SentenceTransformerTrainer(
    model, arguments, train_dataset=data, loss=losses.MultipleNegativesRankingLoss(model)
)
trainer.train(resume_from_checkpoint=last)
print(f"loss {trainer.state.log_history[-2]['loss']:.4f}")
print("weights", digest([p.detach() for p in model.parameters()]))
