"""``mezzo check`` on the command line: on small scripts, interrupted and resumed, with its answer in the terminal and in its record."""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from helpers_launch import Children, ThreeAtOnce, children_in_this_process
from mezzo import cli
from mezzo.cli.machines import Machine
from mezzo.cli.script import Script
from mezzo.cli.values import Budget
from mezzo.cli.words import TYPED_WORDS
from mezzo.commands.check.command import CheckOptions, _commands, time_for_runs_s
from mezzo.devices import Device
from mezzo.gpus import gpu_named
from mezzo.measure.doctor import Facts
from mezzo.records import CheckRecord, read_record
from paths import SCRIPTS

PLAIN = str(SCRIPTS / "plain.py")


def checked(*words: str, children: Children | None = None) -> int:
    with children_in_this_process(before_each=children or Children()):
        return cli.main(["check", *words])


def record_in(folder: Path) -> CheckRecord:
    record = read_record(folder / "record.json")
    assert isinstance(record, CheckRecord)
    return record


def lines_of(text: str, words: Sequence[str]) -> list[str]:
    return [line for line in text.splitlines() if any(word in line for word in words)]


def test_commands_of_the_answer_have_the_script_s_arguments_and_what_means_the_same_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "lib")
    Path("train.py").write_text("import torch\n")
    words = ("check", "--gpu", "h100", "--metric", "acc=(.*)", "--json", "train.py", "--save", "out/{run}")
    token = TYPED_WORDS.set(words)
    try:
        script = Script(target="train.py", arguments=list(words[-2:]))
        asked = CheckOptions(script=script, budget=Budget(60.0), gpu=None, policies=None, seeds=3, metric=words[4])
        command = _commands(asked)
        assert command("run", "--policy", "bf16") == (
            "PYTHONPATH=lib mezzo run --policy bf16 --metric 'acc=(.*)' train.py --save out/run-bf16"
        )
        assert command("check", "--budget", "9m") == (
            "PYTHONPATH=lib mezzo check --budget 9m --gpu h100 --metric 'acc=(.*)' train.py --save 'out/{run}'"
        )
        assert command("python") == "PYTHONPATH=lib python train.py --save out/alone"
    finally:
        TYPED_WORDS.reset(token)


@pytest.mark.usefixtures("cpu_alone")
@pytest.mark.parametrize(("budget", "least_s", "most_s"), [("20m", 600, 1200), ("40s", 1, 38)])
def test_a_prediction_has_the_time_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: str, least_s: float, most_s: float
) -> None:
    given: list[float] = []
    monkeypatch.setattr("mezzo.commands.check.command.predicted_for", lambda *_, limit_s: given.append(limit_s))
    assert checked("--budget", budget, "--out", str(tmp_path / "out"), PLAIN, "14", children=Children()) == 0
    assert len(given) == 1
    assert least_s <= given[0] <= most_s


@pytest.mark.usefixtures("cpu_alone")
def test_one_command_ends_with_one_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    children = Children()
    out = tmp_path / "out"
    assert checked("--gpu", "a100", "--out", str(out), PLAIN, "14", children=children) == 0
    assert children.num == 9
    printed, told = capsys.readouterr()
    record = record_in(out)
    answer = record.answer
    assert (answer.decision, answer.policy) == ("use", "bf16")
    assert answer.next_command == f"mezzo run --policy bf16 {shlex.quote(PLAIN)} 14"
    assert [stage.what for stage in record.stages][:4] == [
        "this machine",
        "fp32, seed 0",
        "bf16, seed 0",
        "fp16, seed 0",
    ]
    assert {offer.what: offer.value for offer in record.offered} == {
        "fp32": "tried",
        "tf32": "left out",
        "bf16": "tried",
        "fp16": "tried",
        "fp8": "left out",
    }
    assert next(gain.kind for gain in answer.gains) == "bound"
    assert (record.gpu, record.first_steps, record.seeds) == ("A100-SXM4-80GB", None, 3)
    assert all((Path(stage.folder) / "record.json").is_file() for stage in record.stages[1:])
    box = printed[printed.index("╭") :]
    assert "Use BF16" in box.splitlines()[0]
    assert "at most" in box
    assert "a ceiling, not a prediction" in " ".join(box.replace("│", " ").split())
    assert f"mezzo run --policy bf16 {shlex.quote(PLAIN)} 14" in printed
    assert "plain.py: finding out what this machine can do" in told.splitlines()[0]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.index("Use BF16") < page.index("The comparison") < page.index("How it was found")


