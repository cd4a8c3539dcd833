"""A PyTorch-Ignite trainer with its checkpoint handler."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from digits_data import BATCH_SIZE, EPOCHS, digest, digits
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver

torch.manual_seed(0)
images, labels = map(torch.from_numpy, digits())
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=BATCH_SIZE)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
trainer = create_supervised_trainer(model, optimizer, F.cross_entropy)
state = {"model": model, "optimizer": optimizer, "trainer": trainer}
saver = Checkpoint(state, DiskSaver(sys.argv[1], create_dir=True, require_empty=False), n_saved=1)
trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)


@trainer.on(Events.EPOCH_COMPLETED)
def report(engine: Engine) -> None:
    accuracy = (model(images).argmax(1) == labels).float().mean()
    print(f"epoch {engine.state.epoch}  loss {engine.state.output:.4f}  acc {accuracy:.4f}", flush=True)


saved = sorted(Path(sys.argv[1]).glob("*.pt"))
if saved:
    Checkpoint.load_objects(state, torch.load(saved[-1]))
trainer.run(loader, max_epochs=EPOCHS)
print("weights", digest([p.detach() for p in model.parameters()]))
