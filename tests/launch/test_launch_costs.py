"""What a script pays for being run under Mezzo: driver calls before its first line, reads of the device and memory a step."""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo.engine.session import Session
from mezzo.launch.torch import switched
from mezzo.launch.training import training_in
from mezzo.measure.steps import NumberBuffer, StepRecorder
from mezzo.observe.settings import AnySettings, AuditSettings, DiagnoseSettings, FallbackSettings, RangesSettings
from mezzo.policy import PRESETS, Policy
from paths import ROOT, TESTS

# --- driver calls before the script's first line -----------------------------------------------------------------------------

ASKS_THE_DRIVER = [
    (torch.cuda, "is_available"),
    (torch.cuda, "device_count"),
    (torch.cuda, "_lazy_init"),
    (torch.cuda, "init"),
    (torch.cuda, "current_device"),
    (torch.cuda, "get_device_capability"),
    (torch.cuda, "get_device_properties"),
    (torch.cuda, "is_bf16_supported"),
    *((torch._C, name) for name in dir(torch._C) if name.startswith("_cuda_")),
    *((torch._C, name) for name in ("_cuda_init", "_cuda_getDeviceCount", "_cuda_getDevice", "_cuda_isInBadFork")),
]
"""A CPU build lacks some of these; a call of theirs must be seen there all the same."""
ONLY_READ = ("_cuda_isInBadFork", "_cuda_getDefaultDevice", "_cuda_isCurrentStreamCapturing")
COMMANDS: dict[str, AnySettings | None] = {
    "run": None,
    "audit": AuditSettings(steps=(1, 2)),
    "diagnose": DiagnoseSettings(steps=(1, 2)),
    "ranges": RangesSettings(steps=(1, 2)),
    "fallback": FallbackSettings(steps=(1, 2)),
}
POLICIES = ["as-is", *PRESETS, "fp16:op_lists=device", "fp16:op_lists=device:loss_scale=static"]


@contextlib.contextmanager
def no_driver_calls() -> Iterator[list[str]]:
    """Collect what asks the driver inside."""
    asked: list[str] = []
    with contextlib.ExitStack() as stack:
        for owner, name in ASKS_THE_DRIVER:
            if name in ONLY_READ:
                continue

            def call(*args: Any, name: str = name, **kwargs: Any) -> bool:
                asked.append(name)
                return False

            stack.enter_context(mock.patch.object(owner, name, call, create=True))
        yield asked


RUNS = [
    *(("run", policy) for policy in POLICIES),
    *((command, policy) for command in COMMANDS for policy in ("fp32", "fp16") if command != "run"),
]
"""``ranges`` and the reference of ``fallback`` run under FP32; ``compare`` makes runs as ``run`` does."""


@pytest.mark.parametrize(("command", "policy"), RUNS)
def test_nothing_asks_the_driver_before_the_scripts_first_line(command: str, policy: str) -> None:
    chosen = None if policy == "as-is" else Policy.of(policy)
    with no_driver_calls() as asked:
        training = training_in("torch")
        with training(chosen, seed=0, observe=COMMANDS[command]):
            before_line_1 = list(asked)
    assert before_line_1 == []


