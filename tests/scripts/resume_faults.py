"""A training that saves and resumes all of its state, apart from what ``--without`` names."""

import argparse
import os
import signal
import sys

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--without", default="")
parser.add_argument("--save", choices=("steps", "epochs", "sigterm"), default="steps")
parser.add_argument("--resume", help="the checkpoint to begin from")
parser.add_argument("--output", default=".")
args = parser.parse_args()
lacks = args.without
path = os.path.join(args.output, "last.pt")
os.makedirs(args.output, exist_ok=True)

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randn(32, 1))
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.8)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
shadow = {name: weight.detach().clone() for name, weight in model.named_parameters()}
step, first_epoch, first_batch, random_state = 0, 0, 0, None


def save(epoch, batch):
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "scaler": scaler.state_dict(),
            "average": average.state_dict(),
            "shadow": shadow,
            "step": step,
            "place": (epoch, batch),
            "random": torch.get_rng_state(),
        },
        path + ".part",
    )
    os.replace(path + ".part", path)


def load(found):
    global step, first_epoch, first_batch, random_state
    weights = found["model"]
    if lacks == "buffers":
        weights = {name: value for name, value in weights.items() if "running" not in name and "tracked" not in name}
    if lacks == "head":
        weights = {name: value for name, value in weights.items() if not name.startswith("4.")}
    model.load_state_dict(weights, strict=False)
    if lacks != "optimizer":
        optimizer.load_state_dict(found["optimizer"])
    if lacks != "scheduler":
        scheduler.load_state_dict(found["scheduler"])
    if lacks != "scaler":
        scaler.load_state_dict(found["scaler"])
    if lacks != "average":
        average.load_state_dict(found["average"])
    if lacks != "shadow":
        shadow.update(found["shadow"])
    if lacks != "step":
        step = found["step"]
    if lacks != "place":
        first_epoch, first_batch = found["place"]
    if lacks != "random":
        random_state = found["random"]


noticed = False


def notice(number, frame):
    global noticed
    noticed = True


if args.save == "sigterm":
    signal.signal(signal.SIGTERM, notice)
begins_from = args.resume or path
if os.path.exists(begins_from) and (args.resume or lacks not in ("resume", "argument")):
    load(torch.load(begins_from))
for epoch in range(first_epoch, 3):
    generator = torch.Generator().manual_seed(epoch)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=generator)
    for batch, (inputs, targets) in enumerate(loader):
        if epoch == first_epoch and batch < first_batch:
            continue
        if random_state is not None:
            torch.set_rng_state(random_state)
            random_state = None
        outputs = model(inputs)
        loss = (outputs - targets).square().mean() + 0.01 * step * outputs.square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(model)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                shadow[name].mul_(0.9).add_(weight, alpha=0.1)
        step += 1
        if noticed:
            save(epoch, batch + 1)
            sys.exit(143)
        if lacks != "checkpoint" and args.save == "steps" and step % 5 == 0:
            save(epoch, batch + 1)
    if args.save == "epochs" and lacks != "checkpoint":
        save(epoch + 1, 0)
