"""Lightning's Trainer, with its own checkpoints."""

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from digits_data import BATCH_SIZE, EPOCHS, digest, digits


class Classifier(lightning.LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


lightning.seed_everything(0, verbose=False)
images, labels = map(torch.from_numpy, digits())
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(images, labels), batch_size=BATCH_SIZE, shuffle=False
)
model, checkpoint = Classifier(), Path(sys.argv[1], "last.ckpt")
saver = lightning.pytorch.callbacks.ModelCheckpoint(checkpoint.parent, save_last=True)
trainer = lightning.Trainer(
    max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[saver],
)  # fmt: skip
trainer.fit(model, loader, ckpt_path=checkpoint if checkpoint.exists() else None, weights_only=False)
print(f"acc {(model.layers(images).argmax(1) == labels).float().mean():.4f}")
print("weights", digest([p.detach() for p in model.parameters()]))
