"""What a session's update costs, counted: reads of the device by the host, operations on several devices, and launches."""

from __future__ import annotations

import cProfile
import importlib
import pstats
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from fake_cuda import Linear, Operations, fake_gpus, step
from mezzo.engine.kernels import reference
from mezzo.engine.kernels.reference import AdamWSettings, Batch
from mezzo.engine.state import NoLoopChecks
from processes import leave_process_group

POLICIES = ["fp32", "bf16", "fp16", "fp16:hysteresis=2", "bf16-master", "fp16-master"]


NO_LAUNCH = ("detach", "to", "device", "_record_function_enter_new", "_record_function_exit")
"""Views and questions; conversions of single numbers are left out too, as some convert nothing."""


def session(policy: str, optimizer: Callable[..., Any], device: str, layers: int = 3, **settings: Any) -> mezzo.Session:
    model = nn.Sequential(*[Linear(8, 8, device=device) for _ in range(layers)])
    one = mezzo.Session(model, optimizer(model.parameters(), lr=0.1), policy=policy, clip_norm=1.0, **settings)
    one.state.progress.updates_closed, one._watch_rounding, one.state.loop_checks = (
        1,
        False,
        NoLoopChecks(),
    )  # what only a first update does
    return one


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("optimizer", [mezzo.AdamW, mezzo.SGD])
def test_an_update_by_our_optimizers_reads_nothing_and_stays_on_its_device(
    monkeypatch: pytest.MonkeyPatch, device: str, policy: str, optimizer: Callable[..., Any]
) -> None:
    if "hysteresis" in policy and torch.version.cuda is None:
        pytest.skip(
            "torch's own where() and masked_fill_() look for the device first, which its CPU build does not know"
        )
    with fake_gpus(monkeypatch):
        one = session(policy, optimizer, device)
        step(one, device)
        with Operations() as log:
            step(one, device)
    assert log.reads == []
    assert log.mixed == []
    # The floor's flag is sent towards the host, which does not wait for it.
    assert log.transfers == ([f"copy_ cpu {device}"] if "fp16" in policy else [])
    assert log.names


def operations(policy: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(reference, "sum_of_squares", lambda gradients: gradients[0].double().sum())  # one launch
    with fake_gpus(monkeypatch):
        one = session(policy, mezzo.AdamW, "cuda:0", layers)
        step(one)
        one.backward(torch.empty((), device="cuda:0", requires_grad=True))
        with Operations() as log:
            one.update()
    return len([name for name in log.names if name not in NO_LAUNCH])


@pytest.mark.parametrize(("policy", "most"), [("bf16", 6), ("bf16-master", 6), ("fp16", 18), ("fp16-master", 18)])
def test_an_update_has_no_more_operations_in_a_large_model(
    monkeypatch: pytest.MonkeyPatch, policy: str, most: int
) -> None:
    few, many = (operations(policy, layers, monkeypatch) for layers in (2, 20))
    assert few == many
    assert many <= most


# --- tables of the Triton kernels -----------------------------------------------------------------


class Launches:
    """Stands for a kernel: counts its launches."""

    count = 0

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        Launches.count += 1
        assert grid[0] > 0
        return lambda *args, **kwargs: None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("triton")
    module = importlib.import_module("mezzo.engine.kernels.gpu")
    monkeypatch.setattr(Launches, "count", 0)
    for kernel in ("square_kernel", "begin_kernel", "adamw_kernel", "sgd_kernel"):
        monkeypatch.setattr(module, kernel, Launches())
    return module


SETTINGS = AdamWSettings(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, amsgrad=False, maximize=False)


def batch() -> Batch:
    def made() -> list[Tensor]:
        return [torch.zeros(16) for _ in range(3)]

    weights = made()
    return Batch(
        weights=weights,
        gradients=made(),
        masters=weights,
        steps=[torch.zeros(()) for _ in weights],
        moments={"exp_avg": made(), "exp_avg_sq": made()},
    )


@pytest.mark.parametrize("groups", [2, 33, 100])
def test_tables_of_any_number_of_groups_are_sent_once(monkeypatch: pytest.MonkeyPatch, gpu: Any, groups: int) -> None:
    sent: list[int] = []
    send = gpu._send
    monkeypatch.setattr(gpu, "_send", lambda numbers, to: (sent.append(len(numbers)), send(numbers, to)))
    batches, one = [batch() for _ in range(groups)], torch.ones(())
    for _ in range(3):
        sent.clear()
        Launches.count = 0
        for group in batches:
            gpu.adamw(group, SETTINGS, one, one)
    assert sent == []
    assert Launches.count == 2 * groups


def test_tables_that_are_not_used_again_are_dropped(gpu: Any) -> None:
    group, one = batch(), torch.ones(())
    for _ in range(20):
        group.gradients = [torch.zeros(16) for _ in range(3)]
        gpu.adamw(group, SETTINGS, one, one)
    ((tables,),) = (group.remembered.values(),)
    assert len(tables._tables) <= 4


@pytest.mark.parametrize("sizes", [[0], [0, 0], [0, 5]])
def test_gradients_without_elements_are_no_work(gpu: Any, sizes: list[int]) -> None:
    gradients = [torch.ones(size, dtype=torch.bfloat16) for size in sizes]
    total = gpu.sum_of_squares(gradients)
    assert total.dtype is torch.float64
    assert Launches.count == (1 if any(sizes) else 0)
    if not any(sizes):
        assert float(total) == 0.0


def calls_a_step(step: Callable[[], None]) -> float:
    """Return the Python and C calls of one step, after the first ones."""
    for _ in range(6):
        step()
    profile = cProfile.Profile()
    profile.runcall(lambda: [step() for _ in range(10)])
    return pstats.Stats(profile).total_calls / 10  # type: ignore[attr-defined,no-any-return]


def test_a_session_under_ddp_makes_no_more_calls_than_a_hand_written_loop() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        models = [DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))) for _ in range(2)]
        inputs = torch.randn(4, 8)
        optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
        scaler = torch.amp.GradScaler("cpu")
        one = mezzo.Session(models[1], optimizers[1], policy="fp16:op_lists=device")

        def by_hand() -> None:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = models[0](inputs).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizers[0])
            scaler.update()
            optimizers[0].zero_grad()

        def with_session() -> None:
            with one.autocast():
                loss = models[1](inputs).float().square().mean()
            one.step(loss)

        assert calls_a_step(with_session) <= calls_a_step(by_hand)
    finally:
        leave_process_group()
