"""How much host time does ``mezzo run`` add to a step of an unmodified script?

The model is a small MLP, so that host time dominates the step, as on a GPU with small kernels, where `mezzo compare` would measure it.
Arithmetic is native and the op lists are the device's, so both sides compute the same.

``python -m benchmarks host_time --device cuda`` measures it on a GPU, and ``--model gpt2`` a GPT-2 of 12 layers there (8 x 128 tokens).
A block ends when the GPU has finished, and three clocks time it. Wall time is the time that a user waits and that `mezzo compare` sees.
The CPU time of all threads is the host's work, and includes waiting, since CUDA waits in a busy loop. The CPU time of the
first thread is in the file only: it lacks the backward pass, which runs in autograd's own thread.
Builds are repeated until the seconds are used up, and the results are written after each.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.shared import RESULTS, options
from benchmarks.shared.harness import BUILDS, CONFIDENCE, Row, show, surroundings, write
from benchmarks.shared.processes import Build, Loop, NoAnswerError, answer_of, build, ratio
from mezzo.launch.request import GuardRequest
from mezzo.launch.torch import switched
from mezzo.policy import Policy

SIZES = (64, 256, 256, 10)
GPT2_BATCH, GPT2_TOKENS = 8, 128
Step = Callable[[], Any]
Training = tuple[nn.Module, Callable[[], Tensor]]
"""A model, and the function that computes its loss."""


@dataclass(frozen=True)
class Case:
    """One policy's script under Mezzo, and the hand-written loop that does the same."""

    name: str
    policy: str | None
    """None: as-is."""
    format: torch.dtype | None
    """The autocast dtype of the hand-written loop; None for no autocast. The script under Mezzo has no autocast, unless it runs as-is.

    On a CPU it is BF16 even where a loss is scaled: FP16 products take ten times as long as the rest of a step, which would hide the
    overhead.
    """
    scales: bool
    target: str
    own_amp: bool = False
    """Whether the script under Mezzo is the hand-written loop itself."""
    control: bool = False
    """Whether Mezzo is left out, so that the hand-written loop is measured against itself."""


AS_IS = Case("as-is", None, None, False, "1.05 or less")
FP32 = Case("fp32", "fp32", None, False, "1.05 or less")
BF16 = Case("bf16", "bf16:op_lists=device", torch.bfloat16, False, "1.03 or less")
FP16 = Case("fp16", "fp16:op_lists=device", torch.float16, True, "1.03 or less")
OWN_BF16 = Case("as-is, the script's own GradScaler", None, torch.bfloat16, True, "1.05 or less", own_amp=True)
OWN_FP16 = replace(OWN_BF16, name="as-is, the script's own autocast and GradScaler", format=torch.float16)
SCALED_BF16 = Case(
    "bf16 with the loss scale of fp16", "bf16:op_lists=device:loss_scale=dynamic", torch.bfloat16, True, "1.03 or less"
)
CONTROL = replace(AS_IS, name="by hand against itself", target="the interval holds 1", control=True)


@dataclass(frozen=True)
class Plan:
    """The measurements of one model on one device."""

    device: str
    model: str
    cases: tuple[Case, ...]
    steps: int = 50
    """Steps of a block: 50 contain their share of the work that a run does every 10, 25 or 32 steps."""
    blocks: int = 24
    shown: tuple[str, ...] = ("thread_ms",)
    """The clocks whose ratios are rows."""
    seconds: float = float("inf")
    """No build is started that would end later, except the first."""
    untimed_steps: int = 110
    """Steps before the first block: the second is inspected, and the first 100 are checked for misuse."""


_GPU_CASES = (AS_IS, OWN_FP16, FP32, BF16, FP16, CONTROL)
_GPU_CLOCKS = ("wall_ms", "process_ms")
CLOCKS = {"wall_ms": "wall time", "process_ms": "CPU time of all threads", "thread_ms": "thread CPU time"}
PLANS = {
    ("cpu", "mlp"): Plan("cpu", "mlp", (AS_IS, OWN_BF16, FP32, BF16, SCALED_BF16)),
    ("cuda", "mlp"): Plan("cuda", "mlp", _GPU_CASES, blocks=8, shown=_GPU_CLOCKS, seconds=130),
    ("cuda", "gpt2"): Plan("cuda", "gpt2", (AS_IS, BF16, FP16), steps=25, blocks=3, shown=_GPU_CLOCKS, seconds=105),
}


