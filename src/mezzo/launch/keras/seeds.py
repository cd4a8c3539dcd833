"""Shift the seeds that a Keras script sets, in addition to those of ``launch.seeds``.

``keras.utils.set_random_seed`` sets the seeds of Python, NumPy and the backend with functions that are shifted
individually. This module adds ``tf.random.set_seed``, and the integers that a script passes as ``seed`` to a layer, an initializer or a
function of ``keras.random``. Seeds left out are drawn from Python's generator, which is shifted.
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
    patches.wrap(tf.random, "set_seed", lambda original: _shifted(original, seed))


def shift_keras(seed: int, patches: Patches) -> None:
    """Add ``seed`` to the integer seeds of Keras' random tensors until ``patches`` are undone."""
    import keras

    generator = importlib.import_module("keras.src.random.seed_generator").SeedGenerator
    patches.wrap(generator, "__init__", lambda original: _shifted_generator(original, seed))
    for module in ("random", "image"):
        users = importlib.import_module(f"keras.src.backend.{keras.backend.backend()}.{module}")
        patches.wrap(users, "draw_seed", lambda original: _shifted(original, seed))


def _shifted(original: Callable[..., Any], by: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(seed: Any) -> Any:
        return original(seed + by if isinstance(seed, int) else seed)

    return function


def _shifted_generator(original: Callable[..., None], by: int) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, seed: Any = None, *args: Any, **kwargs: Any) -> None:
        original(self, seed + by if isinstance(seed, int) else seed, *args, **kwargs)

    return init
