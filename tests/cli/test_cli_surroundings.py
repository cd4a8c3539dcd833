"""What surrounds a command: a full disk, a locale without UTF-8, another command in the same folder, a kill."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers_waiting import until
from mezzo.records import CompareRecord, RunRecord, read_record

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="mounts, and processes in /proc")]

MEZZO = [sys.executable, "-m", "mezzo"]
SCRIPT = """
import os, pathlib, sys, time, torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(int(sys.argv[1])):
    if step == 2 and "FILLS" in os.environ:
        os.system("cat /dev/zero > small/more 2> /dev/null")
    loss = model(torch.randn(8, 8)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    pathlib.Path("steps").write_text(str(step + 1))
    time.sleep(float(os.environ.get("SLEEPS", "0")))
"""


def environment(folder: Path, **variables: str) -> dict[str, str]:
    (folder / "tmp").mkdir(exist_ok=True)
    return {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp"), "OF_TEST": str(folder), **variables}


def processes(folder: Path) -> list[str]:
    """Return the processes of a test that run."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"OF_TEST={folder}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append(place.name)
        except OSError:
            continue
    return found


# --- a full disk -------------------------------------------------------------------------------------------------------------

IN_SMALL = 'mount -t tmpfs -o size=1M tmpfs small && if [ -z $FILLS ]; then cat /dev/zero > small/fill 2> /dev/null; fi; exec "$@"'
FULL = [
    # the command, whether its script fills the disk, and whether the script ends
    (["run", "--policy", "fp16"], False, True),
    (["run", "--policy", "fp16"], True, True),
    (["run", "--policy", "bf16", "--snapshot", "0.1s"], True, True),
    (["audit", "--policy", "bf16"], True, False),
    (["compare", "--policies", "fp32,bf16", "--seeds", "1"], False, False),
    (["diagnose", "--policy", "bf16"], False, True),
    (["ranges", "--steps", "20"], False, True),
    (["watch"], False, True),
    (["resume-check"], False, False),
    (["fallback", "--policy", "bf16", "--fresh", "0"], False, False),
    (["predict", "--gpus", "a100"], False, False),
    (["tune"], False, False),
    (["check"], False, False),
]


@pytest.mark.parametrize(("command", "fills", "ends"), FULL)
def test_a_full_disk_is_said_once_and_ends_no_training(
    command: list[str], fills: bool, ends: bool, tmp_path: Path
) -> None:
    unshare = ["unshare", "--map-root-user", "--user", "--mount"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this system gives no mounts of its own to a process")
    (tmp_path / "t.py").write_text(SCRIPT)
    (tmp_path / "small").mkdir()
    env = environment(tmp_path, SLEEPS="0.05", **({"FILLS": "1"} if fills else {}))
    words = [*unshare, "sh", "-c", IN_SMALL, "sh", *MEZZO, *command, "--out", "small/x", "t.py", "20"]
    ended = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=200)
    said = re.findall(r"mezzo: cannot use '(\S+)': No space left on device", ended.stderr)
    assert ended.returncode == 1, ended.stderr
    assert len(said) == 1, ended.stderr
    assert "small/x/" in said[0]
    assert said[0].endswith("/work/t.py" if "resume-check" in command else (".json", ".html"))
    assert "Traceback" not in ended.stdout + ended.stderr
    assert ended.stderr.count("could not write a snapshot") == ("--snapshot" in command)
    assert not ends or (tmp_path / "steps").read_text() == "20"


@pytest.mark.parametrize("words", [["--help"], ["doctor", "--json"]])
def test_an_output_on_a_full_disk_is_said_once(words: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        ended = subprocess.run(
            [*MEZZO, *words], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 1
    assert ended.stderr.count("No space left on device") == 1
    assert "Traceback" not in ended.stderr


# --- a locale ----------------------------------------------------------------------------------------------------------------

NO_UTF8 = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("command", "variables", "code"),
    [
        (["run", "--policy", "bf16"], {"LC_ALL": "C"}, 0),
        (["run", "--policy", "bf16"], {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii"}, 0),
        (["compare", "--policies", "fp32,bf16", "--seeds", "1"], {"LC_ALL": "C"}, 0),
        (["audit", "--policy", "bf16"], {"LC_ALL": "C"}, 0),
        (["diagnose", "--policy", "bf16"], {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii"}, 0),
        (["resume-check"], {"LC_ALL": "C"}, 1),  # the script writes no checkpoint
        (["ranges", "--steps", "4"], {"LC_ALL": "C"}, 0),
        (["watch"], {"LC_ALL": "C"}, 0),
        (["fallback", "--policy", "bf16", "--fresh", "0"], {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii"}, 0),
        (["check"], {"LC_ALL": "C"}, 0),
        (["tune"], {"LC_ALL": "C"}, 0),
        (["predict", "--gpus", "a100"], {"LC_ALL": "C"}, 0),
    ],
)
def test_a_locale_without_utf8_and_a_chinese_path(
    command: list[str], variables: dict[str, str], code: int, tmp_path: Path
) -> None:
    folder = tmp_path / "中文"
    folder.mkdir()
    (folder / "训练.py").write_text(SCRIPT)
    env = {**environment(tmp_path), **NO_UTF8, **variables}
    for words in ([*command, "--out", "出", "训练.py", "20"], ["report", "出"]):
        ended = subprocess.run([*MEZZO, *words], cwd=folder, env=env, capture_output=True, check=False, timeout=200)
        assert ended.returncode == (code if words[0] != "report" else 0), ended.stderr
        assert b"Traceback" not in ended.stdout + ended.stderr
    record = (folder / "出" / "record.json").read_text(encoding="utf-8")
    assert "训练.py" in record
    assert "中文" in record
    assert "训练.py" in (folder / "出" / "report.html").read_text(encoding="utf-8")


# --- another command ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [["run", "--policy", "bf16"], ["compare", "--policies", "fp32,bf16", "--seeds", "1", "--gpus", "none"]]
)
def test_two_commands_with_one_folder_at_once(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(SCRIPT)
    started = [
        subprocess.Popen(
            [*MEZZO, *command, "--out", "x", "t.py", steps],
            cwd=tmp_path,
            env=environment(tmp_path, SLEEPS="0.1"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for steps in ("20", "30")
    ]
    said = [process.communicate(timeout=200)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert "".join(said).count("x is being written to by another command; writing to x-2 instead") == 1
    found = set()
    for folder in ("x", "x-2"):
        record = read_record(tmp_path / folder / "record.json")
        for run in record.runs if isinstance(record, CompareRecord) else [record]:
            assert isinstance(run, RunRecord)
            assert run.command[-1] == str(len(run.steps))
            found.add(run.command[-1])
    assert found == {"20", "30"}


# --- a kill ------------------------------------------------------------------------------------------------------------------

KILLED = [
    (["run", "--snapshot", "0.2s"], signal.SIGKILL),
    (["compare", "--seeds", "1"], signal.SIGKILL),
    (["compare", "--seeds", "1"], signal.SIGTERM),
    (["audit", "--policy", "bf16", "--at", "300"], signal.SIGKILL),
    (["diagnose", "--policy", "bf16"], signal.SIGKILL),
    (["fallback"], signal.SIGKILL),
    (["check"], signal.SIGKILL),
    (["tune"], signal.SIGKILL),
    (["resume-check"], signal.SIGKILL),
]


@pytest.mark.parametrize(("command", "number"), KILLED)
def test_a_killed_command_leaves_no_process_and_no_folder(command: list[str], number: int, tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(SCRIPT)
    env = environment(tmp_path, SLEEPS="0.05")
    words = [*MEZZO, *command, "--out", "out", "t.py", "400"]
    with (tmp_path / "printed").open("w") as printed:
        process = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=printed, stderr=printed)
    try:
        until(lambda: [*tmp_path.rglob("steps")], "a step")
        process.send_signal(number)
        process.wait(timeout=100)
        until(lambda: not processes(tmp_path), "the end of all processes")
    finally:
        process.kill()
        process.wait()
    assert [path.name for path in (tmp_path / "tmp").iterdir() if not path.name.startswith("torch")] == []
