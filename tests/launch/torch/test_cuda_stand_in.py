"""Scripts that hard-code CUDA, on a machine without it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from forked_processes import in_fork
from mezzo.errors import ScriptError
from mezzo.launch.torch import training
from paths import SCRIPTS

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU stands in only where there is no CUDA device"
)
DEVICE = torch.device("cuda", 0)
CHECKED: dict[str, Any] = {"device": "cuda", "check_invariants": True}


@pytest.fixture
def stand_in() -> Iterator[None]:
    with training(None, seed=None, observe=None) as here:
        here.begin_stand_in()
        yield


CREATIONS: dict[str, tuple[Callable[[], Tensor], list[float]]] = {
    "zeros": (lambda: torch.zeros(2, device="cuda"), [0, 0]),
    "zeros on a number": (lambda: torch.zeros(2, device=1), [0, 0]),
    "zeros, pinned": (lambda: torch.zeros(2, pin_memory=True), [0, 0]),
    "tensor": (lambda: torch.tensor([1.0, 2.0], device="cuda"), [1, 2]),
    "tensor on a number": (lambda: torch.tensor([1.0, 2.0], device=0), [1, 2]),
    "as_tensor": (lambda: torch.as_tensor(np.ones(2), device=DEVICE), [1, 1]),
    "asarray": (lambda: torch.asarray([1.0, 2.0], device="cuda"), [1, 2]),
    "arange": (lambda: torch.arange(2.0, device="cuda:0"), [0, 1]),
    "full": (lambda: torch.full((2,), 3.0, device=DEVICE), [3, 3]),
    "linspace": (lambda: torch.linspace(0, 1, 2, device="cuda"), [0, 1]),
    "eye": (lambda: torch.eye(2, device="cuda")[0], [1, 0]),
    "ones_like": (lambda: torch.ones_like(torch.zeros(2), device="cuda"), [1, 1]),
    "new_zeros": (lambda: torch.ones(2).new_zeros(2, device="cuda"), [0, 0]),
    "sparse": (lambda: torch.sparse_coo_tensor([[0]], [1.0], (2,), **CHECKED).to_dense(), [1, 0]),
    "sparse, moved": (lambda: torch.eye(2).to_sparse().to("cuda").to_dense()[0], [1, 0]),
    "triu_indices": (lambda: torch.triu_indices(2, 2, device="cuda")[1], [0, 1, 1]),
    "tensor type": (lambda: torch.cuda.FloatTensor([1.0, 2.0]), [1, 2]),
    "type by name": (lambda: torch.ones(2).type("torch.cuda.FloatTensor"), [1, 1]),
    "to a name": (lambda: torch.ones(2).to("cuda"), [1, 1]),
    "to a device, named": (lambda: torch.ones(2).to(device=DEVICE, non_blocking=True), [1, 1]),
    "to a number": (lambda: torch.ones(2).to(0), [1, 1]),
    "to a device and a dtype": (lambda: torch.ones(2).to("cuda", torch.float64), [1, 1]),
    "to a dtype": (lambda: torch.ones(2).to(torch.float64), [1, 1]),
    "cuda": (lambda: torch.ones(2).cuda(), [1, 1]),
    "cuda of a number": (lambda: torch.ones(2).cuda(0, non_blocking=True), [1, 1]),
    "pinned": (lambda: torch.ones(2).pin_memory().cuda(), [1, 1]),
    "device as a context": (lambda: _in_context(lambda: torch.ones(2)), [1, 1]),
    "module": (lambda: nn.BatchNorm1d(2).cuda().weight.detach(), [1, 1]),
    "module to a number": (lambda: nn.BatchNorm1d(2).to(0).weight.detach(), [1, 1]),
    "module created there": (lambda: nn.BatchNorm1d(2, device="cuda").weight.detach(), [1, 1]),
    "generator": (lambda: torch.randn(1, generator=torch.Generator("cuda").manual_seed(1), device="cuda") * 0 + 1, [1]),
}


def _in_context(make: Callable[[], Tensor]) -> Tensor:
    with torch.device("cuda"):
        return make()


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", CREATIONS)
def test_a_tensor_of_cuda_is_made_on_the_cpu(name: str) -> None:
    make, expected = CREATIONS[name]
    made = make()
    assert made.device.type == "cpu"
    assert made.tolist() == expected


@pytest.mark.parametrize("name", ["zeros", "tensor", "to a name", "cuda", "module", "generator"])
def test_without_a_stand_in_torch_refuses(name: str) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        CREATIONS[name][0]()


@pytest.mark.usefixtures("stand_in")
def test_a_move_makes_a_copy_as_between_two_devices() -> None:
    data = torch.zeros(2)
    moved = data.cuda()
    moved += 1
    best = moved.cpu()
    moved += 1
    assert (data.tolist(), best.tolist(), moved.tolist()) == ([0, 0], [1, 1], [2, 2])
    array = np.zeros(2)
    torch.as_tensor(array, device="cuda").add_(1)
    assert array.tolist() == [0, 0]


@pytest.mark.usefixtures("stand_in")
def test_what_is_there_already_stays_what_it_is() -> None:
    weight = torch.ones(2, device="cuda", requires_grad=True)
    moved = torch.ones(2).cuda()
    assert weight.to("cuda") is weight
    assert moved.cuda() is moved
    assert moved.to(DEVICE) is moved


@pytest.mark.usefixtures("stand_in")
def test_without_cuda_in_use_the_cpu_copies_nothing() -> None:
    data = torch.zeros(2)
    assert data.cpu() is data
    assert data.to("cpu") is data


@pytest.mark.usefixtures("stand_in")
def test_torch_cuda_answers_and_stays_unavailable(tmp_path: Path) -> None:
    torch.cuda.set_device(0)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        end.record()
    assert 0 <= start.elapsed_time(end) < 1e4
    assert torch.cuda.max_memory_allocated() == 0
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    assert torch.cuda.get_device_capability() == (8, 0)
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 1  # a script that starts a process for each device starts one
    model = nn.Linear(2, 2)
    assert torch.cuda.make_graphed_callables(model, (torch.ones(1, 2),)) is model
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    assert torch.load(tmp_path / "w.pt", map_location="cuda:0")["w"].tolist() == [1, 1]


@pytest.mark.usefixtures("stand_in")
def test_a_cuda_graph_is_refused_by_name() -> None:
    with pytest.raises(ScriptError, match="captures a CUDA graph") as caught:
        torch.cuda.CUDAGraph()
    assert "make_graphed_callables" in caught.value.hint


@pytest.mark.usefixtures("stand_in")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated")
def test_torchscript_compiles_factory_functions_as_before() -> None:
    @torch.jit.script
    def made(n: int) -> Tensor:
        return torch.zeros(n) + torch.tensor(1.0)

    assert made(2).tolist() == [1, 1]


@pytest.mark.parametrize(("policy", "low"), [("as-is", "float32"), ("fp16", "float16")])
def test_a_script_that_hard_codes_cuda_trains(policy: str, low: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = in_fork(["run", "--policy", policy, "--out", str(out), str(SCRIPTS / "cuda_names.py")], folder=tmp_path)
    assert ended.code == 0, ended.printed
    record: dict[str, Any] = json.loads((out / "record.json").read_text())
    printed = json.loads(next(line for line in ended.printed.splitlines() if line.startswith("{")))
    assert printed["formats"] == [low, low]
    assert printed["losses"] == pytest.approx(record["steps"]["loss"], rel=1e-3)
    assert [r["value"] for r in record["explanation"] if r["what"] == "device"] == ["the CPU stands in for CUDA"]
    assert ended.printed.count("the CPU stands in for it") == 1
    own = "the script's autocast is off"
    assert (own in ended.printed) == (policy == "as-is") == (own in [r["value"] for r in record["explanation"]])
