"""Scripts with a fault between the backward pass and the next forward pass, or of a loss scale; and twins without it."""

import torch
from torch import nn
from torch.nn import functional as F

from faults import data, net

STEPS = 6
SCALE = 2.0**16


def half_net():
    return net(torch.tanh).half()


def train_half(optimizer_of, *, change=lambda parameters: None, gain=1.0, model=None):
    """Train a model whose weights are FP16 and whose last input is always 0, without a loss scale."""
    model = model or half_net()
    optimizer = optimizer_of(model.parameters())
    for step in range(1, STEPS + 1):
        x, y = data(step)
        x[:, 5] = 0
        optimizer.zero_grad()
        (F.mse_loss(model(x.half()).float(), y) * gain).backward()
        change(list(model.parameters()))
        optimizer.step()


# --- the optimizer's step ------------------------------------------------------------------------


def update_eps_adamw():
    train_half(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))


def update_eps_rmsprop():
    train_half(lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, foreach=False))


def update_eps_adagrad():
    train_half(lambda parameters: torch.optim.Adagrad(parameters, lr=1e-3))


def update_eps_embedding():
    """Most rows of an embedding have no gradient."""
    torch.manual_seed(0)
    table, head = nn.Embedding(50, 8).half(), nn.Linear(8, 2).half()
    optimizer = torch.optim.Adam([*table.parameters(), *head.parameters()], lr=1e-3)
    for step in range(1, STEPS + 1):
        _, y = data(step)
        optimizer.zero_grad()
        F.mse_loss(head(table(torch.arange(8))).float(), y).backward()
        optimizer.step()


def healthy_own_update_eps():
    train_half(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4))


def update_leaves_range():
    """A weight beyond 65504 is a number in FP32 and in BF16."""
    model = half_net()
    level = nn.Parameter(torch.tensor(65000.0).half())
    optimizer = torch.optim.SGD([{"params": model.parameters(), "lr": 0.0}, {"params": [level], "lr": 6e4}])
    for step in range(1, STEPS + 1):
        x, y = data(step)
        optimizer.zero_grad()
        (F.mse_loss(model(x.half()).float(), y) - level * 0.02).backward()
        optimizer.step()


def update_diverges():
    torch.manual_seed(0)
    model = net(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) * 1e3).backward()
        optimizer.step()


def update_late():
    """The third update has a learning rate of 1e38; the step after it is inspected for another reason."""
    torch.manual_seed(0)
    model = net(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        optimizer.param_groups[0]["lr"] = 1e38 if step == 3 else 1e-6
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) * 1e3).backward()
        optimizer.step()


# --- between the backward pass and the optimizer's step ------------------------------------------


def clip_by_hand(parameters, wide=False):
    squares = [(p.grad.float() if wide else p.grad).square().sum() for p in parameters]
    norm = torch.stack(squares).sum().sqrt()
    for p in parameters:
        p.grad.mul_(1.0 / (norm + 1e-3))


def update_clipped_by_hand():
    """The squares of gradients of some hundreds leave FP16, and every gradient becomes 0."""
    train_half(lambda parameters: torch.optim.SGD(parameters, lr=1e-3), change=clip_by_hand, gain=3e3)


def healthy_own_update_clipped():
    optimizer_of = lambda parameters: torch.optim.SGD(parameters, lr=1e-3)  # noqa: E731 - one expression
    train_half(optimizer_of, change=lambda parameters: clip_by_hand(parameters, wide=True), gain=3e3)


def update_normalized_by_hand():
    """A gradient that is 0 has no direction."""
    model = net(torch.tanh)
    unused = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), unused], lr=1e-3)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) + (unused * 0).sum()).backward()
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.div_(p.grad.norm())
        optimizer.step()


# --- loss scales ---------------------------------------------------------------------------------


def divide(parameter, by):
    parameter.grad.div_(by)


def own_static(scale, *, undo=divide, change=lambda parameters: None):
    """Train with large gradients under the script's own autocast, with a loss scale that never changes."""
    model = net(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        optimizer.zero_grad()
        (F.mse_loss(out.float(), y) * 50 * scale).backward()
        for p in model.parameters():
            undo(p, scale)
        change(list(model.parameters()))
        optimizer.step()


def zero_nans(parameters):
    for p in parameters:
        p.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def scale_static_by_hand():
    own_static(SCALE)


def replace_twice(parameter, by):
    parameter.grad = parameter.grad / 2
    parameter.grad = parameter.grad / by * 2


def scale_static_replaced():
    """The number that undoes the scale divides a gradient that has replaced the first one."""
    own_static(SCALE, undo=replace_twice)


def scale_static_zeroed():
    own_static(SCALE, change=zero_nans)


def healthy_own_static():
    own_static(2.0**10)


def scale_clipped_away():
    """The norm is infinite, the factor 0, and an infinite gradient times 0 is NaN."""
    own_static(SCALE, change=lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0))


