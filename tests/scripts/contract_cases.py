"""A training for each role of a contract: ``contract_cases.py ROLE planted|healthy``; what is planted is made on the line that says so."""

import copy
import io
import sys

import torch
from torch import nn

role, planted = sys.argv[1], sys.argv[2] == "planted"
narrow = torch.bfloat16 if planted else torch.float32
torch.manual_seed(0)


class Momentum(torch.optim.Optimizer):
    """SGD with a momentum in a format of its own, and perhaps copies of the weights."""

    def __init__(self, parameters, form, masters=None):
        super().__init__(parameters, {"lr": 0.1})
        self.form, self.masters = form, masters

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("momentum", torch.zeros_like(p, dtype=self.form))
            if self.masters is not None:
                state.setdefault("master_param", p.to(self.masters, copy=True))
            state["momentum"].mul_(0.9).add_(p.grad)
            p.sub_(0.1 * state["momentum"])


class Passing(Momentum):
    """The same, and the momentum, kept in FP32, passes through another format in each update."""

    def step(self):
        super().step()
        for state in self.state.values():
            state["momentum"].copy_(state["momentum"].to(narrow))


class Scale(nn.Module):
    """A scale, and a count of the numbers that it has seen."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        if self.training:
            self.mean.add_(x.detach().mean(0))
        y = x * self.scale
        return y.to(narrow) if role == "activations" else y


def back_to_fp32(module, args):
    return tuple(x.to(module.weight.dtype) for x in args)


model = nn.Sequential(nn.Linear(8, 8), Scale(), nn.Linear(8, 2))
model[2].register_forward_pre_hook(back_to_fp32)
if role == "weights":
    model[2].to(narrow)  # PLANTED weights
if role == "buffers":
    model[1].mean = model[1].mean.to(narrow)  # PLANTED buffers
if role == "gradients":
    model[2].weight.grad_dtype = narrow
if role == "copies":
    low = model.bfloat16()
    copies = [p.detach().to(narrow if planted else torch.float32, copy=True).requires_grad_() for p in low.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.1)
elif role in ("optimizer_state", "master_weights", "state_in_a_file"):
    kept = {"optimizer_state": narrow}.get(role, torch.float32)
    optimizer = Momentum(model.parameters(), kept, narrow if role == "master_weights" else None)
elif role == "gradients":
    optimizer = Momentum(model.parameters(), torch.float32)
elif role == "rounding":
    optimizer = Passing(model.parameters(), torch.float32)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
average = copy.deepcopy(model).to(narrow)
inputs = torch.randn(16, 8)
for step in range(4):
    if role in ("resume", "state_in_a_file") and step == 2:
        file = io.BytesIO()
        state = copy.deepcopy(optimizer.state_dict())
        for held in state["state"].values():
            for name in {"exp_avg", "momentum"} & set(held):
                held[name] = held[name].to(narrow)
        if role == "state_in_a_file":
            torch.save({"optimizer": state}, file)  # PLANTED state_in_a_file
        else:
            optimizer.load_state_dict(state)  # PLANTED resume
    first = model[0].weight.dtype
    loss = model(inputs.to(first)).float().square().mean()  # PLANTED activations
    loss.backward()  # PLANTED gradients
    if role == "copies":
        for p, c in zip(model.parameters(), copies, strict=True):
            c.grad, p.grad = p.grad.to(c.dtype), None
    optimizer.step()  # PLANTED optimizer_state master_weights rounding
    optimizer.zero_grad()
    if role == "copies":
        for p, c in zip(model.parameters(), copies, strict=True):
            p.data.copy_(c.detach())
    if role == "ema":
        for mean, p in zip(average.parameters(), model.parameters(), strict=True):
            mean.data.lerp_(p.detach().to(mean.dtype), 0.1)  # PLANTED ema
if role == "checkpoints":
    state = {name: p.to(narrow) for name, p in model.state_dict().items()}
    torch.save({"model": state}, io.BytesIO())  # PLANTED checkpoints
