"""Kill small trainings at random moments, saving included, resume them, and compare what they end with: ``make crash-test``.

They are loops with a session, and unmodified scripts: with a loader, without one, with files, and in two processes with DDP and FSDP2.
torch is imported once; each life is a fork of this process, so that 200 kills take minutes. A byte in shared memory says what a life was
doing when it was killed. Usage: ``PYTHONPATH=tests python -m crash_test --kills 200 --seed 0``.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.parallel
from torch.distributed import fsdp as fsdp  # imported once, before the forks

from mezzo.engine.snapshots import container
from mezzo.engine.snapshots.folder import Folder
from mezzo.launch import child
from mezzo.launch import torch as mezzo_launch_torch  # noqa: F401  # imported once, before the forks
from mezzo.launch.request import Request, SnapshotRequest
from mezzo.policy import Policy
from paths import SCRIPTS
from resumable_scripts import HEAD
from resumable_scripts import SCRIPTS as BODIES
from snapshot_runs import OPTIMIZERS, built, final_bits, train

TRAINS, COPIES, WRITES, RENAMES, PRUNES = range(5)
KILLS_A_RUN = 8
"""Then a run may go to its end."""
PHASES = ("training", "copying the state", "writing", "renaming", "deleting old ones")


@dataclass
class Tally:
    """What happened."""

    kills: int = 0
    runs: int = 0
    different: int = 0
    failed: int = 0
    by_phase: Counter[str] = field(default_factory=Counter)
    by_training: Counter[str] = field(default_factory=Counter)
    resumed_from: Counter[str] = field(default_factory=Counter)


SAVED = "[0-9]*-update-*.safetensors"


class Training(NamedTuple):
    """A training that can be killed."""

    name: str
    train: Callable[[Path, bool, int], str]
    """Train to the end in a folder as the rank of the last argument, saving and resuming if the second says so; return a digest."""
    ranks: int = 1


def session(policy: str, optimizer: str) -> Training:
    """Return a loop with a session."""

    def run(folder: Path, saves: bool, rank: int) -> str:
        session, loader = built(policy, OPTIMIZERS[optimizer])
        folder = folder / "snapshots"
        if saves:
            session.load(folder, must_exist=False)
        train(session, loader, after=(lambda s, _: s.save(folder, keep=2) and None) if saves else None)
        if session.state.snapshots.saving is not None:
            session.state.snapshots.saving.wait()
        bits = hashlib.sha256()
        for tensor in final_bits(session):
            bits.update(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
        return bits.hexdigest()

    return Training(f"{policy} {optimizer}", run)


def script(name: str, *, ranks: int = 1) -> Training:
    """Return an unmodified script: one of ``resumable_scripts``, or ``restarted.py`` with ``ddp`` or ``fsdp`` for a name."""

    def run(folder: Path, saves: bool, rank: int) -> str:
        here, out, path = folder / "here", folder / f"out-{rank}.txt", folder / "train.py"
        here.mkdir(exist_ok=True)
        os.chdir(here)
        if ranks > 1:
            path = SCRIPTS / "restarted.py"
        elif not path.exists():
            path.write_text(HEAD + BODIES[name])
        os.environ |= {"DIE_AT": "0"}
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        snapshots = SnapshotRequest(
            folder=str(folder / "run" / "snapshots"), every_s=0.05 if ranks > 1 else 0.0, resume=True, may_be_first=True,
            identity={"script": name},
        )  # fmt: skip
        if ranks > 1:
            snapshots = snapshots.for_rank(rank, ranks=ranks, meeting=os.environ["MEETING"])
        request = Request(
            target=str(path), kind="script", policy=Policy.parse("fp16"), command=("mezzo", "run"),
            record_path=str(folder / f"record-{rank}.json"), snapshots=snapshots if saves else None,
            arguments=("no", "marker", name) if ranks > 1 else (),
        )  # fmt: skip
        code = child.main([request.packed()])
        sys.stdout.flush()
        text = out.read_text()
        found = re.findall(r"^(?:result|RANK) .*", text, re.M)
        if code or len(found) != 1:
            raise RuntimeError(f"exit {code}: {text}")
        bits = hashlib.sha256(found[0].encode())
        for file in sorted(one for one in here.rglob("*") if one.is_file()):
            bits.update(file.name.encode() + file.read_bytes())
        return bits.hexdigest()

    return Training(f"script {name}", run, ranks)


TRAININGS = (
    session("fp16", "mezzo.AdamW"),
    script("rotation"),
    session("bf16-master", "mezzo.AdamW 8bit"),
    script("noloader while"),
    script("ddp", ranks=2),
    session("fp32", "torch.SGD"),
    script("log append"),
    script("fsdp", ranks=2),
    session("fp16-master", "torch.AdamW"),
    script("infinite generator"),
)


def watch_phases(phase: mmap.mmap) -> None:
    """Note in shared memory what this process is doing."""
    write, replace, prune = container._fill, os.replace, Folder.prune

    def filling(*args: object) -> int:
        phase[0] = WRITES
        return write(*args)  # type: ignore[arg-type]

    def renaming(*args: object) -> None:
        phase[0] = RENAMES
        replace(*args)  # type: ignore[arg-type]
        phase[0] = TRAINS

    def pruning(self: Folder, keep: int) -> None:
        phase[0] = PRUNES
        prune(self, keep)
        phase[0] = TRAINS

    container._fill, Folder.prune = filling, pruning  # type: ignore[assignment, method-assign]
    container.os.replace = renaming  # type: ignore[assignment]


def lives(training: Training, folder: Path, phase: mmap.mmap, *, saves: bool = True) -> list[int]:
    """Fork the processes of a training that goes to its end, and return their numbers; each writes its digest into the folder."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    meeting = tempfile.mkdtemp(dir=folder, prefix="meeting-")
    children = []
    for rank in range(training.ranks):
        number = os.fork()
        children.append(number)
        if number:
            continue
        places = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": training.ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        os.environ |= {name: str(value) for name, value in places.items() if training.ranks > 1} | {"MEETING": meeting}
        try:
            watch_phases(phase)
            (folder / f"result-{rank}").write_text(training.train(folder, saves, rank))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return children


