"""Train a small convolutional net on handwritten digits in FP16, with the library: ``python examples/session_digits.py``."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import mezzo


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return 1438 training and 359 test images of 8 x 8."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    training, test = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    return training, test


def build() -> nn.Module:
    """Return two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def accuracy(model: nn.Module, session: mezzo.Session, test: TensorDataset) -> float:
    """Return the model's accuracy on the test images, computed under the session's policy."""
    images, targets = test[:]
    model.eval()
    with torch.no_grad(), session.autocast():
        predicted: Tensor = model(images).argmax(dim=1)
    model.train()
    return (predicted == targets).float().mean().item()


def main() -> None:
    """Train and print one line an epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="fp16")
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    training, test = load()
    loader = DataLoader(training, batch_size=32, shuffle=True)
    model = build()
    optimizer = mezzo.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=arguments.epochs * (len(loader) // 2 + 1)
    )
    session = mezzo.Session(model, optimizer, policy=arguments.policy, accumulate=2, clip_norm=1.0, scheduler=schedule)
    print(session.explain())

    criterion = nn.CrossEntropyLoss()
    for epoch in range(arguments.epochs):
        for images, targets in loader:
            with session.autocast():
                loss = criterion(model(images), targets)
            session.step(loss, weight=len(images))
        if len(loader) % 2:
            session.update()  # the last window of the epoch is a short one
        print(
            f"epoch {epoch + 1}  loss {loss.item():.4f}  acc {accuracy(model, session, test):.4f}  "
            f"scale {session.loss_scale:g}  skipped {session.skipped}  updates {session.updates}"
        )


if __name__ == "__main__":
    main()
