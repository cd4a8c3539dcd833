"""The machine that a command's runs are on: this one, or a worker of a cluster."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mezzo.errors import RecordError, ScriptError, UsageError

if TYPE_CHECKING:
    from mezzo.devices import Device
    from mezzo.measure.doctor import Facts
    from mezzo.records import Note
    from mezzo.studies.side_by_side import Engine


_PROGRAM = "mezzo.cli.machines"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine for runs."""

    facts: Facts
    name: str

    @property
    def device(self) -> Device:
        """The device that scripts train on."""
        return self.facts.devices[0]


def name_of(engine: Engine) -> str:
    """Return the name of the machine that an engine's runs are on."""
    return f"a worker of {engine.cluster}" if engine.cluster else "this machine"


def machine_of(engine: Engine, folder: Path) -> Machine:
    """Return the machine that an open engine's runs are on; for a cluster, the worker that it assigns to one run.

    Raises:
        ScriptError: the worker did not report what it can compute.
    """
    from mezzo.devices import Device, cpu_name
    from mezzo.measure.doctor import Facts, facts  # imports torch, which takes seconds

    if engine.cluster:
        return Machine(facts=_of_worker(engine, folder), name=name_of(engine))
    found = facts() if importlib.util.find_spec("torch") else Facts(devices=(Device(kind="cpu", name=cpu_name()),))
    return Machine(facts=found, name=name_of(engine))


def _of_worker(engine: Engine, folder: Path) -> Facts:
    from mezzo.children.signals import stoppable
    from mezzo.launch.request import Request

    worker_folder = (folder / "worker").absolute()
    facts_file = worker_folder / "facts.json"
    facts_file.unlink(missing_ok=True)
    request = Request(
        target=_PROGRAM,
        kind="module",
        arguments=(str(facts_file),),
        policy=None,
        record_path=str(worker_folder / "record.json"),
        command=(),
    )
    with stoppable() as stop:
        ended = list(engine([request], lambda: None))
        stop.check()
    if not facts_file.exists():
        why = getattr(ended[0][1], "error", None) or "it ended before that"
        raise ScriptError(
            f"a worker did not report what it can compute: {why}",
            hint=f"what it printed is in {worker_folder / 'output.log'}",
        )
    return read_facts(facts_file)


def check_times(engine: Engine) -> None:
    """Refuse to measure times where simultaneous runs would slow each other down by an unknown amount.

    Raises:
        UsageError: the runs have no GPUs of their own.
    """
    if engine.gives_gpus is not False:
        return
    why = "times are measured here, and runs that share one CPU slow each other down"
    if engine.cluster:
        raise UsageError(
            f"--on {engine.cluster} without a GPU for each run; allowed: a GPU of its own for each run, because {why}",
            hint="type: --on slurm:gres=gpu:1 or --on ray:num_gpus=1",
        )
    raise UsageError(
        f"--jobs {engine.at_once} without a GPU for each run; allowed: one run at a time, because {why}",
        hint="leave out --jobs; mezzo compare, check and fallback accept it on a CPU as well",
    )


def how_placed(engine: Engine) -> list[Note]:
    """Return how the runs were placed, for a record; nothing if they ran one after another on this machine."""
    from mezzo.records import Note

    if engine.cluster:
        most = "as many at once as it allowed" if engine.at_once is None else f"at most {engine.at_once} at once"
        value = f"placed by {engine.cluster}"
        return [Note(what="runs", value=value, reason=f"{most}; each record has its placement")]
    if engine.gives_gpus is None:
        return []
    share = "a GPU of its own" if engine.gives_gpus else "its share of the CPU's threads"
    return [Note(what="runs", value=f"{engine.at_once} at once", reason=f"--jobs: each had {share}")]


# What another machine can compute: ``python -m mezzo.cli.machines FILE`` writes it to a file there, ``read_facts`` reads it here.
#
# Importing this module imports no torch; running it does.


def read_facts(path: Path) -> Facts:
    """Return the facts in a file.

    Raises:
        RecordError: the file is missing, or contains something else.
    """
    from pydantic import TypeAdapter, ValidationError

    from mezzo.measure.doctor import Facts

    try:
        return TypeAdapter(Facts).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise RecordError(
            f"{path} does not describe what the machine can compute: {type(error).__name__}",
            hint="type the command again; if that does not help, mezzo doctor on that machine shows why",
        ) from None


def main(arguments: Sequence[str]) -> None:
    """Write the facts of this machine to the file that the first argument names."""
    from pydantic import TypeAdapter

    from mezzo.measure.doctor import Facts, facts
    from mezzo.records.files import write_whole

    write_whole(TypeAdapter(Facts).dump_json(facts()).decode(), Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
