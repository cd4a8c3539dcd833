"""The patch of a check: which answers get one, what a trial decides, and what is written."""

from __future__ import annotations

from pathlib import Path

import pytest

import record_builders as build
from mezzo.cli.script import Script
from mezzo.commands.check import patches
from mezzo.commands.check.patches import PatchOutcome, with_patch
from mezzo.records import Note

LOOP = """\
import torch
from torch import nn

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
"""


def script_in(folder: Path, *, source: str = LOOP, as_module: bool = False) -> Script:
    path = folder / "my train.py"
    path.write_text(source, encoding="utf-8")
    return Script(target=str(path), arguments=[], as_module=as_module, out=None, log_to=None, as_json=False)


def answered(decision: str, policy: str = "bf16") -> object:
    return build.check_record().answer.model_copy(update={"decision": decision, "policy": policy})


REFUSED = [
    # decision, policy, module, source, why there is no patch
    ("stay", "fp32", False, LOOP, "the answer is stay: there is nothing to change in the script"),
    ("undecided", "bf16", False, LOOP, "the answer is undecided: there is nothing to change in the script"),
    ("use", "as-is", False, LOOP, "the script turns on its own mixed precision already"),
    ("use", "bf16", True, LOOP, "a module that runs with -m cannot be tried from another folder"),
    (
        "use",
        "bf16",
        False,
        "print('no loop')\n",
        "no training loop was found: neither a call to backward() nor a trainer that Mezzo knows; "
        "pass the file that has the loop, or put its forward pass under torch.autocast by hand",
    ),
]


@pytest.mark.parametrize(("decision", "policy", "as_module", "source", "why"), REFUSED)
def test_no_patch_without_something_to_change(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    decision: str,
    policy: str,
    as_module: bool,
    source: str,
    why: str,
) -> None:
    record = build.check_record(answer=answered(decision, policy))
    script = script_in(tmp_path, source=source, as_module=as_module)
    found = with_patch(script, record, tmp_path, left_s=60.0, say=lambda _: None)
    assert found.patch == ""
    note = found.notes[-1]
    assert (note.what, note.value) == ("--write-patch", "no patch")
    assert note.reason == why
    assert f"--write-patch: no patch, because {why}" in capsys.readouterr().err


def test_a_patch_that_passes_its_trial_is_written_and_is_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build.run_record("bf16", num_steps=20)
    passed = PatchOutcome(may_be_offered=True, same_losses=True, tried_as="bf16", patched=run)
    monkeypatch.setattr(patches, "try_patch", lambda request, patch, folder, *, limit_s: passed)
    record = build.check_record(answer=answered("use"))
    found = with_patch(script_in(tmp_path), record, tmp_path, left_s=60.0, say=lambda _: None)
    written = tmp_path / "my train.patch"
    assert written.read_text(encoding="utf-8") == found.patch
    assert "+    with torch.autocast(" in found.patch
    assert found.answer.next_command == f"patch '{tmp_path / 'my train.py'}' '{written}'"
    assert found.answer.next_why == (
        "writes bf16 into my train.py; tried for 20 steps: every loss is the same, to the last bit, as under bf16"
    )
    assert (found.stages[-1].name, found.stages[-1].folder) == ("patch", str(tmp_path / "patch"))


def test_a_patch_that_fails_its_trial_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = PatchOutcome(
        may_be_offered=False, reasons=[Note(what="losses", value="different", reason="by 0.5")], tried_as="bf16"
    )
    limits: list[float | None] = []

    def trial(request: object, patch: object, folder: Path, *, limit_s: float | None) -> PatchOutcome:
        limits.append(limit_s)
        return failed

    monkeypatch.setattr(patches, "try_patch", trial)
    record = build.check_record(answer=answered("use"))
    found = with_patch(script_in(tmp_path), record, tmp_path, left_s=1.0, say=lambda _: None)
    assert found.patch == ""
    assert not (tmp_path / "my train.patch").exists()
    assert found.notes[-1].reason == "its trial failed: losses: different (by 0.5)"
    assert found.answer.next_command == record.answer.next_command
    assert limits == [60.0]
