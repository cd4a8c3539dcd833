"""``mezzo predict`` on a small model, from the words typed to the record and both views."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mezzo import cli
from mezzo.measure.predict import named
from mezzo.records import PredictRecord, read_record

pytest.importorskip("transformers", reason="transformers builds the model")
TINY = {
    "tiny": {"type": "gpt2", "task": "causal", "config": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64}}
}


@pytest.fixture(autouse=True)
def _only_a_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "configurations", lambda: TINY)


def test_a_prediction_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "predict --model transformers:tiny --sequence 16 --batch 8 --gpus a100-80gb,T4 --policies fp32,tf32,bf16 --out"
    )
    assert cli.main([*words.split(), str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "runs fastest on" in shown
    assert "T4 has no units for bf16." in shown
    record = read_record(tmp_path / "out" / "record.json")
    assert isinstance(record, PredictRecord)
    assert [(one.gpu, one.policy, one.possible) for one in record.predictions] == [
        ("a100-80gb", "fp32", True),
        ("a100-80gb", "tf32", True),
        ("a100-80gb", "bf16", True),
        ("t4", "fp32", True),
        ("t4", "tf32", True),
        ("t4", "bf16", False),
    ]
    assert sum(record.predictions[0].bounds.values()) == pytest.approx(1)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Where the time and the memory go" in page
    assert "16 tokens, adamw" in page


def test_checkpointing_shows_what_it_costs_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "predict --model transformers:tiny --batch 64 --gpus a100-80gb --policies fp16 --checkpoint full,selective --out"
    assert cli.main([*words.split(), str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    record = read_record(tmp_path / "record.json")
    assert isinstance(record, PredictRecord)
    plain, full, selective = record.predictions
    assert [one.checkpoint for one in record.predictions] == ["", "full", "selective"]
    assert plain.allocated_bytes > selective.allocated_bytes > full.allocated_bytes
    assert plain.step_ms < full.step_ms
    assert "fp16, full" in shown
    assert "less, the step" in shown


def test_the_record_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "predict --model transformers:tiny --gpus all --policies fp32 --json --out"
    assert cli.main([*words.split(), str(tmp_path)]) == 0
    rates = [one["throughput"] for one in json.loads(capsys.readouterr().out)["predictions"]]
    assert len(rates) > 30
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpus h101", "'h101' is not a GPU"),
        ("--policies fp32,fp8", "--policies 'fp8' cannot be predicted"),
        ("--optimizer adamwx", "--optimizer 'adamwx' cannot be predicted"),
        ("--model transformers:tinny", "no configuration of 'tinny'"),
    ],
)
def test_bad_words(words: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = [] if "--model" in words else ["--model", "transformers:tiny"]
    assert cli.main(["predict", *model, *words.split(), "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--model", "transformers:tiny", "train.py"]], ids=["neither", "both"])
def test_a_script_or_a_model(words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["predict", "--out", str(tmp_path), *words]) == 2
    assert "predict needs a script or a model, and not both" in capsys.readouterr().err


def test_a_model_that_refuses_its_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    broken = {
        "tiny": {
            **TINY["tiny"],
            "config": {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "activation_function": "no"},
        }
    }
    monkeypatch.setattr(named, "configurations", lambda: broken)
    assert cli.main(["predict", "--model", "transformers:tiny", "--out", str(tmp_path)]) in (1, 2)
    assert "one step of transformers:tiny cannot be traced without numbers in fp32" in capsys.readouterr().err
