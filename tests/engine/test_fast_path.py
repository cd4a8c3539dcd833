"""Which switches pay for which model, policy and device, and that bringing them about does what the choice says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import mezzo
from mezzo.devices import Device
from mezzo.engine.fast_path import fast_path
from mezzo.engine.matrix_units.native_units import fp32_products_as_they_were

H100 = Device(kind="cuda", name="H100", capability=(9, 0))
A100 = Device(kind="cuda", name="A100", capability=(8, 0))
V100 = Device(kind="cuda", name="V100", capability=(7, 0))
CPU = Device(kind="cpu", name="a CPU", flags=frozenset({"avx2"}))
CPU_WITH_UNITS = Device(kind="cpu", name="a CPU", flags=frozenset({"amx_bf16"}))
MPS = Device(kind="mps", name="Apple")


@pytest.fixture(autouse=True)
def _switches_as_they_were() -> Iterator[None]:
    benchmark = torch.backends.cudnn.benchmark
    with fp32_products_as_they_were():
        yield
    torch.backends.cudnn.benchmark = benchmark


TORCHS_OWN = pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # where its compiler is imported


def convnet() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.Flatten(), nn.Linear(32, 16))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def vision_transformer() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 64, 16, 16), *(nn.Linear(64, 64) for _ in range(8)))


def volumes() -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(8, 8, 3), nn.Conv2d(8, 8, 3))


def sounds() -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(8, 8, 3), nn.Linear(8, 8))


class Model(nn.Module):
    """A language model of one layer, on the meta device: sizes without memory."""

    def __init__(self, words: int, *, tied: bool = True, head: bool = True) -> None:
        super().__init__()
        self.wte = nn.Embedding(words, 768, device="meta")
        self.wpe = nn.Embedding(1023, 768, device="meta")
        self.fc = nn.Linear(768, 3072, device="meta")
        if head:
            self.lm_head = nn.Linear(768, words, bias=False, device="meta")
            if tied:
                self.lm_head.weight = self.wte.weight


def choice(what: str, choices: list[mezzo.Choice]) -> mezzo.Choice:
    (found,) = [c for c in choices if c.what == what]
    return found


DECISIONS = [
    # model, policy, device, and the values of channels_last, cudnn benchmark, tf32, torch.compile, cast cache
    (convnet, "fp16", H100, "on on on suggested on"),
    (convnet, "bf16", A100, "on on on suggested on"),
    (convnet, "fp16-master", H100, "on on on suggested not-used"),
    (convnet, "fp16", V100, "on on off suggested on"),
    (convnet, "bf16", V100, "off on off suggested on"),  # emulated there
    (convnet, "fp32", H100, "off on off suggested not-used"),
    (convnet, "tf32", H100, "off on on suggested not-used"),
    (convnet, "fp16:fp32_modules=4", H100, "on on off suggested on"),
    (convnet, "fp16:fp32=conv", H100, "on on off suggested on"),
    (convnet, "fp16", CPU, "off off off off on"),
    (convnet, "bf16", CPU_WITH_UNITS, "off off off off on"),
    (convnet, "fp16", MPS, "off off off off on"),
    (mlp, "fp16", H100, "off off on suggested on"),
    (vision_transformer, "fp16", H100, "off on on suggested on"),
    (volumes, "fp16", H100, "off on on suggested on"),
    (sounds, "fp16", H100, "off on on suggested on"),
]
SWITCHES = ("channels_last", "cudnn benchmark", "tf32 for the fp32 rest", "torch.compile", "cast cache")


@pytest.mark.parametrize(("model", "policy", "device", "values"), DECISIONS)
def test_decisions(model, policy: str, device: Device, values: str) -> None:  # noqa: ANN001
    choices = fast_path(model(), policy=policy, device=device)

    assert [c.what for c in choices[:5]] == list(SWITCHES)
    assert [c.value for c in choices[:5]] == [v.replace("-", " ") for v in values.split()]
    assert all(c.reason for c in choices)


@pytest.mark.parametrize(
    ("options", "what", "value", "reason"),
    [
        ({"fixed_shapes": False}, "cudnn benchmark", "off", "every new input shape"),
        ({"fixed_shapes": False}, "torch.compile", "off", "new input shapes compile again"),
        ({"compile": True}, "torch.compile", "on", "requested; published: a nanoGPT step"),
        ({}, "cast cache", "on", "0 weights have several users. In a captured step too"),
        ({"compile": True, "device": CPU}, "torch.compile", "on", "0.96 of its speed"),
        ({"device": CPU}, "channels_last", "off", "98 ms in it and 64 ms without"),
        ({"device": CPU}, "16-bit kernels", "emulated", "0.04 to 0.10"),
        ({"device": CPU, "policy": "fp16:arithmetic=native"}, "16-bit kernels", "native, as requested", "0.04 to 0.10"),
        ({}, "channels_last", "on", "1.47 times"),
        ({}, "cudnn benchmark", "on", "12 minutes instead of 17"),
        ({}, "tf32 for the fp32 rest", "on", "0.016 s instead of 0.11 s"),
        ({"device": V100}, "tf32 for the fp32 rest", "off", "7.0, and matrix units take tf32 only from 8.0"),
        ({"policy": "fp16:fp32_modules=4+0"}, "tf32 for the fp32 rest", "off", "keeps 4, 0 in FP32"),
    ],
)
def test_what_was_said_changes_the_decision(options: dict, what: str, value: str, reason: str) -> None:
    found = choice(what, fast_path(convnet(), **{"device": H100, **options}))

    assert found.value == value
    assert reason in found.reason


def test_deterministic_runs_do_not_try_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)

    assert choice("cudnn benchmark", fast_path(convnet(), device=H100)).value == "off"


def test_a_cpu_with_units_has_no_slow_kernels() -> None:
    choices = fast_path(mlp(), policy="bf16", device=CPU_WITH_UNITS)

    assert [c.what for c in choices] == list(SWITCHES)


class Conv1D(nn.Module):
    """The linear layer of transformers, by name; its weight is inputs x outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(24, 30))