@pytest.mark.usefixtures("cpu_alone")
def test_ctrl_c_keeps_what_is_finished_and_the_same_command_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--seeds", "2", "--out", "out", PLAIN, "6")
    assert checked(*words, children=Children(interrupt_at=4)) == 130
    told = capsys.readouterr().err
    assert "stopped by SIGINT; what is finished is kept in out. To continue, type:" in told
    assert told.splitlines()[-1] == f"  mezzo check --resume out --seeds 2 {shlex.quote(PLAIN)} 6"
    assert not Path("out/record.json").exists()
    rest = Children()
    assert checked(*words, children=rest) == 0
    assert rest.num == 2  # of six runs, three were listed as finished, and the interrupted one ran to its end
    assert "3 finished parts of the interrupted check are reused" in capsys.readouterr().err
    resumed = record_in(Path("out"))
    assert [stage.resumed for stage in resumed.stages[1:]] == [True, True, True, True, False, False]
    again = Children()
    assert checked(*words, children=again) == 0
    assert again.num == 6  # a check that was finished is repeated: data may have changed
    assert [path.name for path in Path().iterdir()] == ["out"]


def test_several_runs_at_once_end_with_the_answer_of_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for out, jobs in ((tmp_path / "alone", ()), (tmp_path / "beside", ("--jobs", "3"))):
        if jobs:
            monkeypatch.setattr("mezzo.commands.check.command.engine_of", lambda jobs, on: ThreeAtOnce())
        children = Children()
        assert checked("--seeds", "2", "--out", str(out), *jobs, PLAIN, "6", children=children) == 0
        record = record_in(out)
        assert record.comparison is not None
        rows = [(row.policy, row.verdict, row.loss, row.num_runs) for row in record.comparison.rows]
        found.append((children.num, [(one.what, one.why, one.resumed) for one in record.stages], rows))
    assert found[0] == found[1]
    assert found[0][0] == 6


def test_another_script_starts_anew_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = Path("train.py")
    script.write_text(Path(PLAIN).read_text(encoding="utf-8"), encoding="utf-8")
    words = ("--seeds", "1", "--policies", "bf16", "--out", "out", "train.py", "5")
    assert checked(*words, children=Children(interrupt_at=2)) == 130
    script.write_text(script.read_text(encoding="utf-8") + "\n# one more line\n", encoding="utf-8")
    capsys.readouterr()
    children = Children()
    checked(*words, children=children)
    assert children.num == 2
    assert "starting over: the script's text changed since" in capsys.readouterr().err


@pytest.mark.slow
def test_a_long_script_is_judged_by_its_first_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    for name in ("torch", "mezzo.commands.check.runs", "mezzo.launch.child"):  # the budget is for the runs
        importlib.import_module(name)
    code = checked("--seeds", "1", "--policies", "bf16", "--budget", "4s", "--out", str(out), PLAIN, "10000000")
    record = record_in(out)
    assert record.first_steps is not None
    assert record.comparison is not None
    assert {len(run.steps) for run in record.comparison.runs} == {record.first_steps}
    assert {run.first_steps for run in record.comparison.runs} == {record.first_steps}
    assert code == (record.answer.decision not in ("use", "stay"))
    plural = "s" * (record.first_steps != 1)
    assert f"judged by the first {record.first_steps} step{plural} only" in capsys.readouterr().out


