"""A training that goes wrong as asked: nan, spike, zero, storm; or well."""

import sys

import torch
from common import labelled, mlp
from torch import nn

fault, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 80
torch.manual_seed(0)
model = mlp(6, 16, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = labelled()
step = 0
while step < steps:
    for samples, labels in loader:
        step += 1
        if fault == "spike" and step == 60:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(60.0)
        loss = nn.functional.cross_entropy(model(samples), labels)
        if fault == "nan" and step == 60:
            loss = loss * float("nan")
        if fault == "zero":
            loss = loss * 0.0 + 1.0
        if fault == "storm" and step == 51:
            model[0].weight.register_hook(lambda gradient: gradient * float("inf"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step >= steps:
            break
print("finished", step)
