"""Train MobileNetV3-Large in Keras on a folder of pictures: train and val, each with a folder of JPEG files for every class."""

import argparse
from pathlib import Path

import keras
import numpy as np
from PIL import Image


def read_set(folder: Path, size: int) -> tuple[np.ndarray, np.ndarray]:
    classes = sorted(place.name for place in folder.iterdir() if place.is_dir())
    files = sorted(folder.glob("*/*.[jJ][pP]*"))
    pictures = [np.asarray(Image.open(file).convert("RGB").resize((size, size)), dtype=np.float32) for file in files]
    return np.stack(pictures), np.array([classes.index(file.parent.name) for file in files])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    (images, labels), test = (read_set(args.data / name, args.size) for name in ("train", "val"))
    steps = args.epochs * -(-len(labels) // args.batch_size)
    rate = keras.optimizers.schedules.CosineDecay(0.0, steps, warmup_target=args.lr, warmup_steps=max(1, steps // 10))
    shape = (args.size, args.size, 3)
    model = keras.applications.MobileNetV3Large(
        input_shape=shape, weights=None, classes=int(labels.max()) + 1, classifier_activation=None
    )
    model.compile(
        optimizer=keras.optimizers.AdamW(rate, weight_decay=0.02, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    options = {"batch_size": args.batch_size, "epochs": args.epochs, "verbose": 0}
    history = model.fit(images, labels, validation_data=test, **options).history
    for epoch, (loss, accuracy) in enumerate(zip(history["loss"], history["val_accuracy"], strict=True), 1):
        print(f"epoch {epoch}  loss {loss:.4f}  acc {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
