"""What public scripts expect of their environment: small images instead of downloads, and names that numpy has since removed.

Python imports this file automatically from ``PYTHONPATH``. Nothing happens until a script imports ``torchvision.datasets`` or one of Keras'
data sets; then generated images replace MNIST, FashionMNIST, CIFAR10 and CIFAR100. Each class of images has its own pattern under noise,
so that losses fall.
``PUBLIC_SCRIPTS_IMAGES`` is the number of training and test images, by default ``256,64``.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

PROBE = os.environ.get("PUBLIC_SCRIPTS_PROBE", "")
"""A file for checksums of the weights; empty to leave torch alone."""
MODULE = "torchvision.datasets"
OLD_NUMPY = {"int": "int_", "float": "float64", "Inf": "inf", "in1d": "isin"}
"""Names of numpy 1, and what they meant."""
SETS = {"MNIST": (28, 1, 10), "FashionMNIST": (28, 1, 10), "CIFAR10": (32, 3, 10), "CIFAR100": (32, 3, 100)}
"""Side, channels and classes."""
KERAS_SETS = {"keras.src.datasets.mnist": "MNIST", "keras.src.datasets.fashion_mnist": "FashionMNIST"}
"""The modules that download Keras' sets."""


class WithStandIns(importlib.abc.MetaPathFinder):
    """Finds ``torchvision.datasets`` and ``numpy`` as usual, and sets names in them after import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of one of these modules."""
        replaced = (MODULE, "numpy", *KERAS_SETS, *(["torch"] if PROBE else []))
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in replaced else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_then_replace(module: ModuleType) -> None:
            run(module)
            if name == "numpy":
                vars(module).update((old, getattr(module, new)) for old, new in OLD_NUMPY.items())
                return
            if name == "torch":
                seed_and_watch(module)
                return
            if name in KERAS_SETS:
                set_of = SETS[KERAS_SETS[name]]
                vars(module)["load_data"] = lambda *_, **__: (
                    generated(*set_of, train=True),
                    generated(*set_of, train=False),
                )
                return
            for of, (side, channels, classes) in SETS.items():
                setattr(module, of, stand_in(module.VisionDataset, of, side, channels, classes))

        spec.loader.exec_module = run_then_replace  # type: ignore[method-assign]
        return spec


def seed_and_watch(torch: Any) -> None:
    """Set all seeds, have each update wait, and write the checksums of the weights after the last updates at the end."""
    import random
    import zlib

    import numpy

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    sums, wait_s, process = [0], float(os.environ["PUBLIC_SCRIPTS_WAIT_S"]), os.getpid()

    def updated(optimizer: Any, *_: Any) -> None:
        values = [value for group in optimizer.param_groups for value in group["params"]]
        total = 0
        for value in values:
            total = zlib.crc32(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data, total)
        sums.append(total)
        time.sleep(wait_s)

    def written() -> None:
        if os.getpid() == process and len(sums) > 1:
            Path(PROBE).write_text(json.dumps(sums[1:]))

    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(torch.compiler.disable(updated))
    atexit.register(written)


def generated(side: int, channels: int, classes: int, *, train: bool) -> tuple[Any, Any]:
    """Return images and labels, as ``uint8`` and ``int64`` arrays."""
    import numpy

    shape = (side, side, channels)[: 3 if channels > 1 else 2]
    numbers = [int(number) for number in os.environ.get("PUBLIC_SCRIPTS_IMAGES", "256,64").split(",")]
    draw = numpy.random.RandomState(0 if train else 1)
    patterns = numpy.random.RandomState(2).rand(classes, *shape)
    labels = draw.permutation(numbers[0 if train else 1]) % classes
    return (255 * (0.7 * patterns[labels] + 0.3 * draw.rand(len(labels), *shape))).astype("uint8"), labels


def stand_in(base: type, name: str, side: int, channels: int, classes: int) -> type:
    """Return a data set class with the interface of torchvision's: PIL images, ``data``, ``targets`` and ``classes``."""
    import numpy
    import torch
    from PIL import Image

    def __init__(self: Any, root: Any = None, train: bool = True, transform: Any = None, **other: Any) -> None:
        self.root, self.train, self.transform, self.target_transform = (
            root,
            train,
            transform,
            other.get("target_transform"),
        )
        images, labels = generated(side, channels, classes, train=train)
        self.classes = [str(number) for number in range(classes)]
        self.data = images if channels > 1 else torch.from_numpy(images)
        self.targets = labels.tolist() if channels > 1 else torch.from_numpy(labels)

    def __len__(self: Any) -> int:
        return len(self.data)

    def __getitem__(self: Any, index: int) -> tuple[Any, Any]:
        image, label = Image.fromarray(numpy.asarray(self.data[index])), int(self.targets[index])
        image = self.transform(image) if self.transform else image
        return image, self.target_transform(label) if self.target_transform else label

    return type(name, (base,), {"__init__": __init__, "__len__": __len__, "__getitem__": __getitem__})


sys.meta_path.insert(0, WithStandIns())
