"""Scripts written for a GPU are traced like the same scripts for a CPU, with torch's CPU build too."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from helpers_predict import taped
from mezzo.measure.predict.script.devices import gpu_on_cpu
from mezzo.measure.predict.script.process import record_script
from mezzo.measure.predict.script.tapes import TapeRequest

SCRIPT = """
import torch
from torch import nn

{before}
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)){model}
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(12, 8{factory}), torch.zeros(12, dtype=torch.long{factory})
for step in range(4):
    a, b = x[:4]{data}, y[:4]{data}
    loss = nn.functional.cross_entropy(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {after}
"""
NONE = {"before": "", "model": "", "factory": "", "data": "", "after": "pass"}
CUDA = {"model": ".cuda()", "data": ".cuda()"}
AFTERWARDS = "torch.cuda.synchronize(); 1 / (1 + torch.cuda.max_memory_allocated()); torch.cuda.empty_cache()"
BEGIN = "begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]; begin.record()"
END = "end.record(); torch.cuda.current_stream().wait_event(end); 1 / begin.elapsed_time(end)"
BESIDE = "\n    with torch.cuda.stream(side):\n        side.wait_stream(torch.cuda.current_stream())"
WAYS: dict[str, dict[str, str]] = {
    "cuda()": {"model": ".cuda()", "data": ".cuda(non_blocking=True)"},
    "cuda(0)": {"model": ".cuda(0)", "data": ".cuda(0)"},
    "name": {"model": '.to("cuda")', "data": '.to("cuda", non_blocking=True)'},
    "number": {"model": ".to(0)", "data": ".to(0)"},
    "by keyword": {"model": '.to(device="cuda:0")', "data": '.to(device="cuda:0")'},
    "object": {"before": 'gpu = torch.device("cuda", 0)', "model": ".to(gpu)", "data": ".to(gpu)"},
    "object by number": {"before": "gpu = torch.device(0)", "model": ".to(gpu)", "data": ".to(gpu)"},
    "factories": {"model": ".cuda()", "factory": ', device="cuda"'},
    "numbers in factories": {"model": ".cuda()", "factory": ", device=0"},
    "default device": {"before": 'torch.set_default_device("cuda")'},
    "other accelerators": {"model": '.to("mps")', "data": '.to("xpu:1")'},
    "pinned": {"model": ".cuda()", "data": ".pin_memory().cuda()"},
    "questions": {**CUDA, "before": "torch.cuda.set_device(0); torch.cuda.manual_seed_all(1)", "after": AFTERWARDS},
    "events": {**CUDA, "before": BEGIN, "after": END},
    "streams": {**CUDA, "before": "side = torch.cuda.Stream()", "after": BESIDE},
}

SEEN: dict[str, dict[str, str]] = {
    "data": {"after": "assert a.is_cuda and a.device.type == 'cuda' and a.get_device() == 0"},
    "weights": {"before": "", "after": "assert next(model.parameters()).is_cuda"},
    "gradients": {"after": "assert all(p.grad.is_cuda for p in model.parameters())"},
    "same place": {"after": "assert a.device == model[0].weight.device == torch.device('cuda:0') == torch.device(0)"},
    "factories": {
        "after": "assert torch.zeros(3, device=a.device).is_cuda and torch.zeros(3, device=a.get_device()).is_cuda"
    },
    "a device's kind": {"before": "gpu = torch.device('cuda'); assert gpu.type == 'cuda' and str(gpu) == 'cuda'"},
    "inside a device": {"after": "\n    with torch.device('cuda'):\n        assert torch.zeros(3).is_cuda"},
    "autocast by kind": {
        "after": "\n    with torch.autocast(a.device.type):\n        assert torch.is_autocast_enabled() is False"
    },
    "types": {
        "data": ".cuda()",
        "after": "assert a.type() == 'torch.cuda.FloatTensor'; a.type(torch.cuda.HalfTensor); a.type('torch.cuda.HalfTensor')",
    },
    "typed": {"after": "kind = torch.cuda.FloatTensor if a.is_cuda else None; kind(3, 4), kind([1.0, 2.0])"},
    "default type": {"before": "torch.set_default_tensor_type('torch.cuda.FloatTensor')", "after": "assert a.is_cuda"},
    "generators": {
        "before": "g = torch.Generator(device='cuda'); g.manual_seed(1); assert isinstance(g, torch.Generator)",
        "after": "torch.randperm(4, generator=g, device='cuda')",
    },
}
"""What a script sees of its place."""
CALLS: dict[str, str] = {
    "streams": "s = torch.cuda.Stream(priority=-1); s.cuda_stream, s.device; a.record_stream(s); s.record_event().query()",
    "seeds": "torch.cuda.manual_seed(1); torch.cuda.seed(); torch.cuda.initial_seed()",
    "memory": "torch.cuda.memory_stats()['allocated_bytes.all.peak'], torch.cuda.memory.max_memory_allocated(); "
    "torch.cuda.memory_summary(); torch.cuda.max_memory_cached(); torch.cuda.memory._record_memory_history()",
    "NVTX": "torch.cuda.nvtx.range_push('a'); torch.cuda.nvtx.range_pop()",
    "profiler": "torch.cuda.profiler.start(); torch.cuda.cudart().cudaProfilerStart(); torch.cuda._sleep(9)",
    "versions": "assert int(torch.version.cuda.split('.')[0]) > 10 and torch.backends.cudnn.version() > 9000 "
    "and torch.backends.cuda.is_built() and torch.distributed.is_nccl_available()",
    "graphs": "graph = torch.cuda.CUDAGraph()\n    with torch.cuda.graph(graph):\n        a * 2\n    graph.replay()",
    "graphed": "assert torch.cuda.make_graphed_callables(model, (a,)) is model and torch.cuda.is_initialized()",
    "own functions": """
    class Twice(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type='cuda')
        def forward(ctx, x):
            assert x.is_cuda
            return 2 * x
    Twice.apply(a)""",
}
"""What else a script calls; each has the tape of the script for a CPU."""

DEVICE = {"model": ".to(device)", "data": ".to(device, non_blocking=True)"}
"""Of a script that asks first; each of these has the tape of the script for a CPU."""
CHOSEN = '"cuda" if torch.cuda.is_available() else "cpu"'
FACTS = "p = torch.cuda.get_device_properties(0); print(torch.cuda.get_device_name(), p.name, p.multi_processor_count)"
STATE = "state = torch.cuda.get_rng_state_all(); torch.cuda.set_rng_state_all(state)"
RESET = "torch.cuda.init(); torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()"
ACCELERATOR = "assert torch.accelerator.is_available(); device = torch.accelerator.current_accelerator()"
ABLE = "assert torch.cuda.get_device_capability() >= (8, 0) and 'sm_80' in torch.cuda.get_arch_list()"
USED = "torch.cuda.synchronize(); torch.cuda.max_memory_allocated() / torch.cuda.mem_get_info()[0]"
WITHIN = "assert p.total_memory == torch.cuda.mem_get_info()[1] >= torch.cuda.max_memory_allocated()"
FORKED = "\n    with torch.random.fork_rng():\n        pass"
BEFORE: dict[str, tuple[str, str]] = {
    "by choice": (f"device = {CHOSEN}", "pass"),
    "by object": (f"device = torch.device({CHOSEN})", "pass"),
    "asserted": ('assert torch.cuda.is_available(); device = "cuda"', "pass"),
    "exits": ('import sys; torch.cuda.is_available() or sys.exit("needs a GPU"); device = 0', "pass"),
    "accelerator": (ACCELERATOR, "torch.accelerator.synchronize()"),
    "one GPU": (
        "n = torch.cuda.device_count(); device = list(range(n))[-1]",
        "assert n == 1 and torch.cuda.current_device() == 0",
    ),
    "properties": (f"device = 'cuda'; {FACTS}", WITHIN),
    "capability": (f"device = 'cuda'; {ABLE}", "pass"),
    "random state": (f"device = 'cuda'; {STATE}", FORKED),
    "memory": (f"device = 'cuda'; {RESET}", USED),
}
ASKING = {name: {**DEVICE, "before": before, "after": after} for name, (before, after) in BEFORE.items()}
AUTOCAST = """
use = torch.cuda.is_available()
dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
scaler = torch.amp.GradScaler("cuda", enabled=use and dtype == torch.float16)
class Model(nn.Sequential):
    def forward(self, x):
        with torch.autocast("cuda", dtype=dtype, enabled=use):
            return super().forward(x)
nn.Sequential = Model
"""


@pytest.fixture
def default_type() -> Iterator[None]:
    """The default type of tensors, as it was."""
    own = torch.get_default_dtype()
    yield
    torch.set_default_dtype(own)


def traced(folder: Path, *, policy: str = "fp16", **parts: str) -> list[Any]:
    try:
        tape = taped(folder, SCRIPT.format(**{**NONE, **parts}), policy=policy)
    finally:
        torch.set_default_device(None)  # the trace ends inside the script's loop
    return [(op.name, op.phase, op.module, op.format, op.shape) for op in tape.operations]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the tape of the script for a CPU."""
    return traced(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("parts", [*WAYS.values(), *ASKING.values()], ids=[*WAYS, *(f"asks {n}" for n in ASKING)])
def test_a_script_for_a_gpu_has_the_tape_of_one_for_a_cpu(
    parts: dict[str, str], plain: list[Any], tmp_path: Path
) -> None:
    assert traced(tmp_path, **parts) == plain


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
@pytest.mark.usefixtures("default_type")
@pytest.mark.parametrize("parts", SEEN.values(), ids=SEEN)
def test_what_a_script_sees_of_its_place_is_its_gpu(parts: dict[str, str], plain: list[Any], tmp_path: Path) -> None:
    assert traced(tmp_path, **{"model": ".cuda()", "data": ".cuda()", **parts}) == plain


def test_without_a_gpu_it_sees_the_cpu(tmp_path: Path) -> None:
    after = "assert not a.is_cuda and str(a.device) == 'cpu' and torch.device('cuda').type == 'cpu'"
    parts = {**NONE, "model": ".cuda()", "data": ".cuda()", "after": after}
    taped(tmp_path, SCRIPT.format(**parts), gpu_present=False)


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_what_a_script_calls_of_a_gpu_does_nothing(calls: str, plain: list[Any], tmp_path: Path) -> None:
    assert traced(tmp_path, model=".cuda()", data=".cuda()", after=calls) == plain


def test_every_function_of_torch_cuda_is_answered() -> None:
    """Those that are left need no GPU, or make no sense without numbers."""
    left = {"check_error", "cudaStatus", "CudaError", "DeferredCudaCallError", "default_generators", "GreenContext"}
    left |= {"CUDAPluggableAllocator", "change_current_allocator", "has_half", "has_magma"}
    left |= {"caching_allocator_alloc", "caching_allocator_delete", "current_solver_handle"}
    left |= {"manual_seed", "manual_seed_all"}
    public = {name for name in torch.cuda.__all__ if not name.endswith(("Tensor", "Storage"))}
    modules = {name for name in public if isinstance(getattr(torch.cuda, name), ModuleType)}
    own = {name: getattr(torch.cuda, name) for name in public}
    with gpu_on_cpu():
        same = {name for name in public if getattr(torch.cuda, name) is own[name]}
    assert same - modules == left & public


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_amp_that_is_chosen_by_the_gpu_is_left_out_as_any_other(policy: str, tmp_path: Path) -> None:
    own = torch.nn.Sequential
    try:
        found = traced(tmp_path, policy=policy, before=AUTOCAST, model=".cuda()", data=".cuda()")
    finally:
        torch.nn.Sequential = own  # type: ignore[misc]
    plain = traced(tmp_path, policy=policy)
    assert [(name, phase, form, shape) for name, phase, _, form, shape in found] == [
        (name, phase, form, shape) for name, phase, _, form, shape in plain
    ]


def test_the_queries_that_reported_a_gpu_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    before = 'device = "cuda" if torch.cuda.is_available() and torch.cuda.mem_get_info() else "cpu"'
    path.write_text(SCRIPT.format(**{**NONE, **DEVICE, "before": before}), encoding="utf-8")
    told: list[str] = []
    record_script(TapeRequest(script=str(path), arguments=[], policy="fp32"), told)
    assert told == ["torch.cuda.is_available()", "torch.cuda.mem_get_info()"]


def test_torch_itself_has_no_accelerator_but_an_amp_for_one() -> None:
    """A loader would start a thread that pins memory; autocast would turn itself off."""
    loader = torch.utils.data.DataLoader(list(range(4)), batch_size=2, pin_memory=True)
    with gpu_on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        assert torch.autocast("cuda", dtype=torch.bfloat16)._enabled


def test_it_is_said_only_where_there_is_said_to_be_one(cpu_alone: None) -> None:
    with gpu_on_cpu(gpu_present=False):
        assert not torch.cuda.is_available()
        torch.cuda.synchronize()


def test_it_ends_with_the_block() -> None:
    own = torch.cuda.synchronize
    with gpu_on_cpu():
        on_gpu, on_meta = torch.ones(2, device="cuda").cuda().to("cuda:1"), torch.ones(2, device="meta")
        assert (str(on_gpu.device), on_gpu.is_cuda, on_gpu.type()) == ("cuda:0", True, "torch.cuda.FloatTensor")
    assert (str(on_gpu.device), on_gpu.is_cuda, on_gpu.type()) == ("cpu", False, "torch.FloatTensor")
    assert str(on_meta.device) == "meta"
    assert torch.cuda.synchronize is own
    if torch.version.cuda is None:
        with pytest.raises((RuntimeError, AssertionError)):
            torch.ones(2).to("cuda")
