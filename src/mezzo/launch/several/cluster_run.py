"""One run on a worker of a cluster: it writes its record to the folder that the command and all workers share. Imports no torch."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from mezzo.launch.process.command_signals import Stopped, stoppable
from mezzo.launch.request import Request
from mezzo.launch.runner import run_alone


def run_here(packed: str, folder: str, output: str, limit_s: float | None) -> str:
    """Run a request on this machine; return the name of the signal that stopped the run, or an empty text.

    Args:
        packed: the request as JSON, with a placement.
        folder: the folder that the command was typed in.
        output: the file for the script's output.
        limit_s: seconds after which the script is stopped; None for no limit.
    """
    os.chdir(folder)
    request = Request.of_json(packed)
    assert request.placement is not None
    threads = os.environ.get("OMP_NUM_THREADS", "")
    machine = {
        "host": socket.gethostname(),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES") or None,
        "threads": int(threads) if threads.isdecimal() else None,
    }
    request = request.model_copy(update={"placement": request.placement.model_copy(update=machine)})
    with stoppable() as stop, suppress(Stopped):  # raised by a signal that arrives before the run begins
        run_alone(request, output=Path(output), limit_s=limit_s)
    return stop.name
