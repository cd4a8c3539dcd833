"""Parameters on several devices, as fake tensors: what would mix devices in one kernel raises or is noted here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo import SessionError
from mezzo.engine.arguments import device_of
from mezzo.engine.gradients import multiply, total_norm
from mezzo.engine.kernels import fused, gpu
from mezzo.engine.optimizers import one_pass
from mezzo.engine.scaling import DynamicScale, StaticScale
from mezzo.engine.session import Session

DEVICES = ("cuda:0", "cuda:1", "cpu")


@pytest.fixture
def _fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


class SeesMixtures(TorchDispatchMode):
    """Note operations on lists of tensors of several devices: eager CUDA kernels read the memory of one."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        flat = [t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(t, Tensor)]
        if name.startswith("_foreach") and "norm" not in name and len({t.device for t in flat}) > 1:
            self.mixed.append(name)
        return func(*args, **(kwargs or {}))


def on(*devices: str) -> list[Tensor]:
    return [torch.ones(4, 3, device=device) for device in devices]


@pytest.mark.usefixtures("_fake")
@pytest.mark.parametrize("scale", [StaticScale, DynamicScale])
@pytest.mark.parametrize("device", DEVICES)
def test_a_scale_moves_to_the_loss(scale: type[StaticScale], device: str) -> None:
    scaled = scale(8.0, device="cuda:0").scale(torch.ones((), device=device))
    assert scaled.device == torch.device(device)


@pytest.mark.usefixtures("_fake")
def test_gradients_are_multiplied_device_by_device() -> None:
    with SeesMixtures() as seen:
        multiply(on("cuda:0", "cuda:1", "cpu", "cuda:1"), torch.ones((), device="cuda:0"))
        multiply([], torch.ones((), device="cuda:0"))
    assert seen.mixed == []


@pytest.mark.usefixtures("_fake")
def test_the_norm_is_that_of_all_devices_on_the_first() -> None:
    assert total_norm(on("cuda:1", "cuda:0", "cpu")).device == torch.device("cuda:1")


def test_multiplied_values_are_right() -> None:
    values = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    multiply(values, torch.tensor(0.5))
    assert [v.tolist() for v in values] == [[0.5, 1.0], [1.5]]


@pytest.mark.usefixtures("_fake")
def test_one_launch_squares_the_gradients_of_one_device_and_format(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[list[str]] = []

    class Table:
        def __init__(self, lists: list[list[Tensor]], *, kept: object) -> None:
            launched.append([f"{t.device} {t.dtype}" for t in lists[0]])
            self.memory, self.chunks, self.count, self.programs = lists[0][0], None, 0, 2

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kinds: None

    monkeypatch.setattr(gpu, "table_of", Table)
    monkeypatch.setattr(gpu, "square_kernel", Kernel())
    monkeypatch.setattr(gpu, "on", lambda device: nullcontext())
    first, second = on("cuda:0", "cuda:1")
    found = gpu.sum_of_squares([first, second, first.half(), second, first])
    assert launched == [["cuda:0 torch.float32"] * 2, ["cuda:1 torch.float32"] * 2, ["cuda:0 torch.float16"]]
    assert found.device == torch.device("cuda:0")


@pytest.mark.usefixtures("_fake")
def test_each_devices_own_kernels_compute_its_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def choose(device_type: str) -> tuple[Any, str]:
        asked.append(device_type)
        return fused, "chosen by the test"

    monkeypatch.setattr(one_pass, "choose", choose)
    spread: Any = SimpleNamespace(_one_pass=True, device=torch.device("cuda:0"))
    norm = Session._norm_here(spread, on("cuda:1", "cpu", "cuda:0", "cuda:1"))
    assert asked == ["cuda", "cpu", "cuda"]
    assert norm.device == torch.device("cuda:0")


@pytest.mark.usefixtures("_fake")
@pytest.mark.parametrize(
    ("devices", "trained_on"),
    [
        (("cpu", "cuda:1", "cuda:0"), "cuda:1"),  # an embedding kept on the CPU
        (("cuda:0", "cpu"), "cuda:0"),
        (("cpu", "cpu"), "cpu"),
        (("cpu", "mps"), "mps"),
    ],
)
def test_the_device_is_the_first_that_is_no_cpu(devices: tuple[str, ...], trained_on: str) -> None:
    parameters = [nn.Parameter(torch.ones(2, device=device)) for device in devices]
    assert str(device_of(parameters)) in (trained_on, f"{trained_on}:0")


def test_parameters_that_are_kept_elsewhere_than_they_compute_are_refused() -> None:
    offloaded: Any = SimpleNamespace(
        device=torch.device("cpu"), device_mesh=SimpleNamespace(device_type="cuda"), shape=(2, 3)
    )
    with pytest.raises(SessionError, match="stored on cpu but computed with on cuda"):
        device_of([offloaded])
