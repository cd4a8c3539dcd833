"""A small training with what a gate has to find: a loss that is moved, more memory, one module in FP32, a slower step."""

import argparse
import time

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, *, own_format: bool) -> None:
        super().__init__()
        self.first, self.norm, self.middle = nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 256)
        self.last, self.own_format = nn.Linear(256, 10), own_format

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(inputs)))
        if self.own_format:
            with torch.autocast("cpu", enabled=False):
                hidden = self.middle(hidden.float())
        else:
            hidden = self.middle(hidden)
        return self.last(torch.relu(hidden))


def train() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--add", type=float, default=0.0, help="added to the loss")
    parser.add_argument("--pad", type=int, default=0, help="elements of one more parameter")
    parser.add_argument("--own-format", action="store_true", help="one module outside autocast")
    parser.add_argument("--slower", type=float, default=0.0, help="a share of each step's CPU time that is added to it")
    parser.add_argument("--unseeded", action="store_true", help="other random numbers in every run")
    args = parser.parse_args()
    if args.unseeded:
        torch.seed()
    else:
        torch.manual_seed(0)
    model = Net(own_format=args.own_format)
    if args.pad:
        model.padding = nn.Parameter(torch.zeros(args.pad))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(args.steps):
        began_s = time.process_time()
        inputs = torch.randn(64, 64)
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(1)) + args.add
        if args.pad:
            loss = loss + 0.0 * model.padding.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        until_s = began_s + (1.0 + args.slower) * (time.process_time() - began_s)
        while args.slower and time.process_time() < until_s:
            pass


train()
