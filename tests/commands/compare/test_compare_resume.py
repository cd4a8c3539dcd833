"""``mezzo compare --resume``: stopped at any moment, it continues, repeats no finished run, and ends with the same record."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from helpers_launch import Children, children_in_this_process
from helpers_waiting import until
from mezzo import cli
from mezzo.records import CompareRecord, RunRecord, read_record

SCRIPT = """
import sys, torch
torch.manual_seed(0)
inputs, model = torch.randn(16, 4), torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with open("began.txt", "a") as file:
    print(sys.argv[1], file=file)
for step in range(6):
    loss = (model(inputs) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
WORDS = ("--policies", "fp32,bf16", "--gpus", "none", "--out", "out")
RUNS = ["fp32-seed0", "bf16-seed0", "bf16-seed1", "fp32-seed1"]
"""In their order: interleaved."""


@pytest.fixture(autouse=True)
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    script = Path("train.py")
    script.write_text(SCRIPT, encoding="utf-8")
    return script


def compared(*options: str, seeds: int = 2, interrupt_at: int = 0) -> tuple[int, int]:
    """Return the exit code of a comparison and the number of its runs."""
    children = Children(interrupt_at=interrupt_at)
    with children_in_this_process(before_each=children):
        code = cli.main(["compare", *options, *WORDS, "--seeds", str(seeds), "train.py", "{run}"])
    return code, children.num


def record() -> CompareRecord:
    found = read_record("out/record.json")
    assert isinstance(found, CompareRecord)
    return found


def facts(found: CompareRecord) -> list[object]:
    """Return what does not depend on the clock."""
    rows = [(row.policy, row.verdict, row.loss, row.num_runs, row.memory) for row in found.rows]
    return [found.command, rows, [(run.policy, run.seed, run.steps.loss, run.error) for run in found.runs]]


def test_a_stopped_comparison_goes_on_and_has_the_same_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(interrupt_at=3) == (130, 3)
    told = capsys.readouterr().err
    assert "stopped by SIGINT after 2 of 4 runs; their records are in out. To continue, type:" in told
    words = "mezzo compare --resume out --policies fp32,bf16 --gpus none --seeds 2 train.py '{run}'"
    assert told.splitlines()[-1] == f"  {words}"
    assert compared("--resume", "out") == (0, 1)  # here the third run has no process of its own, so it ran to its end
    assert "mezzo: 3 finished runs reused, 1 run left\n" in capsys.readouterr().err
    resumed = facts(record())
    assert Path("began.txt").read_text().split() == RUNS
    assert compared() == (0, 4)  # a finished comparison starts over: data may have changed
    assert facts(record()) == resumed
    assert [path.name for path in Path().glob("out*")] == ["out"]


def test_the_same_command_goes_on_without_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    compared(interrupt_at=2)
    assert compared() == (0, 2)
    assert "2 finished runs reused, 2 runs left" in capsys.readouterr().err


def test_more_seeds_run_only_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(seeds=1) == (0, 2)
    assert compared("--resume", "out", seeds=3) == (0, 4)
    told = capsys.readouterr().err
    assert "--seeds was 1 and is now 3; runs that belong to both are reused\n" in told
    assert "2 finished runs reused, 4 runs left" in told
    assert [(run.policy, run.seed) for run in record().runs] == [(p, s) for p in ("fp32", "bf16") for s in range(3)]
    assert compared("--resume", "out", seeds=3) == (0, 0)
    assert "6 finished runs reused, none left to run" in capsys.readouterr().err


def test_what_failed_runs_again(train: Path) -> None:
    missing = "import os\nassert os.path.exists('data')\n"
    train.write_text(missing + SCRIPT, encoding="utf-8")
    assert compared() == (7, 4)
    Path("data").touch()
    assert compared("--resume", "out") == (0, 4)
    assert all(run.error is None for run in record().runs)


ATTEMPT = """
import os, sys, time, torch
torch.manual_seed(0)
inputs, model = torch.randn(16, 4), torch.nn.Linear(4, 1)
before, last = "before-" + sys.argv[1], "last-" + sys.argv[1]
for path in (before, last):
    if os.path.exists(path):
        torch.load(path)
torch.save(inputs, before) if not os.path.exists(before) else None
time.sleep(0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(6):
    loss = (model(inputs) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.03)
    if step == 3 and os.path.exists("saves"):
        torch.save(model.state_dict(), last)
    assert step < 4 or os.path.exists("data")
"""


@pytest.mark.slow
@pytest.mark.parametrize("saves", [True, False])
def test_what_a_stopped_attempt_left_bars_the_verdict_unless_it_carries_no_training(train: Path, saves: bool) -> None:
    train.write_text(ATTEMPT, encoding="utf-8")
    if saves:
        Path("saves").touch()
    assert compared(seeds=1) == (7, 2)
    Path("data").touch()
    assert compared("--resume", "out", seeds=1) == (0, 2)
    found = [(Path(file.path).name, file.written_by, file.read_by) for file in record().shared_files]
    left = "{0} with seed 0, in an attempt that was stopped,"
    named = [(f"last-{p}-seed0", left.format(p), f"{p} with seed 0") for p in ("fp32", "bf16")]
    assert found == (named if saves else [])
    assert ("not independent" in record().rows[1].reason) == saves
    assert compared(seeds=1) == (0, 2)  # it starts over: earlier results are not its own
    assert record().shared_files == []


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def test_a_record_that_is_gone_damaged_or_of_another_run_is_missing() -> None:
    compared()
    Path("out/fp32-seed0/record.json").unlink()
    damaged(Path("out/bf16-seed0/record.json"))
    Path("out/fp32-seed1/record.json").write_bytes(Path("out/bf16-seed1/record.json").read_bytes())
    assert compared("--resume", "out") == (0, 3)
    assert [(run.policy, run.seed) for run in record().runs] == [("fp32", 0), ("fp32", 1), ("bf16", 0), ("bf16", 1)]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda: Path("train.py").write_text(SCRIPT + "# more\n"), "the script's text changed since"),
        (lambda: os.environ.update(NVIDIA_TF32_OVERRIDE="0"), "its environment variables changed since: nothing then"),
    ],
)
def test_a_changed_script_is_refused_and_named(
    change: object, why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "")  # and put back
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE")
    compared(interrupt_at=3)
    assert callable(change)
    change()
    assert compared("--resume", "out") == (2, 0)
    told = capsys.readouterr().err
    assert f"--resume cannot continue in out: {why}" in told
    assert "hint: leave out --resume to start over, or undo the change" in told
    assert compared() == (0, 4)
    assert f"starting over: {why}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "--resume 'nowhere' is not a folder; allowed: the folder that the stopped command wrote to"),
        ([".", "--out", "other"], "--resume '.' with --out 'other'; allowed: one folder"),
        (["."], "--resume: . has no comparison to continue"),
    ],
)
def test_nothing_to_go_on_with(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "--resume", *words, "train.py", "{run}"]) == 2
    assert said in capsys.readouterr().err


