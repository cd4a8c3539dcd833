"""Train BERT to fill in masked words: --data is a text file with a sentence a line, --vocab BERT's vocab.txt or another one.

Needs transformers. Without --small it is BERT-base: 12 layers, 768 wide. Masking as in Devlin et al., arXiv:1810.04805, section 3.1.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, BertTokenizer

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def mask(tokens: Tensor, special: Tensor, mask_id: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return the tokens with 15% hidden (80% by a mask, 10% by a random word, 10% shown) and the words to predict."""
    chosen = (torch.rand(tokens.shape) < 0.15) & ~special
    labels = torch.where(chosen, tokens, -100)
    how = torch.rand(tokens.shape)
    masked = torch.where(chosen & (how < 0.8), mask_id, tokens)
    return torch.where(chosen & (how >= 0.9), torch.randint_like(tokens, vocabulary), masked), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--vocab", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="2 layers, 64 wide")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = BertTokenizer(str(args.vocab))
    lines = args.data.read_text(encoding="utf-8").splitlines()
    encoded = tokenizer(lines, padding="longest", truncation=True, max_length=args.length, return_tensors="pt")
    loader = DataLoader(encoded["input_ids"], args.batch_size, shuffle=True, drop_last=True)
    config = BertConfig(vocab_size=len(tokenizer), **(SMALL if args.small else {}))
    model = BertForMaskedLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 1 - step / (args.steps + 1))
    )
    special_ids = torch.tensor(tokenizer.all_special_ids)

    step = 0
    while step < args.steps:
        for tokens in loader:
            inputs, labels = mask(tokens, torch.isin(tokens, special_ids), tokenizer.mask_token_id, len(tokenizer))
            attention = (tokens != tokenizer.pad_token_id).long()
            loss = model(inputs.to(device), attention_mask=attention.to(device), labels=labels.to(device)).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            if step % 20 == 0 or step == args.steps:
                print(f"step {step}  loss {loss.item():.4f}", flush=True)
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
