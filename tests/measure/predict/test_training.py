"""Tapes of small trainings against manual counts, and what autograd keeps against a real run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from helpers_predict import kept_bytes, trained_tape
from mezzo.engine.casts.casting import Casting
from mezzo.measure.memory import SavedTensors
from mezzo.measure.predict import configurations, named
from mezzo.measure.predict.named import NamedModel
from mezzo.measure.predict.tape import ProductSize
from mezzo.measure.predict.tape_memory import bytes_by_kind, predict_memory
from mezzo.measure.predict.training import ZeroGrad, record_training
from mezzo.policy import Policy

SGD = partial(torch.optim.SGD, lr=0.1)


def _loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    outputs = model(inputs["x"])
    return outputs.float().sum(), None


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1, groups=8)
    )


# Batch 4. Products: 4x8x16, 4x16x2 forward; both weight gradients, and the input gradient of the second alone.
MLP_FLOPS = 2 * 4 * 8 * 16 * 2 + 2 * 4 * 16 * 2 * 3


@pytest.mark.parametrize("policy", ["fp32", "fp16", "bf16"])
def test_products_of_a_perceptron(policy: str) -> None:
    products = [op for op in trained_tape(_mlp, 8, policy=policy).operations if op.flops]
    assert sum(op.flops for op in products) == MLP_FLOPS
    assert {op.format for op in products} == {policy}
    size = 4 if policy == "fp32" else 2
    first = products[0]
    assert (first.name, first.shape[:4]) == ("addmm", (1, 4, 16, 8))
    assert (first.read_bytes, first.written_bytes) == (size * (16 + 4 * 8 + 8 * 16), size * 4 * 16)


def test_convolutions_of_a_small_network() -> None:
    products = {op.name: op for op in reversed(trained_tape(_cnn, 3, 6, 6).operations) if op.flops}
    forward = 2 * 4 * 36 * 8 * 27
    assert products["convolution"].flops == forward
    assert products["convolution"].shape == ProductSize(1, 4 * 36, 8, 27, 9)
    names = Counter(op.name for op in trained_tape(_cnn, 3, 6, 6).operations if op.flops)
    assert names == {"convolution": 2, "convolution_weight_gradient": 2, "convolution_input_gradient": 1}
    # the depthwise one: 8 groups of one channel
    assert products["convolution_input_gradient"].shape == ProductSize(8, 4 * 36, 1, 1, 1)
    assert products["convolution_input_gradient"].flops == 2 * 4 * 36 * 8


def test_modules_are_named_in_both_passes() -> None:
    found = {(op.phase, op.module) for op in trained_tape(_cnn, 3, 6, 6).operations if op.flops}
    assert found == {(phase, module) for phase in ("forward", "backward") for module in ("0", "3")}


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
@pytest.mark.parametrize(("build", "shape"), [(_mlp, (8,)), (_cnn, (3, 6, 6))])
def test_another_batch_follows_exactly(build: Callable[[], nn.Module], shape: tuple[int, ...], policy: str) -> None:
    one, other, direct = (trained_tape(build, *shape, batch=n, policy=policy) for n in (4, 6, 32))
    assert one.at_batch(other, 32) == direct


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [(SGD, 0), (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1), (torch.optim.AdamW, 2), (torch.optim.Adagrad, 1)],
)
def test_bytes_by_kind(optimizer: Callable[[Any], torch.optim.Optimizer], state_bytes: int) -> None:
    tape = trained_tape(_mlp, 8, optimizer=optimizer)
    parameters = 4 * (8 * 16 + 16 + 16 * 2 + 2)
    found = bytes_by_kind(tape, until=tape.backward_starts[-1])
    assert found["parameters"] == parameters
    assert found.get("optimizer", 0) == state_bytes * parameters
    assert found["inputs"] == 4 * 4 * 8


@pytest.mark.parametrize(("policy", "optimizer_bytes"), [("fp16-master", 4 + 2 * 4), ("fp16-pure", 2 * 2)])
def test_masters_are_bytes_of_the_optimizer(policy: str, optimizer_bytes: int) -> None:
    tape = trained_tape(_mlp, 8, policy=policy, optimizer=torch.optim.AdamW)
    numbers = 8 * 16 + 16 + 16 * 2 + 2
    found = bytes_by_kind(tape, until=tape.backward_starts[-1])
    assert (found["parameters"], found["optimizer"]) == (2 * numbers, optimizer_bytes * numbers)


def test_tied_weights_are_one_block() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        model[1].weight = model[0].weight
        return model

    blocks = [block.size_bytes for block in trained_tape(tied, 8).blocks if block.kind == "parameters"]
    assert blocks == [4 * 64]


@pytest.mark.parametrize(
    ("place", "alive"), [("before_forward", False), ("before_backward", True), ("after_step", False)]
)
def test_gradients_live_through_the_forward_pass_if_zeroed_after_it(place: ZeroGrad, alive: bool) -> None:
    tape = trained_tape(_mlp, 8, zero_grad=place)
    in_forward = tape.backward_starts[-1] - 1 - (4 if alive else 0)  # zeroing before the backward pass frees four
    assert ("gradients" in bytes_by_kind(tape, until=in_forward)) == alive


def test_a_model_in_bf16_with_adamw_needs_ten_bytes_a_parameter() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8))).bfloat16()

    def loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
        return model(inputs["x"].bfloat16()).sum(), None

    tape = trained_tape(build, 512, loss=loss, batch=1, optimizer=torch.optim.AdamW, zero_grad="after_step")
    num_parameters = 8 * 512 * 512
    peak = predict_memory(tape, workspace_bytes=0).allocated_bytes
    assert peak == pytest.approx(10 * num_parameters, rel=2e-3)  # weights, gradients, two moments, one temporary


# --- against a count on a real run ------------------------------------------------------------------------------------------


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.block = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 16, 1),
            nn.BatchNorm2d(16),
        )
        self.last = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.relu(x + self.block(x))
        return self.last(x.mean((2, 3)))


class _Attention(nn.Module):
    """A layer of BERT or GPT, its attention written out."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 32**0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -1e4)
        x = x + self.out(scores.softmax(-1) @ v)
        return x + self.mlp(self.norms[1](x))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (_Residual, (3, 16, 16)),
    "bert": (partial(_Attention, causal=False), (24, 32)),
    "gpt": (partial(_Attention, causal=True), (24, 32)),
}


