"""Training scripts with one planted fault each, or with none: ``python faults.py NAME``."""

import math
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mezzo

STEPS = 6
"""Steps of a script that does not say otherwise."""


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, h):
        return self.weight * h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6)


class Fn(nn.Module):
    """A module that computes one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def net(function, *, width=8, module=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), module or Fn(function), nn.Linear(width, 2))


def data(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 6, generator=generator)
    return x, x[:, :2].sin()


def train(model, *, steps=STEPS, lr=1e-3, loss_of=F.mse_loss, change=None, call=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(1, steps + 1):
        x, y = data(step)
        if change is not None:
            x, y = change(step, x, y)
        optimizer.zero_grad()
        loss = loss_of((call or model)(x), y)
        loss.backward()
        optimizer.step()


def huge_gradients():
    """Give finite gradients whose norm FP32 cannot hold."""
    train(net(torch.tanh), lr=1e-30, loss_of=lambda p, y: F.mse_loss(p, y) * 1e25)


# --- range overflow ------------------------------------------------------------------------------


def range_linear():
    model = net(F.relu)
    with torch.no_grad():
        model[0].weight.mul_(1e5)
    train(model)


def squared(h):
    h = h * 300
    return h * h * 1e-6


def range_square():
    train(net(squared))


def range_functional():
    """Overflow in a functional operation of the model's own forward, at step 3 only."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Linear(6, 2)
            self.seen = 0

        def forward(self, x):
            self.seen += 1
            return self.body(x) * (3e5 if self.seen >= 5 else 1.0)

    train(Model())


def range_in_backward():
    """A gradient that leaves FP16 at any loss scale; what follows makes it small again, so the loss is harmless."""
    model = net(lambda h: h * 1e-3)

    class Steep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return (grad * 60000.0) * 60000.0 * 60000.0

    model[1].function = lambda h: Steep.apply(h.half()).float()
    train(model)


def range_matmul():
    model = net(lambda h: torch.matmul(h * 500, (h * 500).mT) @ h * 1e-6)
    train(model)


def range_rounded_to_zero():
    """1e-8 is 0 in FP16; in FP32 the quotient is finite."""
    train(net(lambda h: h * 1e-3 / (h * 0 + 1e-8) * 1e-8))


def attention_scores():
    train(net(lambda h: ((h * 400) @ (h * 400).mT).softmax(-1) @ h))


def in_place():
    def function(h):
        h = h * 1.0
        h.mul_(1e3)
        h.mul_(1e3)
        return h * 1e-6

    train(net(function))


def range_convolution():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    with torch.no_grad():
        model[1].weight.mul_(10)
    train(model, change=lambda step, x, y: (x * (1.5e4 if step == 2 else 1), y))