def squares(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(100, 100, device="meta") for _ in range(count)))


THREE = ["0 and 2 more: 100 -> 104 outputs", "0 and 2 more: 100 -> 104 inputs"]
ATTENTION = [  # in_proj is 60 x 20, out_proj 20 x 20
    "MultiheadAttention and 1 more: 20 -> 24 inputs",
    "MultiheadAttention: 60 -> 64 outputs",
    "out_proj: 20 -> 24 outputs",
]
ALIGNMENTS = [
    # model, policy, device, values
    (Model(50257), "fp16", H100, ["lm_head: 50257 -> 50304 vocabulary"]),
    (Model(50257, tied=False), "bf16", A100, ["lm_head: 50257 -> 50304 vocabulary"]),
    (Model(50257, head=False), "bf16", H100, ["wte: 50257 -> 50304 vocabulary"]),
    (Model(50257), "tf32", A100, ["lm_head: 50257 -> 50272 vocabulary"]),
    (Model(50257), "fp8", H100, ["lm_head: 50257 -> 50304 vocabulary"]),
    (Model(30522), "fp16", H100, ["lm_head: 30522 -> 30528 vocabulary"]),
    (Model(50264), "fp16", H100, ["nothing to pad"]),
    (Model(50264), "fp8", H100, ["lm_head: 50264 -> 50304 vocabulary"]),
    (Model(50257), "fp32", H100, []),
    (Model(50257), "fp16", CPU, []),
    (Model(50257), "bf16", V100, []),
    (Model(50257), "fp8", A100, []),
    (nn.Linear(30, 50), "fp16", H100, ["Linear: 50 -> 56 outputs", "Linear: 30 -> 32 inputs"]),
    (nn.Linear(32, 56), "fp8", H100, ["Linear: 56 -> 64 outputs"]),
    (nn.Linear(32, 56), "fp16", H100, ["nothing to pad"]),
    (squares(3), "fp16", H100, THREE),
    (Conv1D(), "fp16", H100, ["Conv1D: 30 -> 32 outputs"]),
    (nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3)), "fp16", H100, ["0: 3 -> 8 inputs"]),
    (nn.Sequential(nn.Conv2d(64, 30, 1), nn.Conv2d(30, 30, 3, groups=30)), "fp16", H100, ["0: 30 -> 32 outputs"]),
    (nn.Conv2d(48, 96, 1, groups=4), "fp16", H100, ["Conv2d: 12 -> 16 inputs"]),
    (nn.MultiheadAttention(20, 4), "fp16", H100, ATTENTION),
    (nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 10)), "fp16", H100, ["1 small layer left"]),
]


