"""Runs of one script in several processes, and their values as one log.

A value with the same bits in all processes counts once: a weight, or a gradient after its reduction. Otherwise its processes are taken for
parts of one batch, whose norm follows from theirs. The parts may have any order, so such a value is compared by its norm alone.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path

import numpy as np

from mezzo.children.signals import stoppable
from mezzo.launch import runner
from mezzo.launch.request import Request
from mezzo.observe.settings import ValuesSettings
from mezzo.observe.values.log import (
    FOURTHS,
    NUMBERS,
    ROUNDING,
    SKETCH,
    SQUARES,
    UNKNOWN,
    Event,
    Floats,
    Output,
    ValuesLog,
)
from mezzo.records import AnyRecord
from mezzo.studies.side_by_side import output_of


def run_ranks(request: Request, *, size: int) -> list[tuple[Request, AnyRecord]]:
    """Run a script in several processes of this machine, as ``torchrun`` would; if one fails, stop the others.

    Returns:
        The request and the record of each, rank 0's first.
    """
    requests = [_of_rank(request, rank, size=size, port=_free_port()) for rank in range(size)]
    port = requests[0].variables["MASTER_PORT"]
    requests = [one.model_copy(update={"variables": {**one.variables, "MASTER_PORT": port}}) for one in requests]
    records: dict[int, AnyRecord] = {}
    over = threading.Event()

    def work(rank: int) -> None:
        one = requests[rank]
        with stoppable(), runner.shared_imports(prints_why_not=False):
            record = runner.run_alone(one, output=output_of(one), interrupted=over.is_set)
        records[rank] = record
        if record.kind != "run" or record.error is not None:
            over.set()

    threads = [threading.Thread(target=copy_context().run, args=(work, rank)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [(requests[rank], records[rank]) for rank in range(size)]


def _of_rank(request: Request, rank: int, *, size: int, port: int) -> Request:
    path = Path(request.record_path)
    folder = path.parent if rank == 0 else path.parent / f"rank-{rank}"
    settings = request.observe
    assert isinstance(settings, ValuesSettings)
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    values = settings.model_copy(update={"path": str(folder / Path(settings.path).name)})
    changes = {"record_path": str(folder / path.name), "variables": variables, "observe": values}
    return request.model_copy(update=changes)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def as_one(logs: Sequence[ValuesLog]) -> ValuesLog:
    """Return the values of several processes as one log; rank 0's alone where they did not run the same operations."""
    lead = logs[0]
    if len(logs) == 1 or any([e.op for e in log.events] != [e.op for e in lead.events] for log in logs[1:]):
        return lead
    numbers, hashes = lead.numbers.copy(), lead.hashes.copy()
    events: list[Event] = []
    for n, event in enumerate(lead.events):
        rows = lead.rows(n)
        of_ranks = [log.numbers[log.rows(n)] for log in logs]
        same = np.all([log.hashes[log.rows(n)] == lead.hashes[rows] for log in logs], axis=0)
        outputs = list(event.outputs)
        for place in np.flatnonzero(~same):
            row = rows.start + int(place)
            hashes[row] = 0
            numbers[row] = _together([one[place] for one in of_ranks], outputs[place], outputs[0])
            if event.phase == "backward":  # each process has the gradient of its own mean, and their mean is meant
                numbers[row] *= _per_process(len(logs))
            if outputs[place].shape[:1] == outputs[0].shape[:1] and outputs[0].shape:
                shape = outputs[place].shape
                outputs[place] = replace(outputs[place], shape=(len(logs) * shape[0], *shape[1:]))
        flops = event.flops if same.all() else sum(log.events[n].flops for log in logs)
        events.append(replace(event, outputs=tuple(outputs), flops=flops))
    return ValuesLog(events, hashes, numbers, lead.points, lead.environment)


def _together(parts: Sequence[Floats], output: Output, first: Output) -> Floats:
    """Return the numbers of one value of several processes: parts of a batch, means over parts, or something that has no counterpart."""
    whole: Floats = np.sum(parts, axis=0)
    if not output.shape:  # the sketch of a mean is the mean of the sketches
        whole = whole / len(parts)
        whole[SQUARES], whole[FOURTHS] = (whole[SKETCH:] ** 2).sum(), (whole[SKETCH:] ** 4).sum()
        return whole
    whole[SKETCH:] = np.nan
    if output.shape[:1] != first.shape[:1]:
        whole[SQUARES] = UNKNOWN
    return whole


def _per_process(ranks: int) -> Floats:
    """Return by what the numbers of a value are multiplied if the value is divided by the number of processes."""
    powers = np.ones(NUMBERS)
    powers[[SQUARES, ROUNDING, FOURTHS]] = 2, 2, 4
    return ranks**-powers