def range_own_amp():
    """A script with its own autocast and GradScaler, whose model leaves FP16 in step 3."""
    model = net(F.relu)
    with torch.no_grad():
        model[0].weight.mul_(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(1, STEPS):
        x, y = data(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x * (1.5e4 if step == 3 else 1))
            loss = F.mse_loss(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


# --- scale overflow ------------------------------------------------------------------------------


def scale_large_loss():
    train(net(torch.tanh), lr=1e-12, loss_of=lambda p, y: F.mse_loss(p, y) * 3e4, steps=12)


def scale_own_scaler():
    model = net(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    for step in range(12):
        x, y = data(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
            loss = F.mse_loss(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


# --- invalid operation ---------------------------------------------------------------------------


def invalid_sqrt():
    """sqrt'(0): the loss is fine, the gradient is not."""
    train(net(lambda h: torch.sqrt((h - h).abs() + 0 * h)))


def invalid_log():
    train(net(lambda h: torch.log(F.relu(h))))


def invalid_zero_times_inf():
    train(net(lambda h: h * torch.where(h > 1e6, 1.0, 0.0) / torch.zeros_like(h)))


def invalid_data():
    spoiled = torch.from_numpy(np.full((8, 6), np.nan, dtype=np.float32))
    train(net(torch.tanh), change=lambda step, x, y: (spoiled if step == 5 else x, y))


def invalid_targets():
    spoiled = torch.from_numpy(np.full((8, 2), np.inf, dtype=np.float32))
    train(net(torch.tanh), change=lambda step, x, y: (x, spoiled if step == 3 else y))


def invalid_norm():
    """A norm by hand of a zero vector."""
    train(net(lambda h: h * 0 + (h * 0).pow(2).sum(-1, keepdim=True).pow(0.5)))


def invalid_masked_rows():
    def attend(h):
        scores = h @ h.mT
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool), -math.inf).softmax(-1) @ h

    train(net(attend))


def invalid_weights():
    """Adam's eps of 1e-8 is 0 in FP16: the first update divides by it where a gradient is 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    for step in range(STEPS):
        x, y = data(step)
        optimizer.zero_grad()
        F.mse_loss(model(x.half() * torch.tensor([1, 1, 1, 1, 1, 0]).half()).float(), y).backward()
        optimizer.step()


def invalid_accumulated():
    """The second of three micro-batches."""
    model = net(lambda h: torch.log(h.abs() + offset[0]))
    optimizer, offset = torch.optim.SGD(model.parameters(), lr=1e-3), [1.0]
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            x, y = data(3 * step + part)
            offset[0] = -1e3 if (step, part) == (2, 1) else 1.0
            F.mse_loss(model(x), y).backward()
        optimizer.step()


# --- silent saturation ---------------------------------------------------------------------------


def silent_rmsnorm():
    model = net(None, module=RMSNorm(8))
    with torch.no_grad():
        model[0].weight.mul_(2000)
    train(model)


def silent_reciprocal():
    """1e5 / (3e4 + inf) is 0 where it should be about 1."""

    def bell(h):
        h = h * 400
        return 1e5 / (3e4 + h * h).float()

    train(net(bell))


def silent_layer_norm():
    """A layer norm by hand, whose loss scale is still on its way down."""

    def norm(h):
        c = h * 3000 - (h * 3000).mean(-1, keepdim=True)
        return c * torch.rsqrt((c * c).mean(-1, keepdim=True) + 1e-5)

    train(net(norm))


def silent_late():
    """The infinity begins at step 4."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.up, self.norm, self.down = nn.Linear(6, 8), RMSNorm(8), nn.Linear(8, 2)
            self.seen = 0

        def forward(self, x):
            self.seen += 1
            return self.down(self.norm(self.up(x) * (3000 if self.seen >= 3 else 1)))

    train(Model())


# --- ways to run ---------------------------------------------------------------------------------


def compiled_square():
    model = net(squared)
    train(model, call=torch.compile(model, backend="eager", fullgraph=False))


def compiled_log():
    model = net(lambda h: torch.log(F.relu(h)))
    train(model, call=torch.compile(model, backend="eager"))


def _checkpointed(model, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.body, self.down = model

        def forward(self, x):
            return self.down(checkpoint(self.body, self.up(x), use_reentrant=reentrant))

    train(Checkpointed())


def checkpointed_square():
    _checkpointed(net(squared), False)


def checkpointed_sqrt():
    _checkpointed(net(lambda h: torch.sqrt((h - h).abs())), False)


def reentrant_square():
    _checkpointed(net(squared), True)


def two_optimizers():
    """The second network's log gets 0."""
    first, second = net(torch.tanh), net(lambda h: torch.log(F.relu(h)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (first, second)]
    for step in range(STEPS):
        x, y = data(step)
        for model, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()


class Bad(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        x, y = data(index)
        x = x[0]
        if index == 37:
            x = x / 0
        return x, y[0]


def workers():
    """Bad data out of a DataLoader with workers, in the fifth batch."""
    model = net(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for x, y in torch.utils.data.DataLoader(Bad(), batch_size=8, num_workers=2):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def late_log():
    """Nothing is wrong until step 7, which no look at fixed steps meets."""
    model = net(lambda h: torch.log(F.relu(h) + offset[0]))
    offset = [1.0]

    def change(step, x, y):
        offset[0] = 0.0 if step == 7 else 1.0
        return x, y

    train(model, steps=10, change=change)


def raises():
    """A script that looks at its loss itself."""
    model = net(lambda h: torch.log(F.relu(h)))

    def loss_of(p, y):
        loss = F.mse_loss(p, y)
        if not math.isfinite(loss.item()):
            raise RuntimeError("the loss is not finite")
        return loss

    train(model, loss_of=loss_of)


RUNS = []


def another_step():
    """A script that goes another way each time: the fault is in step 3, then in step 6."""
    RUNS.append(None)
    model = net(lambda h: torch.log(h.abs() + offset[0]))
    offset = [1.0]

    def change(step, x, y):
        offset[0] = -1e3 if step == 3 * len(RUNS) else 1.0
        return x, y

    train(model, steps=10, change=change)


# --- nothing wrong -------------------------------------------------------------------------------


def healthy_plain():
    train(net(torch.tanh))


def healthy_attention():
    """A causal mask of -inf, made anew and kept in a buffer."""
    torch.manual_seed(0)
    mask = torch.full((8, 8), -math.inf).triu(1)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model = nn.Sequential(nn.Linear(6, 8), Fn(lambda h: attention(h[None], h[None], h[None], attn_mask=mask)[0][0]))

    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.attention, self.head = model, attention, nn.Linear(8, 2)

        def forward(self, x):
            h = self.model(x)
            scores = (h @ h.mT).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -math.inf)
            return self.head(scores.softmax(-1) @ h)

    train(Causal())


def healthy_large_mask():
    """A mask of -1e9 becomes -inf in FP16: softmax makes zeros of both."""

    def attend(h):
        keep = torch.ones(8, 8, dtype=h.dtype).tril()
        return (h @ h.mT + (1 - keep) * -1e9).softmax(-1) @ h

    train(net(attend))


def healthy_normed():
    torch.manual_seed(0)
    train(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 2)))


def healthy_few_skips():
    """A loss that skips the first two or three updates."""
    train(net(torch.tanh), lr=1e-9, loss_of=lambda p, y: F.mse_loss(p, y) * 10, steps=12)


def healthy_own_scaler():
    model = net(torch.tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    for step in range(8):
        x, y = data(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        scaler.scale(F.mse_loss(out.float(), y)).backward()
        scaler.step(optimizer)
        scaler.update()


def healthy_where():
    """An unused branch is infinite."""
    train(net(lambda h: torch.where(h > -1e3, h, torch.full_like(h, math.inf))))


def healthy_convolutions():
    torch.manual_seed(0)
    body = (nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.MaxPool1d(2))
    train(nn.Sequential(*body, nn.Flatten(), nn.Linear(8, 2)))


def healthy_checkpoint():
    _checkpointed(net(torch.tanh), False)


def healthy_compiled():
    model = net(torch.tanh)
    train(model, call=torch.compile(model, backend="eager"))


def healthy_evaluation():
    """Infinities in an evaluation without gradients."""
    model = net(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        x, y = data(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            model[0](x * 1e6).square().reciprocal()


# --- scripts that call no module -----------------------------------------------------------------


def raw(loss_of, *, steps=STEPS, autocast=False, optimized=True, width=6):
    """Train tensors with functions; ``loss_of`` gets the batch, its targets and two matrices."""
    torch.manual_seed(0)
    weights = [torch.randn(width, 8, requires_grad=True), torch.randn(8, 2, requires_grad=True)]
    optimizer = torch.optim.SGD(weights, lr=1e-6) if optimized else None
    for step in range(1, steps + 1):
        x, y = data(step)
        with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
            loss = loss_of(x, y, *weights)
        if optimizer is None:
            gradients = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                torch._foreach_sub_(weights, gradients, alpha=1e-6)
        else:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def raw_log(**more):
    raw(lambda x, y, w, v: torch.log((x @ w).relu()).mean() + v.sum(), **more)


def raw_log_by_hand():
    raw_log(optimized=False)


def raw_log_once():
    raw_log(steps=1)


def raw_overflow():
    """An overflow in the script's own autocast."""
    raw(lambda x, y, w, v: F.mse_loss(F.linear(F.linear(x, w.t()) * 1e5, v.t()).float(), y), autocast=True)


def raw_in_backward():
    """A finite loss whose gradient FP16 does not hold."""

    class Steep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 1e7

    raw(lambda x, y, w, v: Steep.apply(F.linear(F.linear(x, w.t()), v.t())).float().mean(), autocast=True)


def raw_gan():
    torch.manual_seed(0)
    made, judged = torch.randn(6, 8, requires_grad=True), torch.randn(8, 1, requires_grad=True)
    optimizers = [torch.optim.Adam([weight], lr=1e-3) for weight in (made, judged)]
    for step in range(1, STEPS + 1):
        x, _ = data(step)
        for optimizer, sign in zip(optimizers, (1, -1), strict=True):
            loss = torch.log(torch.sigmoid(100 * sign * torch.tanh(x @ made) @ judged)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def siamese(same_at):
    """A distance between two embeddings; at ``same_at`` a pair is the same sample twice, and the root's derivative is infinite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(1, 13):
        x, _ = data(step)
        other = x.roll(1, 0)
        if step == same_at:
            other[2] = x[2]
        optimizer.zero_grad()
        F.relu(1 - ((model(x) - model(other)) ** 2).sum(1).sqrt()).mean().backward()
        optimizer.step()


def invalid_behind_a_skip():
    siamese(7)


def healthy_siamese():
    siamese(0)


def healthy_one_spike():
    """One loss is so large that its gradients overflow at the loss scale, which skips the update as it should."""
    train(
        net(torch.tanh), steps=12, loss_of=lambda p, y: F.mse_loss(p, y) * (1e4 if bool((y == data(7)[1]).all()) else 1)
    )


def session(function, *, policy="fp16", change=None):
    model = net(function)
    held = mezzo.Session(model, torch.optim.SGD(model.parameters(), lr=1e-3), policy=policy, clip_norm=1.0)
    for step in range(1, 13):
        x, y = data(step)
        with held.autocast():
            loss = F.mse_loss(model(x), y)
        held.step(loss * (change or (lambda _: 1.0))(step))


def session_range():
    session(lambda h: 1e3 * (300 * h) * (300 * h) * 1e-8)


def session_static_scale():
    session(torch.tanh, policy="fp16:loss_scale=static:init_scale=65536", change=lambda step: 1e3 if step >= 6 else 1.0)


def session_bf16():
    session(lambda h: torch.log(-h * h), policy="bf16")


def healthy_own_session():
    session(torch.tanh)


def raw_jacobian():
    """Gradients of torch.func inside the loss."""
    raw(lambda x, y, w, v: torch.func.grad(lambda u: (x @ u).relu().sum())(w).sqrt().log().mean() + w.sum() * v.sum())


def healthy_raw():
    raw(lambda x, y, w, v: F.mse_loss(torch.tanh(x @ w) @ v, y))


def healthy_raw_once():
    raw(lambda x, y, w, v: F.mse_loss(torch.tanh(x @ w) @ v, y), steps=1)


def healthy_raw_after_strange_data():
    """Preparation that is not finite and that no loss reads."""
    torch.zeros(3).log().reciprocal_()
    healthy_raw()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
