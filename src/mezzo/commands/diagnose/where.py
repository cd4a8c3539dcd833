"""The place for the line of a fix, for each kind of script. Imports no torch.

A fix is a policy, on the command line or in code, or a line of the script.
"""

from __future__ import annotations

import re
from typing import Literal

from mezzo.records import DiagnoseRecord

Caller = Literal["loop", "session", "own_amp", "lightning", "fabric", "accelerate", "transformers", "function"]
"""The code that trains: a loop that calls torch, a loop with a ``mezzo.Session`` or with its own autocast or GradScaler, a library, or a
function passed to ``mezzo.diagnose``."""

_POLICY = re.compile(r'policy = "([^"]+)"')
_SESSION = 'mezzo.Session(model, optimizer, policy="{policy}")'
_IN_CODE: dict[Caller, str] = {
    "lightning": 'Trainer(plugins=mezzo.compat.lightning.MezzoPrecision("{policy}"))',
    "fabric": 'Fabric(plugins=mezzo.compat.lightning.MezzoFabricPrecision("{policy}"))',
    "accelerate": 'mezzo.compat.accelerate.MezzoAccelerator(policy="{policy}")',
    "transformers": 'mezzo.compat.transformers.MezzoTrainer(..., policy="{policy}")',
}
"""How to pass a policy to a library that trains."""
_SCALER: dict[Caller, str] = {
    "lightning": "pass it on: Trainer(plugins=MixedPrecision('16-mixed', 'cuda', scaler=scaler))",
    "fabric": "pass it on: Fabric(plugins=MixedPrecision('16-mixed', scaler=scaler))",
    "accelerate": "Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale={scale})]), which creates the scaler",
    "transformers": "TrainingArguments cannot pass it: type mezzo run --policy fp16:init_scale={scale}",
}
"""How to set the initial loss scale of a library's scaler."""
_BF16: dict[Caller, str] = {
    "lightning": 'Trainer(precision="bf16-mixed")',
    "fabric": 'Fabric(precision="bf16-mixed")',
    "accelerate": 'Accelerator(mixed_precision="bf16")',
    "transformers": "TrainingArguments(bf16=True)",
}
"""The argument that turns on BF16 autocast in a library."""


def where_to_write(record: DiagnoseRecord, caller: Caller) -> str:
    """Return where to write the record's line; empty if it has none."""
    line, module = record.fix_line, record.module or "the model"
    if not line:
        return ""
    if named := _POLICY.search(line):
        if record.session_policy:
            return f"in code: {_SESSION.format(policy=named[1])}; or on the command line, in its place: --policy {named[1]}"
        return _policy(named[1], line, caller, record.run.framework)
    at = f"at {record.line}" if record.line else "in the script"
    if record.run.framework.startswith("keras"):
        return _keras(line, at)
    if "GradScaler(" in line:
        scale = re.search(r"init_(?:scale|loss_scaling)=([\d.]+)", line)
        known = _SCALER.get(caller, "") if scale else ""
        if known and scale:
            return known.format(scale=scale[1])
        return "where the script creates its GradScaler" if record.own_scaler else "before the training loop"
    if "enabled=False" in line or "enable=False" in line:
        return f"in the forward of {module}, around its operations"
    if "autocast(" in line or "auto_cast(" in line:
        return _BF16.get(caller, "in place of the script's own autocast, and without its GradScaler")
    if "clip_grad_norm_(" in line:
        return "between loss.backward() and optimizer.step()"
    if ".isfinite(batch)" in line:
        return "where the script reads a batch"
    return at


def _policy(policy: str, line: str, caller: Caller, framework: str) -> str:
    """Return how to pass a policy: on the command line, or in code."""
    typed = f"on the command line: --policy {policy}"
    if framework.startswith("paddle"):
        return (
            f"{typed}; in code: the line before #, where the script turns on mixed precision" if "#" in line else typed
        )
    if caller == "function":
        return f"in code: {_SESSION.format(policy=policy)}"
    inside = _IN_CODE.get(caller, _SESSION).format(policy=policy)
    removed = ", without the script's autocast and GradScaler" if caller == "own_amp" else ""
    return f"{typed}; in code: {inside}{removed}"


def _keras(line: str, at: str) -> str:
    """Return where a line of Keras belongs."""
    places = []
    if "set_dtype_policy" in line:
        places.append("before the first layer is created")
    if "LossScaleOptimizer" in line or "clipnorm" in line:
        places.append("where the optimizer is created, before model.compile()")
    if "dtype=" in line and "set_dtype_policy" not in line:
        places.append("where the layer is created")
    return "; ".join(places) or at
