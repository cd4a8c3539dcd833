"""Where the line of a fix belongs, for each kind of script."""

from __future__ import annotations

import pytest

from mezzo.commands.diagnose.where import Caller, where_to_write
from mezzo.records import DiagnoseRecord
from record_builders import run_record

accelerate, lightning, transformers = (
    pytest.importorskip(f"mezzo.compat.{name}") for name in ("accelerate", "lightning", "transformers")
)

POLICY = 'policy = "fp16:fp32_modules=head"'
TYPED = "on the command line: --policy fp16:fp32_modules=head"


def found(fix_line: str, *, framework: str = "torch 2.13.0", **fields: object) -> DiagnoseRecord:
    facts = {"verdict": "range_overflow", "module": "head", "line": "train.py:12", "fix_line": fix_line}
    return DiagnoseRecord.model_validate({"run": run_record("fp16", framework=framework), **facts, **fields})


@pytest.mark.parametrize(
    ("caller", "where"),
    [
        ("loop", f'{TYPED}; in code: mezzo.Session(model, optimizer, policy="fp16:fp32_modules=head")'),
        ("session", f'{TYPED}; in code: mezzo.Session(model, optimizer, policy="fp16:fp32_modules=head")'),
        (
            "own_amp",
            f'{TYPED}; in code: mezzo.Session(model, optimizer, policy="fp16:fp32_modules=head"), '
            "without the script's autocast and GradScaler",
        ),
        (
            "lightning",
            f'{TYPED}; in code: Trainer(plugins=mezzo.compat.lightning.MezzoPrecision("fp16:fp32_modules=head"))',
        ),
        (
            "fabric",
            f'{TYPED}; in code: Fabric(plugins=mezzo.compat.lightning.MezzoFabricPrecision("fp16:fp32_modules=head"))',
        ),
        (
            "accelerate",
            f'{TYPED}; in code: mezzo.compat.accelerate.MezzoAccelerator(policy="fp16:fp32_modules=head")',
        ),
        (
            "transformers",
            f'{TYPED}; in code: mezzo.compat.transformers.MezzoTrainer(..., policy="fp16:fp32_modules=head")',
        ),
        ("function", 'in code: mezzo.Session(model, optimizer, policy="fp16:fp32_modules=head")'),
    ],
)
def test_a_policy_is_typed_or_passed(caller: Caller, where: str) -> None:
    assert where_to_write(found(POLICY), caller) == where


def test_the_named_interfaces_exist() -> None:
    for module, name in (
        (lightning, "MezzoPrecision"),
        (lightning, "MezzoFabricPrecision"),
        (accelerate, "MezzoAccelerator"),
        (transformers, "MezzoTrainer"),
    ):
        assert hasattr(module, name), (module.__name__, name)


SCALER = "scaler = torch.amp.GradScaler(init_scale=1024.0)"


@pytest.mark.parametrize(
    ("line", "caller", "fields", "where"),
    [
        (SCALER, "own_amp", {"own_scaler": True}, "where the script creates its GradScaler"),
        (SCALER, "loop", {}, "before the training loop"),
        (
            SCALER,
            "lightning",
            {"own_scaler": True},
            "pass it on: Trainer(plugins=MixedPrecision('16-mixed', 'cuda', scaler=scaler))",
        ),
        (
            SCALER,
            "accelerate",
            {"own_scaler": True},
            "Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)]), which creates the scaler",
        ),
        (
            SCALER,
            "transformers",
            {"own_scaler": True},
            "TrainingArguments cannot pass it: type mezzo run --policy fp16:init_scale=1024.0",
        ),
        (
            "with torch.autocast(x.device.type, enabled=False):  # in their forward, on x.float()",
            "own_amp",
            {},
            "in the forward of head, around its operations",
        ),
        (
            "torch.autocast(device_type, dtype=torch.bfloat16)  # and no GradScaler",
            "own_amp",
            {},
            "in place of the script's own autocast, and without its GradScaler",
        ),
        (
            "torch.autocast(device_type, dtype=torch.bfloat16)  # and no GradScaler",
            "transformers",
            {},
            "TrainingArguments(bf16=True)",
        ),
        ("clip_grad_norm_(parameters, 1.0)", "loop", {}, "between loss.backward() and optimizer.step()"),
        ("assert torch.isfinite(batch).all()", "loop", {}, "where the script reads a batch"),
        ("y = torch.sqrt(x + 1e-12)", "loop", {}, "at train.py:12"),
        ("y = torch.sqrt(x + 1e-12)", "loop", {"line": ""}, "in the script"),
        ("", "loop", {}, ""),
    ],
)
def test_a_line_of_the_script_has_a_place(line: str, caller: Caller, fields: dict[str, object], where: str) -> None:
    assert where_to_write(found(line, **fields), caller) == where


KERAS = "keras 3.15.1 on torch 2.13.0"


@pytest.mark.parametrize(
    ("framework", "line", "where"),
    [
        (KERAS, 'keras.config.set_dtype_policy("mixed_bfloat16")', "before the first layer is created"),
        (KERAS, 'dtype="float32"  # argument of the layer head', "where the layer is created"),
        (
            KERAS,
            "optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=256.0)",
            "where the optimizer is created, before model.compile()",
        ),
        (KERAS, "y = keras.ops.sqrt(x + 1e-12)", "at train.py:12"),
        (
            "paddle 3.3.0",
            f"with paddle.amp.auto_cast(enable=False):  # {POLICY}",
            f"{TYPED}; in code: the line before #, where the script turns on mixed precision",
        ),
        (
            "paddle 3.3.0",
            "with paddle.amp.auto_cast(enable=False):  # in their forward",
            "in the forward of head, around its operations",
        ),
        ("paddle 3.3.0", POLICY, TYPED),
        ("paddle 3.3.0", "y = paddle.sqrt(x + 1e-12)", "at train.py:12"),
    ],
)
def test_keras_and_paddle_have_places_of_their_own(framework: str, line: str, where: str) -> None:
    assert where_to_write(found(line, framework=framework), "loop") == where
