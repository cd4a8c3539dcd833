"""Bytes of a training step against manual counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import checkpoint as checkpointing

from mezzo.launch.torch import switched
from mezzo.measure import memory
from mezzo.policy import Policy
from mezzo.records import Memory

BATCH = 8


def weighed(
    policy: str,
    model: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    inputs: Tensor,
    build: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    *,
    steps: int = 3,
    before_each: Callable[[], object] = lambda: None,
    **settings: float,
) -> Memory:
    """Train three steps and return the bytes of the second."""
    optimizer = build(model.parameters(), lr=0.01, **settings)
    with switched(Policy.parse(policy)) as (_, counted):
        for _ in range(steps):
            optimizer.zero_grad()
            before_each()
            loss_of(model(inputs)).backward()
            optimizer.step()
    return counted.memory()


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def mean_square(predicted: Tensor, *, targets: Tensor = torch.zeros(BATCH, 2)) -> Tensor:  # noqa: B008
    return F.mse_loss(predicted, targets)


MLP_BYTES = {
    # input of the first layer, tanh's result (and input of the second layer), prediction and target of the loss
    "fp32": 4 * (BATCH * 6 + BATCH * 16 + BATCH * 2 + BATCH * 2),
    # the same in 16 bits but for the loss, and the copy of the second weight: no gradient reads the first
    "fp16": 2 * (BATCH * 6 + BATCH * 16) + 4 * (BATCH * 2 + BATCH * 2) + 2 * (16 * 2),
}
MLP_BYTES["bf16"] = MLP_BYTES["fp16"]


@pytest.mark.parametrize("policy", MLP_BYTES)
def test_activations_of_a_perceptron(policy: str) -> None:
    assert weighed(policy, mlp(), mean_square, torch.randn(BATCH, 6)).activations_bytes == MLP_BYTES[policy]


@pytest.mark.parametrize(("num_steps", "known"), [(0, (False, False)), (1, (True, False)), (2, (True, True))])
def test_what_was_not_measured_is_not_zero(num_steps: int, known: tuple[bool, bool]) -> None:
    found = weighed("fp32", mlp(), mean_square, torch.randn(BATCH, 6), steps=num_steps)
    assert (found.parameters_bytes is not None, found.activations_bytes is not None) == known
    assert (found.gradients_bytes is not None, found.optimizer_bytes is not None) == known[:1] * 2
    assert (found.total_bytes is not None) == all(known)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_emulated_recurrent_layer_counts_what_a_device_keeps_inside(layer: type[nn.RNNBase], dropout: float) -> None:
    def kept(policy: str) -> int:
        torch.manual_seed(0)
        model = layer(16, 32, num_layers=2, dropout=dropout)
        found = weighed(policy, model, lambda y: y[0].square().mean(), torch.randn(40, BATCH, 16)).activations_bytes
        assert found is not None
        return found

    weights = 2 * sum(p.numel() for p in layer(16, 32, num_layers=2).parameters())  # their 16-bit copies
    assert kept("fp16") - weights == pytest.approx(kept("fp32") / 2, rel=0.3)


SIZE = 2 * 4 * 6 * 6  # elements behind the convolution: 2 images, 4 channels, 6 by 6
CNN_LOSS_BYTES = 4 * 2 * 3 + 8 * 2 + 4  # log-probabilities, labels, the sum of the labels' weights
CNN_BYTES = {
    # image; relu's result, which is the pool's input; the pool's places and result; the loss
    "fp32": 4 * 2 * 36 + 4 * SIZE + (8 + 4) * SIZE // 4 + CNN_LOSS_BYTES,
    # the same with 16-bit values, and the copies of both weights
    "fp16": 2 * 2 * 36 + 2 * SIZE + (8 + 2) * SIZE // 4 + CNN_LOSS_BYTES + 2 * (4 * 9 + 36 * 3),
}


@pytest.mark.parametrize("policy", CNN_BYTES)
def test_activations_of_a_small_convolutional_network(policy: str) -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    labels = torch.tensor([0, 2])
    found = weighed(policy, nn.Sequential(*layers), lambda y: F.cross_entropy(y, labels), torch.randn(2, 1, 6, 6))
    assert found.activations_bytes == CNN_BYTES[policy]


class Deep(nn.Module):
    """Four blocks, checkpointed or not."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 16)
        blocks = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh()) for _ in range(4)]
        self.blocks, self.use_reentrant = nn.ModuleList(blocks), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.run(block, x)
        return x[:, :2]

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            return block(x)
        return checkpointing.checkpoint(block, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_keeps_the_inputs_of_blocks_only(use_reentrant: bool) -> None:
    inputs = torch.randn(BATCH, 6)
    plain = weighed("fp32", Deep(None), mean_square, inputs).activations_bytes
    saved = weighed("fp32", Deep(use_reentrant), mean_square, inputs).activations_bytes
    assert plain == 4 * BATCH * (6 + 16 + 4 * (64 + 16) + 2)
    assert saved == 4 * BATCH * (6 + 4 * 16 + 16 + 2)  # the last block's result whole: the loss keeps a view of it


COUNT = 6 * 16 + 16 + 16 * 2 + 2  # parameters of the perceptron


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("build", "settings", "state_bytes"),
    [
        (torch.optim.AdamW, {}, 2 * 4 * COUNT + 4 * 4),  # two moments, and a step count a parameter
        (torch.optim.SGD, {"momentum": 0.9}, 4 * COUNT),
        (torch.optim.SGD, {}, 0),
    ],
)
def test_parameters_gradients_and_state(
    policy: str, build: Callable[..., torch.optim.Optimizer], settings: dict[str, float], state_bytes: int
) -> None:
    found = weighed(policy, mlp(), mean_square, torch.randn(BATCH, 6), build, **settings)
    assert (found.parameters_bytes, found.gradients_bytes) == (4 * COUNT, 4 * COUNT)
    assert found.optimizer_bytes == state_bytes


