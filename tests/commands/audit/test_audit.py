"""``mezzo audit`` from the command line: scripts of every kind, unedited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import mezzo
from forked_processes import in_forks
from helpers_audit import audited
from helpers_launch import children_in_this_process
from mezzo import cli
from mezzo.records import AuditRecord, RunRecord, read_record
from paths import SCRIPTS

ONCE = 2 * 8 * 6 * 16 + 2 * 8 * 16 * 2  # the two layers of mlp(6, 16, 2) on a batch of 8
FIRST = 2 * 8 * 6 * 16  # the first one has no gradient for its input


def run_cli(out: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mezzo", "audit", "--out", str(out), *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **(env or {})}
    )


def run_here(out: Path, *words: str) -> int:
    with children_in_this_process():
        return cli.main(["audit", "--out", str(out), *words])


def read(out: Path) -> AuditRecord:
    record = read_record(out / "record.json")
    assert isinstance(record, AuditRecord)
    return record


def test_a_plain_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(tmp_path, str(SCRIPTS / "plain.py")) == 0
    record = read(tmp_path)
    assert record.steps == [3]
    assert record.run.policy == "as-is"
    assert record.run.exit_code == 0
    assert record.run.error is None
    assert len(record.run.steps) == 3  # it was ended before the fourth
    assert {f.code for f in record.findings} == {"A101"}
    assert record.run.effective.flops_by_format == record.flops_by_format
    assert record.run.effective.counted_on_step == 3
    assert "A101  no mixed precision" in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "no mixed precision" in page
    assert 'id="title-flops"' in page


def test_json_of_several_steps_under_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(tmp_path, "--json", "--policy", "bf16", "--at", "2,4-5", str(SCRIPTS / "plain.py")) == 0
    record = AuditRecord.model_validate(json.loads(capsys.readouterr().out))
    assert record == read(tmp_path)
    assert record.steps == [2, 4, 5]
    assert record.run.policy == "bf16"
    assert set(record.flops_by_format) == {"bf16"}
    assert all(o.count % 3 == 0 for o in record.operations if o.flops), "three steps alike"


def test_steps_beyond_the_end_of_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(tmp_path, "--at", "1000", str(SCRIPTS / "plain.py")) == 7
    printed = capsys.readouterr()
    assert "training steps; the steps to observe are 1000" in printed.err
    assert printed.out.count("hint: pass numbers from 1 to") == 1
    assert "hint:" not in printed.err
    assert read(tmp_path).operations == []


WITHOUT_MODULES = """
import torch
weight = torch.ones(8, 4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range({num_steps}):
    optimizer.zero_grad()
    (torch.ones(16, 8) @ weight).square().mean().backward()
    optimizer.step()
"""
COMPILED = """
import torch
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    model(torch.ones(16, 8)).square().mean().backward()
    optimizer.step()
step = torch.compile(step, backend="eager")
for _ in range({num_steps}):
    step()
"""
FIRST_CALL = "step 1 is observed from the first call of a module, and no module was called in it"
LATER = "later steps are observed from the end of the step before, with modules or without"
IN_COMPILED = "began inside compiled code, where no observation can begin"


@pytest.mark.parametrize(
    ("script", "num_steps", "steps", "what", "hint"),
    [
        (WITHOUT_MODULES, 4, "1", FIRST_CALL, f"pass a number from 2 to 4 with --at: {LATER}"),
        (WITHOUT_MODULES, 1, "1", FIRST_CALL, f"make the script train longer: {LATER}"),
        (WITHOUT_MODULES, 4, "2", None, None),
        (COMPILED, 3, "1", f"step 1 {IN_COMPILED}", "run the script with its optimizer called without torch.compile"),
        (COMPILED, 4, "3", f"step 3 {IN_COMPILED}", "run the script with its optimizer called without torch.compile"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch.compile's, of a backward pass that it does not trace
def test_steps_that_cannot_be_observed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    script: str,
    num_steps: int,
    steps: str,
    what: str | None,
    hint: str | None,
) -> None:
    path = tmp_path / "train.py"
    path.write_text(script.format(num_steps=num_steps), encoding="utf-8")
    code = run_here(tmp_path / "out", "--at", steps, str(path))
    if what is None:
        assert code == 0
        assert read(tmp_path / "out").flops_by_format == {"fp32": 2 * (2 * 16 * 8 * 4)}
        return
    assert code == 7
    printed = capsys.readouterr()
    assert f"ended after {num_steps} training step{'s' * (num_steps > 1)}; {what}" in " ".join(printed.err.split())
    assert f"hint: {hint}" in " ".join(printed.out.split())


def test_a_script_that_crashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "crash.py"
    script.write_text("raise RuntimeError('broken')\n", encoding="utf-8")
    assert run_here(tmp_path / "out", str(script)) == 1
    assert read(tmp_path / "out").run.error == "RuntimeError: broken"
    assert "No step of crash.py was audited" in capsys.readouterr().out


@pytest.mark.slow
def test_a_process_that_dies_leaves_the_record_of_a_run(tmp_path: Path) -> None:
    script = tmp_path / "die.py"
    script.write_text("import os\nos._exit(3)\n", encoding="utf-8")
    done = run_cli(tmp_path / "out", str(script))
    assert done.returncode == 3
    record = read_record(tmp_path / "out" / "record.json")
    assert isinstance(record, RunRecord)
    assert record.error == "the process died with exit code 3 before it could write a record"


@pytest.mark.parametrize("steps", ["0", "", "a", "3-2", "1,,2", "-1", "1.5", "1-1000000000", "1-100001"])
def test_steps_that_are_no_numbers(steps: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", f"--at={steps}", str(SCRIPTS / "plain.py")]) == 2
    assert "is not a list of steps" in capfd.readouterr().err


@pytest.mark.slow
def test_daemon_threads_of_a_script_that_is_ended(tmp_path: Path) -> None:
    done = run_cli(tmp_path, str(SCRIPTS / "threads.py"))
    assert done.returncode == 0
    assert "terminate" not in done.stderr
    assert read(tmp_path).flops_by_format.keys() == {"fp32"}


@pytest.mark.slow
def test_two_processes_of_distributed_data_parallel(tmp_path: Path) -> None:
    words = ["audit", "--out", str(tmp_path), str(SCRIPTS / "distributed.py")]
    ended = in_forks(words, folder=tmp_path)
    assert [one.code for one in ended] == [0, 0], ended
    record = read(tmp_path)
    assert record.flops_by_phase == {
        "forward": {"fp32": ONCE},
        "dgrad": {"fp32": ONCE - FIRST},
        "wgrad": {"fp32": ONCE},
    }
    assert {o.module for o in record.operations if o.flops} == {"0", "2"}
    assert any(o.op == "allreduce_" for o in record.operations)
    assert len(record.run.ranks) == 2


# --- scripts of every kind, in this process ------------------------------------------------------

# script and arguments: steps, FLOPs by phase (None where they depend on the script's own sizes), modules of the products
KINDS: dict[str, tuple[tuple[str, ...], set[str], set[str]]] = {
    "own autocast and GradScaler": (("own_amp", "new", "1024"), {"fp16"}, {"0", "2", "(script)"}),
    "own GradScaler that skips the step": (("own_amp", "new", "1e30"), {"fp16"}, {"0", "2", "(script)"}),
    "two optimizers": (("two_optimizers",), {"fp32"}, {"Sequential.0", "Sequential.2", "Sequential#2.0"}),
    "forked workers": (("workers", "fork"), {"fp32"}, {"0", "2"}),
    "spawned workers": (("workers", "spawn"), {"fp32"}, {"0", "2"}),
    "compiled module": (("compiled", "module", "aot_eager"), {"fp32"}, {"0", "2"}),
    "compiled in place": (("compiled", "in-place", "aot_eager"), {"fp32"}, {"0", "2"}),
    "compiled update": (("compiled", "update", "aot_eager"), {"fp32"}, {"0", "2"}),
    "accumulation": (("accumulation", "2"), {"fp32"}, {"0", "2"}),
    "no module": (("functional",), {"fp32"}, {"0", "(script)"}),
    "no optimizer": (("by_hand", "backward"), {"fp32"}, {"0", "2"}),
}


@pytest.mark.parametrize("name", KINDS)
def test_scripts_of_every_kind(name: str) -> None:
    arguments, formats, modules = KINDS[name]
    record = audited(*arguments)
    assert record.steps == [2]
    assert set(record.flops_by_format) == formats
    assert {o.module for o in record.operations if o.flops} == modules
    assert record.forced_eager is name.startswith("compiled")
    assert ("torch.compile" in [n.what for n in record.notes]) is record.forced_eager


@pytest.mark.parametrize("reentrant", ["reentrant", "not"])
@pytest.mark.parametrize("where", ["module", "script"])
def test_checkpointing(where: str, reentrant: str) -> None:
    record = audited("checkpointing", where, reentrant)
    by_phase = {phase: sum(flops.values()) for phase, flops in record.flops_by_phase.items()}
    blocks = 3 * 2 * (2 * 8 * 16 * 32)
    first, last = 2 * 8 * 6 * 16, 2 * 8 * 16 * 2
    assert by_phase["forward"] == by_phase["wgrad"] == first + blocks + last
    assert by_phase["dgrad"] == blocks + last + (first if where == "script" else 0)
    assert blocks <= by_phase["recompute"] <= by_phase["forward"]
    again = {o.module for o in record.operations if o.phase == "recompute" and o.flops}
    assert {f"blocks.{k}.0.{j}" for k in range(3) for j in (0, 2)} <= again


def test_consecutive_and_first_steps_are_alike() -> None:
    alone = audited("plain", steps=(3,))
    first = audited("plain", steps=(1,))
    both = audited("plain", steps=(2, 3))
    assert first.flops_by_phase == alone.flops_by_phase
    assert {p: {f: n // 2 for f, n in own.items()} for p, own in both.flops_by_phase.items()} == alone.flops_by_phase
    assert both.steps == [2, 3]


def test_the_policys_cast_of_what_the_model_returns_belongs_to_the_model() -> None:
    casts = [
        (c.phase, c.of, c.source, c.target) for c in audited("plain", policy="fp16").casts if c.module == "Sequential"
    ]
    assert ("forward", "activation", "fp16", "fp32") in casts
    assert ("dgrad", "gradient", "fp32", "fp16") in casts


def test_marks_of_a_profiler_are_no_operations() -> None:
    model = nn.Linear(2, 2)

    def step() -> None:
        with torch.profiler.record_function("mine"):
            model(torch.ones(1, 2)).sum().backward()

    assert not [o.op for o in mezzo.audit(step).operations if "record_function" in o.op]
