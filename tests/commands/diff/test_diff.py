"""``mezzo diff`` from outside: two policies, two scripts, two records, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers_diff import text_of
from helpers_launch import children_in_this_process
from helpers_values import record_at
from mezzo.cli import main
from mezzo.records import DiffRecord
from paths import SCRIPTS

MASKS = str(SCRIPTS / "diff" / "masks.py")
NEAREST = ('mode="bilinear", align_corners=False', 'mode="nearest"')
LONGER = ("range(2)", "range(3)")


def script(folder: Path, old: str = "", new: str = "", *, name: str = "other.py") -> str:
    path = folder / name
    path.write_text(text_of("masks").replace(old, new) if old else text_of("masks"))
    return str(path)


def diff(folder: Path, *words: str) -> tuple[int, DiffRecord]:
    """Return the exit code of the command, and its record."""
    with children_in_this_process():
        code = main(["diff", "--out", str(folder), *words])
    return code, record_at(folder / "record.json", DiffRecord)


def fingerprints(folder: Path, target: str, *words: str) -> str:
    with children_in_this_process():
        assert main(["run", "--policy", "fp32", "--fingerprints", *words, "--out", str(folder), target]) == 0
    return str(folder / "record.json")


def test_two_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, record = diff(tmp_path / "out", "--policies", "fp32,bf16", MASKS)
    assert (code, record.verdict, record.mode) == (0, "rounding", "policies")
    assert (record.name_a, record.name_b, record.steps) == ("fp32", "bf16", [1, 2])
    assert record.has_control
    assert record.beginnings == []
    assert {trial.policy for trial in record.trials} >= {"fp16", "bf16:fp32_modules=out"}
    assert all(trial.distance > 0 for trial in record.trials)
    assert "masks.py, fp32 and bf16 are apart by rounding alone" in capsys.readouterr().out
    assert (tmp_path / "out" / "report.html").is_file()


def test_two_scripts(tmp_path: Path) -> None:
    code, record = diff(tmp_path / "out", "--steps", "1", MASKS, script(tmp_path, *NEAREST))
    (one,) = record.beginnings
    assert (code, record.verdict, record.mode, record.steps) == (1, "beyond rounding", "scripts", [1])
    assert (one.b.op, one.b.module, one.b.phase, one.b.step, one.by) == (
        "interpolate",
        "Masks",
        "forward",
        1,
        "settings",
    )
    assert one.b.line.endswith("other.py:29")
    assert one.a.line.endswith("masks.py:29")
    assert one.distance > 1e3 * one.allowed


def test_the_same_script_twice_is_identical_and_needs_no_more_runs(tmp_path: Path) -> None:
    code, record = diff(tmp_path / "out", MASKS, script(tmp_path))
    assert (code, record.verdict, record.has_control) == (0, "identical", False)
    assert record.num_identical == record.num_paired == record.num_values > 200


def test_scripts_with_other_numbers_of_steps_are_not_called_identical(tmp_path: Path) -> None:
    longer = script(tmp_path, *LONGER)
    code, record = diff(tmp_path / "out", "--steps", "3", MASKS, longer)
    assert (code, record.verdict) == (1, "failed")
    assert record.why == "the first run has 2 steps and the second 3: compare 2, with --steps 2"
    code, record = diff(tmp_path / "two", "--steps", "2", MASKS, longer)
    assert (code, record.verdict, record.steps) == (0, "identical", [1, 2])


def test_records(tmp_path: Path) -> None:
    a = fingerprints(tmp_path / "a", MASKS)
    b = fingerprints(tmp_path / "b", script(tmp_path, *NEAREST), "--seed", "0")
    code, record = diff(tmp_path / "out", a, b)
    assert (code, record.mode, record.verdict, record.has_control) == (1, "records", "beyond rounding", False)
    assert record.beginnings[0].b.op == "interpolate"
    code, record = diff(tmp_path / "same", a, str(tmp_path / "a"))
    assert (code, record.verdict) == (0, "identical")


def test_a_record_without_fingerprints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with children_in_this_process():
        assert main(["run", "--policy", "fp32", "--out", str(tmp_path / "a"), MASKS]) == 0
    record = str(tmp_path / "a" / "record.json")
    assert main(["diff", record, record]) == 8
    assert f"there are no fingerprints at {tmp_path / 'a' / 'values.npz'}" in capsys.readouterr().err


def test_a_record_of_another_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diff(tmp_path / "out", MASKS, script(tmp_path))
    record = str(tmp_path / "out" / "record.json")
    capsys.readouterr()
    assert main(["diff", record, record]) == 2
    assert "the record of mezzo diff has no fingerprints" in capsys.readouterr().err


def test_a_script_that_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = script(tmp_path, name="nothing.py")
    Path(nothing).write_text("import torch\nprint(torch.ones(1))\n")
    code, record = diff(tmp_path / "out", nothing, MASKS)
    assert (code, record.verdict) == (7, "failed")
    assert record.why.startswith(f"nothing.py: {nothing} ended without a training step: it never called backward()")


def test_a_script_that_fails(tmp_path: Path) -> None:
    code, record = diff(tmp_path / "out", MASKS, script(tmp_path, "loss.backward()", "raise ValueError('no')"))
    assert (code, record.verdict) == (1, "failed")
    assert record.why.startswith("other.py: ")
    assert "ValueError: no" in record.why


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([MASKS], "there is nothing to compare the script with; allowed: --policies A,B, --checkout COMMIT, "),
        (["--policies", "fp32,bf16", "--compile", MASKS], "--policies and --compile were given; allowed: one of them"),
        (["--ranks", "1,1", MASKS], "--ranks 1,1; allowed: two different numbers of processes"),
        (["record.json", "a.json", "b.json"], "mezzo diff record.json has 2 records to compare it with; allowed: one"),
        (["--compile", "a.json", "b.json"], "--compile was given with two records, which are over; allowed: no option"),
        (
            ["--steps", "2", "a.json", "b.json"],
            "--steps was given with two records, which are over; allowed: no option",
        ),
        (["record.json"], "mezzo diff record.json has 0 records to compare it with; allowed: one"),
        (
            ["--compile", "keras.py"],
            "mezzo diff was given for a Keras on tensorflow script, and compiled steps hide their values",
        ),
    ],
)
def test_what_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keras.py").write_text("import keras\n")
    assert main(["diff", *words]) == (7 if "keras.py" in words else 2)
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["keras.py"]


SUMS = str(SCRIPTS / "diff" / "sums.py")


def test_products_added_up_in_fewer_bits(tmp_path: Path) -> None:
    """The first difference is the first sum of 4096 products, and what helps is to add up in FP32 after every 128."""
    policies = "fp8,fp8:accumulate=fp22"
    code, record = diff(tmp_path / "out", "--policies", policies, "--steps", "1", SUMS, "0", "1e-5")
    assert (code, record.verdict) == (0, "rounding")
    assert record.first is not None
    assert (record.first.b.op, record.first.b.module, record.first.b.phase) == ("linear", "wide", "forward")
    assert 0.05 < record.first.distance < 0.1
    shares = {trial.policy: trial.share for trial in record.trials}
    assert shares["fp8:accumulate=fp22-128"] > 0.9
    assert "fp8" not in shares  # the first run


def test_gradients_added_up_in_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each small gradient is 0.0015 of the large one: less than half a unit, which is 2^-9 to 2^-8 of the sum. All 31 are lost."""
    policies = "fp32,fp32:gradients=bf16"
    code, record = diff(tmp_path / "out", "--policies", policies, "--steps", "1", SUMS, "31", "1e-5")
    assert (code, record.verdict) == (1, "beyond rounding")
    assert {(one.b.op, one.b.phase) for one in record.beginnings} == {("accumulate_grad", "backward")}
    gradients = next(one.distance for one in record.outcomes if one.what == "gradients")
    lost = 31 * 0.0015 / (1 + 31 * 0.0015)
    assert gradients == pytest.approx(lost, abs=2.0**-8)  # the large one is rounded, too
    assert "mezzo compare --policies fp32,fp32:gradients=bf16" in capsys.readouterr().out