def test_json_is_the_record_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checked("--json", "--seeds", "1", "--policies", "bf16", "--out", str(tmp_path / "out"), PLAIN, "5")
    printed = json.loads(capsys.readouterr().out)
    assert printed["kind"] == "check"
    assert printed == json.loads((tmp_path / "out" / "record.json").read_text(encoding="utf-8"))


FAILING = [
    ("raise RuntimeError('no data')\n", 1, "its first run, in fp32, failed: RuntimeError: no data"),
    ("print('nothing to train')\n", 7, "its first run, in fp32, failed: train.py ended without a training step"),
    ("import sys\nsys.exit(3)\n", 3, "its first run, in fp32, failed: the run ended without a training step"),
]


@pytest.mark.parametrize(("script", "code", "why"), FAILING)
def test_a_script_that_fails_keeps_its_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    code: int,
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    Path("train.py").write_text(script, encoding="utf-8")
    children = Children()
    assert checked("--out", "out", "train.py", children=children) == code
    assert children.num == 1
    answer = record_in(Path("out")).answer
    assert answer.decision == "failed"
    assert answer.why.startswith(why)
    assert answer.next_command == "python train.py"
    assert "No answer: train.py did not train" in capsys.readouterr().out


def test_a_syntax_error_is_shown_as_python_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("def f(:\n", encoding="utf-8")
    assert checked("train.py") == 1
    assert "SyntaxError" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_an_unknown_gpu_is_refused_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    children = Children()
    assert checked("--gpu", "a1000", PLAIN, children=children) == 2
    assert children.num == 0
    assert "is not a GPU that Mezzo knows; did you mean a10" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (
            "fp32",
            "--policies 'fp32' names nothing to compare with fp32\n  hint: type: mezzo check --policies bf16,fp16 ",
        ),
        (",", "--policies ',' contains an empty policy name\n  hint: type: mezzo check --policies fp32,bf16 "),
        ("bf61", "unknown policy 'bf61'"),
    ],
)
def test_policies_are_checked_before_anything_runs(
    policies: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    children = Children()
    assert checked("--policies", policies, PLAIN, children=children) == 2
    assert children.num == 0
    assert f"mezzo: {message}" in capsys.readouterr().err


def test_a_patch_that_cannot_be_offered_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    checked("--write-patch", "--seeds", "1", "--policies", "bf16", "--out", str(out), PLAIN, "5")
    assert "--write-patch: no patch, because" in capsys.readouterr().err
    assert record_in(out).patch == ""


def test_a_patch_is_not_tried_for_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mezzo.commands.check.command.engine_of", lambda jobs, on: ThreeAtOnce())
    assert checked("--write-patch", "--on", "ray", PLAIN) == 2
    assert "--write-patch with --on ray; allowed: one of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("budget_s", "kind", "gpu", "framework", "runs_s"),
    [
        (90.0, "cpu", None, "torch", 67.5),
        (600.0, "cpu", None, "torch", 570.0),
        (90.0, "cuda", None, "torch", 88.0),
        (90.0, "cuda", "t4", "torch", 67.5),
        (90.0, "cpu", None, "keras", 88.0),
        (2.0, "cuda", None, "torch", 1.0),
    ],
)
def test_time_is_kept_for_the_prediction(
    budget_s: float, kind: str, gpu: str | None, framework: str, runs_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Script, "framework", framework)
    monkeypatch.setattr(Budget, "spent_s", 0.0)
    asked = CheckOptions(
        script=Script(target="train.py", arguments=[]),
        budget=Budget(budget_s),
        gpu=None if gpu is None else gpu_named(gpu),
        policies=None,
        seeds=3,
        metric=None,
    )
    machine = Machine(facts=Facts(devices=(Device(kind=kind, name="here"),)), name="this machine")
    assert time_for_runs_s(asked, machine) == runs_s
    own = replace(asked, gpu=None, beside=asked.gpu)  # this machine's own GPU is predicted beside what is measured
    assert time_for_runs_s(own, machine) == runs_s
