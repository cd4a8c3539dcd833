"""A fastai Learner with its one-cycle schedule, saved after each epoch."""

import sys
from pathlib import Path

import torch
from digits_data import BATCH_SIZE, EPOCHS, digest, digits
from fastai.basics import CrossEntropyLossFlat, DataLoaders, Learner, accuracy, set_seed
from fastai.callback.progress import ProgressCallback
from fastai.callback.schedule import Learner  # noqa: F811  (fastai adds fit_one_cycle to the class there)
from fastai.callback.tracker import SaveModelCallback

set_seed(0)
images, labels = map(torch.from_numpy, digits())
dataset = torch.utils.data.TensorDataset(images, labels)
loaders = DataLoaders.from_dsets(dataset, dataset, bs=BATCH_SIZE, num_workers=0, device="cpu")
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
learner = Learner(loaders, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, path=Path(sys.argv[1]))
learner.remove_cb(ProgressCallback)
saved = sorted(Path(sys.argv[1], "models").glob("model_*.pth"))
if saved:
    learner.create_opt()
    learner.load(saved[-1].stem)
saver = SaveModelCallback(every_epoch=True, with_opt=True)
with learner.no_logging():
    learner.fit_one_cycle(EPOCHS, 3e-3, cbs=[saver], start_epoch=len(saved))
accuracy_at_end = (model(images).argmax(1) == labels).float().mean()
print(f"acc {accuracy_at_end:.4f}")
print("weights", digest([p.detach() for p in model.parameters()]))
