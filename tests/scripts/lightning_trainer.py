"""Lightning's Trainer: validation, a schedule stepped every update, clipping, accumulation with a short last window."""

import argparse
import logging
import tempfile
import warnings

import torch
from common import batches, report
from torch import nn
from torch.nn import functional as F

with warnings.catch_warnings():  # what Lightning's own modules do while they are imported
    warnings.simplefilter("ignore")
    import lightning as L
    from lightning.pytorch.plugins.precision import MixedPrecision

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=12)
options.add_argument("--accumulate", type=int, default=1)
options.add_argument("--precision", default="32-true")
options.add_argument("--factor", type=float, default=1.0)  # of the inputs
options = options.parse_args()


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.losses, self.rates, self.validated = [], [], []

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch[0] * options.factor), batch[1])
        self.log("loss", loss)
        self.losses.append(loss.item())
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return loss

    def validation_step(self, batch, batch_idx):
        self.validated.append(F.mse_loss(self.net(batch[0]), batch[1]).item())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
L.seed_everything(0, verbose=False)
model = Regression()
with tempfile.TemporaryDirectory() as folder:
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        # Lightning makes bf16 of "16-mixed" on a CPU, unless the plugin is passed.
        plugins=[MixedPrecision("16-mixed", "cpu")] if options.precision == "16-mixed" else None,
        precision=None if options.precision == "16-mixed" else options.precision,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=1.0,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        logger=False,
        default_root_dir=folder,
    )
    same = batches(1) * options.steps
    trainer.fit(
        model,
        torch.utils.data.DataLoader(same, batch_size=None),
        torch.utils.data.DataLoader(same[:1], batch_size=None),
    )
report(losses=model.losses, rates=model.rates, validated=model.validated, steps=trainer.global_step)
