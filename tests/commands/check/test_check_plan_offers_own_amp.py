"""Mixed precision that a script switches on by itself, read from its source."""

from __future__ import annotations

import pytest

from mezzo.commands.check.plan import own_amp
from paths import SCRIPTS


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("with torch.autocast('cuda', dtype=torch.float16): loss = f(x)", "autocast"),
        ("scaler = torch.amp.GradScaler()", "GradScaler"),
        ("scaler = GradScaler(enabled=args.amp)", "GradScaler"),
        ("scaler = GradScaler(enabled=False)", ""),
        ("# torch.autocast('cuda') would be faster\nx = 'GradScaler()'", ""),
        ("trainer = Trainer(precision='16-mixed')", "precision='16-mixed'"),
        ("trainer = Trainer(precision='bf16-mixed', max_epochs=3)", "precision='bf16-mixed'"),
        ("trainer = Trainer(precision=16)", "precision=16"),
        ("trainer = Trainer(precision='32-true')", ""),
        ("trainer = Trainer(precision=32)", ""),
        ("accelerator = Accelerator(mixed_precision='fp16')", "mixed_precision='fp16'"),
        ("accelerator = Accelerator(mixed_precision='no')", ""),
        ("args = TrainingArguments('out', fp16=True)", "fp16=True"),
        ("args = TrainingArguments('out', fp16=False, bf16=True)", "bf16=True"),
        ("torch.set_float32_matmul_precision('high')", ""),
        ("print(round(x, precision='4'))", ""),
        ("with session.autocast(): f(x)\nsession = mezzo.Session(model, optimizer)", "mezzo.Session"),
        ("from mezzo import Session\nsession = Session(model, optimizer)", "mezzo.Session"),
        ("session = requests.Session()", ""),
        ("from requests import Session\nsession = Session()", ""),
        ("from mezzo import Policy\npolicy = Policy.parse('fp16')", ""),
        ("def f(:", ""),
    ],
)
def test_what_asks_for_mixed_precision(source: str, found: str) -> None:
    assert own_amp([source]) == found


@pytest.mark.parametrize(("name", "asks"), [("own_amp", True), ("plain", False), ("gan", False)])
def test_scripts(name: str, asks: bool) -> None:
    assert bool(own_amp([(SCRIPTS / f"{name}.py").read_text(encoding="utf-8")])) == asks


def test_the_first_file_that_asks_is_named() -> None:
    assert own_amp(["x = 1", "GradScaler()", "autocast('cuda')"]) == "GradScaler"
