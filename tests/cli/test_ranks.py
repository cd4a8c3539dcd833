"""Commands in several processes, as torchrun starts them: one record, runs in step, and a rank that fails is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from forked_processes import in_forks
from mezzo import cli
from mezzo.cli import ranks
from mezzo.cli.parser import app
from mezzo.records import AuditRecord, CompareRecord, FallbackRecord, RangesRecord, Rewind, RunRecord, read_record
from paths import SCRIPTS
from processes import Ended, in_processes

RANKS = str(SCRIPTS / "ranks.py")
_SAID = re.compile(r"rank (\d+) injected (\d+) weights (\S+)")


def read(folder: Path) -> Any:
    assert not list(folder.glob("rank*/record.json"))  # one record for the job
    return read_record(folder / "record.json")


def weights(ended: list[Ended]) -> set[str]:
    """Return the sums of weights that the ranks printed."""
    found = {m[1]: m[3] for one in ended for m in _SAID.finditer(one.printed)}
    assert len(found) == len(ended)
    return set(found.values())


@pytest.mark.slow
def test_a_run_in_two_processes(tmp_path: Path) -> None:
    ended = in_processes(["run", "--policy", "fp16", "--out", "out", RANKS, "ddp", "6"], folder=tmp_path)
    assert [one.code for one in ended] == [0, 0], ended
    assert len(weights(ended)) == 1
    record = read(tmp_path / "out")
    assert isinstance(record, RunRecord)
    assert [(r.rank, r.num_steps, r.error) for r in record.ranks] == [(0, 6, None), (1, 6, None)]
    assert record.ranks[0].weights == record.ranks[1].weights != ""
    assert record.steps.loss[-1] == pytest.approx(sum(r.final_loss or 0.0 for r in record.ranks) / 2)
    assert record.between_ranks == []
    assert "Ranks" in ended[0].printed
    assert "Result" not in ended[1].printed  # the summary is printed once


@pytest.mark.parametrize("words", [["run"], ["run", "nowhere.py"]])
def test_a_word_that_cannot_be_used_ends_all_processes_and_is_said_once(words: list[str], tmp_path: Path) -> None:
    ended = in_processes(words, folder=tmp_path)
    assert [one.code for one in ended] == [2, 2]
    assert "mezzo:" in ended[0].printed
    assert ended[1].printed == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size", "policy"),
    [
        ("ddp", 4, "fp16:growth_interval=1"),
        ("fsdp", 2, "fp16:growth_interval=1"),
        ("ddp", 2, "fp16:growth_interval=1:reduce=fp16"),
        ("fsdp", 4, "fp16:growth_interval=1:reduce=bf16:gather=fp16"),
    ],
)
def test_an_overflow_in_one_rank_skips_the_same_steps_in_all(kind: str, policy: str, size: int, tmp_path: Path) -> None:
    words = ["run", "--policy", policy, "--out", "out", RANKS, kind, "230", "overflow"]
    ended = in_forks(words, size=size, folder=tmp_path)
    assert [one.code for one in ended] == [0] * size, ended
    assert len(weights(ended)) == 1
    injected = {m[1]: int(m[2]) for one in ended for m in _SAID.finditer(one.printed)}
    assert sum(injected.values()) >= 100
    record = read(tmp_path / "out")
    skipped = [rank.skipped_steps for rank in record.ranks]
    assert skipped == [skipped[0]] * size
    assert len(skipped[0]) >= 100
    assert record.between_ranks == []
    assert "reduce" not in {reason.what for reason in record.effective.left_alone}


AT_THE_HANG = """
import sys
from pathlib import Path
from mezzo import cli
from mezzo.launch.ranks.leading import Leader

over, polls = Leader._over, [0]

def over_once_all_wait(leader, run):
    left = [len(list(Path().glob(f"{what}-*"))) for what in ("hangs", "waits")]
    polls[0] = polls[0] + 1 if min(left) == run.number else 0
    if polls[0] == 20:  # the waiting process wrote its file before it began to wait
        run.began_s = float("-inf")
    return over(leader, run)

