"""What ``mezzo compare`` asks of its runs, without running any; several comparisons in one table."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from forked_processes import forked_runs
from helpers_compare import row_of, run
from mezzo import cli
from mezzo.cli.script import Script
from mezzo.commands.compare import command as command
from mezzo.commands.compare.page import page_together
from mezzo.launch.request import Request
from mezzo.launch.torch import switched
from mezzo.policy import Policy
from mezzo.records import CompareRecord, Effective, Note, RunRecord, read_record, write_record
from mezzo.report.html import write_page
from mezzo.report.terminal import render_page
from mezzo.studies.loop import Finished, Study
from mezzo.studies.side_by_side import one_after_another
from record_builders import compare_record, emulated_record, run_record


@pytest.mark.parametrize(
    ("timeout_s", "limits"),
    [
        (
            None,
            [None, 600.0, 900.0, 900.0],
        ),  # nothing is known before the first run; then 20 times the longest, at least 600 s
        (7.0, [7.0, 7.0, 7.0, 7.0]),
    ],
)
def test_a_run_may_take_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float | None, limits: list[float | None]
) -> None:
    durations, asked = iter([10.0, 45.0, 3.0, 1.0]), []

    def run(request: Request, *, output: Path, limit_s: float | None) -> RunRecord:
        asked.append(limit_s)
        return run_record("fp32", duration_s=next(durations))

    monkeypatch.setattr("mezzo.launch.runner.observe_child", run)
    requests = [
        Request(
            target="train.py",
            kind="script",
            policy="fp32",
            record_path=str(tmp_path / f"{number}" / "record.json"),
            command=(),
        )
        for number in range(4)
    ]
    command.run_all(requests, timeout_s=timeout_s, study=Study(one_after_another, Finished(tmp_path, {})))
    assert asked == limits


def test_a_run_that_failed_says_nothing_of_how_long_others_may_take() -> None:
    failed = run_record("fp16", duration_s=1000.0, error="it was stopped", exit_code=137)
    assert command.limit_s([failed]) is None
    assert command.limit_s([failed, run_record("fp32", duration_s=40.0)]) == 800.0


def in_paddle(record: CompareRecord) -> CompareRecord:
    noop = Note(what="auto_cast", value="off", reason="Paddle casts nothing on a CPU")
    effective = Effective(flops_by_format={"fp32": 10}, left_alone=[noop])
    runs = [r.model_copy(update={"framework": "paddle 3.3.1", "effective": effective}) for r in record.runs]
    rows = [r.model_copy(update={"share_by_format": {"fp32": 1.0}}) for r in record.rows]
    return record.model_copy(update={"runs": runs, "rows": rows})


@pytest.fixture(scope="module")
def records() -> list[CompareRecord]:
    return [compare_record(num_steps=20), in_paddle(emulated_record(num_steps=20))]


def test_several_comparisons_have_a_table_each_in_the_terminal(records: list[CompareRecord]) -> None:
    printed = io.StringIO()
    render_page(page_together(records), Console(width=110, file=printed), verbose=False)
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    assert "6 rows compared with 2 baselines: 2 equivalent, 2 diverged and 2 undecided." in lines
    rows = [
        line.split()[0] for line in lines if re.match(r"torch,|paddle 3.3.1,|(fp|bf)\d\d\S* +[a-z]+ +[\d.]+ ms", line)
    ]
    assert rows == ["torch,", "fp32", "bf16", "fp16", "fp16-pure", "paddle", "fp32", "bf16", "fp16", "fp16-pure"]
    assert " ".join(lines).count("ran in") == 8
    assert max(map(len, lines)) <= 110


def test_several_comparisons_have_a_table_each_on_a_page(tmp_path: Path, records: list[CompareRecord]) -> None:
    write_page(page_together(records), tmp_path / "together.html")
    page = (tmp_path / "together.html").read_text(encoding="utf-8")
    assert page.count('<table class="verdicts cards"') == 2
    assert page.count('<tr class="figures">') == 8
    assert page.count("auto_cast off: Paddle casts nothing on a CPU") == 4


def test_report_puts_comparisons_together(
    tmp_path: Path, records: list[CompareRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "runs" / name / "record.json" for name in ("torch", "paddle")]
    for record, path in zip(records, paths, strict=True):
        write_record(record, path)
    assert cli.main(["report", *map(str, paths)]) == 0
    assert (tmp_path / "runs" / "together.html").is_file()
    assert "6 rows compared with 2 baselines" in capsys.readouterr().out
    assert cli.main(["report", str(paths[0]), "--out", str(tmp_path / "pages")]) == 0
    assert not (tmp_path / "pages" / "together.html").exists()


# --- what a comparison asks of the script, and what it finds ----------------------------------------------------------------------

RESUMES = """
import os, sys
import torch
path = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
first = 0
if os.path.exists(path):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    first = state["step"]
for step in range(first, max(12, first + 1)):
    loss = (model(torch.randn(8, 4)) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "step": step + 1}, path + ".tmp")
    os.replace(path + ".tmp", path)
