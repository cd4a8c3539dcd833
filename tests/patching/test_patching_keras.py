"""Keras' global policy: where it is set, under which name, and when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers_patching import added, patch_of, refusal_of

SETS = 'keras.mixed_precision.set_global_policy("mixed_float16")\n'
INSERTED = [
    # the script until the line that is inserted, and after it; the policy; the line
    ("import keras\n", "x = 1\n", "fp16", f"\n{SETS}"),
    (
        "import keras as k\nimport numpy\n",
        "\nx = 1\n",
        "bf16",
        '\nk.mixed_precision.set_global_policy("mixed_bfloat16")\n',
    ),
    ("from tensorflow import keras\n", "", "fp16", f"\n{SETS}"),
    ("import tensorflow as tf\n", "m = tf.keras.Sequential()\n", "fp16", f"\ntf.{SETS}"),
    ("from keras import layers\n", "", "fp16", f"\nimport keras\n{SETS}"),
    ("import tensorflow as tf, keras, sys\n", "x = 1\n", "fp16", f"\n{SETS}"),
]
MIXED = "from keras import mixed_precision\nmixed_precision.set_global_policy(mixed_precision.Policy({}))\n"
NAMED = (
    "import tensorflow as tf\nname = {}\npolicy = tf.keras.mixed_precision.Policy(name=name)\n"
    "tf.keras.mixed_precision.set_global_policy(policy)\n"
)
SETTER = "from tensorflow.keras.mixed_precision import set_global_policy\nset_global_policy({})\n"
CHANGED = [
    # the script with the name of the dtype policy as it is; the policy; the name that it gets
    ("import keras\nkeras.config.set_dtype_policy({})\n", '"float32"', "fp16", '"mixed_float16"'),
    (MIXED, '"float32"', "bf16", '"mixed_bfloat16"'),
    (NAMED, "'float32'", "fp16", '"mixed_float16"'),
    (SETTER, "'float32'", "fp16", '"mixed_float16"'),
    (
        "import keras\nkeras.config.set_dtype_policy(keras.DTypePolicy({}))\n",
        "'mixed_float16'",
        "bf16",
        '"mixed_bfloat16"',
    ),
]
SET = [(before + after, policy, before + line + after) for before, after, policy, line in INSERTED]
SET += [(source.format(name), policy, source.format(new)) for source, name, policy, new in CHANGED]


SET += [
    (
        "import tensorflow as tf, keras, sys\nx = 1\n",
        "fp16",
        'import tensorflow as tf, keras, sys\n\nkeras.mixed_precision.set_global_policy("mixed_float16")\nx = 1\n',
    ),
    (
        'from keras import mixed_precision\nmixed_precision.set_global_policy(mixed_precision.Policy("float32"))\n',
        "bf16",
        'from keras import mixed_precision\nmixed_precision.set_global_policy(mixed_precision.Policy("mixed_bfloat16"))\n',
    ),
    (
        "import tensorflow as tf\nname = 'float32'\npolicy = tf.keras.mixed_precision.Policy(name=name)\n"
        "tf.keras.mixed_precision.set_global_policy(policy)\n",
        "fp16",
        'import tensorflow as tf\nname = "mixed_float16"\npolicy = tf.keras.mixed_precision.Policy(name=name)\n'
        "tf.keras.mixed_precision.set_global_policy(policy)\n",
    ),
    (
        "from tensorflow.keras.mixed_precision import set_global_policy\nset_global_policy('float32')\n",
        "fp16",
        'from tensorflow.keras.mixed_precision import set_global_policy\nset_global_policy("mixed_float16")\n',
    ),
    (
        "import keras\nkeras.config.set_dtype_policy(keras.DTypePolicy('mixed_float16'))\n",
        "bf16",
        'import keras\nkeras.config.set_dtype_policy(keras.DTypePolicy("mixed_bfloat16"))\n',
    ),
]
APPLY = "optimizer.apply_gradients(zip(grads, model.trainable_variables))"


def loop(*, optimizer: str = "SGD()", before: str = "", after: str = APPLY, loss: str = "model(x)") -> str:
    return f"""import keras
import tensorflow as tf
{before}optimizer = keras.optimizers.{optimizer}
for x in data:
    with tf.GradientTape() as tape:
        loss = {loss}
    grads = tape.gradient(loss, model.trainable_variables)
    {after}
