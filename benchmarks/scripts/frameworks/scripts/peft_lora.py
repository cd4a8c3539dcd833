"""A small GPT-2 that PEFT fine-tunes with LoRA, in a plain loop."""

import sys
from pathlib import Path

import torch
from digits_data import digest
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from tiny_text import sentences, tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
words = tokenizer()
config = GPT2Config(
    vocab_size=len(words), n_embd=32, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=5
)
model = get_peft_model(GPT2LMHeadModel(config), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
tokens = words(sentences(96), return_tensors="pt")["input_ids"]
first, checkpoint = 0, Path(sys.argv[1], "last.pt")
checkpoint.parent.mkdir(exist_ok=True)
if checkpoint.exists():
    saved = torch.load(checkpoint)
    set_peft_model_state_dict(model, saved["adapter"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["generator"])
    first = saved["epoch"]

model.train()
for epoch in range(first, 2):
    for batch in torch.randperm(len(tokens)).split(8):
        loss = model(input_ids=tokens[batch], labels=tokens[batch]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapter = get_peft_model_state_dict(model)
    state = {"adapter": adapter, "optimizer": optimizer.state_dict(), "generator": torch.get_rng_state()}
    torch.save({**state, "epoch": epoch + 1}, checkpoint)
    print(f"epoch {epoch}  loss {loss.item():.4f}")
print("weights", digest([p.detach() for p in model.parameters()]))
