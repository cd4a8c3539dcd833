"""``mezzo tune`` on the command line: on small scripts, interrupted and resumed, with its answer in the terminal and in its record."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers_launch import Children, ThreeAtOnce, children_in_this_process
from helpers_predict import traced_in_forks
from mezzo import cli
from mezzo.records import RunRecord, TuneRecord, read_record

SCRIPT = """
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=2)
size = parser.parse_args().batch_size
if size == 5:
    raise RuntimeError("five is no size")
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(200):
    images = torch.randn(size, 1, 8, 8)
    optimizer.zero_grad()
    model(images).square().mean().backward()
    optimizer.step()
"""
SHORT = ("--steps", "10", "--seeds", "2")


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT, encoding="utf-8")


def tuned(*words: str, children: Children | None = None) -> int:
    with children_in_this_process(before_each=children or Children()):
        return cli.main(["tune", *words])


def record() -> TuneRecord:
    found = read_record(Path("out/record.json"))
    assert isinstance(found, TuneRecord)
    return found


def test_one_command_measures_and_answers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--policies", "fp16", "--changes", "channels-last", "--vary", "batch-size=4,5", *SHORT, "--out", "out")
    code = tuned(*words, "train.py")
    printed, told = capsys.readouterr()
    found = record()
    assert code == 0
    rows = {row.name: row for row in found.rows}
    assert found.decision == ("use" if any(row.state == "faster" for row in found.rows) else "keep")
    assert len(rows) == 12
    assert rows["as-is"].state == "now"
    for name, row in rows.items():
        if "batch-size 5" in name:  # a configuration that fails does not end the search
            assert (row.state, row.reason) == ("failed", "RuntimeError: five is no size")
        elif "fp16" in name:
            assert (row.state, row.reason) == ("barred", "its formats are emulated here: its speed says nothing")
    assert rows["as-is, batch-size 4"].inputs == 2.0
    assert "fp16" not in found.chosen
    assert found.next_command in printed
    assert "12 configurations, including the script as it is" in told
    run = read_record(Path("out/round1-as-is,batch-size=4,channels-last/record.json"))
    assert isinstance(run, RunRecord)
    assert (len(run.steps), run.first_steps, run.input_elements) == (10, 10, 4 * 64)
    assert "The configurations" in Path("out/report.html").read_text(encoding="utf-8")


def test_ctrl_c_keeps_what_is_finished_and_the_same_command_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--policies", "as-is", "--changes", "channels-last", *SHORT, "--out", "out", "train.py")
    assert tuned(*words, children=Children(interrupt_at=2)) == 130
    told = capsys.readouterr().err
    assert "stopped by SIGINT; what is finished is kept in out. To continue, type:" in told
    assert told.splitlines()[-1].startswith("  mezzo tune --resume out --policies as-is")
    rest = Children()
    assert tuned(*words, children=rest) == 0
    assert "1 finished runs of the interrupted search are reused" in capsys.readouterr().err
    trials = record().trials
    assert [trial.resumed for trial in trials] == [True, True] + [
        False
    ] * rest.num  # the interrupted run ran to its end


def test_several_at_once_make_the_same_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.commands.tune.command.engine_of", lambda jobs, on: ThreeAtOnce())
    children = Children()
    words = ("--policies", "as-is", "--changes", "channels-last", "--vary", "batch-size=4", *SHORT)
    assert tuned(*words, "--jobs", "3", "--out", "out", "train.py", children=children) == 0
    trials = record().trials
    assert children.num == len(trials)  # nothing ran that was not requested
    names = [trial.name for trial in trials if trial.round == "1"]
    assert names == [row.name for row in sorted(record().rows, key=lambda row: names.index(row.name))]
    assert len(names) == 4


def test_jobs_without_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    children = Children()
    assert tuned("--jobs", "2", "train.py", children=children) == 2
    assert children.num == 0
    assert "--jobs 2 without a GPU for each run; allowed: one run at a time" in capsys.readouterr().err


def test_a_script_that_fails_keeps_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", "lib")
    Path("train.py").write_text("import torch\nraise SystemExit(3)\n", encoding="utf-8")
    children = Children()
    assert tuned("--out", "out", "train.py", children=children) == 3
    assert children.num == 1
    assert (record().decision, record().next_command) == ("failed", "PYTHONPATH=lib python train.py")
    assert "No answer: train.py cannot be timed" in capsys.readouterr().out


REFUSED = [
    (("--vary", "batch-size"), "--vary 'batch-size'; allowed: an option of the script and its values"),
    (("--changes", "compil"), "--changes 'compil' names 'compil'; did you mean compile"),
    (
        ("--memory", "much"),
        "--memory 'much' is not a size; allowed: a number above 0 with a unit, such as 12GiB, 800MB or 2.5 GB",
    ),
    (
        ("--memory", "0GiB"),
        "--memory '0GiB' is not a size; allowed: a number above 0 with a unit, such as 12GiB, 800MB or 2.5 GB",
    ),
    (("--policies", "bf61"), "unknown policy 'bf61'"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_bad_options_are_refused_before_anything_runs(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    children = Children()
    assert tuned(*words, "train.py", children=children) == 2
    assert children.num == 0
    assert message in capsys.readouterr().err


def test_other_frameworks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("keras_train.py").write_text("import keras\n", encoding="utf-8")
    assert tuned("keras_train.py") == 7
    assert (
        "mezzo tune was given for a Keras on tensorflow script, and it stops runs after a number of PyTorch steps"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--memory", "8GiB"), "--memory 8GiB was given for a Keras script, whose peak memory is not measured"),
        (("--checkpoint", "full"), "--checkpoint was given for a Keras on torch script"),
        (("--changes", "compile"), "--compile was given for a Keras on torch script"),
        (("--changes", "channels-last"), "--channels-last was given for a Keras on torch script"),
    ],
)
def test_keras_on_torch_is_taken_without_changes_to_its_models(
    option: tuple[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nos.environ['KERAS_BACKEND'] = 'torch'\nimport keras\n", encoding="utf-8")
    assert cli.main(["tune", *option, str(script)]) == 7
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_alone")
def test_predictions_leave_out_what_cannot_fit_and_checkpointing_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--policies", "fp32", "--changes", "none", "--vary", "batch-size=80000", "--checkpoint", "full", *SHORT)
    with traced_in_forks():
        assert tuned(*words, "--memory", "18MiB", "--gpu", "t4", "--out", "out", "train.py") == 0
    told = capsys.readouterr().err
    assert "predicting what fits on T4, and how fast it is" in told
    rows = {row.name: row for row in record().rows}
    assert len(rows) == 8
    too_large = rows["fp32, batch-size 80000"]
    assert too_large.state == "not run"
    assert too_large.reason.startswith("predicted to need ")
    assert "MiB on T4, above the limit of 18 MiB by more than the predictor's 10%" in too_large.reason
    assert rows["as-is, batch-size 80000"].reason.startswith("it needs ")  # run: its own precision is not predicted
    assert rows["fp32, checkpointed full"].checkpoint == "full"
    notes = {note.what: note for note in record().notes}
    assert notes["predictions"].value == "1 of 8 configurations are not run"
    assert notes["not tried"].value == "CUDA graphs of whole steps"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu", "a100-80"), "--gpu 'a100-80' is not a GPU that Mezzo knows; did you mean a100-80gb"),
        (("--checkpoint", "ful"), "--checkpoint 'ful'; did you mean full"),
        (("--checkpoint", "full,12"), "--checkpoint '12'; allowed: full, every-K with a number, selective, or bytes"),
    ],
)
def test_unknown_gpus_and_plans_are_refused(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    children = Children()
    assert tuned(*words, "train.py", children=children) == 2
    assert children.num == 0
    assert message in capsys.readouterr().err
