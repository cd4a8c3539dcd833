"""skorch's NeuralNetClassifier, which looks like an estimator of scikit-learn."""

import sys
from pathlib import Path

import torch
from digits_data import BATCH_SIZE, EPOCHS, digest, digits
from skorch import NeuralNetClassifier
from skorch.callbacks import Checkpoint, LoadInitState

torch.manual_seed(0)
images, labels = digits()
saver = Checkpoint(dirname=sys.argv[1], monitor=None)
network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
net = NeuralNetClassifier(
    network, criterion=torch.nn.CrossEntropyLoss, optimizer=torch.optim.AdamW, lr=3e-3, batch_size=BATCH_SIZE,
    max_epochs=EPOCHS, train_split=None, callbacks=[saver, LoadInitState(saver)], verbose=0,
)  # fmt: skip
Path(sys.argv[1]).mkdir(exist_ok=True)
net.fit(images, labels)
print(f"acc {net.score(images, labels):.4f}")
print("weights", digest([p.detach() for p in net.module_.parameters()]))
