"""A loop in Paddle that saves its state after each epoch and resumes from it."""

import sys
from pathlib import Path

import paddle
from digits_data import BATCH_SIZE, EPOCHS, digest, digits
from paddle.nn import functional as F

paddle.seed(0)
images, labels = map(paddle.to_tensor, digits())
model = paddle.nn.Sequential(paddle.nn.Linear(64, 128), paddle.nn.ReLU(), paddle.nn.Linear(128, 10))
optimizer = paddle.optimizer.AdamW(3e-3, parameters=model.parameters())
first, checkpoint = 0, Path(sys.argv[1], "last.pdparams")
if checkpoint.exists():
    saved = paddle.load(str(checkpoint))
    model.set_state_dict(saved["model"])
    optimizer.set_state_dict(saved["optimizer"])
    first = saved["epoch"]

for epoch in range(first, EPOCHS):
    for start in range(0, len(labels), BATCH_SIZE):
        loss = F.cross_entropy(model(images[start : start + BATCH_SIZE]), labels[start : start + BATCH_SIZE])
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
    paddle.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, str(checkpoint))
    accuracy = float((model(images).argmax(axis=1) == labels).astype("float32").mean())
    print(f"epoch {epoch}  loss {float(loss):.4f}  acc {accuracy:.4f}", flush=True)
print("weights", digest([p.numpy() for p in model.parameters()]))