def test_a_pure_policy_halves_parameters_gradients_and_state() -> None:
    found = weighed("fp16-pure", mlp(), mean_square, torch.randn(BATCH, 6), momentum=0.9)
    assert (found.parameters_bytes, found.gradients_bytes, found.optimizer_bytes) == (2 * COUNT,) * 3


def test_a_graph_that_was_thrown_away_is_not_counted() -> None:
    model, inputs = mlp(), torch.randn(BATCH, 6)

    def thrown_away() -> None:
        for _ in range(3):  # with gradients on, and never used
            model(torch.randn(100, 6))

    found = weighed("fp32", model, mean_square, inputs, before_each=thrown_away)
    assert found.activations_bytes == MLP_BYTES["fp32"]


@pytest.mark.parametrize(
    ("cut", "elements"),
    [
        (lambda data: data[16 : 16 + BATCH], BATCH * 6),
        (lambda data: data[16 : 16 + BATCH].reshape(2, -1, 6).flatten(0, 1), BATCH * 6),
        (lambda data: data[16].expand(BATCH, 6), 6),
    ],
)
def test_a_batch_that_is_cut_out_of_a_data_set_counts_alone(cut: Callable[[Tensor], Tensor], elements: int) -> None:
    """A data set of 96 kB stays in any case: it is no activation, neither in FP32 nor where a cast copies the batch."""
    found = weighed("fp32", mlp(), lambda y: y.square().mean(), cut(torch.randn(4096, 6))).activations_bytes
    assert found == 4 * (elements + BATCH * 16 + BATCH * 2)


def test_parts_of_a_data_set_that_overlap_count_once() -> None:
    data = torch.randn(4096, 6)
    inputs, targets = data[16 : 16 + BATCH], data[17 : 17 + BATCH, :2]  # the last target lies two elements beyond
    found = weighed("fp32", mlp(), lambda y: (y * targets).mean(), inputs).activations_bytes
    # The product keeps the targets; what it would keep of y has no use.
    assert found == 4 * (BATCH * 6 + 2 + BATCH * 16)


def test_the_largest_of_several_backward_passes_counts() -> None:
    model = mlp()

    def others() -> None:
        for size in (3, BATCH):
            F.mse_loss(model(torch.randn(size, 6)), torch.zeros(size, 2)).backward()

    targets = torch.zeros(5, 2)
    found = weighed("fp32", model, lambda y: F.mse_loss(y, targets), torch.randn(5, 6), before_each=others)
    assert found.activations_bytes == MLP_BYTES["fp32"]


def test_the_state_of_an_optimizer_whose_first_updates_are_skipped_counts() -> None:
    models = mlp(), mlp()
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    with switched(Policy.parse("fp16")) as (_, counted):
        for _ in range(12):
            for model, optimizer, times in zip(models, optimizers, (1.0, 1e3), strict=True):
                optimizer.zero_grad()
                (times * mean_square(model(torch.ones(BATCH, 6)))).backward()
                optimizer.step()
    assert counted.memory().optimizer_bytes == 2 * (2 * 4 * COUNT + 4 * 4)


def test_several_optimizers_add_up_and_shared_parameters_count_once() -> None:
    first, second = mlp(), nn.Linear(2, 2, bias=False)
    second.weight = nn.Parameter(first[2].weight[:, :2].detach().clone())
    tied = nn.Sequential(first, second, second)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (first, second)]
    with switched(Policy.parse("fp32")) as (_, counted):
        for _ in range(3):
            mean_square(tied(torch.randn(BATCH, 6))).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    found = counted.memory()
    assert found.parameters_bytes == found.optimizer_bytes == 4 * (COUNT + 4)


def test_total_bytes_counts_storages_and_both_parts_of_sparse_tensors() -> None:
    whole = torch.zeros(10)
    sparse = torch.sparse_coo_tensor([[1, 3]], [1.0, 2.0], (5,), check_invariants=True)
    assert memory.total_bytes([whole, whole[:3], whole.view(2, 5)]) == 40
    assert memory.total_bytes([sparse]) == 2 * 8 + 2 * 4
    assert memory.total_bytes([]) == 0
