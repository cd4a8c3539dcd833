"""Kill a small training at random moments, saving included, resume it, and compare what it ends with: ``make crash-test``.

torch is imported once; each life is a fork of this process, so that 200 kills take minutes. A byte in shared memory says what a life was
doing when it was killed. Usage: ``PYTHONPATH=tests python -m crash_test --kills 200 --seed 0``.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mezzo.engine.snapshots import container
from mezzo.engine.snapshots.folder import Folder, saved_in
from snapshot_runs import OPTIMIZERS, built, final_bits, train

TRAINS, COPIES, WRITES, RENAMES, PRUNES = range(5)
PHASES = ("training", "copying the state", "writing", "renaming", "deleting old ones")
VARIANTS = (
    ("fp16", "mezzo.AdamW"),
    ("bf16-master", "mezzo.AdamW 8bit"),
    ("fp32", "torch.SGD"),
    ("fp16-master", "torch.AdamW"),
)


@dataclass
class Tally:
    """What happened."""

    kills: int = 0
    runs: int = 0
    different: int = 0
    failed: int = 0
    by_phase: Counter[str] = field(default_factory=Counter)
    resumed_from: Counter[str] = field(default_factory=Counter)


def digest(policy: str, optimizer: str, folder: Path | None) -> str:
    """Train to the end, from the newest snapshot if there is a folder, and return a digest of the result."""
    session, loader = built(policy, OPTIMIZERS[optimizer])
    if folder is not None:
        session.load(folder, must_exist=False)
    train(session, loader, after=None if folder is None else lambda s, _: s.save(folder, keep=2) and None)
    if session.state.snapshots.saving is not None:
        session.state.snapshots.saving.wait()
    bits = hashlib.sha256()
    for tensor in final_bits(session):
        bits.update(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
    return bits.hexdigest()


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


def life(variant: tuple[str, str], folder: Path, result: Path, phase: mmap.mmap) -> int:
    """Fork a process that trains to the end, and return its number."""
    child = os.fork()
    if child:
        return child
    try:
        watch_phases(phase)
        result.write_text(digest(*variant, folder))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def run_until_it_ends(
    variant: tuple[str, str], wanted: str, lasts_s: float, tally: Tally, kills: int, draw: random.Random
) -> None:
    """Kill a run again and again; when it ends by itself, compare what it ended with."""
    folder = Path(tempfile.mkdtemp(prefix="mezzo-crash-"))
    result, phase = folder / "result", mmap.mmap(-1, 1)
    while True:
        newest = saved_in(folder / "snapshots")
        tally.resumed_from["a snapshot" if newest else "the beginning"] += 1
        phase[0] = TRAINS
        child = life(variant, folder / "snapshots", result, phase)
        if tally.kills < kills:
            time.sleep(draw.uniform(0.02, lasts_s))
            os.kill(child, signal.SIGKILL)
            at = PHASES[phase[0]]
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            tally.kills += 1
            tally.by_phase[at] += 1
            continue
        tally.runs += 1
        tally.failed += os.WEXITSTATUS(status) != 0
        if os.WEXITSTATUS(status) == 0:
            tally.different += result.read_text() != wanted
        break
    shutil.rmtree(folder)


def crash_test(kills: int, seed: int) -> Tally:
    """Kill ``kills`` lives and return what happened."""
    torch.set_num_threads(1)
    draw, tally = random.Random(seed), Tally()
    wanted: dict[tuple[str, str], tuple[str, float]] = {}
    for variant in VARIANTS:
        bits = digest(*variant, None)
        folder = Path(tempfile.mkdtemp(prefix="mezzo-crash-"))
        began = time.perf_counter()
        assert digest(*variant, folder) == bits, "saving changed the training"
        wanted[variant] = bits, time.perf_counter() - began
        shutil.rmtree(folder)
    while tally.kills < kills:
        for variant in VARIANTS:
            if tally.kills < kills:
                bits, lasts_s = wanted[variant]
                run_until_it_ends(variant, bits, lasts_s, tally, kills, draw)
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
    print(f"{sum(tally.resumed_from.values())} starts, from: {dict(tally.resumed_from)}; {tally.failed} failed")
    print(f"{tally.runs} runs ended; {tally.different} with other bits than the undisturbed run")
    raise SystemExit(1 if tally.failed or tally.different else 0)


if __name__ == "__main__":
    main()
