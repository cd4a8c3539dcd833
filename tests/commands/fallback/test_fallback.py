"""``mezzo fallback`` from outside: an unmodified script, a policy file that the other commands accept, refusals."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from helpers_launch import Children, ThreeAtOnce, children_in_this_process
from mezzo.cli import main
from mezzo.launch.request import Request
from mezzo.launch.runner import run_child
from mezzo.policy import Policy
from mezzo.records import FallbackRecord, read_record
from paths import SCRIPTS

FRAGILE = str(SCRIPTS / "fragile.py")


@pytest.mark.slow
def test_a_script_gets_a_policy_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with children_in_this_process():
        code = main(["fallback", "--json", "--fresh", "1", "--out", str(tmp_path), FRAGILE])

    shown = capfd.readouterr()
    record = read_record(tmp_path / "record.json")
    assert code == 0, shown.err
    assert isinstance(record, FallbackRecord)
    assert json.loads(shown.out)["kind"] == "fallback"  # and nothing that the script prints
    assert "mezzo: nothing in FP32: " in shown.err
    assert "mezzo: 1 module in FP32: " in shown.err
    assert (record.verdict, record.kept) == ("found", ["4.last"])
    assert [(t.kept, t.passed, t.steps) for t in record.verifications] == [
        ([], False, record.verifications[0].steps),
        (["4.last"], True, [1]),
        (["4.last"], True, [1, 2]),
    ]
    policy = Policy.load(tmp_path / "policy.toml")
    assert policy == Policy.parse("fp16:fp32_modules=4.last") == Policy.parse(record.suggested)
    assert record.policy_file == str(tmp_path / "policy.toml")
    assert "4.last" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert list(tmp_path.glob("runs/*.pt")) == []
    assert "0 " in (tmp_path / "runs" / "kept-4.last.log").read_text(encoding="utf-8")

    request = Request(
        target=FRAGILE, kind="script", policy=str(policy), record_path=str(tmp_path / "run.json"), command=("mezzo",)
    )
    trained = run_child(request, output=tmp_path / "run.log")
    assert trained.exit_code == 0
    assert len(trained.steps) == 20
    assert not any(trained.steps.skipped[1:])  # the first one may look for its loss scale


FOURIER = """
import torch
from torch import nn

class Fourier(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return torch.fft.fft(x).abs() * self.gain

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), Fourier(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(6):
    loss = model(torch.randn(16, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_module_whose_operation_takes_no_such_format_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "fourier.py"
    script.write_text(FOURIER)
    out = tmp_path / "out"
    with children_in_this_process():
        assert main(["run", "--policy", "bf16", "--out", str(tmp_path / "run"), str(script)]) != 0
        assert f"mezzo fallback --policy bf16 {script}" in capfd.readouterr().out.replace("\n", " ").replace("  ", " ")
        assert main(["fallback", "--policy", "bf16", "--fresh", "1", "--out", str(out), str(script)]) == 0
        assert main(["run", "--policy", str(out / "policy.toml"), "--out", str(tmp_path / "kept"), str(script)]) == 0
    record = read_record(out / "record.json")
    assert isinstance(record, FallbackRecord)
    assert (record.verdict, record.kept) == ("found", ["1"])


def searched(*words: str, children: Children) -> tuple[int, int]:
    """Return the exit code and the number of runs."""
    with children_in_this_process(before_each=children):
        code = main(["fallback", "--fresh", "1", *(() if "--out" in words else ("--out", "out")), *words, FRAGILE])
    return code, children.num


@pytest.mark.slow
def test_a_search_that_was_stopped_goes_on_and_several_at_once_find_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert searched("--resume", "out", children=Children()) == (2, 0)
    assert searched(children=Children(interrupt_at=3)) == (130, 3)
    told = capfd.readouterr().err
    assert "the records of its runs are in out. To continue, type:" in told
    assert f"  mezzo fallback --resume out --fresh 1 {shlex.quote(FRAGILE)}" in told.splitlines()
    assert [*Path("out/runs").glob("*.pt")]
    assert searched("--resume", "out", children=Children()) == (
        0,
        3,
    )  # the third, which got the signal at its first line, ran to its end
    resumed = read_record("out/record.json")
    assert not [*Path("out/runs").glob("*.pt")]
    assert isinstance(resumed, FallbackRecord)
    assert (resumed.verdict, resumed.kept) == ("found", ["4.last"])
    assert searched("--resume", "out", children=Children()) == (
        0,
        1,
    )  # it had finished: the reference's gradients are gone
    monkeypatch.setattr("mezzo.commands.fallback.command.engine_of", lambda jobs, on: ThreeAtOnce())
    assert searched("--out", "beside", children=Children())[0] == 0
    beside = read_record("beside/record.json")
    assert isinstance(beside, FallbackRecord)
    assert beside.verifications == resumed.verifications
    assert (beside.kept, beside.modules, beside.noise) == (resumed.kept, resumed.modules, resumed.noise)


def test_a_script_that_is_not_there_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fallback", "nowhere.py"]) == 2
    assert "nowhere.py" in capfd.readouterr().err
