"""Public reports of trouble with 16 bits, rebuilt small and without their code: ``python reports.py NAME``.

Each docstring has the report's address below ``https://github.com/`` and the right answer, which was written down before Mezzo ran.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from faults import data, net

STEPS = 6


def on_cpu(dtype=torch.float16):
    return torch.autocast("cpu", dtype=dtype)


# --- diagnosed -----------------------------------------------------------------------------------


def soft_prompt():
    """matanbt/TROPT/pull/8: a prompt is optimized before a frozen FP16 model, and is infinite after one update.

    Right: range overflow in Adam's step: its eps of 1e-8 is 0 in FP16; larger eps or an FP32 prompt.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).half().requires_grad_(False)
    prompt = nn.Parameter(torch.randn(4, 16).half())
    wanted = torch.randn(16, generator=torch.Generator().manual_seed(1)).half()
    optimizer = torch.optim.Adam([prompt], lr=1e-2)
    for _ in range(STEPS):
        loss = 1 - F.cosine_similarity(model(prompt).mean(0).float(), wanted.float(), dim=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def dice():
    """qubvel-org/segmentation_models.pytorch/issues/463: a Dice loss of masks with 512 x 512 pixels is NaN.

    Right: range overflow in the forward pass, in the sum over 16-bit pixels of the loss; the sum in FP32.
    """
    torch.manual_seed(0)
    model = nn.Conv2d(1, 1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(1, STEPS + 1):
        image = torch.rand(1, 1, 512, 512, generator=torch.Generator().manual_seed(step))
        mask = (image > 0.1).half()
        with on_cpu():
            seen = torch.sigmoid(model(image) + 4)
        shared = torch.sum(seen * mask)
        total = torch.sum(seen) + torch.sum(mask)
        optimizer.zero_grad()
        scaler.scale(1 - (2 * shared / total).float()).backward()
        scaler.step(optimizer)
        scaler.update()


def unit_channels():
    """huggingface/diffusers/pull/13316: the RMS norm of an autoencoder, built on F.normalize, gives NaN for empty pixels in FP16.

    Right: range overflow in the forward pass, in the division by a norm of 0, whose bound of 1e-12 is 0 in FP16; the norm in FP32.
    """

    class Norm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x):
            return F.normalize(x, dim=1) * x.shape[1] ** 0.5 * self.weight[:, None]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 8, 1, bias=False), Norm(8), nn.Conv1d(8, 2, 1)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        x = torch.randn(4, 2, 12, generator=torch.Generator().manual_seed(step)).half()
        x[:, :, 9:] = 0
        optimizer.zero_grad()
        F.mse_loss(model(x).float(), x.float()).backward()
        optimizer.step()


