"""Kill a public script twice at random moments, resume it each time, and compare it with its undisturbed run.

The undisturbed run comes first. It tells how many updates there are; each update then waits a little, so that the training lasts for
some seconds. Compared are the loss of each step since the last resume, a checksum of the weights at the last updates, and all files.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzo.errors import MezzoError, SnapshotError
from mezzo.records import RunRecord, read_record

LASTS_S = 8.0
"""How long the training is made to last."""
EVERY = "0.3s"
_CLOCK = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?")
"""Times in logs."""
_CLOCK_NAME = re.compile(r"20\d{6}|\d{16,}|[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d")
"""Files and folders that are named by the clock."""


@dataclass
class _Lives:
    """The lives of one script, and where they leave their outputs and records."""

    command: list[str]
    target: list[str]
    folder: Path
    environment: dict[str, str]
    results: Path

    @property
    def probe(self) -> Path:
        return self.results / "probe.json"

    def live(self, name: str, *options: str, kill_after_s: float | None = None, wait_s: float = 0.0) -> int:
        """Run the script and return its exit code; kill it that long after its next snapshot."""
        own = {"PUBLIC_SCRIPTS_PROBE": str(self.probe), "PUBLIC_SCRIPTS_WAIT_S": str(wait_s), "PYTHONHASHSEED": "0"}
        run = self.results / "run"
        with (self.results / f"{name}.txt").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [*self.command, "--out", str(run), *options, *self.target], cwd=self.folder, env=self.environment | own,
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            newest, began_s = _newest(run), time.monotonic()
            while process.poll() is None and time.monotonic() - began_s < 600:
                if kill_after_s is not None and _newest(run) > newest:
                    time.sleep(kill_after_s)
                    break
                time.sleep(0.02)
            ended = process.poll()
            for one in _descendants(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            process.wait()
            return -signal.SIGKILL if ended is None else ended


def resumed_outcome(words: list[str], sandbox: Path, folder: Path, environment: dict[str, str], results: Path) -> str:
    """Run a script in a folder of a sandbox, undisturbed and killed, and return what the comparison says.

    Args:
        words: the command line, up to the options of ``mezzo run``, and ``words[-1]`` its target and arguments.
        sandbox: the script's files.
        folder: where in it the script runs.
        environment: its variables.
        results: a folder for outputs and records.
    """
    start, _, rest = "\0".join(words).partition("\0--out\0")
    target = rest.split("\0")[1:]
    lives = _Lives(start.split("\0"), target, folder, environment, results)
    untouched, whole = sandbox.with_name("untouched"), sandbox.with_name("whole")
    shutil.copytree(sandbox, untouched, symlinks=True)
    if lives.live("whole") != 0:
        return "the undisturbed run failed"
    wanted, weights = read_record(results / "run" / "record.json"), _checksums(lives.probe)
    assert isinstance(wanted, RunRecord)
    if not wanted.steps:
        return "the undisturbed run made no update"
    shutil.rmtree(results / "run")
    sandbox.rename(whole)
    shutil.copytree(untouched, sandbox, symlinks=True)
    draw, wait_s, resumes = random.Random(str(target)), LASTS_S / len(wanted.steps), ("--resume", str(results / "run"))
    for kills in range(3):
        options = ["--snapshot", EVERY, *(resumes if kills else ())]
        is_last = kills == 2
        lives.probe.unlink(missing_ok=True)
        after_s = None if is_last else draw.uniform(0, LASTS_S / (3 + kills))
        code = lives.live(f"life-{kills}", *options, kill_after_s=after_s, wait_s=0.0 if is_last else wait_s)
        if code != -signal.SIGKILL:
            break
    said = _said(results / f"life-{kills}.txt")
    if code == SnapshotError.exit_code:
        return f"{'WRONG: refused after a kill' if kills else 'refused'}: {said}"
    if code != 0:
        return f"WRONG: exit {code} after {kills} kills: {said}"
    if kills == 0:
        return "the run ended before its first kill"
    different = _differences(wanted, weights, results, _checksums(lives.probe)) + _files(whole, sandbox)
    return f"WRONG: {', '.join(different)}" if different else f"same bits after {kills} kills"


def _newest(run: Path) -> int:
    return max((int(path.name.split("-")[0]) for path in (run / "snapshots").glob("*.safetensors")), default=0)


def _checksums(probe: Path) -> list[int]:
    """Return the checksums of the weights after each update; none if the script has no optimizer."""
    return json.loads(probe.read_text()) if probe.exists() else []


def _descendants(process: int) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found = [process]
    for one in found:
        found += [child for child, parent in pairs if parent == one]
    return found


def _said(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").rpartition("mezzo: ")[2].partition("\n")[0]


def _differences(wanted: RunRecord, weights: list[int], results: Path, now: list[int]) -> list[str]:
    # A life that was killed after its last line has a record in its folder, so the next one writes beside it.
    newest = max(results.glob("run*/record.json"), key=lambda path: path.stat().st_mtime, default=results / "run")
    try:
        record = read_record(newest)
    except MezzoError as error:
        return [error.message]
    assert isinstance(record, RunRecord)
    taken = record.snapshots
    made, all_losses = record.steps.loss, wanted.steps.loss
    if taken is None or taken.resumed_from is None:
        return ["it began anew"]
    problems = [problem.reason for problem in taken.problems]
    if [loss.hex() for loss in made] != [loss.hex() for loss in all_losses[len(all_losses) - len(made) :]]:
        problems.append(f"other losses: {len(made)} of {len(all_losses)} steps")
    if now[-3:] != weights[len(weights) - len(now[-3:]) :]:
        problems.append("other weights")
    return problems


def _files(one: Path, two: Path) -> list[str]:
    """Return what differs between the files of two folders, except TensorBoard's and what is named by the clock."""
    names = {
        str(path.relative_to(root))
        for root in (one, two)
        for path in root.rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and ".tfevents." not in path.name
        and not _CLOCK_NAME.search(str(path.relative_to(root)))
    }
    return [f"file {name}" for name in sorted(names) if not _same_file(one / name, two / name)]


def _same_file(one: Path, two: Path) -> bool:
    if not (one.exists() and two.exists()):
        return False
    if _CLOCK.sub(b"", one.read_bytes()) == _CLOCK.sub(b"", two.read_bytes()):
        return True
    if one.suffix not in (".pt", ".pth", ".pkl", ".ckpt", ".tar"):
        return False
    import torch

    try:
        return _same(torch.load(one, weights_only=False, map_location="cpu"), torch.load(two, weights_only=False))
    except Exception:  # it names classes of the script, which are not here
        return False


def _same(one: Any, two: Any) -> bool:
    import torch

    if isinstance(one, torch.Tensor):
        return torch.equal(one, two) and one.dtype is two.dtype
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_same(value, two[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(_same, one, two))
    return bool(one == two) or repr(one) == repr(two)