def range_beside_a_percentage():
    """A metric in percent, and an average that moves by a hundredth, are no loss scale."""
    model = net(torch.tanh)
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        loss = F.mse_loss(out.float(), y)
        print((loss * 100.0).item())
        optimizer.zero_grad()
        (loss * torch.tensor(3e6)).backward()
        optimizer.step()
        for mean, p in zip(average, model.parameters(), strict=True):
            mean.mul_(0.99).add_(p.detach() * 0.01)


def own_scaler(gain, *, steps=24):
    model = net(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(1, steps + 1):
        x, y = data(step)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(out.float(), y) * gain).backward()
        scaler.step(optimizer)
        scaler.update()


def scale_settles_low():
    """Gradients of some thousands fit at a scale of 8 only."""
    own_scaler(3e4)


def healthy_own_scale_settles():
    own_scaler(100.0)


def penalty_at_zero():
    """The second derivative of a root at 0 has no value at any loss scale."""
    model = net(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(1, 25):
        x, y = data(step)
        x.requires_grad_()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        loss = F.mse_loss(out.float(), y)
        slope = torch.autograd.grad((out.float()[:4] * 0).sum(), x, create_graph=True)[0]
        optimizer.zero_grad()
        scaler.scale(loss + slope.square().sum(-1).sqrt().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def penalty_beside_an_overflow():
    """In step 1 a gradient also overflows at the scale, before the root's."""
    model = net(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(1, 7):
        x, y = data(step)
        x.requires_grad_()
        out = model(x)
        slope = torch.autograd.grad((out[:4] * 0).sum(), x, create_graph=True)[0]
        optimizer.zero_grad()
        (30 * F.mse_loss(out, y) + slope.square().sum(-1).sqrt().mean()).backward()
        optimizer.step()


# --- the script's own 16 bits --------------------------------------------------------------------


def own_half_weights():
    """A model that was cast whole: its second layer leaves FP16."""
    model = net(lambda h: h * 300).half()
    with torch.no_grad():
        model[0].weight.mul_(300)
    train_half(lambda parameters: torch.optim.SGD(parameters, lr=1e-12), model=model)


def own_half_log():
    """A logarithm of 0 has no value in FP32 either, whatever the weights are."""
    model = net(lambda h: torch.log(h.abs() * 0)).half()
    train_half(lambda parameters: torch.optim.SGD(parameters, lr=1e-3), model=model)


def own_noise():
    """Gumbel noise, computed before the first module is called: 1e-20 is 0 in FP16, and so is the logarithm of a uniform number of 1."""
    model = net(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        x, _ = data(step)
        uniform = (torch.arange(1.0, 17.0) / 16).view(8, 2).half()
        noise = -torch.log(1e-20 - torch.log(uniform))
        loss = F.softmax(model(x) + noise, -1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def own_probabilities():
    """1 - 1e-6 is 1 in FP16, so the clamp keeps no distance from it."""
    model = net(lambda h: h * 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step in range(1, STEPS + 1):
        x, _ = data(step)
        with torch.autocast("cpu", dtype=torch.float16):
            p = torch.sigmoid(model(x))
            loss = -torch.log1p(-p.clamp(max=1 - 1e-6)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def cast_loss():
    """An outlier among the targets, in a loss that the script computes in FP16: no list of operations reaches it."""
    model = net(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        y[0, 0] = 300
        loss = (model(x).half() - y.half()).pow(2).mean() * 1e-3
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def softmax_by_hand(narrow):
    model = net(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        h = model(x) * 40
        h = h.half() if narrow else h.float()
        h = h - h.amax(1, keepdim=True)
        loss = -(y.softmax(1) * (h.exp() / h.exp().sum(1, keepdim=True)).log()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def cast_softmax_by_hand():
    """Logits that the script casts to FP16: the exponential of a low one is 0."""
    softmax_by_hand(narrow=True)


def healthy_softmax_by_hand():
    softmax_by_hand(narrow=False)


# --- an error of torch ---------------------------------------------------------------------------


class Scatter(nn.Module):
    def forward(self, h):
        return torch.zeros(8, h.shape[1]).scatter_reduce_(0, torch.arange(8)[:, None].expand_as(h), h, reduce="sum")


class Put(nn.Module):
    def forward(self, h):
        out = torch.zeros(8, h.shape[1])
        out[torch.arange(8)] = h
        return out


def raising(module):
    model = net(None, module=module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class OneRow(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, h):
        return self.norm(h[:1])  # torch refuses it in Python, before any operation


def raises_in_a_check():
    raising(OneRow())


def raises_in_scatter():
    raising(Scatter())


def raises_in_put():
    raising(Put())
