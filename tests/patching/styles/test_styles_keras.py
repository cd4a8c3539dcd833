"""Keras' global policy: where it is set, under which name, and when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from mezzo.patching import Patch, Refused, make_patch
from mezzo.policy import Policy

SET = [
    # source, policy, patched
    (
        "import keras\nx = 1\n",
        "fp16",
        'import keras\n\nkeras.mixed_precision.set_global_policy("mixed_float16")\nx = 1\n',
    ),
    (
        "import keras as k\nimport numpy\n\nx = 1\n",
        "bf16",
        'import keras as k\nimport numpy\n\nk.mixed_precision.set_global_policy("mixed_bfloat16")\n\nx = 1\n',
    ),
    (
        "from tensorflow import keras\n",
        "fp16",
        'from tensorflow import keras\n\nkeras.mixed_precision.set_global_policy("mixed_float16")\n',
    ),
    (
        "import tensorflow as tf\nm = tf.keras.Sequential()\n",
        "fp16",
        'import tensorflow as tf\n\ntf.keras.mixed_precision.set_global_policy("mixed_float16")\nm = tf.keras.Sequential()\n',
    ),
    (
        "from keras import layers\n",
        "fp16",
        'from keras import layers\n\nimport keras\nkeras.mixed_precision.set_global_policy("mixed_float16")\n',
    ),
    (
        'import keras\nkeras.config.set_dtype_policy("float32")\n',
        "fp16",
        'import keras\nkeras.config.set_dtype_policy("mixed_float16")\n',
    ),
]


def outcome_of(source: str, policy: str, tmp_path: Path) -> Patch | Refused:
    path = tmp_path / "script.py"
    path.write_text(source, encoding="utf-8")
    return make_patch(path, policy=Policy.parse(policy))


@pytest.mark.parametrize(("source", "policy", "patched"), SET)
def test_the_global_policy_is_set(source: str, policy: str, patched: str, tmp_path: Path) -> None:
    patch = outcome_of(source, policy, tmp_path)
    assert isinstance(patch, Patch), patch
    assert patch.patched == patched
    assert patch.kind == "keras"


@pytest.mark.parametrize(
    ("source", "policy", "reason"),
    [
        (
            'import keras\nkeras.mixed_precision.set_global_policy("mixed_float16")\n',
            "fp16",
            "already sets the policy mixed_float16",
        ),
        (
            "import keras\nkeras.mixed_precision.set_global_policy(name)\n",
            "fp16",
            "line 2 takes the policy from elsewhere",
        ),
        ("import keras\n", "fp16-master", "policy fp16-master: a Keras script can be patched for fp16 and bf16"),
        (
            "import tensorflow as tf\ntf.keras\nwith tf.GradientTape() as t: pass\n",
            "fp16",
            "line 3 opens a tape, and no gradient of a loss is taken from it",
        ),
        ("import keras\nloss = m(x)\nloss.backward()\n", "fp16", "a Keras model is trained by a torch loop"),
        ("if x:\n    import keras\n", "fp16", "the script imports keras inside a function"),
    ],
)
def test_the_global_policy_is_left(source: str, policy: str, reason: str, tmp_path: Path) -> None:
    outcome = outcome_of(source, policy, tmp_path)
    assert isinstance(outcome, Refused), outcome.diff
    assert outcome.reason.startswith(reason)
