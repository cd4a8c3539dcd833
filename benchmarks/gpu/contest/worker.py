"""The measuring process: ``python -m benchmarks contest`` starts it, ends it within the budget, and restarts it if a GPU is lost."""

from __future__ import annotations

import gc
import json
import platform
import re
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.contest import kernels, timing
from benchmarks.gpu.contest.cases import LOST, Case, Way, plan
from benchmarks.gpu.contest.results import Results
from benchmarks.gpu.contest.timing import FULL, TINY, Memory, Roofs, set_precision
from benchmarks.gpu.contest.ways import Contestant, NotHereError, build
from benchmarks.gpu.contest.workloads import Workload, workload
from mezzo.devices import cpu_name
from mezzo.errors import UnsupportedFormatError
from mezzo.measure.environment import nvidia_driver, package_version
from mezzo.measure.flops import FlopCounter

BATCHES = 4
LIBRARIES = ("mezzo", "triton", "timm", "transformers", "accelerate", "lightning")


class Worker:
    """Runs the cases that fit into the remaining time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.device, self.tiny = settings["device"], settings["tiny"]
        self.only, self.deadline = settings["only"], settings["deadline"]
        self.results = Results(Path(settings["results"]))
        self.command = settings["command"]
        self.sizes = TINY if self.tiny else FULL
        self.roofs = Roofs()
        self.planned = self.spent = 0.0

    def run(self) -> None:
        torch.backends.cudnn.benchmark = self.device == "cuda"
        done = self.results.begun()
        if not done:
            self.results.add("environment", **environment(self.device, self.command))
        for case in plan(tiny=self.tiny):
            wanted = case.kind == "roofs" or re.search(self.only, case.name)
            if wanted and (case.name not in done or case.kind == "roofs"):
                self._case(case, again=case.name in done)

    def _case(self, case: Case, *, again: bool) -> None:
        left, needed = self.deadline - time.time(), case.seconds * self._pace()
        if needed > left:
            why = f"needs about {needed:.0f} s, {max(left, 0):.0f} s are left: run again with --only '{case.name}'"
            self.results.add("row", case=case.name, status="not run", why=why)
            return
        if not again:
            self.results.add("begin", case=case.name)
        started = time.time()
        try:
            if case.kind == "roofs":
                self._roofs(case, report=not again)
            else:
                (self._optimizer if case.kind == "optimizer" else self._training)(case)
        except Exception as error:
            self._failed(case, "", error)
        took = time.time() - started
        self.planned, self.spent = self.planned + case.seconds, self.spent + took
        if not again:
            self.results.add("end", case=case.name, seconds=round(took, 1))
        self.results.write_markdown()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        clean(self.device)

    def _pace(self) -> float:
        """Return the time of the finished cases divided by their planned time."""
        return min(3.0, max(0.5, self.spent / self.planned)) if self.planned else 1.0

    def _roofs(self, case: Case, *, report: bool) -> None:
        self.roofs = timing.measure_roofs(self.device, self.sizes)
        if not report:
            return
        rows = {"copy, read and write": f"{self.roofs.copy_gb_per_s:,.0f} GB/s"}
        side = self.sizes.product
        rows.update({f"{side} x {side} product, {n}": f"{t:,.1f} TFLOP/s" for n, t in self.roofs.tflops.items()})
        for what, value in rows.items():
            self.results.add("row", case=case.name, what=what, value=value, status="measured")

    def _optimizer(self, case: Case) -> None:
        for row in kernels.measure(self.device, self.sizes, self.roofs):
            self.results.add("row", case=case.name, status="measured", **row)

    def _training(self, case: Case) -> None:
        work = workload(case.model, tiny=self.tiny)
        batches = work.batches(case.batch, self.device, BATCHES)
        flops = self._flops(work) * case.batch
        facts: dict[str, dict[str, Any]] = {}
        runs: dict[str, timing.Step] = {}
        for way in case.ways:
            found = self._prepared(case, way, work, batches)
            if found is not None:
                runs[str(way)], facts[str(way)] = found
        set_precision("")
        times, failed = timing.in_turn(runs, self.device, self.sizes, self.deadline)
        for name, error in failed.items():
            self._failed(case, name, error)
        reference = times.get(str(case.reference))
        for way in case.ways:
            ms = times.get(str(way))
            if ms is not None:
                row = {**facts[str(way)], **timing.spread(ms), **(timing.speed(ms, reference) if reference else {})}
                second = 1e3 / row["ms_median"]
                tflops = flops * second / 1e12
                emulated = "emulated" in row["note"]
                row["percent_of_peak"] = None if emulated else self.roofs.percent_of_peak(way.policy, tflops)
                row |= {"a_second": second * case.batch * work.units_a_sample, "unit": work.unit, "tflops": tflops}
                row |= {"rounds": len(ms), "against": str(case.reference), "times_ms": ms}
                self.results.add("row", case=case.name, way=str(way), status="measured", **row)

    def _flops(self, work: Workload) -> float:
        """Return the operations of a sample's step, counted on a batch of 2."""
        model, (batch,) = work.model(self.device), work.batches(2, self.device, 1)
        counter = FlopCounter(in_region=lambda: True)
        with counter:
            work.loss(model, *batch).backward()
        return sum(counter.by_format.values()) / 2

    def _prepared(
        self, case: Case, way: Way, work: Workload, batches: list[Any]
    ) -> tuple[timing.Step, dict[str, Any]] | None:
        """Build a way and train its first steps; return None if it fails, after adding a row that says why."""
        clean(self.device)
        memory, started = Memory(self.device), time.time()
        try:
            set_precision(way.policy)
            contestant = build(way, work, batches[0], self.device, tiny=self.tiny)
            loss = contestant.step(batches[0])
            first = time.time() - started
            for number in range(1, self.sizes.loss_steps):
                loss = contestant.step(batches[number % BATCHES])
            facts = {"loss": float(loss.detach()), "loss_steps": self.sizes.loss_steps, "first_step_s": round(first, 2)}
            return _runner(way, contestant, batches), {**facts, **memory.found(), "note": contestant.note}
        except Exception as error:
            self._failed(case, str(way), error)
            return None

    def _failed(self, case: Case, way: str, error: Exception) -> None:
        unavailable = isinstance(error, (NotHereError, UnsupportedFormatError))
        status = "not available" if unavailable else "failed"
        why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}"
        if isinstance(error, torch.OutOfMemoryError):
            status, why = "out of memory", why[:120]
        if isinstance(error, ImportError):
            status, why = "not installed", str(error)[:300]
        self.results.add("row", case=case.name, way=way, status=status, why=why)
        timing.bare(error)
        if self.device == "cuda" and lost():
            self.results.add("end", case=case.name, seconds=0)
            sys.exit(LOST)


def _runner(way: Way, contestant: Contestant, batches: list[Any]) -> timing.Step:
    turn = 0

    def run() -> None:
        nonlocal turn
        turn += 1
        contestant.step(batches[turn % BATCHES])

    if way.policy not in ("fp32", "tf32"):
        return run

    def run_in_precision() -> None:  # a switch of the whole process, so each step sets it: two calls of a microsecond
        set_precision(way.policy)
        run()
        set_precision("")

    return run_in_precision


def lost() -> bool:
    """Return whether the GPU no longer answers: after an illegal address, for instance, every later call fails."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def clean(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def environment(device: str, command: str) -> dict[str, str]:
    on_gpu = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"{cpu_name()}, a test of the program, not a measurement",
        "driver": nvidia_driver() or "unknown" if on_gpu else "none",
        "torch": torch.__version__,
        "cuda": f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        "python": platform.python_version(),
        **{name: package_version(name) or "not installed" for name in LIBRARIES},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
    }


if __name__ == "__main__":
    Worker(json.loads(sys.argv[1])).run()
