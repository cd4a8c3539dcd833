"""``mezzo diagnose`` and ``mezzo.diagnose`` from outside: commands, exit codes, several processes, views, errors."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import mezzo
from forked_processes import in_forks
from helpers_backward import BOTH_WAYS
from helpers_launch import children_in_this_process
from mezzo import ScriptError, SessionError, cli
from mezzo.records import DiagnoseRecord, read_record
from mezzo.report.html import render_html
from mezzo.report.pages import page_of
from mezzo.report.terminal import render
from paths import FAULTS, SCRIPTS

FAULTY = str(FAULTS / "faults.py")
PARALLEL = str(FAULTS / "parallel.py")


@BOTH_WAYS
def test_the_command_finds_a_fault_in_three_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with children_in_this_process():
        assert cli.main(["diagnose", "--out", str(tmp_path), FAULTY, "late_log"]) == 1
    record = read_record(tmp_path / "record.json")
    assert isinstance(record, DiagnoseRecord)
    assert (record.verdict, record.module, record.op, record.step) == ("invalid_operation", "1", "log", 7)
    assert [p.watched for p in record.passes] == [[1, 2, 4], [6, 7], [7]]
    assert record.run.script == FAULTY
    assert {p.name for p in tmp_path.iterdir()} >= {"record.json", "report.html", "pass2.log", "pass3.log"}
    shown = capfd.readouterr().out
    assert "invalid operation in step 7, forward pass of 1" in shown
    assert "y = torch.log(x.clamp_min(1e-6))" in shown


def test_a_healthy_script_ends_with_code_0_and_json_on_standard_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["diagnose", "--json", "--steps", "4", "--out", str(tmp_path), FAULTY, "healthy_few_skips"]
    with children_in_this_process():
        assert cli.main(words) == 0
    printed = json.loads(capfd.readouterr().out)
    assert (printed["kind"], printed["verdict"], len(printed["run"]["steps"]["loss"])) == ("diagnose", "healthy", 4)


TRAINS = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
"""
SHAPES = "import torch\ntorch.nn.Linear(4, 1)(torch.ones(3))"
ENDINGS = [
    # the script, its exit code, steps, part of the sentence
    ("raise SystemExit(3)", 3, 0, "the script ended before its first training step, with exit code 3"),
    ("print('nothing')", 7, 0, "never called backward()"),
    (
        f"{TRAINS}raise KeyError('mine')",
        1,
        3,
        "the script ended after 3 training steps, with exit code 1: KeyError: 'mine'",
    ),
    (
        f"{TRAINS}raise SystemExit(5)",
        5,
        3,
        "the script ended after 3 training steps, with exit code 5. No fault was found",
    ),
    (
        f"{TRAINS}raise KeyboardInterrupt",
        130,
        3,
        "the script was interrupted after 3 training steps, with exit code 130",
    ),
    (SHAPES, 1, 0, "with exit code 1: RuntimeError: mat1 and mat2"),
]