BEFORE_A_FORK = """
import sys
import torch
import test_launch_costs
from mezzo.children import fork_server
from mezzo.launch import runner
assert "torch._dynamo" not in sys.modules
torch._C._cuda_getCurrentRawStream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # imported where it seems a CUDA build
with test_launch_costs.no_driver_calls() as asked:
    imported = fork_server._import(runner._PROGRAMS, [])
assert imported.failure is None, imported.failure
assert "torch._dynamo" in sys.modules
print(asked)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked elsewhere")
def test_nothing_asks_the_driver_before_the_runs_of_a_command_are_forked(tmp_path: Path) -> None:
    """``compare`` and ``fallback`` fork their runs from one process that has made the imports: CUDA would not survive that."""
    said = tmp_path / "said.txt"  # a file, as a command's own process has: what the imports print is read again
    with said.open("w+") as file:
        subprocess.run(
            [sys.executable, "-c", BEFORE_A_FORK],
            stdout=file,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", TESTS, Path(__file__).parent)))},
            timeout=120,
            check=True,
        )
    assert said.read_text().splitlines()[-1] == "[]"


# --- reads of the device a step ----------------------------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Count what makes a host wait for its device: reads of one number, and copies of tensors to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count here, also what never reaches the dispatcher."""

        def counted(original: Callable[..., Any], name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.counts[name] += 1
                return original(*args, **kwargs)

            return call

        with contextlib.ExitStack() as stack:
            for name in ("tolist", "numpy", "cpu"):
                own = getattr(torch.Tensor, name)
                stack.enter_context(mock.patch.object(torch.Tensor, name, counted(own, name)))
            stack.enter_context(self)
            yield


Step = Callable[[], None]


def loop(*, scales: bool = False, fused: bool = False, optimizers: int = 1) -> Step:
    """Return a step of a script."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    parts = [[*model.parameters()]] if optimizers == 1 else [[*model[0].parameters()], [*model[2].parameters()]]
    # Not AdamW, which reads its count of steps: on a GPU that lies on the host.
    made = [torch.optim.SGD(part, lr=1e-3, fused=fused) for part in parts]
    scaler = torch.amp.GradScaler("cpu", enabled=scales)
    inputs, labels = torch.randn(4, 8), torch.randint(0, 2, (4,))

    def step() -> None:
        for optimizer in made:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        for optimizer in made:
            scaler.step(optimizer)
        scaler.update()

    return step


def reads_a_step(step: Step, *, steps: int = 4) -> dict[str, float]:
    for _ in range(5):  # the first step checks the loss, the second is inspected
        step()
    reads = Reads()
    with reads.counting():
        for _ in range(steps):
            step()
    return {name: count / steps for name, count in reads.counts.items()}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fp32", {}),
        ("tf32", {}),
        ("bf16", {}),
        ("bf16:op_lists=device", {}),
        ("fp16", {"_local_scalar_dense": 1.0}),
        ("fp16:op_lists=device", {"_local_scalar_dense": 1.0}),
        ("fp16:loss_scale=static", {"_local_scalar_dense": 1.0}),
        ("fp16-master", {"_local_scalar_dense": 1.0}),
        ("bf16-master", {}),
    ],
)
def test_a_script_under_a_policy_reads_one_flag_where_the_loss_is_scaled(
    policy: str, expected: dict[str, float]
) -> None:
    with switched(Policy.of(policy)):
        assert reads_a_step(loop()) == expected


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scales", [False, True])
def test_as_is_reads_what_the_script_reads(scales: bool, fused: bool, optimizers: int) -> None:
    alone = reads_a_step(loop(scales=scales, fused=fused, optimizers=optimizers))
    with switched(None):
        assert reads_a_step(loop(scales=scales, fused=fused, optimizers=optimizers)) == alone
    assert alone == ({"_local_scalar_dense": float(optimizers)} if scales and not fused else {})


@pytest.mark.parametrize(
    ("policy", "optimizer", "expected"),
    [
        ("fp16", mezzo.AdamW, {}),
        ("bf16", mezzo.AdamW, {}),
        ("fp16", mezzo.SGD, {}),
        ("fp16-master", mezzo.AdamW, {}),
        ("fp16", torch.optim.SGD, {"_local_scalar_dense": 1.0}),
        ("bf16", torch.optim.SGD, {}),
    ],
)
def test_a_session_reads_one_flag_with_torchs_optimizers_and_a_scale(
    policy: str, optimizer: Any, expected: dict[str, float]
) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    session = Session(model, optimizer(model.parameters(), lr=1e-3), policy=policy)
    inputs, labels = torch.randn(4, 8), torch.randint(0, 2, (4,))

    def step() -> None:
        with session.autocast():
            loss = nn.functional.cross_entropy(model(inputs), labels)
        session.step(loss)

    assert reads_a_step(step) == expected


@pytest.mark.parametrize("fused", [False, True])
def test_skips_that_only_the_device_knows_are_recorded(fused: bool) -> None:
    with switched(None) as (run, _):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for factor in (1.0, torch.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum() * 2).backward()
            model.weight.grad.mul_(factor)
            scaler.step(optimizer)
            scaler.update()
    steps = run.update.recorder.steps()
    assert steps.skipped == [False, True, False]
    assert steps.loss_scale == [4.0, 2.0, 2.0]


# --- memory a step -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "samples"), [(None, True), ("bf16", True), ("fp16:arithmetic=emulated", False)])
def test_norms_are_sampled_where_no_loss_scale_needs_them(policy: str | None, samples: bool) -> None:
    with switched(None if policy is None else Policy.of(policy)) as (run, _):
        step = loop()
        for _ in range(130):
            step()
        run.close_update()
        norms = run.update.recorder.steps().grad_norm
    taken = {number for number, norm in enumerate(norms, start=1) if norm == norm}
    assert taken == ({*range(1, 101), 128} if samples else {*range(1, 131)})


def test_recorded_numbers_share_one_buffer() -> None:
    recorder = StepRecorder()
    for number in range(600):
        recorder.loss(torch.tensor(float(number)))
        recorder.norm(torch.tensor(2.0 * number))
        recorder.updated()
        recorder.close(skipped=False, scale=torch.tensor(8.0))
    numbers = recorder._numbers[torch.device("cpu")]
    chunks = {
        one.buffer.tensor_at(one.position).untyped_storage().data_ptr() for step in recorder._loss for one in step
    }
    assert len(recorder._numbers) == 1
    assert len(chunks) == len(numbers._chunks) == 4  # 1800 numbers in chunks of 512
    steps = recorder.steps()
    assert (steps.loss[599], steps.grad_norm[599], steps.loss_scale[599]) == (599.0, 1198.0, 8.0)


def test_a_device_that_has_failed_leaves_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = NumberBuffer(torch.device("cpu"))
    numbers.keep(torch.tensor(1.0))
    monkeypatch.setattr(torch, "cat", mock.Mock(side_effect=RuntimeError("CUDA error: device-side assert triggered")))
    assert [value != value for value in numbers.read()] == [True]


# --- a script's own view -----------------------------------------------------------------------------------------------------


def test_as_is_lets_calls_of_modules_alone_once_nothing_is_counted() -> None:
    before = nn.Module.__call__
    with switched(None):
        step = loop()
        for _ in range(110):  # the loop's first 100 updates are checked for misuse
            step()
        assert nn.Module.__call__ is before
        assert _get_current_function_mode_stack() == []
    assert nn.Module.__call__ is before


def test_a_script_that_sets_its_gpus_is_asked_nothing_first(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '3'\nimport torch\nasked_before = list(torch.cuda._asked)\n"
    )
    environment = dict(os.environ)
    with (
        no_driver_calls() as asked,
        mock.patch.object(torch.cuda, "_asked", asked, create=True),
        mock.patch.dict(os.environ, environment),
        switched(Policy.of("fp32")),
    ):
        assert runpy.run_path(str(path))["asked_before"] == []
