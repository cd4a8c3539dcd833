"""Lightning's Fabric: its own backward and clipping calls."""

import logging
import sys
import warnings

import torch
from common import batches, mlp, report
from torch.nn import functional as F

with warnings.catch_warnings():  # what Lightning's own modules do while they are imported
    warnings.simplefilter("ignore")
    from lightning.fabric import Fabric

logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
fabric = Fabric(accelerator="cpu", devices=1, precision=sys.argv[1] if len(sys.argv) > 1 else "32-true")
fabric.launch()
model = mlp(6, 16, 2)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(batches(1) * 12, batch_size=None))
losses, rates = [], []
for inputs, targets in loader:
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    losses.append(loss.item())
    rates.append(optimizer.param_groups[0]["lr"])
    scheduler.step()
report(losses=losses, rates=rates, steps=len(losses))
