"""Unmodified scripts that are killed and resumed end with the bits of the run that was never stopped; what cannot be resumed is refused."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from mezzo.errors import SnapshotError
from mezzo.launch import child
from mezzo.launch.request import Request
from mezzo.launch.request_parts import SnapshotRequest
from mezzo.policy import Policy
from mezzo.records import RunRecord, read_record
from paths import SCRIPTS

HEAD = """
import os, random, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
random.seed(0)
data = TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,)))
loader = DataLoader(data, batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
updates = 0

def step(x, y, update=True):
    global updates
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    if update:
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
        if updates == int(os.environ["DIE_AT"]):
            os.environ["DIE_AT"] = "0"
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
    return loss.item()

def result(*values):
    print("result", values, [p.sum().item() for p in model.parameters()], random.random(), torch.rand(1).item())
"""

RESUMABLE: dict[str, str] = {
    "enumerate and accumulation": """
seen = []
for epoch in range(3):
    for number, (x, y) in enumerate(loader, 1):
        seen.append((number, step(x, y, update=number % 3 == 0)))
result(seen)
""",
    "validation in the middle of a pass": """
held = DataLoader(data, batch_size=20)
scores = []
for epoch in range(2):
    for x, y in loader:
        step(x, y)
        if updates % 4 == 0:
            model.eval()
            with torch.no_grad():
                scores.append(sum(nn.functional.cross_entropy(model(a), b).item() for a, b in held))
            model.train()
result(scores)
""",
    "a count of steps": """
def train():
    losses, most = {}, 17
    while updates < most:
        for x, y in loader:
            losses[updates] = step(x, y)
            if updates == most:
                break
    return losses
result(train())
""",
    "a class": """
class Trainer:
    def __init__(self):
        self.model, self.epochs_done, self.log = model, 0, []
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        self.generator = torch.Generator().manual_seed(4)
    def fit(self, epochs):
        for epoch in range(epochs):
            for x, y in loader:
                noise = torch.rand(1, generator=self.generator)
                self.log.append(step(x + noise, y))
            self.scheduler.step()
            self.epochs_done += 1
trainer = Trainer()
trainer.fit(3)
result(trainer.log, trainer.epochs_done, optimizer.param_groups[0]["lr"])
""",
    "a scaler of its own": """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
for epoch in range(2):
    for x, y in loader:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        updates += 1
        if updates == int(os.environ["DIE_AT"]):
            os.environ["DIE_AT"] = "0"
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
result(scaler.get_scale())
""",
}


def lives(
    script: Path, folder: Path, *, die_at: int = 0, resume: bool = False, how: int = signal.SIGKILL, **more: Any
) -> tuple[int, str]:
    """Run a script in a forked process, which may kill itself; return its exit status and its output."""
    snapshots = SnapshotRequest(
        folder=str(folder / "snapshots"), every_s=0.0, resume=resume, identity={"script": script.name}
    )
    request = Request(
        target=str(script),
        kind="script",
        policy=more.pop("policy", None),
        record_path=str(folder / "record.json"),
        command=("mezzo", "run"),
        snapshots=more.pop("snapshots", snapshots),
        **more,
    )
    folder.mkdir(exist_ok=True)
    process = os.fork()
    if process == 0:
        gc.freeze()  # what pytest has imported is not searched for references
        out = os.open(folder / "out.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        os.environ |= {"DIE_AT": str(die_at), "SIGNAL": str(int(how))}
        code = 99
        try:
            code = child.main([request.packed()])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), (folder / "out.txt").read_text()


def result_of(text: str) -> str:
    found = re.findall(r"^result .*", text, re.M)
    assert len(found) == 1, text
    return found[0]


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(body: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(HEAD + body)
        return path

    return write


QUICK = "enumerate and accumulation"


@pytest.mark.parametrize("name", [QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in RESUMABLE if n != QUICK)])
def test_a_killed_script_ends_with_the_bits_of_the_undisturbed_run(name: str, written: Any, tmp_path: Path) -> None:
    script = written(RESUMABLE[name])
    policy = None if "scaler" in name else Policy.parse("fp16")
    code, text = lives(script, tmp_path / "whole", policy=policy, snapshots=None)
    assert code == 0, text
    folder = tmp_path / "run"
    assert lives(script, folder, die_at=7, policy=policy)[0] == -signal.SIGKILL

    code, again = lives(script, folder, resume=True, policy=policy)

    assert code == 0, again
    assert result_of(again) == result_of(text)
    record = read_record(folder / "record.json")
    assert isinstance(record, RunRecord)
    assert record.snapshots is not None
    assert record.snapshots.problems == []
    assert record.snapshots.resumed_updates in range(1, 7)  # the last ones may have been killed while they were written


@pytest.mark.filterwarnings("ignore:loaded .* not loaded, though newer")
def test_a_snapshot_that_cannot_be_loaded_is_in_the_record(written: Any, tmp_path: Path) -> None:
    script, folder = written(RESUMABLE[QUICK]), tmp_path / "run"
    assert lives(script, folder, die_at=7)[0] == -signal.SIGKILL
    newest = max((folder / "snapshots").glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1])

    code, text = lives(script, folder, resume=True)

    assert code == 0, text
    record = read_record(folder / "record.json")
    assert isinstance(record, RunRecord)
    assert record.snapshots is not None
    (problem,) = record.snapshots.problems
    assert (problem.what, problem.value) == (newest.name, "not loaded")
    assert f"mezzo: not {newest.name}: {problem.reason}" in text


def outside_its_function(script: Path) -> str:
    """Return a script whose ``main`` is written out at the top level, so that all its variables are the module's."""
    head, main = script.read_text(encoding="utf-8").split("def main():\n")
    return head + textwrap.dedent(main.removesuffix("main()\n"))


@pytest.mark.slow
@pytest.mark.parametrize("in_function", [True, False])
def test_a_whole_script(in_function: bool, tmp_path: Path) -> None:
    script = SCRIPTS / "resumable.py"
    if not in_function:
        script = tmp_path / "train.py"
        script.write_text(outside_its_function(SCRIPTS / "resumable.py"), encoding="utf-8")
    policy = Policy.parse("fp16")
    _, text = lives(script, tmp_path / "whole", policy=policy, snapshots=None)
    arguments = ("--checkpoint", str(tmp_path / "best.pt"))
    assert lives(script, tmp_path / "run", policy=policy, arguments=arguments, die_at=19)[0] == -signal.SIGKILL
    best = (tmp_path / "best.pt").read_bytes()

    code, again = lives(script, tmp_path / "run", policy=policy, resume=True, arguments=arguments)

    assert code == 0, again
    assert result_of(again) == result_of(text)
    assert text.endswith(again.split("not shown\n")[1]), again
    assert (tmp_path / "best.pt").read_bytes() == best


def test_sigterm_saves_and_ends(written: Any, tmp_path: Path) -> None:
    script = written(RESUMABLE["a class"])
    _, text = lives(script, tmp_path / "whole", snapshots=None)
    rare = SnapshotRequest(
        folder=str(tmp_path / "run" / "snapshots"), every_s=1e6, resume=False, identity={"script": script.name}
    )

    code, _ = lives(script, tmp_path / "run", die_at=12, how=signal.SIGTERM, snapshots=rare)
    resumed, again = lives(script, tmp_path / "run", resume=True)

    assert (code, resumed) == (143, 0), again
    assert result_of(again) == result_of(text)


REFUSED: dict[str, tuple[str, str]] = {
    "next": (
        """
batches = iter(loader)
for number in range(8):
    step(*next(batches))
result()
""",
        "the script takes batches by next() in a loop of its own",
    ),
    "zip": (
        """
for number, (x, y) in zip(range(100), loader):
    step(x, y)
result()
""",
        "the loop gets its batches through zip",
    ),
    "two loaders": (
        """
other = iter(DataLoader(data, batch_size=4))
next(other)
for x, y in loader:
    step(x, y)
result(next(other))
""",
        "two loaders are read alternately",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_loops_that_cannot_be_resumed_are_named_and_run_on(name: str, written: Any, tmp_path: Path) -> None:
    body, why = REFUSED[name]

    code, text = lives(written(body), tmp_path / "run")

    assert code == 0, text
    assert why in text
    result_of(text)
    record = read_record(tmp_path / "run" / "record.json")
    assert isinstance(record, RunRecord)
    assert record.snapshots is not None
    assert record.snapshots.saved == 0
    assert {one.what for one in record.snapshots.problems} == {"save"}


def test_a_script_that_continues_its_own_checkpoint_is_refused(written: Any, tmp_path: Path) -> None:
    """It would begin at a later epoch, and the resumed run would miss one."""
    body = """
start = int(open("epoch.txt").read()) if os.path.exists("epoch.txt") else 0
for epoch in range(start, 4):
    for x, y in loader:
        step(x, y)
    open("epoch.txt", "w").write(str(epoch + 1))
result()
"""
    script = written(body.replace('"epoch.txt"', repr(str(tmp_path / "epoch.txt"))))
    assert lives(script, tmp_path / "run", die_at=14)[0] == -signal.SIGKILL

    code, text = lives(script, tmp_path / "run", resume=True)

    assert code == SnapshotError.exit_code
    assert "the enclosing loops are at {'epoch': 2}, and were at {'epoch': 1}" in text


@pytest.mark.slow
def test_a_script_that_ends_too_early_is_refused(written: Any, tmp_path: Path) -> None:
    body = """
for epoch in range(int(open("epochs.txt").read())):
    for x, y in loader:
        step(x, y)
result()
"""
    (tmp_path / "epochs.txt").write_text("3")
    script = written(body.replace('"epochs.txt"', repr(str(tmp_path / "epochs.txt"))))
    assert lives(script, tmp_path / "run", die_at=25)[0] == -signal.SIGKILL
    (tmp_path / "epochs.txt").write_text("1")

    code, text = lives(script, tmp_path / "run", resume=True)

    assert code == SnapshotError.exit_code
    assert "the script ended before it reached the place where that run was stopped" in text


def test_another_run_is_refused(written: Any, tmp_path: Path) -> None:
    script = written(RESUMABLE["a class"])
    assert lives(script, tmp_path / "run", die_at=5)[0] == -signal.SIGKILL
    other = SnapshotRequest(
        folder=str(tmp_path / "run" / "snapshots"), every_s=60, resume=True, identity={"script": "other.py"}
    )

    code, text = lives(script, tmp_path / "run", snapshots=other)

    assert code == SnapshotError.exit_code
    assert "it is of a run with script 'train.py', and this one has 'other.py'" in text
