"""Runs as tasks of Ray, on a Ray cluster or on this machine. Ray ends them when the command ends. Imports no torch."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from mezzo.errors import UsageError
from mezzo.launch.request import Request
from mezzo.launch.several.on_cluster import run_here
from mezzo.launch.several.side_by_side import visible_gpus

ADDRESS, CPUS, GPUS = "address", "num_cpus", "num_gpus"
OPTIONS = (ADDRESS, CPUS, GPUS)
_EXAMPLE = "type: --on ray:num_gpus=1"


class Ray:
    """A Ray cluster, or one on this machine that lives as long as the command."""

    name: Literal["ray"] = "ray"

    def __init__(self, options: Mapping[str, str]) -> None:
        """Find Ray.

        Args:
            options: ``address`` of the cluster, and ``num_cpus`` and ``num_gpus`` of a run.

        Raises:
            UsageError: there is no such option, or a number is not one.
        """
        unknown = [name for name in options if name not in OPTIONS]
        if unknown:
            raise UsageError(f"--on ray:{unknown[0]}=...; allowed: {', '.join(OPTIONS)}", hint=_EXAMPLE)
        try:
            self._cpus, gpus = float(options.get(CPUS, "1")), options.get(GPUS)
            self._gpus = None if gpus is None else float(gpus)
        except ValueError as error:
            raise UsageError(f"--on ray: {error}; allowed: numbers for {CPUS} and {GPUS}", hint=_EXAMPLE) from None
        self._address = options.get(ADDRESS)
        self._ray: Any = importlib.import_module("ray")

    @property
    def gives_gpus(self) -> bool | None:
        """Whether each run gets at least one whole GPU."""
        return self._num_gpus() >= 1

    def _num_gpus(self) -> float:
        return self._gpus if self._gpus is not None else float(bool(visible_gpus()))

    def begin(self, folder: Path) -> None:
        """Connect to the cluster, or start one here."""
        path = os.environ.get("PYTHONPATH", "")
        environment = {"env_vars": {"PYTHONPATH": path}} if path else None
        local = {} if self._address or "RAY_ADDRESS" in os.environ else {"include_dashboard": False}
        self._ray.init(
            address=self._address, runtime_env=environment, log_to_driver=False, logging_level="error", **local
        )
        self._task = self._ray.remote(max_retries=0, num_cpus=self._cpus, num_gpus=self._num_gpus())(run_here)

    def submit(self, request: Request, *, output: Path, limit_s: float | None) -> RayTask:
        """Submit a run."""
        folder = os.getcwd()
        return RayTask(self._ray, self._task.remote(request.model_dump_json(), folder, str(output.absolute()), limit_s))

    def under_way(self, request: Request) -> RayTask | None:
        """Return None: Ray ends the tasks of a command that has ended."""
        return None

    def end(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self._ray.shutdown()


class RayTask:
    """A Ray task."""

    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def done(self) -> bool:
        """Return whether it is over."""
        return bool(self._ray.wait([self._reference], timeout=0)[0])

    def lost(self) -> str:
        """Return why a task that is over did not finish its run; empty if it did."""
        try:
            stopped_by = self._ray.get(self._reference)
        except Exception as error:  # raised by Ray or by the task
            first = next(iter(str(error).splitlines()), "")
            return f"{type(error).__name__}: {first}".rstrip(": ")
        return f"its worker was stopped by {stopped_by}" if stopped_by else ""

    def cancel(self) -> None:
        """End it with its worker."""
        with suppress(Exception):  # it may just have ended
            self._ray.cancel(self._reference, force=True)
