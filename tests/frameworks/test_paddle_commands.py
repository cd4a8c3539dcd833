"""The commands on whole Paddle scripts, in processes of their own: records, rows, verdicts, errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FIT = ROOT / "tests/frameworks/scripts/paddle_fit.py"
FRAGILE = ROOT / "tests/frameworks/scripts/paddle_fragile.py"
DIGITS = ROOT / "examples/paddle_digits.py"


def mezzo(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mezzo", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)


def record_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    return found


def test_compare_on_a_script_that_fits_a_model(tmp_path: Path) -> None:
    done = mezzo(
        "compare", "--policies", "fp32,fp16", "--seeds", "1", "--metric", "acc ([0-9.]+)", "--out", tmp_path, FIT
    )
    assert done.returncode == 0, done.stderr
    rows = record_in(tmp_path)["rows"]
    assert [row["policy"] for row in rows] == ["fp32", "fp16"]
    assert (tmp_path / "report.html").is_file()


def test_run_on_the_example(tmp_path: Path) -> None:
    done = mezzo("run", "--policy", "fp16", "--out", tmp_path, DIGITS, "--epochs", "1")
    assert done.returncode == 0, done.stderr
    assert "acc 0." in done.stdout
    record = record_in(tmp_path)
    assert record["framework"] == "paddle 3.3.1"
    assert len(record["steps"]["loss"]) == 23
    assert record["steps"]["loss_scale"] == [65536.0] * 23
    assert record["effective"]["emulated"]
    assert list(record["effective"]["flops_by_format"]) == ["fp16"]
    assert record["environment"]["device"] == "cpu"


REFUSED = [
    (["--policy", "fp8"], 2, "asks for FP8, which paddle.amp does not train in; allowed: fp32, tf32, fp16"),
    (["--guard", "stop"], 7, "--guard was given for a Paddle script, and it returns PyTorch's state to a snapshot"),
]


@pytest.mark.parametrize(("options", "exit_code", "message"), REFUSED)
def test_what_cannot_be_done_ends_with_a_sentence_and_one_hint(
    tmp_path: Path, options: list[str], exit_code: int, message: str
) -> None:
    done = mezzo("run", *options, "--out", tmp_path, FIT)
    assert done.returncode == exit_code
    assert message in done.stderr
    assert (done.stdout + done.stderr).count("hint:") == 1


def test_diagnose_names_the_layer_and_tries_the_fix(tmp_path: Path) -> None:
    done = mezzo("diagnose", "--out", tmp_path, FRAGILE)
    assert done.returncode == 1, done.stderr
    found = record_in(tmp_path)
    place = [found[key] for key in ("verdict", "module", "op", "phase", "step", "format", "largest")]
    assert place == ["range_overflow", "big", "cast", "forward", 6, "fp16", 300000.0]
    assert found["line"].endswith("paddle_fragile.py:20")
    assert found["fix_tried"]
    assert found["fix_line"] == 'with paddle.amp.auto_cast(enable=False):  # policy = "fp16:fp32_modules=big"'
    assert "mezzo run --policy fp16:fp32_modules=big" in done.stdout
