"""Shift the seeds that a Keras script sets, in addition to those of ``launch.seeds``.

``keras.utils.set_random_seed`` sets the seeds of Python, NumPy and the backend by functions each of which is shifted. This
module adds ``tf.random.set_seed``, and the integers that a script passes as ``seed`` to a layer, an initializer or a
function of ``keras.random``. If a script passes no seed, Keras draws one from Python's generator, which is shifted.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from mezzo.launch.patches import Patches


def shift_tensorflow(seed: int, patches: Patches) -> None:
    """Seed TensorFlow with ``seed``, and add it to every seed set until ``patches`` are undone."""
    import tensorflow as tf

    tf.random.set_seed(seed)
    patches.around(tf.random, "set_seed", functools.partial(_shifted, seed))


def shift_keras(seed: int, patches: Patches) -> None:
    """Add ``seed`` to the integer seeds of Keras' random tensors until ``patches`` are undone."""
    import keras

    generator = importlib.import_module("keras.src.random.seed_generator").SeedGenerator
    patches.around(generator, "__init__", functools.partial(_shifted_generator, seed))
    for module in ("random", "image"):
        users = importlib.import_module(f"keras.src.backend.{keras.backend.backend()}.{module}")
        patches.around(users, "draw_seed", functools.partial(_shifted, seed))


def _shifted(by: int, original: Callable[..., Any], seed: Any) -> Any:
    return original(seed + by if isinstance(seed, int) else seed)


def _shifted_generator(
    by: int, original: Callable[..., Any], self: Any, seed: Any = None, *args: Any, **kwargs: Any
) -> None:
    original(self, seed + by if isinstance(seed, int) else seed, *args, **kwargs)
