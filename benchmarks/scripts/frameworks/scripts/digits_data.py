"""Handwritten digits, and a digest of a model's weights, for the scripts next to this file."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

EPOCHS, BATCH_SIZE = 2, 64


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return 768 images, scaled to [0, 1], and their labels."""
    found = load_digits()
    return (found.data[:768] / 16).astype(np.float32), found.target[:768].astype(np.int64)


def digest(weights: list[Any]) -> str:
    """Return a digest of weights, given as arrays."""
    return hashlib.sha256(b"".join(np.ascontiguousarray(weight).tobytes() for weight in weights)).hexdigest()[:16]
