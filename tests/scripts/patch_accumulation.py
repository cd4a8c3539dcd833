"""Accumulation in a function that is given its model and optimizer; gradients are clipped where the window ends."""

import torch
from torch import nn


def train(model, device, loader, optimizer, every=4):
    criterion = nn.MSELoss()
    optimizer.zero_grad()
    for number, (inputs, targets) in enumerate(loader):
        inputs, targets = inputs.to(device), targets.to(device)
        loss = criterion(model(inputs), targets)
        (loss / every).backward()
        if (number + 1) % every == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=0.1,
        momentum=0.9,
    )
    loader = [(torch.randn(8, 6), torch.randn(8, 2)) for _ in range(12)]
    for epoch in range(2):
        print(epoch, train(model, device, loader, optimizer))


if __name__ == "__main__":
    main()