def _counted(build: Callable[[], nn.Module], shape: tuple[int, ...], policy: str) -> int:
    model, saved = build(), SavedTensors()
    region = Casting.of(Policy.parse(policy).replace(arithmetic="native"), "cpu").region
    inputs = {"x": torch.randn(16, *shape)}
    saved.start(model.parameters())
    saved.keep(inputs)  # the loop keeps them, whether autograd saves them or a cast copy
    try:
        with region():
            loss, _ = _loss(model, inputs)
        saved.backward_begins()
        loss.backward()
    finally:
        saved.stop()
    assert saved.peak_bytes is not None
    return saved.peak_bytes


@pytest.mark.parametrize("policy", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_saved_activations_are_those_of_a_real_run(model: str, policy: str) -> None:
    build, shape = MODELS[model]
    tape = trained_tape(build, *shape, batch=16, policy=policy)
    found = kept_bytes(tape)
    kept = found["activations"] + found["inputs"]
    assert kept == pytest.approx(_counted(build, shape, policy), rel=0.01)


def _named(model: str) -> tuple[NamedModel, int]:
    """Return a model with two of its layers, where all are equal, and the size of its batches."""
    sizes = {"timm": {"image": 64}, "transformers": {"sequence": 64}}
    if find_spec(model.partition(":")[0]) is None:
        pytest.skip(f"{model.partition(':')[0]} is not installed")
    known = configurations.configurations()
    for facts in known.values():
        facts["config"]["num_hidden_layers"] = 2
    with mock.patch.object(configurations, "configurations", return_value=known):
        return named.named_model(model, **sizes[model.partition(":")[0]]), 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "policy"),
    [
        ("timm:resnet50", "bf16"),
        ("timm:mobilenetv3_large_100", "fp32"),
        ("transformers:bert-base-uncased", "fp32"),
        ("transformers:gpt2", "bf16"),
    ],
)
def test_saved_activations_of_whole_models_are_those_of_a_real_run(model: str, policy: str) -> None:
    """Without dropout, and with the attention that a CPU has: a GPU keeps other tensors there."""
    found, batch = _named(model)

    def build() -> nn.Module:
        made = found.build()
        for module in made.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return made

    tape = record_training(
        build,
        found.batch_of,
        lambda model, inputs: (found.loss_of(model, inputs)[0], None),  # outputs that nobody holds
        batch=batch,
        optimizer=SGD,
        policy=Policy.parse(policy),
        gpu=False,
    )
    kinds = kept_bytes(tape)
    real, saved = build().train(), SavedTensors()
    inputs = {name: torch.zeros_like(tensor) for name, tensor in found.batch_of(batch).items()}
    saved.start([*real.parameters(), *real.buffers()])
    saved.keep(inputs)
    try:
        with Casting.of(Policy.parse(policy).replace(arithmetic="native"), "cpu").region():
            loss = found.loss_of(real, inputs)[0]
        saved.backward_begins()
        del loss
    finally:
        saved.stop()
    assert saved.peak_bytes is not None
    print(f"{model} {policy}: traced {kinds['activations'] + kinds['inputs']} counted {saved.peak_bytes}")
    assert kinds["activations"] + kinds["inputs"] == pytest.approx(saved.peak_bytes, rel=0.01)
