"""A loop with Lightning Fabric."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from digits_data import BATCH_SIZE, EPOCHS, digest, digits
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu")
fabric.launch()
fabric.seed_everything(0, verbose=False)
images, labels = map(torch.from_numpy, digits())
dataset = torch.utils.data.TensorDataset(images, labels)
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(dataset, batch_size=BATCH_SIZE))
network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
model, optimizer = fabric.setup(network, torch.optim.AdamW(network.parameters(), lr=3e-3))
state = {"model": model, "optimizer": optimizer, "epoch": 0}
checkpoint = Path(sys.argv[1], "last.ckpt")
if checkpoint.exists():
    fabric.load(checkpoint, state)

for epoch in range(state["epoch"], EPOCHS):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
    state["epoch"] = epoch + 1
    fabric.save(checkpoint, state)
    print(f"epoch {epoch}  loss {loss.item():.4f}  acc {(model(images).argmax(1) == labels).float().mean():.4f}")
print("weights", digest([p.detach() for p in network.parameters()]))