"""


APPLY = "optimizer.apply_gradients(zip(grads, model.trainable_variables))"


@pytest.mark.parametrize(("source", "policy", "patched"), SET)
def test_the_global_policy_is_set(source: str, policy: str, patched: str, tmp_path: Path) -> None:
    patch = patch_of(source, policy, tmp_path)
    assert patch.patched == patched
    assert patch.kind == "keras"


SELF = APPLY.replace("optimizer", "self.optimizer")
NAME = "import keras\nname = 'float32'\nif x:\n    name = 'mixed_float16'\nkeras.config.set_dtype_policy(name)\n"
TWICE = "import keras\nkeras.mixed_precision.set_global_policy(a)\nkeras.mixed_precision.set_global_policy(b)\n"
REWRITES = "import tensorflow as tf\nopt = tf.train.experimental.enable_mixed_precision_graph_rewrite(tf.keras.o)\n"
OLD = "import tensorflow as tf\ntf.keras.mixed_precision.experimental.set_policy('mixed_float16')\n"
VARIABLE = "import os, keras\nos.environ['TF_ENABLE_AUTO_MIXED_PRECISION'] = '1'\n"
OTHER = loop(before="other = keras.optimizers.SGD()\n", optimizer="get(other)")
LEFT = [
    ("import keras\n" + SETS, "fp16", "already sets the policy mixed_float16"),
    ("import keras\nkeras.mixed_precision.set_global_policy(name)\n", "fp16", "line 2 takes the policy from elsewhere"),
    ("import keras\n", "fp16-master", "policy fp16-master: a Keras script can be patched for fp16 and bf16"),
    (
        "import tensorflow as tf\ntf.keras\nwith tf.GradientTape() as t: pass\n",
        "fp16",
        "line 3 opens a tape, and no gradient",
    ),
    (TWICE, "fp16", "lines 2 and 3 set the policy"),
    (NAME, "fp16", "line 5 takes the policy from elsewhere"),
    (OLD, "fp16", "line 2 calls mixed_precision.experimental"),
    (REWRITES, "bf16", "line 2 lets TensorFlow rewrite its graphs"),
    (VARIABLE, "fp16", "line 2 lets TensorFlow rewrite its graphs"),
    (loop(loss="optimizer.get_scaled_loss(model(x))"), "bf16", "line 6 calls get_scaled_loss()"),
    (loop(after="grads = clip(grads)\n    " + APPLY), "fp16", "line 8 reads gradients that would be scaled"),
    (loop(after=APPLY + "\n    print(grads)"), "fp16", "line 9 reads gradients that would be scaled"),
    (OTHER, "fp16", "line 9 updates with optimizer, which this file does not create in one place"),
    (loop(after=SELF), "fp16", "line 8 updates with self.optimizer, which no compile() in this file is passed"),
    (loop() + "model.compile(optimizer)\n", "fp16", "line 9 passes optimizer to compile()"),
    (loop().replace("gradient(loss,", "gradient(loss * 2,"), "fp16", "line 7 differentiates loss * 2"),
    ("import keras\nkeras.x.stateless_apply()\n", "fp16", "line 2 trains in a loop of its own"),
    ("import keras\nloss = m(x)\nloss.backward()\n", "fp16", "a Keras model is trained by a torch loop"),
    ("if x:\n    import keras\n", "fp16", "the script imports keras inside a function"),
]


@pytest.mark.parametrize(("source", "policy", "reason"), LEFT)
def test_the_global_policy_is_left(source: str, policy: str, reason: str, tmp_path: Path) -> None:
    assert refusal_of(source, policy, tmp_path).reason.startswith(reason)


def test_a_loop_that_scales_its_loss_already_only_gets_the_policy(tmp_path: Path) -> None:
    source = loop(optimizer="LossScaleOptimizer(inner)", loss="optimizer.scale_loss(model(x))")
    expected = source.replace("tensorflow as tf\n", f"tensorflow as tf\n\n{SETS}")
    assert patch_of(source, "fp16", tmp_path).patched == expected


def test_a_network_of_two_losses_scales_each_by_its_own_optimizer(tmp_path: Path) -> None:
    source = """import keras
import tensorflow as tf
first = keras.optimizers.Adam(1e-4)
second = keras.optimizers.Adam(1e-4)
@tf.function
def step(x):
    with tf.GradientTape() as a, tf.GradientTape() as b:
        one = f(x)
        other = g(x)
    ones = a.gradient(one, f.trainable_variables)
    others = b.gradient(other, g.trainable_variables)
    first.apply(ones, f.trainable_variables)
    second.apply(others, g.trainable_variables)
"""
    patch = patch_of(source, "fp16", tmp_path)
    assert added(patch) == [
        "",
        'keras.mixed_precision.set_global_policy("mixed_float16")',
        "first = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-4))",
        "second = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-4))",
        "        scaled_one = first.scale_loss(one)",
        "        scaled_other = second.scale_loss(other)",
        "    ones = a.gradient(scaled_one, f.trainable_variables)",
        "    others = b.gradient(scaled_other, g.trainable_variables)",
    ]