def mlp(device: str) -> Training:
    layers = [m for a, b in pairwise(SIZES) for m in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1]).to(device)
    inputs, labels = torch.randn(64, SIZES[0]).to(device), torch.randint(0, SIZES[-1], (64,)).to(device)
    return model, lambda: nn.functional.cross_entropy(model(inputs), labels)


def gpt2(device: str, *, tiny: bool = False) -> Training:
    """Return GPT-2 of 12 layers, from its configuration and with random weights, and its loss on one batch."""
    from benchmarks.gpu.contest.workloads import workload

    work = workload("gpt2", tiny=tiny)
    model = work.model(device)
    batch, length = (2, 16) if tiny else (GPT2_BATCH, GPT2_TOKENS)
    tokens = torch.randint(0, 128 if tiny else 50257, (batch, length)).to(device)
    return model, lambda: work.loss(model, tokens, tokens)


MODELS: dict[str, Callable[[str], Training]] = {"mlp": mlp, "gpt2": gpt2}
_LEARNING_RATES = {"mlp": 1e-3, "gpt2": 1e-4}


def script(format: torch.dtype | None, *, scales: bool, device: str = "cpu", model: str = "mlp") -> Step:
    """Return a training step of a script, with its own autocast if ``format`` is given, and a GradScaler if ``scales``."""
    torch.manual_seed(0)
    network, loss_of = MODELS[model](device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=_LEARNING_RATES[model])
    scaler = torch.amp.GradScaler(device) if scales else None

    def step() -> None:
        optimizer.zero_grad()
        if format is None:  # no null context: it would add calls that a script without autocast does not have
            loss = loss_of()
        else:
            with torch.autocast(device, dtype=format):
                loss = loss_of()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return step


@dataclass(frozen=True)
class Script:
    """A case's script under Mezzo, or the hand-written loop, after its untimed steps; a value, so that it can be sent to a new process."""

    plan: Plan
    case: Case
    under_mezzo: bool

    @contextmanager
    def __call__(self) -> Iterator[Step]:
        """Run as ``mezzo run`` does, its guard included; or without Mezzo."""
        case = self.case
        if not self.under_mezzo or case.control:
            yield self._block(case.format, scales=case.scales)
            return
        with switched(None if case.policy is None else Policy.of(case.policy)) as (run, _):
            run.begin_guard(GuardRequest(), on_stop=list)
            yield self._block(case.format if case.own_amp else None, scales=case.own_amp and case.scales)

    def _block(self, format: torch.dtype | None, *, scales: bool) -> Step:
        plan = self.plan
        step = script(format, scales=scales, device=plan.device, model=plan.model)
        wait = torch.cuda.synchronize if plan.device == "cuda" else nullcontext

        def block(steps: int = plan.steps) -> None:
            for _ in range(steps):
                step()
            wait()

        block(plan.untimed_steps)
        return block


def loops(plan: Plan, case: Case) -> dict[str, Loop]:
    return {name: Script(plan, case, under_mezzo=by == "mezzo") for by, name in _names(case).items()}


def _names(case: Case) -> dict[str, str]:
    return {by: f"{case.name}: {by}" for by in ("mezzo", "hand")}


def on_cpu(plan: Plan) -> Iterator[list[Build]]:
    """Yield the builds so far, case by case: there are two cores, and each build has two processes."""
    builds: list[Build] = []
    for case in plan.cases:
        pair = loops(plan, case)
        for loop in pair.values():
            with loop():
                pass  # imports happen here once, instead of in each build
        builds += [build(pair, blocks=plan.blocks) for _ in range(BUILDS)]
        yield builds


def on_gpu(plan: Plan, *, began_s: float, start: str) -> Iterator[list[Build]]:
    """Yield the builds so far, each with the loops of all cases: their processes start in parallel, since starting dominates a build."""
    every = {name: loop for case in plan.cases for name, loop in loops(plan, case).items()}
    builds: list[Build] = []
    longest_s = 0.0
    while len(builds) < BUILDS and (not builds or time.monotonic() - began_s + longest_s < plan.seconds):
        from_s = time.monotonic()
        builds.append(build(every, blocks=plan.blocks, start=start))
        longest_s = max(longest_s, time.monotonic() - from_s)
        print(f"build {len(builds)}: {time.monotonic() - from_s:.0f} s", file=sys.stderr, flush=True)
        yield builds


