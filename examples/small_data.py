"""Write small data sets in the file formats of MNIST, CIFAR-10, ImageNet and plain text, so that every example runs without a download.

    python examples/small_data.py data

Pictures are the handwritten digits of scikit-learn, enlarged; sentences are drawn from a small grammar. The formats are the real data
sets': put the real files in the same place, and the same script trains on them.
"""

import argparse
import gzip
import random
import struct
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def digit_pictures(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the digits as bytes of ``size`` x ``size`` pixels, and their classes, in a fixed random order."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    pictures = [
        np.asarray(
            Image.fromarray((picture * 255 / 16).astype(np.uint8)).resize((size, size), Image.Resampling.BILINEAR)
        )
        for picture in digits.images[order]
    ]
    return np.stack(pictures), digits.target[order].astype(np.uint8)


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write bytes in the format of MNIST's files: a magic number, the sizes, the bytes, compressed."""
    header = struct.pack(">BBBB", 0, 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(header + values.tobytes()))


def write_mnist(folder: Path) -> None:
    """Write MNIST's four files."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures, classes = digit_pictures(28)
    for name, chosen in (("train", slice(None, 1500)), ("t10k", slice(1500, None))):
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", pictures[chosen])
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", classes[chosen])


def write_cifar(folder: Path) -> None:
    """Write CIFAR-10's binary version: a byte for the class and 3 x 32 x 32 bytes for each picture."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures, classes = digit_pictures(32)
    tints = np.random.default_rng(1).integers(80, 256, (len(pictures), 3, 1, 1))
    coloured = (pictures[:, None] * tints // 255).astype(np.uint8)
    rows = np.concatenate([classes[:, None], coloured.reshape(len(classes), -1)], axis=1)
    for number in range(5):
        (folder / f"data_batch_{number + 1}.bin").write_bytes(rows[number * 300 : (number + 1) * 300].tobytes())
    (folder / "test_batch.bin").write_bytes(rows[1500:].tobytes())


def write_image_folder(folder: Path) -> None:
    """Write JPEG files in a folder for each class, laid out like ImageNet's train and val folders."""
    pictures, classes = digit_pictures(96)
    for number, (picture, label) in enumerate(zip(pictures[:240], classes[:240], strict=True)):
        place = folder / ("train" if number < 200 else "val") / f"n{label:08d}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).convert("RGB").save(place / f"{number}.jpeg", quality=90)


def write_text(folder: Path) -> None:
    """Write sentences, labelled sentences (a label, a tab, the sentence) and a WordPiece vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    nouns, verbs = "cat dog bird child teacher engine river".split(), "sees likes finds follows hears".split()
    good, bad = "bright kind quick lovely calm".split(), "dull cruel slow awful loud".split()
    sentences = []
    for _ in range(2000):
        label = draw.randrange(2)
        mood = (bad, good)[label]
        words = [
            "the",
            draw.choice(mood),
            draw.choice(nouns),
            draw.choice(verbs),
            "a",
            draw.choice(mood),
            draw.choice(nouns),
        ]
        sentences.append((label, " ".join(words)))
    (folder / "corpus.txt").write_text("\n".join(text for _, text in sentences) + "\n", encoding="utf-8")
    (folder / "labelled.tsv").write_text("".join(f"{label}\t{text}\n" for label, text in sentences), encoding="utf-8")
    words = sorted({"the", "a", *nouns, *verbs, *good, *bad})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *words]) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write small data sets in the formats of the real ones.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    write_mnist(folder / "mnist")
    write_cifar(folder / "cifar-10-batches-bin")
    write_image_folder(folder / "imagenet")
    write_text(folder / "text")
    print(f"{folder}: mnist, cifar-10-batches-bin, imagenet, text")


if __name__ == "__main__":
    main()
