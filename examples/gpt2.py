"""Train GPT-2 on the bytes of a text file. Needs transformers. Without --small it is the smallest published size: 12 layers, 768 wide."""

import argparse
from pathlib import Path

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

SMALL = {"n_embd": 64, "n_layer": 2, "n_head": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="2 layers, 64 wide")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per update")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = torch.frombuffer(bytearray(args.data.read_bytes()), dtype=torch.uint8).long()
    config = GPT2Config(
        vocab_size=256, n_positions=args.length, bos_token_id=None, eos_token_id=None, **(SMALL if args.small else {})
    )
    model = GPT2LMHeadModel(config).to(device)
    if args.compile:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(1, args.steps + 1):
        total = 0.0
        for _ in range(args.accumulate):
            starts = torch.randint(0, len(text) - args.length, (args.batch_size,))
            tokens = torch.stack([text[start : start + args.length] for start in starts.tolist()]).to(device)
            loss = model(tokens, labels=tokens).loss / args.accumulate
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == args.steps:
            print(f"step {step}  loss {total:.4f}", flush=True)


if __name__ == "__main__":
    main()
