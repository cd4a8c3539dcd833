"""Train scripts and their patches; ``python keras_patched.py NAME POLICY`` ... prints one JSON line for each pair.

The runs share one process: importing TensorFlow takes seconds.
"""

# ruff: noqa: ANN201, ANN001
import json
import sys
from pathlib import Path

import keras

from mezzo.launch.keras import training
from mezzo.patching import make_patch
from mezzo.policy import Policy

SCRIPTS = Path(__file__).parents[2] / "scripts"


def trained(source, policy):
    """Return the steps of a script's text, and the weights of its model."""
    keras.backend.clear_session()
    keras.config.set_dtype_policy("float32")
    names = {"__name__": "__main__"}
    with training(policy, seed=0, observe=None) as told:
        exec(compile(source, "script.py", "exec"), names)
        told.close_update()
    keras.config.set_dtype_policy("float32")
    steps = told.steps()
    weights = [weight.numpy().tolist() for weight in names["model"].trainable_weights]
    return {"loss": steps.loss, "grad_norm": steps.grad_norm, "skipped": steps.num_skipped, "weights": weights}


for name, text in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    policy = Policy.parse(text)
    patch = make_patch(SCRIPTS / f"patch_{name}.py", policy=policy)
    as_keras_begins = policy.replace(init_scale=2.0**15)
    print(json.dumps([trained(patch.source, as_keras_begins), trained(patch.patched, None)]), flush=True)
