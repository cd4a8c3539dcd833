"""Files that Keras and TensorFlow read in native code are heard."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("keras")
pytest.importorskip("tensorflow")

SCRIPT = """
import os, sys, time
from pathlib import Path
from mezzo.launch.recording import files_read
since = time.time() - 60
os.environ["KERAS_BACKEND"] = "tensorflow"
import numpy as np

def earlier():
    for path in Path(".").iterdir():
        os.utime(path, (time.time() - 1.0003,) * 2)

with files_read(since):
    pass  # what is imported later is wrapped then
import keras
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.save_weights("last.weights.h5")
model.save("last.keras")
import tensorflow as tf
tf.train.Checkpoint(model=model).write("last.ckpt")
tf.io.write_file("last.txt", "3")
for use in (
    lambda: model.load_weights("last.weights.h5"),
    lambda: keras.models.load_model("last.keras"),
    lambda: tf.train.load_checkpoint("last.ckpt"),
    lambda: tf.train.Checkpoint(model=model).read("last.ckpt"),
    lambda: tf.io.gfile.GFile("last.txt").read(),
):
    earlier()
    with files_read(since) as files:
        use()
    print(",".join(Path(f.path).name for f in files.found))
"""


def test_checkpoints_of_keras_and_tensorflow_are_recorded(tmp_path: Path) -> None:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = ["last.weights.h5", "last.keras", "last.ckpt.index", "last.ckpt.index", "last.txt"]
    assert done.stdout.split() == expected
