"""Scripts whose gradients or losses come from torch.func, and conditions that torch itself puts on numbers, in a trace without numbers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from helpers_predict import recorded, tape_of
from mezzo.measure.predict.script.recorder import copies_without_numbers

HEAD = """
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def loss_of(params, x, y):
    return (functional_call(net, params, (x,)) - y).square().mean()
"""
META = """
def task(params, x, y):
    found = grad(loss_of)(params, x, y)
    return loss_of({name: p - 0.1 * found[name] for name, p in params.items()}, x, y)

for _ in range(STEPS):
    params = dict(net.named_parameters())
    loss = vmap(task, in_dims=(None, 0, 0))(params, torch.randn(6, 5, 3), torch.randn(6, 5, 2)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
EACH_SAMPLE = """
for _ in range(STEPS):
    params = dict(net.named_parameters())
    found = vmap(grad(loss_of), in_dims=(None, 0, 0))(params, torch.randn(12, 3), torch.randn(12, 2))
    for name, p in net.named_parameters():
        p.grad = found[name].mean(0).detach()
    optimizer.step()
"""


@pytest.mark.parametrize(("body", "batch"), [(META, 6), (EACH_SAMPLE, 12)])
@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_what_torch_func_computes_is_recorded(tmp_path: Path, body: str, batch: int, policy: str) -> None:
    """The FLOPs are those that torch counts in a step of the script by itself."""
    script = HEAD + body
    made = recorded(tmp_path, script.replace("STEPS", "4"), policy=policy, steps=2)
    assert made.batch == batch
    counter = FlopCounterMode(display=False)
    with counter:
        exec(compile(script.replace("STEPS", "1"), "train.py", "exec"), {"__name__": "__main__"})
    assert sum(op.flops for op in tape_of(made).operations) == counter.get_total_flops()
    parameters = sum(block.size_bytes for block in tape_of(made).blocks if block.kind == "parameters")
    assert parameters == 4 * (3 * 16 + 16 + 16 * 2 + 2)


SAMPLED = """
import torch
from torch import nn
from torch.distributions import Categorical, Normal

policy, optimizer = nn.Linear(4, 3), None
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
for _ in range(4):
    out = policy(torch.randn(8, 4))
    choice, value = Categorical(logits=out), Normal(out, out.exp())
    loss = choice.log_prob(choice.sample()).mean() + value.log_prob(value.rsample()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_distribution_does_not_judge_numbers_that_are_not_there(tmp_path: Path) -> None:
    checks = torch.distributions.Distribution._validate_args
    assert recorded(tmp_path, SAMPLED, steps=2).batch == 8
    assert torch.distributions.Distribution._validate_args == checks


WINDOWS = """
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

data = torch.randint(0, 20, (500,))
model = nn.Sequential(nn.Embedding(20, 16), nn.Flatten(0, 1), nn.BatchNorm1d(16), nn.Linear(16, 20))
average = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    starts = torch.randint(0, 400, (8,))
    x = torch.stack([data[i : i + 32] for i in starts])
    y = torch.stack([data[i + 1 : 1 + i + 32] for i in starts])
    loss = nn.functional.cross_entropy(model(x), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update_parameters(model)
    print(f"{step}: {loss:.4f} {data[starts].shape}")
"""


def test_windows_that_begin_anywhere_averaged_weights_and_printed_losses(tmp_path: Path) -> None:
    made = recorded(tmp_path, WINDOWS, steps=2)
    assert made.batch == 8
    assert {op.shape.rows for op in tape_of(made).operations if op.name == "addmm"} == {8 * 32}


def test_a_copy_without_numbers_is_what_a_copy_is() -> None:
    whole = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    whole[0].bias.requires_grad_(False)
    with FakeTensorMode(), copies_without_numbers():
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        model[0].bias.requires_grad_(False)
        tied = copy.deepcopy([model, model[0].weight])

    def facts(model: nn.Module) -> list[tuple[object, ...]]:
        state = model.state_dict(keep_vars=True).items()
        return [(name, t.shape, t.dtype, t.requires_grad, isinstance(t, nn.Parameter)) for name, t in state]

    assert facts(tied[0]) == facts(whole)
    assert tied[1] is tied[0][0].weight
    assert tied[1] is not model[0].weight
