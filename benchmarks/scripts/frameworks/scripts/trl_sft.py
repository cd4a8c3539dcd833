"""TRL's SFTTrainer on a small Llama."""

import logging
import sys
from pathlib import Path

from datasets import Dataset
from digits_data import digest
from tiny_text import sentences, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

logging.disable(logging.WARNING)
set_seed(0)
words = tokenizer()
config = LlamaConfig(
    vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=32,
)  # fmt: skip
model = LlamaForCausalLM(config)
arguments = SFTConfig(
    sys.argv[1], per_device_train_batch_size=8, num_train_epochs=2, learning_rate=3e-3, logging_steps=4, max_length=16,
    save_strategy="steps", save_steps=6, report_to="none", disable_tqdm=True, use_cpu=True, bf16=False,
)  # fmt: skip
trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_dict({"text": sentences(96)}), processing_class=words)
last = get_last_checkpoint(sys.argv[1]) if Path(sys.argv[1]).is_dir() else None
trainer.train(resume_from_checkpoint=last)
print(f"loss {trainer.state.log_history[-2]['loss']:.4f}")
print("weights", digest([p.detach() for p in model.parameters()]))
