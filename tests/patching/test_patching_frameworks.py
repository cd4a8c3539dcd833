"""Arguments of libraries that train: added, changed, already there, or taken from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers_patching import patch_of, refusal_of

LIGHTNING = "import lightning as L\n"
HF = "from transformers import TrainingArguments\n"
ACCELERATE = "from accelerate import Accelerator\n"

CHANGED = [
    # source, policy, line of the patched script
    (LIGHTNING + "L.Trainer()\n", "fp16", 'L.Trainer(precision="16-mixed")'),
    (LIGHTNING + "L.Trainer(max_epochs=1)\n", "bf16", 'L.Trainer(max_epochs=1, precision="bf16-mixed")'),
    (LIGHTNING + 'L.Trainer(precision="32-true")\n', "fp16", 'L.Trainer(precision="16-mixed")'),
    (LIGHTNING + "L.Trainer(precision=16)\n", "bf16-pure", 'L.Trainer(precision="bf16-true")'),
    (LIGHTNING + "L.Trainer(**options)\n", "fp16", 'L.Trainer(**options, precision="16-mixed")'),
    ("from pytorch_lightning import Trainer\nTrainer(\n)\n", "fp16", 'precision="16-mixed")'),
    ("import pytorch_lightning as pl\nt = pl.Trainer(\n\tmax_epochs=1,\n)\n", "fp16", '\tprecision="16-mixed",'),
    ("from lightning.fabric import Fabric\nFabric()\n", "fp16", 'Fabric(precision="16-mixed")'),
    (ACCELERATE + 'Accelerator(mixed_precision="no")\n', "fp16", 'Accelerator(mixed_precision="fp16")'),
    (HF + 'TrainingArguments("x", bf16=True)\n', "fp16", 'TrainingArguments("x", bf16=False, fp16=True)'),
    (HF + 'TrainingArguments("x", fp16=False)\n', "fp16", 'TrainingArguments("x", fp16=True)'),
    ("from transformers import Seq2SeqTrainingArguments as A\nA('x')\n", "bf16", "A('x', bf16=True)"),
]


@pytest.mark.parametrize(("source", "policy", "line"), CHANGED)
def test_the_argument_is_set(source: str, policy: str, line: str, tmp_path: Path) -> None:
    patch = patch_of(source, policy, tmp_path)
    assert line in patch.patched.splitlines()
    assert patch.style == "framework"
    changed = [new for new in patch.patched.splitlines() if new not in source.splitlines()]
    assert len(changed) == 1


CLI = "from lightning.pytorch.cli import LightningCLI\nLightningCLI(M)\n"
PARSER = "from transformers import HfArgumentParser\nHfArgumentParser(X)\n"
OPTION = "p.add_argument('--mixed_precision')\nAccelerator(mixed_precision=args.mixed_precision)\n"
READS = "line 2 reads the trainer's arguments"
SCALE = "fp16:init_scale=8"
REFUSED = [
    # source, policy, reason, what to do
    (LIGHTNING + 'L.Trainer(precision="16-mixed")\n', "fp16", "already has precision='16-mixed'", "nothing"),
    (HF + 'TrainingArguments("x", bf16=True)\n', "bf16", "already has bf16=True", "nothing"),
    (LIGHTNING + "L.Trainer(precision=a.p)\n", "fp16", "line 2 takes precision from a.p", "make a.p equal"),
    (
        ACCELERATE + OPTION,
        "fp16",
        "line 3 takes mixed_precision from args.mixed_precision",
        "with --mixed_precision fp16",
    ),
    (LIGHTNING + "o = {'precision': 32}\nL.Trainer(**o)\n", "fp16", "line 3 unpacks arguments", "set precision there"),
    (
        HF + 'TrainingArguments("x", bf16=on)\n',
        "fp16",
        "line 2 takes bf16 from on",
        "set fp16=True and bf16=False there",
    ),
    (ACCELERATE + "Accelerator()\n", "fp16-master", "policy fp16-master: accelerate has no", "docs/accelerate.md"),
    (LIGHTNING + "L.Trainer()\n", SCALE, f"policy {SCALE}: lightning has no such setting", "docs/lightning.md"),
    (PARSER, "fp16", READS, "--fp16"),
    (CLI, "fp16", READS, "--trainer.precision"),
]


@pytest.mark.parametrize(("source", "policy", "reason", "by_hand"), REFUSED)
def test_the_argument_is_left(source: str, policy: str, reason: str, by_hand: str, tmp_path: Path) -> None:
    outcome = refusal_of(source, policy, tmp_path)
    assert outcome.reason.startswith(reason)
    assert by_hand in outcome.by_hand
    assert outcome.already is reason.startswith("already")
