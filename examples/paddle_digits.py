"""Train a small convolutional network on scikit-learn's handwritten digits, in PaddlePaddle."""

import argparse

import numpy as np
import paddle
from paddle import Tensor, nn
from paddle.nn import functional as F
from sklearn.datasets import load_digits


def build_model() -> nn.Layer:
    return nn.Sequential(
        nn.Conv2D(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2D(2),
        nn.Conv2D(32, 64, 5, padding=2, bias_attr=False),
        nn.BatchNorm2D(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def load_data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images = paddle.to_tensor(digits.images[order, np.newaxis] / 16.0, dtype="float32")
    labels = paddle.to_tensor(digits.target[order])
    split = int(0.8 * len(order))
    return images[:split], labels[:split], images[split:], labels[split:]


@paddle.no_grad()
def evaluate(model: nn.Layer, images: Tensor, labels: Tensor) -> float:
    model.eval()
    return float((model(images).argmax(axis=1) == labels).astype("float32").mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    paddle.seed(args.seed)
    train_images, train_labels, test_images, test_labels = load_data(args.seed)
    model = build_model()
    steps = args.epochs * -(-len(train_labels) // args.batch_size)
    schedule = paddle.optimizer.lr.CosineAnnealingDecay(args.lr, T_max=steps)
    clip = nn.ClipGradByGlobalNorm(1.0)
    optimizer = paddle.optimizer.AdamW(schedule, parameters=model.parameters(), weight_decay=0.01, grad_clip=clip)

    for epoch in range(1, args.epochs + 1):
        model.train()
        losses = []
        order = paddle.randperm(len(train_labels))
        for start in range(0, len(order), args.batch_size):
            batch = order[start : start + args.batch_size]
            loss = F.cross_entropy(model(train_images[batch]), train_labels[batch])
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            schedule.step()
            losses.append(loss.detach())
        accuracy = evaluate(model, test_images, test_labels)
        print(f"epoch {epoch}  loss {float(paddle.stack(losses).mean()):.4f}  acc {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