Leader._over = over_once_all_wait
sys.exit(cli.main(sys.argv[1:]))
"""
"""Mezzo, with a limit that is reached when a rank hangs and the other waits for it, however long they took to come there."""


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_at_its_limit_and_is_found(tmp_path: Path) -> None:
    words = [
        "compare",
        "--policies",
        "fp32,fp16",
        "--seeds",
        "1",
        "--gpus",
        "none",
        "--timeout",
        "3000s",
        "--out",
        "out",
    ]
    line = 1 + next(n for n, text in enumerate(Path(RANKS).read_text("utf-8").splitlines()) if "sleep(1000)" in text)
    ended = in_processes(
        [*words, RANKS, "ddp", "50", "hang"], program=["-c", AT_THE_HANG], folder=tmp_path, timeout_s=600
    )
    assert ended[0].code == ended[1].code != 0
    for policy in ("fp32", "fp16"):
        error = read_record(tmp_path / "out" / f"{policy}-seed0" / "record.json").error  # type: ignore[union-attr]
        assert error is not None
        assert error.startswith(f"stopped at its limit of 3000 s: rank 1: it made no progress at ranks.py:{line}"), (
            error
        )


@pytest.mark.slow
def test_all_processes_stop_after_the_same_step_because_of_an_alarm_of_one(tmp_path: Path) -> None:
    words = ["run", "--policy", "fp32", "--guard", "stop", "--out", "out", str(SCRIPTS / "going_wrong_ranks.py")]
    ended = in_forks([*words, "spike", "2000"], folder=tmp_path)
    assert [one.code for one in ended] == [10, 10], ended
    record = read(tmp_path / "out")
    steps = {rank.num_steps for rank in record.ranks}
    assert len(steps) == 1
    assert 124 <= steps.pop() < 2000
    assert len({rank.weights for rank in record.ranks}) == 1
    (alarm,) = record.guardrails.alarms
    assert (alarm.kind, alarm.step) == ("loss spike", 124)
    assert alarm.evidence.startswith("rank 1: the last 5 losses are ")
    assert record.guardrails.stopped == f"loss spike: {alarm.evidence}"


def rewound(policy: str, fault: str, num_steps: int, folder: Path) -> tuple[list[Rewind], list[Ended]]:
    """Return the step that a training returned to, and what both processes printed; all steps ran, on the same weights."""
    words = ["run", "--policy", policy, "--guard", "rewind", "--snapshot", "1s", "--out", "out"]
    ended = in_forks([*words, str(SCRIPTS / "going_wrong_ranks.py"), fault, str(num_steps)], folder=folder)
    record = read(folder / "out")
    assert [one.code for one in ended] == [0, 0], ended
    assert [rank.num_steps for rank in record.ranks] == [num_steps, num_steps]
    assert len({rank.weights for rank in record.ranks}) == 1
    return record.guardrails.rewinds, ended


@pytest.mark.slow
def test_all_processes_return_to_the_same_snapshot(tmp_path: Path) -> None:
    (rewind,), ended = rewound("fp32", "spike", 300, tmp_path)
    assert (rewind.alarm, rewind.changes[0].what) == ("loss spike", "learning rate")
    assert 0 < rewind.updates < 120
    for one in ended:
        assert f"guard: back to {rewind.snapshot}, after {rewind.updates} updates" in one.printed


@pytest.mark.slow
def test_all_processes_fall_back_to_the_same_policy(tmp_path: Path) -> None:
    (first, second), ended = rewound("bf16", "twice", 400, tmp_path)
    assert first.snapshot == second.snapshot
    assert [change.what for change in first.changes] == ["learning rate"]
    assert [(change.what, change.value.split(",")[0]) for change in second.changes] == [
        ("learning rate", "x 0.5"),
        ("policy", "fp32"),
    ]
    for one in ended:
        assert "policy fp32, before bf16" in one.printed


@pytest.mark.slow
def test_the_runs_of_a_comparison_follow_one_another_in_all_processes(tmp_path: Path) -> None:
    words = ["compare", "--policies", "fp32,fp16", "--seeds", "2", "--gpus", "none", "--out", "out", RANKS, "ddp", "40"]
    ended = in_forks(words, folder=tmp_path, timeout_s=400)
    assert [one.code for one in ended] == [0, 0], ended
    record = read(tmp_path / "out")
    assert isinstance(record, CompareRecord)
    assert [row.verdict for row in record.rows] == ["baseline", "equivalent"]
    assert len(record.runs) == 4
    for run in record.runs:
        assert len({rank.weights for rank in run.ranks}) == 1
        assert [rank.num_steps for rank in run.ranks] == [40, 40]


@pytest.mark.slow
def test_what_one_process_finds_is_what_two_find(tmp_path: Path) -> None:
    """The ranks' histograms add up; every other figure here is that of each rank."""
    for words in (["audit", "--at", "2"], ["ranges", "--steps", "2"], ["fallback", "--fresh", "0"]):
        ended = in_forks(
            [*words, "--out", words[0], RANKS, "fsdp" if words[0] == "ranges" else "ddp", "4"], folder=tmp_path
        )
        assert [one.code for one in ended] == [0, 0], ended
    audit, ranges, fallback = (read(tmp_path / name) for name in ("audit", "ranges", "fallback"))
    assert isinstance(audit, AuditRecord)
    assert len(audit.run.ranks) == 2
    assert isinstance(ranges, RangesRecord)
    counted = {(t.kind, t.name): t.histogram.total for t in ranges.tensors}
    assert counted["activations", "0"] == 2 * 2 * 8 * 32  # ranks, steps, samples, features
    assert isinstance(fallback, FallbackRecord)
    assert fallback.verdict == "not needed"


@pytest.mark.parametrize("command", sorted(ranks._IN_ONE_PROCESS))
@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("torchrun", {"RANK": "1", "WORLD_SIZE": "4"}),
        ("srun", {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}),
    ],
)
def test_commands_for_one_process_are_refused_in_several(
    command: str,
    launcher: str,
    variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main([command, RANKS]) == 7
    said = " ".join(capsys.readouterr().err.split())
    assert f"{launcher} started mezzo {command} in 4 processes; allowed: one" in said


def test_every_command_on_a_script_says_what_it_does_in_several_processes() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    on_scripts = {name for name, command in commands.items() if "arguments" in {p.name for p in command.params}}
    assert on_scripts == {*ranks._IN_ALL_PROCESSES, *ranks._IN_ONE_PROCESS}


@pytest.mark.parametrize("option", ["--compile", "--checkpoint full"])
def test_options_for_one_process_are_refused_under_every_launcher(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr("mezzo.cli.ranks.in_ranks", lambda _, command: command())  # no other process is there to meet
    assert cli.main(["run", *option.split(), RANKS]) == 7
    said = " ".join(capsys.readouterr().err.split())
    assert f"{option} was given in one of 2 processes; allowed: one process" in said