def test_a_scripts_own_option_of_that_name_is_its_own() -> None:
    with children_in_this_process():
        words = ["compare", *WORDS, "--seeds", "1", "--", "train.py", "--resume"]
        assert cli.main(words) == 0
    assert record().command == ["mezzo", *words]


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_and_runs_nothing_twice_that_had_finished(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mezzo", "compare", *WORDS, "--seeds", "2", "train.py", "{run}"]
    began, again = Path("began.txt"), list[str]()
    for num_begun, num_finished, later_s in ((1, 0, 0.0), (1, 0, 0.02), (2, 0, 0.0), (0, 1, 0.0)):
        finished, before = _finished(), _lines(began)
        if len(finished) == len(RUNS):
            break  # on a fast machine: a finished comparison would start over
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        while process.poll() is None and (
            len(_lines(began)) < len(before) + num_begun or len(_finished()) < len(finished) + num_finished
        ):
            time.sleep(0.005)
        time.sleep(later_s)
        process.kill()
        process.wait()
        until(partial(_session_is_over, process.pid), "the ends of its runs")  # they are killed with it
        again += [name for name in _lines(began)[len(before) :] if name in finished]
    finished = _finished()
    code, made = compared()
    assert (code, made) == (0, 4 - len(finished) if len(finished) < 4 else made)
    assert again == []
    resumed = facts(record())
    assert compared() == (0, 4)  # undisturbed
    assert facts(record()) == resumed
    assert not list(tmp_path.glob("out/*.part"))


def _lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def _finished() -> set[str]:
    return {name for name in RUNS if _is_whole(name)}


def _session_is_over(number: int) -> bool:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, _, session, *_ = path.read_text().rpartition(")")[2].split()
            if session == str(number) and state not in "ZX":
                return False
    return True


def _is_whole(name: str) -> bool:
    path = Path("out") / name / "record.json"
    return path.exists() and isinstance(read_record(path), RunRecord)
