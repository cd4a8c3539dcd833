"""Try a patch on PyTorch as ``mezzo check`` does; ``python keras_patch_trial.py SCRIPT POLICY FOLDER`` prints the outcome.

All runs of the trial share this process: importing Keras takes seconds.
"""

# ruff: noqa: ANN201
import json
import sys
from pathlib import Path

import keras

from helpers_launch import children_in_this_process
from mezzo.commands.check.patches import try_patch
from mezzo.launch.request import Request
from mezzo.patching import make_patch
from mezzo.policy import Policy


def begin_anew():
    """Undo what the script of the run before has set."""
    keras.backend.clear_session()
    keras.config.set_dtype_policy("float32")


script, text, folder = sys.argv[1:]
policy = Policy.parse(text)
request = Request(
    target=script,
    kind="script",
    framework="keras",
    policy=policy,
    record_path=str(Path(folder, "record.json")),
    command=("mezzo", "check"),
)
with children_in_this_process(before_each=begin_anew):
    outcome = try_patch(request, make_patch(Path(script), policy=policy), Path(folder))
print(json.dumps([outcome.may_be_offered, outcome.same_losses, outcome.tried_as, [r.reason for r in outcome.reasons]]))