def result(plan: Plan, builds: list[Build]) -> tuple[list[Row], dict[str, Any]]:
    """Return the rows, and for each case the ratio by every clock and the microseconds of a hand-written step."""
    rows: list[Row] = []
    data: dict[str, Any] = {}
    for case in plan.cases:
        mezzo, hand = _names(case).values()
        failed = {name: why for one in builds for name, why in one.failed.items() if name in (mezzo, hand)}
        rows += [(name, f"failed: {why}", "") for name, why in failed.items()]
        whole = [one for one in builds if mezzo in one.times and hand in one.times]
        if not whole:
            continue
        data[case.name] = {}
        for clock, what in CLOCKS.items():
            by_hand_us = [getattr(spent, clock) / plan.steps * 1e3 for one in whole for spent in one.times[hand]]
            found = ratio(whole, mezzo, hand, clock)
            data[case.name][what] = {**found, "by_hand_us_a_step": round(statistics.median(by_hand_us), 1)}
            if clock in plan.shown:
                rows.append((f"{case.name}: {what} a step", _text(found), case.target))
    return rows, data


def _text(found: dict[str, Any]) -> str:
    low, high = found["interval"]
    builds = len(found["medians_of_builds"])
    if builds == 1:
        return f"{found['ratio']:.3f}x (one build)"
    few = "" if found["confidence"] >= CONFIDENCE else f", {builds} builds"
    return f"{found['ratio']:.3f}x ({low:.3f} to {high:.3f}{few})"


def gpu() -> dict[str, Any]:
    """Return the environment of measurements on the GPU, after a pass on it.

    Raises:
        RuntimeError: this process cannot use a GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("torch.cuda.is_available() is false")
    torch.set_num_threads(1)  # as in the processes that measure
    torch.ones(1, device="cuda", requires_grad=True).sum().backward()
    torch.cuda.synchronize()
    return surroundings("cuda")


def folder_of(gpu: str) -> str:
    """Return the name of the folder with a GPU's results: ``h100`` for NVIDIA H100 80GB HBM3."""
    words = gpu.lower().split()
    return next((word for word in words if re.search(r"\d", word)), "-".join(words))


def main(argv: Sequence[str] = ()) -> None:
    began_s = time.monotonic()
    args = _parse(argv)
    plan: Plan = replace(args.plan, seconds=args.seconds or args.plan.seconds)
    facts: dict[str, Any] = {"command": _command(argv)}
    torch.set_num_threads(1)
    if plan.device == "cpu":
        facts, folder, so_far = {**facts, "environment": surroundings("cpu")}, RESULTS, on_cpu(plan)
    else:
        # The first optimizer imports it, and a fork inherits it. Nothing else is imported here: transformers' models import torchao where
        # it is installed, which calls CUDA's driver, and then no fork could use the GPU.
        importlib.import_module("torch._dynamo")
        try:
            where = answer_of(gpu, start=args.start)
        except NoAnswerError as error:
            sys.exit(f"no GPU to measure on: {error}. If an import called CUDA's driver, --start spawn helps")
        facts, folder = {**facts, "environment": where}, RESULTS / folder_of(str(where["gpu"]))
        so_far = on_gpu(plan, began_s=began_s, start=args.start)
    name = "host_time" if plan.model == "mlp" else f"host_time_{plan.model}"
    path = (args.out or folder) / f"{name}.json"
    rows: list[Row] = []
    for builds in so_far:
        rows, data = result(plan, builds)
        write(path, rows, {**facts, **data})
    show(name, rows)
    if any(measured.startswith("failed") for _, measured, _ in rows):
        sys.exit(1)


def _command(argv: Sequence[str]) -> str:
    """Return the command as typed, without ``--out``: a path of this machine, which changes no figure."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--out")
    return shlex.join(["python", "-m", "benchmarks", "host_time", *parser.parse_known_args(argv)[1]])


def _parse(argv: Sequence[str]) -> Any:
    parser = options(__name__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=tuple(MODELS), default="mlp", help="gpt2: on a GPU only, needs transformers")
    parser.add_argument("--seconds", type=float, help="on a GPU: the time limit for all builds")
    parser.add_argument("--out", type=Path, help="folder of the results, instead of benchmarks/results or the GPU's")
    parser.add_argument("--start", choices=("fork", "spawn"), default="fork", help="on a GPU: how processes start")
    args = parser.parse_args(argv)
    args.plan = PLANS.get((args.device, args.model))
    if args.plan is None:
        parser.error(f"--model {args.model} needs --device cuda: on a CPU arithmetic takes the whole step")
    return args
