"""The steps of one model in two frameworks: their tapes, and how far these are from each other."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from mezzo.gpus import GPUS
from mezzo.launch.request import Request
from mezzo.measure.predict.script.observed import ObservedTape
from mezzo.measure.predict.script.tapes import TapeRequest, recorded_tapes
from mezzo.measure.predict.step import Conditions
from mezzo.measure.predict.tape import TrainingTape
from mezzo.policy import Policy

SCRIPTS = Path(__file__).parent / "scripts"
SAME = SCRIPTS / "same_steps.py"
_A100 = Conditions(gpu=GPUS["a100-80gb"])


def observed(script: Path, *arguments: str, framework: str, policy: str = "fp32", backend: str = "") -> ObservedTape:
    """Return what a script shows of its second step, in a process of its own."""
    with TemporaryDirectory() as folder:
        tape = Path(folder, "tape")
        request = Request(
            target=str(script),
            kind="script",
            arguments=arguments,
            framework=framework,
            policy=Policy.parse(policy),
            record_path=str(Path(folder, "record.json")),
            command=(),
            tape_file=str(tape),
        )
        variables = {"PYTHONPATH": os.pathsep.join(sys.path), "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [sys.executable, "-m", "mezzo.launch.child", request.packed()]
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
        found = ObservedTape.read(tape)
    assert found is not None, done.stderr[-2000:]
    return found


@cache
def in_torch(model: str, policy: str = "fp32") -> TrainingTape:
    """Return the tape of the same model in torch."""
    request = TapeRequest(script=str(SAME), arguments=["torch", model], policy=policy)
    tape = recorded_tapes([request])[0].tape
    assert tape is not None
    return tape


def flops(tape: TrainingTape) -> int:
    """Return the FLOPs of a step."""
    return sum(op.flops for op in tape.operations)


def moved(tape: TrainingTape) -> int:
    """Return the bytes that a step moves."""
    return sum(op.read_bytes + op.written_bytes for op in tape.operations)


def products(tape: TrainingTape) -> list[tuple[str, int, tuple[int, ...]]]:
    """Return the products of a step by phase, with their sizes in any order of rows and columns."""
    return sorted(
        (op.phase, op.flops, (op.shape.products, *sorted(op.shape[1:3]), *op.shape[3:]))
        for op in tape.operations
        if op.flops
    )


def seconds(tape: TrainingTape, policy: str = "fp32") -> float:
    """Return a step's seconds on an A100, without its host's."""
    return _A100.step(tape, policy).device_s
