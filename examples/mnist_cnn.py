"""Train a convolutional network on MNIST: --data is the folder of its four files (http://yann.lecun.com/exdb/mnist), compressed or not."""

import argparse
import gzip
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def read_idx(folder: Path, name: str) -> Tensor:
    """Return the bytes of one of MNIST's files: a magic number, the sizes, the values."""
    packed = folder / f"{name}.gz"
    content = gzip.decompress(packed.read_bytes()) if packed.is_file() else (folder / name).read_bytes()
    num_sizes = content[3]
    sizes = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(num_sizes)]
    values = torch.frombuffer(bytearray(content[4 + 4 * num_sizes :]), dtype=torch.uint8)
    assert len(values) == math.prod(sizes), f"{name} is incomplete"
    return values.view(*sizes)


def read_set(folder: Path, name: str) -> TensorDataset:
    images = read_idx(folder, f"{name}-images-idx3-ubyte").unsqueeze(1).float() / 255
    return TensorDataset((images - 0.1307) / 0.3081, read_idx(folder, f"{name}-labels-idx1-ubyte").long())


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 12 * 12, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    correct = sum(int((model(x.to(device)).argmax(1).cpu() == y).sum()) for x, y in loader)
    return correct / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--max-steps", type=int, default=None, help="stop an epoch after so many steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader = DataLoader(read_set(args.data, "train"), args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(read_set(args.data, "t10k"), 256)
    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(1, args.epochs + 1):
        model.train()
        for step, (images, labels) in enumerate(train_loader):
            if step == args.max_steps:
                break
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}  loss {loss.item():.4f}  acc {evaluate(model, test_loader, device):.4f}", flush=True)


if __name__ == "__main__":
    main()
