"""Lightning's Trainer in one process on all the data, or in two on a half of it each: ``lightning_ranks.py automatic|manual``.

An overflow comes in the half of rank 1 at the third of six updates; the last window is shorter than the others.
"""

import logging
import os
import sys
import warnings

import torch
from torch import nn
from torch.nn import functional as F

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
import lightning

from mezzo.compat.lightning import MezzoPrecision

rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
half = slice(None) if size == 1 else slice(4 * rank, 4 * rank + 4)


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
        self.automatic_optimization = "manual" not in sys.argv

    def training_step(self, batch, index):
        inputs, targets, factors = (part[0] for part in batch)
        loss = (F.cross_entropy(self.net(inputs), targets, reduction="none") * factors).mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()
        return None

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        step = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": step}


data = torch.Generator().manual_seed(1)
batches = []
for micro in range(11):
    inputs, targets = torch.randn(8, 6, generator=data), torch.randint(0, 3, (8,), generator=data)
    factors = torch.ones(8)
    if micro == 4:
        factors[6] = float("inf")
    batches.append((inputs[half], targets[half], factors[half]))
automatic = {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2} if "manual" not in sys.argv else {}
plugin = MezzoPrecision("fp16:init_scale=1024:fp32=linear")
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    devices=size,
    strategy="ddp" if size > 1 else "auto",
    use_distributed_sampler=False,
    plugins=plugin,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    **automatic,
)
model = Net()
trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=1))
total = sum(p.detach().double().abs().sum().item() for p in model.parameters())
skipped = plugin.record().steps.num_skipped
print(
    f"RANK {rank} weights {total!r} skipped {skipped} rate {trainer.optimizers[0].param_groups[0]['lr']}\n",
    end="",
    flush=True,
)
