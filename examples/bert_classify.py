"""Train BERT to classify sentences: each line of --data is a label (0, 1, ...), a tab and a sentence; --vocab is a WordPiece vocabulary.

Needs transformers. --model FOLDER starts from a local checkpoint; without it the weights are random.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    correct = 0
    for tokens, attention, labels in loader:
        output = model(tokens.to(device), attention_mask=attention.to(device))
        correct += int((output.logits.argmax(1).cpu() == labels).sum())
    return correct / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--vocab", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--small", action="store_true", help="2 layers, 64 wide")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--max-steps", type=int, default=None, help="stop an epoch after so many steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = BertTokenizer(str(args.vocab))
    rows = [line.split("\t", 1) for line in args.data.read_text(encoding="utf-8").splitlines()]
    labels = torch.tensor([int(label) for label, _ in rows])
    encoded = tokenizer(
        [text for _, text in rows], padding="longest", truncation=True, max_length=128, return_tensors="pt"
    )
    data = TensorDataset(encoded["input_ids"], encoded["attention_mask"], labels)
    train_set, test_set = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(args.seed))
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, 128)
    num_labels = int(labels.max()) + 1
    if args.model is not None:
        model = BertForSequenceClassification.from_pretrained(args.model, num_labels=num_labels, local_files_only=True)
    else:
        config = BertConfig(vocab_size=len(tokenizer), num_labels=num_labels, **(SMALL if args.small else {}))
        model = BertForSequenceClassification(config)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    for epoch in range(1, args.epochs + 1):
        model.train()
        for step, (tokens, attention, targets) in enumerate(train_loader):
            if step == args.max_steps:
                break
            loss = model(tokens.to(device), attention_mask=attention.to(device), labels=targets.to(device)).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        print(f"epoch {epoch}  loss {loss.item():.4f}  acc {evaluate(model, test_loader, device):.4f}", flush=True)


if __name__ == "__main__":
    main()