@pytest.mark.parametrize(("model", "policy", "device", "values"), ALIGNMENTS)
def test_alignment(model: nn.Module, policy: str, device: Device, values: list[str]) -> None:
    found = [c.value for c in fast_path(model, policy=policy, device=device) if c.what == "alignment"]

    assert sorted(found) == sorted(values)


COSTS = [
    # 47 rows of 768, of 50257 * 768 + 1023 * 768 + 768 * 3072 + 3072 parameters
    (Model(50257), "costs 36,096 weights (0.09% of the model)"),
    (nn.Linear(30, 50), "costs 180 weights (11.61% of the model)"),  # 6 x 30 of 1550
]


@pytest.mark.parametrize(("model", "cost"), COSTS)
def test_cost_of_padding(model: nn.Module, cost: str) -> None:
    first = next(c for c in fast_path(model, policy="fp16", device=H100) if c.what == "alignment")

    assert cost in first.reason


@pytest.mark.parametrize("how", [{"device": H100, "compile": True}, {"device": "cpu", "apply": True}])
def test_asking_and_applying_on_a_cpu_change_nothing(how: dict) -> None:
    model = convnet()
    fast_path(model, policy="fp16", **how)

    assert model[0].weight.is_contiguous()
    assert model._compiled_call_impl is None
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.benchmark


@TORCHS_OWN
def test_applying_brings_about_what_is_on() -> None:
    model, images = convnet(), torch.randn(2, 16, 3, 3)
    before = model(images)
    choices = fast_path(model, policy="fp16", device=H100, compile=True, apply=True)

    assert [c.value for c in choices[:5]] == ["on", "on", "on", "on", "on"]
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    assert model._compiled_call_impl is not None
    assert torch.backends.cuda.matmul.fp32_precision == torch.backends.cudnn.conv.fp32_precision == "tf32"
    assert torch.backends.cudnn.benchmark
    model._compiled_call_impl = None  # compiling is torch's; here it would only take time
    torch.testing.assert_close(model(images), before)


@TORCHS_OWN
def test_a_compiled_model_is_not_compiled_again() -> None:
    model = mlp()
    fast_path(model, device=H100, compile=True, apply=True)
    first = model._compiled_call_impl
    found = choice("torch.compile", fast_path(model, device=H100, compile=True, apply=True))

    assert model._compiled_call_impl is first
    assert (found.value, found.reason.split(";")[0]) == ("on", "the model is compiled already")


def test_shared_weights_are_counted() -> None:
    found = choice("cast cache", fast_path(Model(50257), device=H100))

    assert "1 weights have several users" in found.reason


def test_the_device_is_the_models_own() -> None:
    by_itself, named = fast_path(convnet()), fast_path(convnet(), device="cpu")

    assert by_itself == named
    assert fast_path(convnet().to("meta")) == named


def test_a_session_trains_what_was_applied() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 8))
    fast_path(model, policy="fp16", device=H100, apply=True)
    session = mezzo.Session(model, mezzo.AdamW(model.parameters(), lr=1e-2), policy="fp16")
    images = torch.randn(4, 8, 5, 5)
    losses = []
    for _ in range(6):
        with session.autocast():
            loss = model(images).square().mean()
        session.step(loss)
        losses.append(loss.item())

    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert losses[-1] < 0.9 * losses[0]


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(mezzo.SessionError, match="no parameters"):
        fast_path(nn.ReLU())


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(mezzo.UnsupportedFormatError, match="finds no CUDA device"):
        fast_path(mlp(), device=Device(kind="cuda", name="cuda"))
