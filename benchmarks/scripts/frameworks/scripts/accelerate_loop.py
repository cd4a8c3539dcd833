"""A loop with Hugging Face Accelerate, gradient accumulation and clipping."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from digits_data import BATCH_SIZE, EPOCHS, digest, digits

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(0)
images, labels = map(torch.from_numpy, digits())
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=6)
dataset = torch.utils.data.TensorDataset(images, labels)
loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
checkpoints = Path(sys.argv[1])
done = len(list(checkpoints.glob("epoch_*"))) if checkpoints.exists() else 0
if done:
    accelerator.load_state(str(checkpoints / f"epoch_{done - 1}"))

for epoch in range(done, EPOCHS):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    accelerator.save_state(str(checkpoints / f"epoch_{epoch}"))
    print(f"epoch {epoch}  loss {loss.item():.4f}  acc {(model(images).argmax(1) == labels).float().mean():.4f}")
print("weights", digest([p.detach() for p in model.parameters()]))