def is_over(child: int) -> bool:
    """Return whether a process has ended; it can still be waited for."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def ended(children: list[int]) -> list[int]:
    """Wait for processes and return their exit codes."""
    return [os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) for one in children]


def results(training: Training, folder: Path) -> list[str]:
    """Return what the processes of a training ended with."""
    return [(folder / f"result-{rank}").read_text() for rank in range(training.ranks)]


def run_until_it_ends(
    training: Training, wanted: list[str], lasts_s: float, tally: Tally, kills: int, draw: random.Random
) -> None:
    """Kill a run again and again; when it ends by itself, compare what it ended with."""
    folder = Path(tempfile.mkdtemp(prefix="mezzo-crash-"))
    phase = mmap.mmap(-1, 1)
    while True:
        tally.resumed_from["a snapshot" if any(folder.rglob(SAVED)) else "the beginning"] += 1
        phase[0] = TRAINS
        children = lives(training, folder, phase)
        is_killed = tally.kills < kills
        if is_killed:
            time.sleep(draw.uniform(0.02, lasts_s))
            while tally.kills + 1 == kills and not any(folder.rglob(SAVED)) and not any(map(is_over, children)):
                time.sleep(0.01)  # on a busy machine all kills may come too early; each run resumes at least once
            at = PHASES[phase[0]]
            draw.shuffle(children)
            for one in children:  # not all at the same moment
                os.kill(one, signal.SIGKILL)
                time.sleep(draw.uniform(0.0, 0.02) if training.ranks > 1 else 0.0)
        codes = ended(children)
        if is_killed and set(codes) == {-signal.SIGKILL}:
            tally.kills += 1
            tally.by_phase[at] += 1
            tally.by_training[training.name] += 1
            continue
        if is_killed and -signal.SIGKILL in codes:  # one process had ended
            continue
        tally.runs += 1
        tally.failed += any(codes)
        if not any(codes):
            tally.different += results(training, folder) != wanted
        print(
            f"{training.name}: {tally.kills} kills, {tally.runs} runs ended, {tally.failed} failed, {tally.different} different",
            flush=True,
        )
        break
    shutil.rmtree(folder)


def undisturbed(training: Training) -> tuple[list[str], float]:
    """Return what a training ends with that is not killed, with and without saving, and how long it takes while it saves."""
    ends = []
    for saves in (False, True):
        folder = Path(tempfile.mkdtemp(prefix="mezzo-crash-"))
        began = time.perf_counter()
        codes = ended(lives(training, folder, mmap.mmap(-1, 1), saves=saves))
        assert not any(codes), f"{training.name} ended with {codes}"
        ends.append(results(training, folder))
        shutil.rmtree(folder)
    assert ends[0] == ends[1], f"saving changed the training {training.name}"
    return ends[0], time.perf_counter() - began


def crash_test(kills: int, seed: int) -> Tally:
    """Kill ``kills`` lives and return what happened."""
    torch.set_num_threads(1)
    draw, tally = random.Random(seed), Tally()
    wanted: dict[str, tuple[list[str], float]] = {}
    while tally.kills < kills:
        for training in TRAININGS:
            if tally.kills < kills:
                if training.name not in wanted:
                    wanted[training.name] = undisturbed(training)
                run_until_it_ends(training, *wanted[training.name], tally, min(tally.kills + KILLS_A_RUN, kills), draw)
    return tally


def main() -> None:
    """Print what happened; exit with 1 if a resume failed or a run ended differently."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.perf_counter()
    tally = crash_test(options.kills, options.seed)
    print(
        f"{tally.kills} kills (seed {options.seed}) in {time.perf_counter() - began:.0f} s, while: {dict(tally.by_phase)}"
    )
    print(f"by training: {dict(tally.by_training)}")
    print(f"{sum(tally.resumed_from.values())} starts, from: {dict(tally.resumed_from)}; {tally.failed} failed")
    print(f"{tally.runs} runs ended; {tally.different} with other bits than the undisturbed run")
    raise SystemExit(1 if tally.failed or tally.different else 0)


if __name__ == "__main__":
    main()
