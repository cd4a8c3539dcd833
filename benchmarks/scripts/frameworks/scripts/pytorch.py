"""A loop in PyTorch that saves its state after each epoch and resumes from it."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from digits_data import BATCH_SIZE, EPOCHS, digest, digits

torch.manual_seed(0)
images, labels = map(torch.from_numpy, digits())
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
first, checkpoint = 0, Path(sys.argv[1], "last.pt")
checkpoint.parent.mkdir(exist_ok=True)
if checkpoint.exists():
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["generator"])
    first = saved["epoch"]

for epoch in range(first, EPOCHS):
    for batch in torch.randperm(len(labels)).split(BATCH_SIZE):
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
    torch.save(state | {"generator": torch.get_rng_state()}, checkpoint)
    accuracy = (model(images).argmax(1) == labels).float().mean()
    print(f"epoch {epoch}  loss {loss.item():.4f}  acc {accuracy:.4f}", flush=True)
print("weights", digest([p.detach() for p in model.parameters()]))
