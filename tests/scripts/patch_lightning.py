"""Lightning's Trainer."""

import logging
import warnings

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning as L

warnings.filterwarnings("ignore", module="lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
model = Regression()
batches = [(torch.randn(8, 6), torch.randn(8, 2)) for _ in range(8)]
trainer = L.Trainer(
    max_epochs=1,
    accelerator="auto",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=None))
