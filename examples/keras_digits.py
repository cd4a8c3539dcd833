"""Train a small network on scikit-learn's handwritten digits with Keras, on the backend that KERAS_BACKEND names."""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def report(epoch: int, logs: dict[str, float]) -> None:
    print(f"epoch {epoch + 1}  loss {logs['loss']:.4f}  acc {logs['val_accuracy']:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    digits = load_digits()
    images = (digits.data / 16.0).astype(np.float32)
    x, x_test, y, y_test = train_test_split(images, digits.target, test_size=0.2, random_state=args.seed)
    model = build_model()
    model.compile(
        optimizer=keras.optimizers.AdamW(args.lr, weight_decay=0.01, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    reports = keras.callbacks.LambdaCallback(on_epoch_end=report)
    model.fit(x, y, args.batch_size, args.epochs, 0, [reports], validation_data=(x_test, y_test))


if __name__ == "__main__":
    main()
