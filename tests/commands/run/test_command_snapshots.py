"""``--snapshot`` and ``--resume``: what is refused before a script runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mezzo import cli
from mezzo.cli.script import Script
from mezzo.commands.run.command import snapshot_request
from mezzo.policy import Policy

REFUSED = [
    (
        ["--snapshot", "often"],
        "mezzo: --snapshot 'often'; allowed: a time above 0 with its unit, such as 30s, 5m or 1h\n"
        "  hint: type: mezzo run --snapshot 10m train.py\n",
    ),
    (
        ["--snapshot", "-5m"],
        "mezzo: --snapshot '-5m'; allowed: a time above 0 with its unit, such as 30s, 5m or 1h\n"
        "  hint: type: mezzo run --snapshot 10m train.py\n",
    ),
    (
        ["--resume", "nowhere"],
        "mezzo: --resume 'nowhere' has no folder snapshots; allowed: the folder of a run with --snapshot\n"
        "  hint: type: mezzo run --snapshot 5m train.py\n",
    ),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_what_cannot_be_used_is_refused_before_the_script_runs(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("open('ran', 'w')\n")

    assert cli.main(["run", *words, "train.py"]) == 2

    assert capsys.readouterr().err == message
    assert not Path("ran").exists()


@pytest.mark.parametrize(("given", "taken"), [(None, "0"), ("random", "0"), ("7", "7")])
def test_a_resumed_run_goes_on_in_the_folder_of_the_earlier_one(
    given: str | None, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTHONHASHSEED", given)
    script = Script(
        target="train.py", arguments=["--epochs", "3"], as_module=False, out=None, log_to=None, as_json=False
    )
    policy = Policy.parse("bf16")

    fresh = snapshot_request(script, tmp_path / "new", "1m", None, policy=policy, seed=None)
    resumed = snapshot_request(script, tmp_path / "newer", None, tmp_path / "new", policy=policy, seed=None)

    assert snapshot_request(script, tmp_path, None, None, policy=policy, seed=None) is None
    assert fresh is not None
    assert resumed is not None
    assert fresh.hash_seed == resumed.hash_seed == taken
    assert fresh.folder == resumed.folder == str(tmp_path / "new" / "snapshots")
    assert (fresh.every_s, fresh.resume, resumed.every_s, resumed.resume) == (60.0, False, 300.0, True)
    assert (
        fresh.identity
        == resumed.identity
        == {
            "script": "train.py",
            "arguments": '["--epochs", "3"]',
            "policy": "bf16",
            "seed": "None",
            "PYTHONHASHSEED": taken,
        }
    )


@pytest.mark.slow
def test_a_set_of_texts_has_one_order_in_all_lives(tmp_path: Path) -> None:
    """Python draws the order anew in each process."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "names = {f'name {n}' for n in range(30)}\n"
        "weight = torch.zeros(1, requires_grad=True)\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "for step in range(2):\n"
        "    weight.sum().backward()\n"
        "    optimizer.step()\n"
        "    print('order', list(names))\n"
    )
    words = [sys.executable, "-m", "mezzo", "run", "--out", "out", "--snapshot", "1h"]

    lives = [
        subprocess.run([*words, *more, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for more in ([], ["--resume", "out"])
    ]

    orders = [line for text in lives for line in text.splitlines() if line.startswith("order")]
    assert len(orders) == 3
    assert len(set(orders)) == 1