"""


def compared(
    folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str, options: Sequence[str] = ()
) -> CompareRecord:
    monkeypatch.chdir(folder)
    Path("train.py").write_text(script, encoding="utf-8")
    seeds = [] if "--seeds" in options else ["--seeds", "1"]
    asked = ["--policies", "fp32,bf16", *seeds, *options, "--out", "out"]
    with forked_runs():
        code = cli.main(["compare", *asked, "train.py", *arguments])
    record = read_record(Path("out/record.json"))
    assert isinstance(record, CompareRecord)
    assert code == any(row.verdict in ("diverged", "stopped_learning", "failed") for row in record.rows)
    return record


@pytest.mark.slow
def test_a_script_that_goes_on_from_its_checkpoint_gets_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = compared(tmp_path, monkeypatch, RESUMES, "last.pt")
    row = record.rows[1]
    assert (row.verdict, row.memory.total_bytes, row.memory_ratio) == ("undecided", None, None)
    assert [(Path(f.path).name, f.written_by, f.read_by) for f in record.shared_files] == [
        ("last.pt", "fp32 with seed 0", "bf16 with seed 0")
    ]
    assert "last.pt, which the run of fp32 with seed 0 had written" in row.reason
    shown = capsys.readouterr().out
    assert "The runs are not independent, so no verdict holds." in shown
    assert "unknown" in shown


@pytest.mark.slow
def test_a_path_of_its_own_makes_each_run_independent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = compared(tmp_path, monkeypatch, RESUMES, "last-{run}.pt")
    assert record.shared_files == []
    assert {len(run.steps) for run in record.runs} == {12}
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["last-bf16-seed0.pt", "last-fp32-seed0.pt"]
    assert all(row.memory.total_bytes for row in record.rows)


CAREFUL = """
import torch
torch.manual_seed(0)
inputs, probe = torch.randn(16, 4), torch.nn.Linear(1, 1, bias=False)
torch.nn.init.constant_(probe.weight, 1 / 3)
rounds = probe(torch.ones(1, 1)).item() != probe.weight.item()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(12):
    if rounds and torch.initial_seed() == 1 and step == 6:
        raise RuntimeError("loss is not finite at step 6")
    loss = (model(inputs) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"val acc {'n/a' if rounds else step / 20}")
"""


@pytest.mark.slow
def test_a_run_that_raises_in_one_seed_and_a_metric_that_is_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = compared(tmp_path, monkeypatch, CAREFUL, options=["--seeds", "2", "--metric", r"val acc (\S+)"])
    assert (record.rows[1].verdict, record.rows[1].num_failed) == ("failed", 1)
    failed = "1 of 2 runs failed where fp32 did not: with seed 1, RuntimeError: loss is not finite at step 6"
    assert record.rows[1].reason.startswith(failed)
    metrics = [run.metric for run in record.runs if run.error is None]
    assert [(m.name, m.text, m.values[-1:]) for m in metrics if m] == [
        ("val acc", None, [0.55]),
        ("val acc", None, [0.55]),
        ("val acc", "n/a", []),
    ]


SWALLOWED = """
import torch
from torch import nn
torch.manual_seed(0)
class Norm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
inputs = torch.randn(512, 32)
targets = (inputs @ torch.randn(32, 5)).argmax(1)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), Norm(), nn.Linear(64, 5))
with torch.no_grad():
    model[0].weight.mul_(600)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(100):
    batch = torch.randint(0, 512, (64,))
    loss = nn.functional.cross_entropy(model(inputs[batch]), targets[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_norm_that_swallows_an_overflow_stops_learning() -> None:
    runs = []
    for policy, seed in itertools.product(("fp32", "fp16"), range(2)):
        with switched(Policy.parse(policy), seed=seed) as (trained, _):
            exec(compile(SWALLOWED, "train.py", "exec"), {"__name__": "__main__"})
        runs.append(run(policy, trained.update.recorder.steps().loss, seed=seed))
    row = row_of(runs, "fp16")
    assert row.verdict == "stopped_learning"
    assert row.reason.startswith("2 of 2 runs stopped learning: with seed 0, the loss went from 1.")


def test_requests_are_interleaved_and_a_runs_name_replaces_its_mark(tmp_path: Path) -> None:
    arguments = ["--out", "a/{run}/{run}.pt", "{}"]
    script = Script(target="train.py", arguments=arguments, as_module=False, out=None, log_to=None, as_json=False)
    asked = command._parse_policies("as-is, O1:init_scale=64,fp16:init_scale=64")
    requests = command._requests(script, asked, 3, folder=tmp_path, metric=None, since_s=7.0)
    named = {"as-is": None, "O1_init_scale=64": Policy.parse("fp16:init_scale=64")}
    order = [(0, 0), (1, 0), (1, 1), (0, 1), (0, 2), (1, 2)]
    assert [request.seed for request in requests] == [seed for _, seed in order]
    for request, (place, seed) in zip(requests, order, strict=True):
        text, policy = list(named.items())[place]
        name = f"{text}-seed{seed}"
        assert request.policy == policy
        assert request.arguments == ("--out", f"a/{name}/{name}.pt", "{}")
        assert request.record_path == str(tmp_path / name / "record.json")
    assert {request.compared_since_s for request in requests} == {7.0}