def running_mean():
    """pytorch/pytorch/issues/88474: the GradScaler skips an overflow, but the running statistics stay NaN, as validation shows.

    Right: range overflow in the forward pass of step 4, in the convolution before the batch norm: no normal skip.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 2, 3, padding=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(1, 9):
        x = torch.rand(2, 3, 10, generator=torch.Generator().manual_seed(step)) * (6e4 if step == 4 else 1)
        with on_cpu():
            out = model(x)
        optimizer.zero_grad()
        scaler.scale(out.float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def unit_rows():
    """keras-team/keras/issues/23546: the gradient of an L2 norm of small numbers is infinite in FP16, the result is not.

    Right: range overflow in the backward pass, in the derivative of rsqrt; the norm in FP32.
    """
    torch.manual_seed(0)
    model = nn.Linear(6, 8).half()
    with torch.no_grad():
        model.weight.mul_(0.01)
        model.bias.mul_(0.01)

    def normed(x):
        return x * x.square().sum(-1, keepdim=True).clamp(min=1e-12**2).rsqrt()

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        optimizer.zero_grad()
        (normed(model(x.half()))[:, :2].float() - y).square().mean().backward()
        optimizer.step()


def huge_norm():
    """pytorch/pytorch/issues/193006: torch.linalg.norm squares in FP32, so a norm of 1e20 is infinite, and its gradient silently 0.

    Right: the norm is named as the first value that leaves its format (FP32), in the forward pass.
    """
    model = net(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        x, _ = data(step)
        optimizer.zero_grad()
        out = model(x) * 1e20
        (out / torch.linalg.norm(out, dim=-1, keepdim=True)).square().sum().backward()
        optimizer.step()


def masked_entropy():
    """huggingface/trl/pull/7263: the entropy of logits with masked classes is NaN: exp(-inf) * -inf.

    Right: invalid operation in the forward pass, in that product, in FP32 as well; xlogy or a finite mask.
    """
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    closed = torch.tensor([False, True, False, False, True])
    for step in range(1, STEPS + 1):
        x, y = data(step)
        logs = policy(x).masked_fill(closed, -torch.inf).log_softmax(-1)
        entropy = -(logs.exp() * logs).sum(-1)
        optimizer.zero_grad()
        (-(logs[:, 0] * y[:, 0]) - 0.01 * entropy).mean().backward()
        optimizer.step()


# --- misuse, under run ---------------------------------------------------------------------------


def lip_reading():
    """k2-fsa/icefall/pull/2081: unscale_ is commented out before clipping, and the schedule steps before the scaler.

    Right: gradients are clipped while they are scaled (A601), the schedule steps before the optimizer (A611).
    """
    model = net(torch.tanh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        with on_cpu():
            loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        schedule.step()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def dreambooth_average():
    """d8ahazard/sd_dreambooth_extension/pull/1415: the EMA of 16-bit weights never moves.

    Right: an average of weights is kept in 16 bits (A612), at the line that moves it.
    """
    model = net(torch.tanh).bfloat16()
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        optimizer.zero_grad()
        F.mse_loss(model(x.bfloat16()).float(), y).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average, model.parameters(), strict=True):
                slow.sub_((slow - fast) * (1 - 0.9999))


def large_norms_left_out():
    """Haian-Jin/LVSM/pull/19: a step with a large norm is left out together with scaler.update(), and the next unscale_ fails.

    Right: GradScaler calls out of order (A605), at unscale_ of the step after.
    """
    model = net(torch.tanh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        with on_cpu():
            loss = F.mse_loss(model(x).float(), y * (50 if step == 3 else 1))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if nn.utils.clip_grad_norm_(model.parameters(), 1.0) < 5:
            scaler.step(optimizer)
            scaler.update()


def scaled_only():
    """nerfstudio-project/nerfacc/issues/307: the scaler scales the loss, and the optimizer steps by itself: 1024 times the gradient.

    Right: an optimizer steps on scaled gradients (A603).
    """
    model = net(torch.tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        optimizer.step()


def steps_twice():
    """IAHispano/Applio/pull/860: a voice GAN calls scaler.step(optimizer) and then optimizer.step().

    Right: an error at the bare step() of each: the same gradients are applied twice, also when the scaler skipped them.
    """
    maker, critic = net(torch.tanh), net(torch.tanh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4) for m in (critic, maker)]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        for model, optimizer in zip((critic, maker), optimizers, strict=True):
            with on_cpu():
                loss = F.mse_loss(model(x).float(), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            optimizer.step()
        scaler.update()


def loaded_in_half():
    """yk7333/d3po/issues/6: a model loaded in FP16 is fine-tuned whole: "Attempting to unscale FP16 gradients".

    Right: GradScaler over FP16 weights (A616).
    """
    model = net(torch.tanh).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x.half()).float(), y)).backward()
        scaler.step(optimizer)
        scaler.update()


def resumed_without_scaler():
    """PolymathicAI/the_well/issues/77: a resumed training diverges from an uninterrupted one: the scaler begins anew.

    Right: checkpoints without the GradScaler (A617), at torch.save.
    """
    model = net(torch.tanh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(1, 4):
            x, y = data(epoch)
            with on_cpu():
                loss = F.mse_loss(model(x).float(), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            held = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(held, Path(folder) / "recent.pt")


# --- precision, under audit ----------------------------------------------------------------------


def waves(t, dim=16):
    """Sines and cosines of time steps, computed in FP64."""
    frequencies = 10000.0 ** -(torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
    angles = torch.outer(t.double(), frequencies)
    return torch.cat([angles.cos(), angles.sin()], 1)


def rounded_times():
    """modelscope/DiffSynth-Studio/pull/1025: time steps of a flow in [0, 1000] are cast to BF16 before their embedding: 998.4 is 1000.

    Right: the cast of the time steps to 16 bits is named, or the sines and cosines of what it left.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16 + 6, 32), nn.SiLU(), nn.Linear(32, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        x, _ = data(step)
        noise = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        t = torch.rand(8, generator=torch.Generator().manual_seed(step)) * 1000
        with on_cpu(torch.bfloat16):
            embedding = waves(t.to(torch.bfloat16)).bfloat16()
            share = t[:, None] / 1000
            out = model(torch.cat([embedding, ((1 - share) * x + share * noise).bfloat16()], 1))
        optimizer.zero_grad()
        F.mse_loss(out.float(), noise - x).backward()
        optimizer.step()


class Rotary(nn.Module):
    """Rotary tables in the format of the weights."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, width, 2).float() / width))

    def forward(self, h):
        t = torch.arange(h.shape[1]).type_as(self.inv_freq)
        angles = torch.einsum("i,j->ij", t, self.inv_freq)
        cos, sin = angles.cos(), angles.sin()
        a, b = h.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rotary_tables():
    """EleutherAI/gpt-neox/issues/1003: rotary tables computed in the model's 16 bits are far off for late positions.

    Right: integers that 16 bits cannot hold (A621) at the cast of the positions, sines and cosines of 16-bit angles (A623).
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Rotary(8), nn.Linear(8, 4)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(1, STEPS + 1):
        x = torch.randn(2, 600 + step, 4, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.zero_grad()
        F.mse_loss(model(x).float(), x.float()).backward()
        optimizer.step()


def lost_updates():
    """pytorch/ao/pull/1124: with BF16 weights and no FP32 copy, updates below a thousandth of a weight change nothing.

    Right: 16-bit weights updated without FP32 masters (A401).
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 2)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        optimizer.zero_grad()
        F.mse_loss(model(x.bfloat16()).float(), y).backward()
        optimizer.step()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
