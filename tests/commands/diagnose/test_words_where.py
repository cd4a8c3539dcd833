"""Where the line of a fix belongs, for each kind of script."""

from __future__ import annotations

import ast

import pytest

from mezzo.commands.diagnose import offers
from mezzo.commands.diagnose.offers import Offer
from mezzo.commands.diagnose.words import TrainingStyle, applies, written
from mezzo.frameworks import framework_called, keras
from mezzo.observe.settings import TrialChanges
from mezzo.policy import Policy
from mezzo.records import DiagnoseRecord
from record_builders import run_record

FP16 = Policy.parse("fp16")
accelerate, lightning, transformers = (
    pytest.importorskip(f"mezzo.compat.{name}") for name in ("accelerate", "lightning", "transformers")
)

POLICY = "fp16:fp32_modules=head"
TYPED = f"on the command line: --policy {POLICY}"
KEEP = Offer("keep head in FP32", policy=Policy.parse(POLICY))


def found(*, framework: str = "torch 2.13.0", policy: str = "fp16", **fields: object) -> DiagnoseRecord:
    facts = {"verdict": "range_overflow", "module": "head", "line": "train.py:12"}
    return DiagnoseRecord.model_validate({"run": run_record(policy, framework=framework), **facts, **fields})


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
def test_a_policy_is_typed_or_passed(caller: TrainingStyle, where: str) -> None:
    assert written(KEEP, found(), FP16, caller) == (f'policy = "{POLICY}"', where, POLICY)


def test_a_session_writes_its_policy_in_code() -> None:
    where = f'in code: mezzo.Session(model, optimizer, policy="{POLICY}"); or on the command line, in its place: --policy {POLICY}'
    assert written(KEEP, found(policy="as-is", session_policy="fp16"), FP16, "lightning").where == where


def test_the_named_interfaces_exist() -> None:
    for module, name in (
        (lightning, "MezzoPrecision"),
        (lightning, "MezzoFabricPrecision"),
        (accelerate, "MezzoAccelerator"),
        (transformers, "MezzoTrainer"),
    ):
        assert hasattr(module, name), (module.__name__, name)


SCALER = Offer("begin lower", offers.new_scaler(1024.0), changes=TrialChanges(loss_scale=1024.0))
OWN = {"own_scaler": True}


@pytest.mark.parametrize(
    ("offer", "caller", "fields", "where"),
    [
        (SCALER, "own_amp", OWN, "where the script creates its GradScaler"),
        (SCALER, "loop", {}, "before the training loop"),
        (
            SCALER,
            "lightning",
            OWN,
            "pass it on: Trainer(plugins=MixedPrecision('16-mixed', 'cuda', scaler=scaler))",
        ),
        (
            SCALER,
            "accelerate",
            OWN,
            "Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)]), which creates the scaler",
        ),
        (
            SCALER,
            "transformers",
            OWN,
            "TrainingArguments cannot pass it: type mezzo run --policy fp16:init_scale=1024.0",
        ),
        (Offer("scale", offers.new_scaler()), "lightning", {}, "before the training loop"),
        (Offer("off", offers.AUTOCAST_OFF), "own_amp", {}, "in the forward of head, around its operations"),
        (
            Offer("BF16", offers.OWN_BF16),
            "own_amp",
            {},
            "in place of the script's own autocast, and without its GradScaler",
        ),
        (Offer("BF16", offers.OWN_BF16), "transformers", {}, "TrainingArguments(bf16=True)"),
        (Offer("clip", offers.CLIP), "loop", {}, "between loss.backward() and optimizer.step()"),
        (Offer("clean", offers.CHECK_DATA), "loop", {}, "where the script reads a batch"),
        (Offer("root", offers.NO_ROOT.line({"fp32"})), "loop", {}, "at train.py:12"),
        (Offer("root", offers.NO_ROOT.line({"fp32"})), "loop", {"line": ""}, "in the script"),
        (Offer("cast", offers.CAST, where="there"), "loop", {}, "there"),
        (Offer("lower the learning rate"), "loop", {}, ""),
    ],
)
def test_a_line_of_the_script_has_a_place(
    offer: Offer, caller: TrainingStyle, fields: dict[str, object], where: str
) -> None:
    line = "" if offer.line is None else offer.line.text("torch")
    assert written(offer, found(**fields), None, caller) == (line, where, "")


KERAS, PADDLE = "keras 3.15.1 on torch 2.13.0", "paddle 3.3.0"
HEAD_OFF = Offer("off", offers.AUTOCAST_OFF, changes=TrialChanges(fp32_modules=("head",)))


@pytest.mark.parametrize(
    ("framework", "offer", "expected"),
    [
        (KERAS, KEEP, ('dtype="float32"  # argument of the layer head', "where the layer is created", "")),
        (KERAS, Offer("clip", offers.CLIP), ("clipnorm=1.0  # argument of the optimizer", keras.AT_OPTIMIZER, "")),
        (
            KERAS,
            Offer("cast", offers.CAST),
            ('x = keras.ops.cast(x, "float32")  # before this line', "at train.py:12", ""),
        ),
        (
            PADDLE,
            KEEP,
            (
                f'with paddle.amp.auto_cast(enable=False):  # policy = "{POLICY}"',
                f"{TYPED}; in code: the line before #, where the script turns on mixed precision",
                POLICY,
            ),
        ),
        (
            PADDLE,
            HEAD_OFF,
            (
                'with paddle.amp.auto_cast(enable=False):  # in their forward, on x.astype("float32")',
                "in the forward of head, around its operations",
                "",
            ),
        ),
        (PADDLE, SCALER, ("scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0)", "before the training loop", "")),
        (PADDLE, Offer("as before", policy=FP16), ('policy = "fp16"', "on the command line: --policy fp16", "fp16")),
        (
            PADDLE,
            Offer("clip", offers.CLIP),
            ("paddle.nn.utils.clip_grad_norm_(parameters, 1.0)", "between loss.backward() and optimizer.step()", ""),
        ),
    ],
)
def test_keras_and_paddle_have_words_of_their_own(framework: str, offer: Offer, expected: tuple[str, str, str]) -> None:
    own = None if offer is HEAD_OFF else FP16
    assert written(offer, found(framework=framework), own, "loop") == expected


def test_no_single_operation_stays_in_fp32_in_keras() -> None:
    of_op = Offer("compute mul in FP32", policy=Policy.parse("fp16:fp32=mul"))
    assert [applies(of_op, FP16, library) for library in ("torch", "paddle", "keras")] == [True, True, False]


LINES = [value for value in vars(offers).values() if isinstance(value, offers.ScriptLine)]
LINES += [domain.line({form}) for domain in (*offers.DOMAINS, offers.NO_ROOT) for form in ("fp32", "bf16", "fp16")]
LINES += [offers.new_scaler(), offers.new_scaler(64.0)]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.text("torch"))
def test_every_line_is_python_and_names_its_own_framework_alone(line: offers.ScriptLine) -> None:
    for library in ("torch", "keras", "paddle"):
        text = line.text(library)
        code = text.partition("  #")[0]
        ast.parse(f"{code} pass" if code.endswith(":") else code)
        assert not any(other in text for other in ("torch", "keras", "paddle") if other != library)
    assert "clamp" not in line.text("paddle")


def test_no_framework_has_a_line_of_another_name() -> None:
    names = {line.name for line in LINES}
    assert [sorted({*framework_called(name).lines} - names) for name in ("keras", "paddle")] == [[], []]
