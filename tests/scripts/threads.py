"""A second thread that calls the model all the time, while the first trains it."""

import threading

import torch
from common import batches, mlp, report
from torch.nn import functional as F

model = mlp(6, 16, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
inputs, targets = batches(1)[0]
done, dtypes = threading.Event(), set()


def watch():
    with torch.no_grad():
        while not done.is_set():
            dtypes.add(str(model(inputs).dtype))


thread = threading.Thread(target=watch, daemon=True)
thread.start()
losses = []
for _ in range(30):
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
done.set()
thread.join()
report(losses=losses, dtypes=sorted(dtypes))
