"""A DataLoader with a worker process, started as the first argument says."""

import sys

import torch
from common import mlp, report
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        x = torch.full((6,), index / 32)
        return index, x, (x[:2] ** 2)


def main():
    model = mlp(6, 16, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    order, losses = [], []
    loader = DataLoader(
        Squares(),
        batch_size=8,
        shuffle=True,
        num_workers=1,
        multiprocessing_context=sys.argv[1],
        generator=torch.Generator().manual_seed(5),
    )
    for numbers, inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        order += numbers.tolist()
        losses.append(loss.item())
    report(losses=losses, order=order)


if __name__ == "__main__":
    main()