@pytest.mark.parametrize(("text", "code", "steps", "sentence"), ENDINGS, ids=[e[0][-24:] for e in ENDINGS])
def test_a_run_that_ends_by_itself_is_never_called_healthy(
    text: str, code: int, steps: int, sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(text)
    with children_in_this_process():
        assert (
            cli.main(["diagnose", "--policy", "bf16:arithmetic=emulated", "--out", str(tmp_path / "out"), str(script)])
            == code
        )
    record = read_record(tmp_path / "out" / "record.json")
    assert isinstance(record, DiagnoseRecord)
    assert (record.verdict, record.located, len(record.run.steps)) == ("unfinished", False, steps)
    assert sentence in record.detail
    shown = capfd.readouterr()
    assert "no verdict" in shown.out
    assert "healthy" not in shown.out + shown.err
    assert len(record.passes) == 1  # the step that raised was inspected


def test_an_error_that_fp32_raises_too_is_no_fault_of_the_format(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fails.py").write_text(SHAPES)
    words = [
        "diagnose",
        "--policy",
        "bf16:arithmetic=native",
        "--out",
        str(tmp_path / "out"),
        str(tmp_path / "fails.py"),
    ]
    with children_in_this_process():
        assert cli.main(words) == 1
    record = read_record(tmp_path / "out" / "record.json")
    assert isinstance(record, DiagnoseRecord)
    assert (record.verdict, record.op, record.fix) == ("unfinished", "addmm", "")
    assert record.fix_note == "the error is the same in FP32: the format is not its cause"
    assert record.fix_note in capfd.readouterr().out.replace("\n", " ")


def test_a_pattern_that_matches_no_module_is_an_error_before_the_first_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["diagnose", "--policy", "fp16:fp32_modules=o", "--out", str(tmp_path), FAULTY, "healthy_plain"]
    with children_in_this_process():
        assert cli.main(words) == 2
    record = read_record(tmp_path / "record.json")
    assert isinstance(record, DiagnoseRecord)
    assert (record.verdict, len(record.run.steps), len(record.passes)) == ("unfinished", 0, 1)
    assert "no module is named 'o'; allowed: 0, 1, 2" in capfd.readouterr().err


@pytest.mark.slow
def test_a_script_that_trains_in_a_thread_is_healthy(tmp_path: Path) -> None:
    assert cli.main(["diagnose", "--out", str(tmp_path), str(SCRIPTS / "threads.py")]) == 0


@pytest.mark.slow
def test_two_processes_end_together_and_name_the_one_at_fault(tmp_path: Path) -> None:
    ended = in_forks(["diagnose", "--out", str(tmp_path), PARALLEL, "3"], folder=tmp_path)
    assert [one.code for one in ended] == [1, 1], ended
    first = read_record(tmp_path / "record.json")
    assert isinstance(first, DiagnoseRecord)
    assert (first.verdict, first.module, first.step) == ("invalid_operation", "0", 3)
    assert [one.policy for one in first.passes] == ["fp16", "fp16", "fp32"]  # each in both processes
    assert ("found by", "the process of rank 1") in [(n.what, n.value) for n in first.notes]


# --- in this process -----------------------------------------------------------------------------


def training(change: Any = None, *, steps: int = 5) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for step in range(1, steps + 1):
            x = torch.ones(2, 4) * step
            out = model(x)
            loss = out.square().mean() if change is None else change(step, out)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train


@BOTH_WAYS
def test_a_function_is_diagnosed_in_its_own_precision() -> None:
    def change(step: int, out: torch.Tensor) -> torch.Tensor:
        return (out - out.detach() if step == 3 else out).abs().sqrt().mean()

    record = mezzo.diagnose(training(change))
    assert (record.verdict, record.op, record.phase, record.step) == ("invalid_operation", "sqrt", "backward", 3)
    assert record.module == "(script)"
    assert record.passes[0].watched == [1, 2, 3]
    assert [t.step for t in record.trend] == [1, 2, 3]
    assert math.isnan(record.trend[-1].grad_norm)


def test_a_healthy_function_is_ended_after_its_steps() -> None:
    record = mezzo.diagnose(training(steps=50), policy="fp16", steps=4)
    assert (record.verdict, len(record.run.steps)) == ("healthy", 4)


def test_an_error_that_is_no_fault_of_numbers_is_raised() -> None:
    def change(step: int, out: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        mezzo.diagnose(training(change))


@pytest.mark.parametrize("values", [{"steps": 0}, {"train": 3}])
def test_wrong_arguments_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(SessionError, match="steps 1 or more"):
        mezzo.diagnose(**{"train": training(), **values})


def test_a_function_that_never_trains_is_refused() -> None:
    with pytest.raises(ScriptError, match="without a training step"):
        mezzo.diagnose(lambda: None)


# --- views ---------------------------------------------------------------------------------------


def found() -> DiagnoseRecord:
    return mezzo.diagnose(training(lambda step, out: (F.relu(out) * 0 * float(step)).log().mean()), policy="fp16")


def test_views_say_verdict_place_and_fix() -> None:
    record = found()
    page = page_of(record)
    assert page.answer.sentence.endswith("under fp16: undecided in step 1, forward pass of (script)")
    assert ("undecided", "perhaps invalid operation") in [
        (note.what, note.value) for note in page.facts("How it was found")
    ]
    assert {f.what: f.value for f in page.facts("Where")} == {
        "module": "(script)",
        "operation": "log",
        "line": record.line,
        "step": "1",
        "phase": "forward",
        "loss scale": "65536",
    }
    output = io.StringIO()
    render(record, Console(file=output, width=200))
    for text in (output.getvalue(), render_html(record)):
        assert "y = torch.log(x.clamp_min(1e-6))" in text
        assert "not tried: it is a change of the script itself" in text
        assert "Skipped updates are normal" not in text  # none was skipped


def test_names_from_a_script_are_escaped_in_the_page() -> None:
    record = found().model_copy(update={"module": "<script>x</script>", "fix_line": "a < b"})
    page = render_html(record)
    assert "<script>x</script>" not in page
    assert "a &lt; b" in page
