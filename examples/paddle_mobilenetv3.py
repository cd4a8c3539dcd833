"""Train MobileNetV3-Large in PaddlePaddle on a folder of pictures, laid out like ImageNet.

--level O1 or O2 turns on Paddle's own mixed precision. For several devices: python -m paddle.distributed.launch paddle_mobilenetv3.py ...
"""

import argparse
from pathlib import Path

import numpy as np
import paddle
from paddle import nn
from PIL import Image


def read_set(folder: Path, size: int) -> tuple[np.ndarray, np.ndarray]:
    classes = sorted(place.name for place in folder.iterdir() if place.is_dir())
    files = sorted(folder.glob("*/*.[jJ][pP]*"))
    pictures = [np.asarray(Image.open(file).convert("RGB").resize((size, size)), dtype=np.float32) for file in files]
    values = (np.stack(pictures).transpose(0, 3, 1, 2) / 255 - 0.45) / 0.225
    return values.astype(np.float32), np.array([classes.index(file.parent.name) for file in files])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--level", choices=["O0", "O1", "O2"], default="O0")
    parser.add_argument("--max-steps", type=int, default=None, help="stop an epoch after so many steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    paddle.seed(args.seed)
    world, rank = paddle.distributed.get_world_size(), paddle.distributed.get_rank()
    if world > 1:
        paddle.distributed.init_parallel_env()
    (images, labels), (test_images, test_labels) = (read_set(args.data / name, args.size) for name in ("train", "val"))
    images, labels = images[rank::world], labels[rank::world]
    model = paddle.vision.models.mobilenet_v3_large(num_classes=int(labels.max()) + 1)
    optimizer = paddle.optimizer.AdamW(args.lr, parameters=model.parameters(), grad_clip=nn.ClipGradByGlobalNorm(1.0))
    lowered = args.level != "O0"
    if args.level == "O2":
        model, optimizer = paddle.amp.decorate(model, optimizer, level="O2", dtype="float16", master_weight=True)
    if world > 1:
        model = paddle.DataParallel(model)
    scaler = paddle.amp.GradScaler(enable=lowered, init_loss_scaling=1024)

    for epoch in range(1, args.epochs + 1):
        model.train()
        order = np.random.default_rng(args.seed + epoch).permutation(len(labels))
        for step, start in enumerate(range(0, len(order) - args.batch_size + 1, args.batch_size)):
            if step == args.max_steps:
                break
            chosen = order[start : start + args.batch_size]
            with paddle.amp.auto_cast(enable=lowered, level=args.level if lowered else "O1", dtype="float16"):
                output = model(paddle.to_tensor(images[chosen]))
                loss = nn.functional.cross_entropy(output.astype("float32"), paddle.to_tensor(labels[chosen]))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad()
        model.eval()
        with paddle.no_grad():
            predicted = model(paddle.to_tensor(test_images)).argmax(axis=1).numpy()
        print(f"epoch {epoch}  loss {float(loss):.4f}  acc {(predicted == test_labels).mean():.4f}", flush=True)


if __name__ == "__main__":
    main()
