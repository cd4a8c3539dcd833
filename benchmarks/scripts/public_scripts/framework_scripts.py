"""The public Keras and Paddle scripts of docs/public-scripts.md.

They run with the interpreter that runs the benchmark: that of ``.venv-keras`` or ``.venv-paddle``.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.scripts.public_scripts.scripts import Script

KERAS, TCN = "keras-team/keras", "philipperemy/keras-tcn"
REC, MODELS = "PaddlePaddle/PaddleRec", "PaddlePaddle/models"
ENOUGH_IMAGES = {"PUBLIC_SCRIPTS_IMAGES": "10512,128"}
"""These scripts validate on 10,000 training images."""
MOBILENET, FEW = "tutorials/mobilenetv3_prod/Step6/train.py", "--data-path lite_data --device cpu -b 4 --epochs 2 -j 0"

TEXTS = "tasks/word_ptb/*"


def own_images(folder: Path) -> None:
    """Unpack the images that are in the repository."""
    subprocess.run(["tar", "-x", "-f", "test_images/lite_data.tar"], cwd=folder, check=True)


SCRIPTS = [
    Script(KERAS, "guides/custom_train_step_in_jax.py"),
    Script(KERAS, "guides/custom_train_step_in_tensorflow.py"),
    Script(KERAS, "guides/writing_a_custom_training_loop_in_tensorflow.py", variables=ENOUGH_IMAGES),
    Script(KERAS, "guides/writing_a_custom_training_loop_in_torch.py", variables=ENOUGH_IMAGES),
    Script(KERAS, "guides/distributed_training_with_tensorflow.py", variables=ENOUGH_IMAGES),
    Script(KERAS, "guides/writing_your_own_callbacks.py", variables={"KERAS_BACKEND": "tensorflow"}),
    Script(KERAS, "examples/demo_mnist_convnet.py", variables={"KERAS_BACKEND": "torch"}),
    Script(KERAS, "examples/demo_custom_layer_backend_agnostic.py", variables={"KERAS_BACKEND": "jax"}),
    Script(TCN, "tasks/multi_length_sequences.py", folder="", variables={"PYTHONPATH": "."}, leave_out=TEXTS),
    Script(
        TCN,
        "tasks/many_to_many.py",
        folder="",
        variables={"PYTHONPATH": ".", "KERAS_BACKEND": "torch"},
        leave_out=TEXTS,
    ),
    Script(
        REC,
        "tools/trainer.py",
        "-m models/rank/dnn/config.yaml -o runner.epochs=1",
        folder="",
        leave_out="tools/inference/*",
    ),
    Script(
        REC,
        "tools/trainer.py",
        "-m models/rank/deepfm/config.yaml -o runner.epochs=1",
        folder="",
        leave_out="tools/inference/*",
    ),
    Script(REC, "tools/trainer.py", "-m models/rank/wide_deep/config.yaml", folder="", leave_out="tools/inference/*"),
    Script(MODELS, MOBILENET, FEW, data=own_images),
    Script(MODELS, MOBILENET, f"{FEW} --amp_level O1", data=own_images),
]
