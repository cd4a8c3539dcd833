"""Runs that are killed again and again end with the bits of the undisturbed run (``make crash-test`` for 200 kills)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paths import ROOT

# The first life waits after ten of 21 passes: however late its kill comes, passes follow that draw random numbers.
PLANTED = """
import sys, time
import crash_test
from mezzo.engine.snapshots import contents, position
contents.set_random_states = position.set_random_states = lambda states: None
undisturbed, train = crash_test.undisturbed, crash_test.train

def train_and_wait(session, loader, *, after):
    passes = []
    def then(session, made):
        after(session, made)
        passes.append(made)
        if len(passes) == made == 10:
            time.sleep(240)
    return train(session, loader, after=then)

def undisturbed_once(training):
    wanted = undisturbed(training)
    crash_test.train = train_and_wait
    return wanted

crash_test.undisturbed = undisturbed_once
sys.argv = ["crash_test", "--kills", "1"]
crash_test.main()
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_killed_runs_end_with_the_same_bits() -> None:
    done = python("-m", "crash_test", "--kills", "12", "--seed", "3")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 kills" in done.stdout
    assert "0 failed" in done.stdout
    assert "; 0 with other bits" in done.stdout


@pytest.mark.slow
def test_the_crash_test_finds_a_state_that_is_not_restored() -> None:
    done = python("-c", PLANTED)

    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 runs ended; 1 with other bits" in done.stdout
