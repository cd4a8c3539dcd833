"""What looks like a misuse of mixed precision and is none."""

import copy
import io
import pickle
import sys
import types
import warnings

import torch
import torch.distributed as dist
from lint_planted import (
    STEPS,
    Moments,
    batches,
    before_updates,
    begin_group,
    checkpoint_of,
    half,
    loss_of,
    model,
    network,
    optimizer,
    plain_loss,
    scaled,
    scaler,
    stepped,
    train_in,
    train_plainly,
    train_with,
    windows,
)
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers
from torch.utils.checkpoint import checkpoint


def scaled_step():
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def recipe():
    scheduler = schedulers.StepLR(optimizer, 1, 0.9)
    for batch in batches[:STEPS]:
        optimizer.zero_grad(set_to_none=True)
        with half():
            loss = F.mse_loss(model(batch[0]).float(), batch[1])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()


def clip_by_hand_after_unscale():
    for _ in scaled():
        scaler.unscale_(optimizer)
        total = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5
        for p in model.parameters():
            p.grad.mul_(min(1.0, 1.0 / (total.item() + 1e-6)))
            p.grad.clamp_(-1, 1)


def clamped_after_unscaling_by_hand():
    for batch in batches[:STEPS]:
        scaler.scale(loss_of(batch)).backward()
        for p in model.parameters():
            p.grad.div_(1024.0)
            p.grad.clamp_(-1, 1)
        optimizer.step()
        optimizer.zero_grad()


def clip_at_scaled_limit():
    for _ in scaled():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0 * scaler.get_scale())


def limit_scaled_before():
    limit = 0.5 * 1024.0
    scaler.scale(torch.zeros(()))
    for batch in batches[:STEPS]:
        scale = scaler.get_scale()
        limit = 0.5 * scale
        scaler.scale(loss_of(batch)).backward()
        if scale != 1.0:  # a scaler that is off has nothing to take out
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        scaled_step()


def unscaled_by_hand():
    for batch in batches[:STEPS]:
        scaler.scale(loss_of(batch)).backward()
        inverse = 1.0 / scaler.get_scale()
        for p in model.parameters():
            p.grad.mul_(inverse)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def unscaled_by_hand_at_once():
    for batch in batches[:STEPS]:
        scaler.scale(loss_of(batch)).backward()
        torch._foreach_div_([p.grad for p in model.parameters()], 1024.0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def norm_divided_by_scale():
    for _ in scaled():
        print(torch.stack([p.grad.norm() for p in model.parameters()]).norm() / scaler.get_scale())


def scaled_gradients_averaged():
    for _ in scaled():
        for p in model.parameters():
            p.grad.div_(1)  # as after an all-reduce by hand
            assert p.grad.isfinite().all()


def checked_by_hand():
    for batch in batches[:STEPS]:
        scaler.scale(loss_of(batch)).backward()
        scaler.unscale_(optimizer)
        if all(p.grad.isfinite().all() for p in model.parameters()):
            optimizer.step()
        scaler.update()
        optimizer.zero_grad()


def loss_scaled_by_hand():
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        (loss_of(batch) * 512.0).backward()
        for p in model.parameters():
            p.grad.mul_(1 / 512.0)
        optimizer.step()


def loss_scaled_by_the_scalers_number():
    scaler.scale(torch.zeros(()))
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        (loss_of(batch) * scaler.get_scale()).backward()
        scaled_step()


def gradient_scaled_by_hand():
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        loss_of(batch).backward(torch.tensor(256.0))
        for p in model.parameters():
            p.grad.div_(256.0)
        optimizer.step()


def list_of_losses():
    for batch in batches[:STEPS]:
        first, second = scaler.scale([loss_of(batch), loss_of(batch)])
        (first + 0.5 * second).backward()
        scaled_step()


def scaled_and_divided():
    for number, batch in enumerate(batches, 1):
        (scaler.scale(loss_of(batch)) / 3).backward()
        if number % 3 == 0:
            scaled_step()


def two_backward_calls():
    for batch in batches[:STEPS]:
        torch.autograd.backward([scaler.scale(loss_of(batch)), scaler.scale(loss_of(batch))])
        scaled_step()


def penalty():
    for batch in batches[:STEPS]:
        loss = loss_of(batch)
        gradients = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        norm = sum((g / scaler.get_scale()).pow(2).sum() for g in gradients).sqrt()
        scaler.scale(loss + 0.1 * norm).backward()
        scaled_step()


def two_optimizers_one_update():
    other = network()
    second = torch.optim.AdamW(other.parameters(), lr=1e-3)
    for batch in batches[:STEPS]:
        scaler.scale(loss_of(batch) + loss_of(batch, other)).backward()
        for each in (optimizer, second):
            scaler.unscale_(each)
            nn.utils.clip_grad_norm_(each.param_groups[0]["params"], 1.0)
        scaler.step(optimizer)
        scaler.step(second)
        scaler.update()
        optimizer.zero_grad()
        second.zero_grad()


def gan(with_scaler=True):
    critic, maker = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), network()
    first = torch.optim.Adam(critic.parameters(), lr=1e-3)
    second = torch.optim.Adam(maker.parameters(), lr=1e-3)
    rates = schedulers.ExponentialLR(first, 0.9), schedulers.ExponentialLR(second, 0.9)
    for noise, real in batches[:6]:
        first.zero_grad()
        with half():
            fake = maker(noise)
            loss_real = F.softplus(-critic(real)).mean()
        run(loss_real, with_scaler)
        with half():
            loss_fake = F.softplus(critic(fake.detach())).mean()
        run(loss_fake, with_scaler)
        step(first, with_scaler)
        second.zero_grad()
        with half():
            loss = F.softplus(-critic(fake)).mean()
        run(loss, with_scaler)
        step(second, with_scaler)
        for rate in rates:
            rate.step()


def run(loss, with_scaler):
    (scaler.scale(loss) if with_scaler else loss * 128.0).backward()


def step(which, with_scaler):
    if with_scaler:
        scaler.step(which)
        scaler.update()
    else:
        for p in which.param_groups[0]["params"]:
            p.grad.div_(128.0)
        which.step()


def gan_scaled_by_hand():
    gan(with_scaler=False)


def critic_without_scaler():
    other = network()
    second = torch.optim.SGD(other.parameters(), lr=0.01)
    for batch in stepped():
        second.zero_grad()
        plain_loss(batch, other).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        second.step()


def two_scalers():
    other = network()
    second, own = torch.optim.SGD(other.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=64.0)
    for batch in scaled():
        own.scale(loss_of(batch, other)).backward()
        own.step(second)
        own.update()
        second.zero_grad()


def scale_set_by_hand():
    for _ in stepped():
        scaler.update(512.0)
        optimizer.zero_grad()


def bad_batch_given_up():
    for number, batch in enumerate(batches[:8]):
        scaler.scale(loss_of(batch)).backward()
        scaler.unscale_(optimizer)
        if number % 4 == 3:
            optimizer.zero_grad()
            scaler.update()
            continue
        scaled_step()


def bad_batch_cleared():
    for number, batch in enumerate(batches):
        plain_loss(batch).backward()
        if number % 4 == 3:
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


def accumulated():
    for number, batch in enumerate(batches, 1):
        scaler.scale(loss_of(batch) / 4).backward()
        if number % 4 == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaled_step()


def accumulated_with_rest():
    windows = [batches[start : start + 5] for start in range(0, 12, 5)]
    for window in windows:
        for batch in window:
            (plain_loss(batch) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulated_by_tokens():
    for start in range(0, 12, 4):
        window = batches[start : start + 4]
        count = sum(batch[1].numel() for batch in window)
        for batch in window:
            (F.mse_loss(model(batch[0]), batch[1], reduction="sum") / count).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulated_gradients_divided():
    for number, batch in enumerate(batches, 1):
        plain_loss(batch).backward()
        if number % 4 == 0:
            for p in model.parameters():
                p.grad.div_(4)
            optimizer.step()
            optimizer.zero_grad()


def half_a_square():
    for batch in windows(2):
        (0.5 * plain_loss(batch) / 2).backward()


def half_a_square_by_division():
    for batch in windows(2):
        loss = (model(batch[0]) - batch[1]).pow(2).mean() / 2
        (loss / 2).backward()


def mean_of_two_losses():
    for batch in windows(2):
        loss = (plain_loss(batch) + F.l1_loss(model(batch[0]), batch[1])) / 2
        (loss / 2).backward()


def sums():
    for batch in windows(4):
        F.mse_loss(model(batch[0]), batch[1], reduction="sum").backward()


def samples():
    net = nn.Linear(6, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    for inputs, targets in batches[:STEPS]:
        for x, y in zip(inputs, targets, strict=True):
            F.mse_loss(net(x), y).backward()
        opt.step()
        opt.zero_grad()
        for x, y in zip(inputs, targets, strict=True):
            F.mse_loss(net(x[None]), y[None]).backward()
        opt.step()
        opt.zero_grad()


def several_losses():
    for batch in batches[:STEPS]:
        predicted = model(batch[0])
        F.mse_loss(predicted, batch[1]).backward(retain_graph=True)
        F.l1_loss(predicted, batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()


def losses_in_a_loop():
    for batch in batches[:STEPS]:
        predicted = model(batch[0])
        for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss):
            loss(predicted, batch[1]).backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()


def tasks_in_a_loop():
    body, heads = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 2) for _ in range(3))
    opt = torch.optim.SGD([*body.parameters(), *heads.parameters()], lr=0.01)
    for batch in batches[:STEPS]:
        for head in heads:
            F.mse_loss(head(body(batch[0])), batch[1]).backward()
        opt.step()
        opt.zero_grad()


def adversarial():
    for inputs, targets in batches[:STEPS]:
        x = inputs.clone().requires_grad_()
        scaler.scale(loss_of((x, targets))).backward()
        with torch.no_grad():
            moved = x + 0.01 * x.grad.sign()
        optimizer.zero_grad()
        scaler.scale(loss_of((moved, targets))).backward()
        scaled_step()


def frozen_teacher():
    teacher = network().half().eval()
    for inputs, targets in batches[:STEPS]:
        with torch.autocast("cpu", dtype=torch.float16), torch.no_grad():
            aim = teacher(inputs.half()).float()
        F.mse_loss(model(inputs), (aim + targets) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def teacher_in_a_region():
    teacher = network().eval()
    for inputs, targets in batches[:STEPS]:
        with half(), torch.no_grad():
            aim = teacher(inputs).float()
        F.mse_loss(model(inputs), (aim + targets) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def bf16_without_scaler():
    off = torch.amp.GradScaler("cpu", enabled=False)
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(batch[0]).float(), batch[1])
        off.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        off.step(optimizer)
        off.update()


def bf16_evaluation():
    for batch in stepped():
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            model(batch[0])


def backward_inside():
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plain_loss(batch).backward()
        optimizer.step()


def backward_in_decorated():
    @torch.autocast("cpu", dtype=torch.float16)
    def training_step(batch):
        loss = F.mse_loss(model(batch[0]).float(), batch[1])
        scaler.scale(loss).backward()

    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        training_step(batch)
        scaler.step(optimizer)
        scaler.update()


def region_off_around_backward():
    with half():
        for batch in batches[:STEPS]:
            loss = loss_of(batch)
            with torch.autocast("cpu", enabled=False):
                scaler.scale(loss).backward()
                scaled_step()


def schedule_waits():
    high = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    scheduler = schedulers.LinearLR(optimizer, 0.1, 1.0, 10)
    high.scale(torch.zeros(()))
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        scale = high.get_scale()
        high.scale(loss_of(batch)).backward()
        high.step(optimizer)
        high.update()
        if high.get_scale() >= scale:
            scheduler.step()


def schedule_waits_for_fused():
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    high = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    scheduler = schedulers.LinearLR(fused, 0.1, 1.0, 10)
    high.scale(torch.zeros(()))
    for batch in batches[:STEPS]:
        fused.zero_grad()
        scale = high.get_scale()
        high.scale(loss_of(batch)).backward()
        high.step(fused)
        high.update()
        if high.get_scale() >= scale:
            scheduler.step()


def schedule_by_epoch():
    high = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    scheduler = schedulers.StepLR(optimizer, 1, 0.5)
    for _ in range(2):
        for batch in batches:
            optimizer.zero_grad()
            high.scale(loss_of(batch)).backward()
            high.step(optimizer)
            high.update()
        scheduler.step()


def schedule_resumed():
    scheduler = schedulers.StepLR(optimizer, 2, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(1):
            scheduler.step()
    for batch in batches[:STEPS]:
        plain_loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def schedule_by_micro_batch():
    scheduler = schedulers.CosineAnnealingLR(optimizer, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, batch in enumerate(batches, 1):
            (plain_loss(batch) / 4).backward()
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()


def average_in_fp32():
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).bfloat16()
    mean = copy.deepcopy(net).float()
    ready = torch.optim.swa_utils.AveragedModel(copy.deepcopy(model))

    def after():
        with torch.no_grad():
            for slow, fast in zip(mean.parameters(), net.parameters(), strict=True):
                slow.lerp_(fast.float(), 0.001)
                slow.mul_(0.99).add_(fast.float(), alpha=0.01)
        ready.update_parameters(model)

    train_plainly(after, net, dtype=torch.bfloat16)


def average_served_in_half():
    mean = copy.deepcopy(model)
    served = copy.deepcopy(model).half()

    def after():
        with torch.no_grad():
            for slow, fast, copied in zip(mean.parameters(), model.parameters(), served.parameters(), strict=True):
                slow.copy_(0.99 * slow + 0.01 * fast)
                mixture = 0.9 * slow + 0.1 * fast
                copied.copy_(mixture)
                copied.copy_(mixture.half())

    train_plainly(after)


def merged_once():
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).bfloat16()
    before = copy.deepcopy(net.state_dict())
    train_plainly(lambda: None, net, dtype=torch.bfloat16)
    net.load_state_dict({name: 0.5 * before[name] + 0.5 * value for name, value in net.state_dict().items()})


def copied_to_half():
    served = copy.deepcopy(model).half()

    def after():
        with torch.no_grad():
            for copied, weight in zip(served.parameters(), model.parameters(), strict=True):
                copied.copy_(weight)

    train_plainly(after)


def noise_on_half_weights():
    net = nn.Linear(6, 2).bfloat16()

    def after():
        with torch.no_grad():
            for weight in net.parameters():
                weight.add_(torch.randn_like(weight), alpha=1e-3)
                weight.mul_(1 - 1e-4)
                weight.add_(weight, alpha=-1e-4)
        print(sum(p.norm() for p in net.parameters()))

    train_plainly(after, net, dtype=torch.bfloat16)


def frozen_statistics():
    net = network()
    net[1].bfloat16().eval()
    for p in net[1].parameters():
        p.requires_grad_(requires_grad=False)
    head = nn.Linear(16, 2)
    opt = torch.optim.SGD(head.parameters(), lr=0.01)
    for inputs, targets in batches[:STEPS]:
        with torch.no_grad():
            features = net[1](net[0](inputs).bfloat16()).float()
        F.mse_loss(head(features), targets).backward()
        opt.step()
        opt.zero_grad()


def closure():
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for opt in (lbfgs, torch.optim.SGD(model.parameters(), lr=0.1)):
        for batch in batches[:STEPS]:

            def evaluate(opt=opt, batch=batch):
                opt.zero_grad()
                loss = plain_loss(batch)
                loss.backward()
                return loss

            opt.step(evaluate)


def step_inside_backward():
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def after(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(after)
    for batch in batches[:STEPS]:
        plain_loss(batch).backward()


def default_device():
    for batch in batches[:STEPS]:
        with torch.device("cpu"):
            scaler.scale(loss_of(batch)).backward()
        torch.set_default_device("cpu")
        scaler.unscale_(optimizer)
        torch.set_default_device(None)
        scaled_step()


def fused():
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for batch in batches[:STEPS]:
        opt.zero_grad()
        scaler.scale(loss_of(batch)).backward()
        scaler.step(opt)
        scaler.update()


def session():
    import mezzo

    net = network()
    ours = mezzo.Session(net, torch.optim.SGD(net.parameters(), lr=0.05), policy="fp16", accumulate=2, clip_norm=1.0)
    for batch in batches:
        with ours.autocast():
            loss = 0.5 * F.mse_loss(net(batch[0]).float(), batch[1])
        ours.step(loss)
    assert ours.updates + ours.skipped == 6


def reinforcement():
    policy = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for inputs, _ in batches[:STEPS]:
        for state in inputs:
            odds = torch.distributions.Categorical(logits=policy(state))
            action = odds.sample()
            (-odds.log_prob(action) * 0.3).backward()
        opt.step()
        opt.zero_grad()


def proximal_policy():
    actor, value = nn.Linear(6, 3), nn.Linear(6, 1)
    both = [*actor.parameters(), *value.parameters()]
    opt = torch.optim.Adam(both, lr=1e-3)
    for states, _ in batches[:2]:
        with torch.no_grad():
            odds = torch.distributions.Categorical(logits=actor(states))
            actions = odds.sample()
            before, gains = odds.log_prob(actions), torch.randn(len(states))
        for _ in range(3):
            for chosen in torch.randperm(len(states)).split(8):
                with half():
                    odds = torch.distributions.Categorical(logits=actor(states[chosen]).float())
                    ratio = (odds.log_prob(actions[chosen]) - before[chosen]).exp()
                    surrogate = torch.min(ratio * gains[chosen], ratio.clamp(0.8, 1.2) * gains[chosen]).mean()
                    fit = F.mse_loss(value(states[chosen]).float().squeeze(1), gains[chosen])
                    loss = -surrogate + 0.5 * fit - 0.01 * odds.entropy().mean()
                opt.zero_grad()
                scaler.scale(loss).backward()
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(both, 0.5)
                scaler.step(opt)
                scaler.update()


def soft_actor_critic():
    critic, actor = network(), network()
    target = copy.deepcopy(critic)
    first, second = (torch.optim.Adam(net.parameters(), lr=1e-3) for net in (critic, actor))
    for inputs, targets in batches[:STEPS]:
        with torch.no_grad(), half():
            aim = target(inputs).float() + targets
        first.zero_grad()
        scaler.scale(loss_of((inputs, aim), critic)).backward()
        scaler.step(first)
        for p in critic.parameters():
            p.requires_grad_(requires_grad=False)
        second.zero_grad()
        with half():
            loss = -critic(torch.cat([actor(inputs), inputs[:, 2:]], 1)).float().mean()
        scaler.scale(loss).backward()
        scaler.step(second)
        scaler.update()
        for p, slow in zip(critic.parameters(), target.parameters(), strict=True):
            p.requires_grad_(requires_grad=True)
            slow.data.mul_(0.995)
            slow.data.add_(0.005 * p.data)


def gan_through_a_helper():
    critic, maker = nn.Linear(2, 1), network()
    first, second = torch.optim.Adam(critic.parameters()), torch.optim.Adam(maker.parameters())

    def learn(loss):
        loss.backward()

    for noise, real in batches[:STEPS]:
        first.zero_grad()
        fake = maker(noise)
        learn(F.softplus(-critic(real)).mean())
        learn(F.softplus(critic(fake.detach())).mean())
        first.step()
        second.zero_grad()
        learn(F.softplus(-critic(fake)).mean())
        second.step()


def gradient_penalty_of_critic():
    critic = nn.Sequential(nn.Linear(2, 8), nn.SiLU(), nn.Linear(8, 1))
    opt = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for _, real in batches[:STEPS]:
        inputs = real.clone().requires_grad_()
        with half():
            judged = critic(inputs)
        (slopes,) = torch.autograd.grad(scaler.scale(judged.float().sum()), inputs, create_graph=True)
        slopes = slopes / scaler.get_scale()
        loss = F.softplus(-judged.float()).mean() + 10 * (slopes.norm(2, dim=1) - 1).square().mean()
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()


def additive_mask():
    layer, head = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), nn.Linear(8, 2)
    weights = [*layer.parameters(), *head.parameters()]
    opt = torch.optim.AdamW(weights, lr=1e-3)
    rates = schedulers.OneCycleLR(opt, 1e-3, total_steps=10)
    later = torch.ones(5, 5).triu(1).bool()
    mask = torch.zeros(5, 5).masked_fill(later, torch.finfo(torch.float16).min)
    for _ in range(STEPS):
        opt.zero_grad()
        with half():
            loss = head(layer(torch.randn(4, 5, 8), src_mask=mask)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(weights, 1.0)
        scaler.step(opt)
        scaler.update()
        rates.step()


def compiled():
    net = torch.compile(model, backend="eager")
    mean = copy.deepcopy(model)
    for number, batch in enumerate(batches, 1):
        scaler.scale(loss_of(batch, net) / 3).backward()
        if number % 3 == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaled_step()
            with torch.no_grad():
                for slow, fast in zip(mean.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)


def compiled_update():
    opt = torch.optim.SGD(model.parameters(), lr=0.05, foreach=True)
    mean = [p.detach().clone() for p in model.parameters()]

    @torch.compile(backend="eager")
    def follow(slow, fast):
        torch._foreach_lerp_(slow, fast, 0.01)

    for batch in batches[:STEPS]:
        opt.zero_grad()
        plain_loss(batch).backward()
        opt.step()
        follow(mean, [p.detach() for p in model.parameters()])


def sharpness_aware():
    for batch in scaled():
        scaler.unscale_(optimizer)
        length = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        before = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad * (0.05 / (length + 1e-12)))
        optimizer.zero_grad()
        scaler.update()
        scaler.scale(loss_of(batch)).backward()
        for p, old in zip(model.parameters(), before, strict=True):
            p.data = old


def scaler_in_a_class():
    class Scaler:
        def __init__(self):
            self.inner = torch.amp.GradScaler("cpu", init_scale=1024.0)

        def __call__(self, loss, opt, net, *, updates):
            self.inner.scale(loss).backward()
            if updates:
                self.inner.unscale_(opt)
                nn.utils.clip_grad_value_(net.parameters(), 1.0)
                self.inner.step(opt)
                self.inner.update()
                opt.zero_grad()

    own = Scaler()
    for number, batch in enumerate(batches, 1):
        own(loss_of(batch) / 2, optimizer, model, updates=number % 2 == 0)


def closure_in_bf16():
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")
    for batch in batches[:STEPS]:

        def evaluate(batch=batch):
            lbfgs.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(model(batch[0]).float(), batch[1])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            return loss

        lbfgs.step(evaluate)


def queue_in_half():
    net = nn.Linear(6, 2)
    net.register_buffer("queue", torch.zeros(12, 6, dtype=torch.float16))
    net.register_buffer("mean", torch.zeros(6, dtype=torch.float16))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for number, (inputs, targets) in enumerate(batches):
        net.queue[number] = inputs[0].half()
        F.mse_loss(net(inputs - net.mean), targets).backward()
        opt.step()
        opt.zero_grad()


def norm_of_unchanged_clamps():
    for _ in scaled():
        print(max(p.grad.clamp(-1, 1).max() for p in model.parameters()))


def checkpointed():
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):
        for inputs, targets in batches[:STEPS]:
            x = inputs.clone().requires_grad_()
            with half():
                hidden = checkpoint(model[:3], x, use_reentrant=reentrant)
                loss = F.mse_loss(model[3](hidden).float(), targets)
            scaler.scale(loss).backward()
            scaled_step()


def saved_with_scaler():
    for _ in stepped():
        state = {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        torch.save({"model": model.state_dict(), **state}, io.BytesIO())


def saved_to_files_of_their_own():
    for _ in stepped():
        for each in (model, optimizer, scaler):
            torch.save(each.state_dict(), io.BytesIO())


def saved_as_objects():
    for _ in stepped():
        pass
    torch.save([optimizer, scaler], io.BytesIO())


def saved_in_an_object_with_scaler():
    for _ in stepped():
        state = types.SimpleNamespace(optimizer=optimizer.state_dict(), scaler=scaler.state_dict())
        torch.save(state, io.BytesIO())
        pickle.dump(vars(state), io.BytesIO())


def saved_for_evaluation():
    for _ in stepped():
        torch.save({"model": model.state_dict(), "state": 3}, io.BytesIO())


def scale_saved_as_a_number():
    for _ in stepped():
        torch.save({"optimizer": optimizer.state_dict(), "scale": scaler.get_scale()}, io.BytesIO())


def saved_before_the_scaler_steps():
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())
    for _ in stepped():
        pass


def saved_without_a_scaler_in_use():
    off = torch.amp.GradScaler("cpu", enabled=False)
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        off.scale(plain_loss(batch)).backward()
        off.step(optimizer)
        off.update()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())


def split_between_two_optimizers():
    first = torch.optim.SGD(model[:3].parameters(), lr=0.05)
    second = torch.optim.SGD(model[3].parameters(), lr=0.05)
    for batch in batches[:STEPS]:
        model.zero_grad()
        scaler.scale(loss_of(batch)).backward()
        scaler.step(first)
        scaler.step(second)
        scaler.update()


def shared_but_computed_again():
    second = torch.optim.SGD(model[3].parameters(), lr=0.05)
    for batch in batches[:STEPS]:
        for each in (optimizer, second):
            model.zero_grad()
            scaler.scale(loss_of(batch)).backward()
            scaler.unscale_(each)
            scaler.step(each)
        scaler.update()


def shared_in_turns():
    second = torch.optim.SGD(model.parameters(), lr=0.05)
    for number, batch in enumerate(batches[:STEPS]):
        model.zero_grad()
        scaler.scale(loss_of(batch)).backward()
        scaler.step((optimizer, second)[number % 2])
        scaler.update()


def average_waits_for(opt):
    mean, own = torch.optim.swa_utils.AveragedModel(model), copy.deepcopy(model)
    high = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    mean.update_parameters(model)
    high.scale(torch.zeros(()))
    for batch in batches[:8]:
        opt.zero_grad()
        scale = high.get_scale()
        high.scale(loss_of(batch)).backward()
        high.step(opt)
        high.update()
        if high.get_scale() >= scale:
            mean.update_parameters(model)
            with torch.no_grad():
                for slow, fast in zip(own.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)


def average_waits():
    average_waits_for(torch.optim.AdamW(model.parameters()))


def average_waits_for_fused():
    average_waits_for(torch.optim.AdamW(model.parameters(), fused=True))


def average_in_new_tensors_waits():
    mean = [p.detach().clone() for p in model.parameters()]
    high = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        high.scale(loss_of(batch)).backward()
        high.step(optimizer)
        before = high.get_scale()
        high.update()
        if high.get_scale() >= before:
            mean = [0.99 * slow + 0.01 * fast.data for slow, fast in zip(mean, model.parameters(), strict=True)]


def average_of_several_updates():
    mean = torch.optim.swa_utils.AveragedModel(model)
    high = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    for number, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        high.scale(loss_of(batch)).backward()
        high.step(optimizer)
        high.update()
        if number % 6 == 0:
            mean.update_parameters(model)


def average_begins_with_a_copy():
    mean = torch.optim.swa_utils.AveragedModel(model)
    high = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    for batch in batches[:1]:
        high.scale(loss_of(batch)).backward()
        high.step(optimizer)
        high.update()
        mean.update_parameters(model)


def clamped_in_fp32():
    def loss(batch):
        chance = torch.sigmoid(model(batch[0])).half().float().clamp(1e-7, 1 - 1e-6)
        spread = chance.square().mean(0).clamp_min(1e-12)
        return -torch.log(1 - chance + 1e-12).mean() + (chance / torch.sqrt(spread + 1e-8)).mean()

    train_with(loss)


def bounds_that_the_format_holds():
    def loss(batch):
        x = model(batch[0]).half()
        chance = torch.sigmoid(x).clamp(1e-7, 1 - 1e-3)
        narrow = torch.sigmoid(x.bfloat16()).clamp(1e-12, 0.99).clamp(0, 1)
        return (chance.float() + narrow.float()).mean() + (x + 1e-6 + 0.0).clamp(-1.0, 1.0).float().mean()

    train_with(loss)


def bounds_in_functions_and_tensors():
    eps = torch.tensor(1e-3)

    def loss(batch):
        x = model(batch[0]).half()
        unit = F.normalize(x, dim=1, eps=1e-4) + F.cosine_similarity(x, x.detach(), eps=1e-3)[:, None]
        return (unit + eps).clamp_min(eps).float().mean()

    train_with(loss)


def eps_in_bf16():
    def loss(batch):
        x = model(batch[0]).bfloat16()
        return (x / (x.square().mean() + 1e-12)).float().square().mean()

    train_with(loss)


def eps_of_modules():
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8, eps=1e-12), nn.Linear(8, 2))

    def loss(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.normalize(net(batch[0]), dim=1).float().square().mean() + net(batch[0]).float().mean()

    train_with(loss, net)


def labels_in_fp32():
    labels = torch.arange(3000, 3016)

    def loss(batch):
        return (model(batch[0])[:, 0] - labels.float() / 3000).square().mean()

    train_with(loss)


def integers_that_16_bits_hold():
    pixels, bits = torch.arange(240, 256), torch.arange(2033, 2049)

    def loss(batch):
        scaled = (
            pixels.bfloat16().float() / 255 + bits.half().float() / 2048 + (pixels * torch.ones(16).bfloat16()).float()
        )
        position = torch.arange(2048, dtype=torch.float16)[:16] + torch.arange(0, 4096, 16, dtype=torch.bfloat16)[:16]
        return (model(batch[0])[:, 0] - scaled).square().mean() + position.float().mean()

    train_with(loss)


def counts_that_divide():
    counts = torch.arange(300, 316)

    def loss(batch):
        x = model(batch[0]).bfloat16()
        share = counts[:, None].to(x.dtype)
        return (x / share).float().square().mean() + (x / counts[:, None]).float().mean()

    train_with(loss)


def sound_in_half():
    sound = torch.arange(3001, 3017, dtype=torch.int16)

    def loss(batch):
        return (model(batch[0])[:, 0] * (sound.half() / 32768).float()).square().mean()

    train_with(loss)


def one_number_in_half():
    def loss(batch):
        return (model(batch[0]).half() * torch.tensor(3001) / torch.tensor(3001).half()).float().square().mean()

    train_with(loss)


def offsets_that_16_bits_hold():
    offset = torch.zeros(16, dtype=torch.bfloat16)

    def loss(batch):
        position = (torch.arange(100, 116) + offset).float() + torch.arange(3000, 3016) + 3000 * offset
        return (model(batch[0])[:, 0] * position / 3000).square().mean()

    train_with(loss)


def rotary_in_polar_form_in_fp32():
    angles = torch.outer(torch.linspace(1500.0, 1999.0, 16), 100.0 ** -torch.linspace(0, 1, 8))

    def loss(batch):
        return (model(batch[0]) * torch.polar(torch.ones_like(angles), angles).real[:, :2]).square().mean()

    train_with(loss)


def rotary_in_fp32():
    frequency = 100.0 ** -torch.linspace(0, 1, 8)[None]
    position = 4096 + torch.arange(16.0)[:, None]

    def loss(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            angles = position * frequency
            turned = angles.cos().to(torch.bfloat16)
        return (model(batch[0]) * turned[:, :2].float()).square().mean()

    train_with(loss)


def small_angles_in_half():
    def loss(batch):
        x = model(batch[0])
        return (
            (30 * x).bfloat16().clamp(-60, 60).sin().float().mean()
            + torch.arange(250.0).cos().mean()
            + x.half().cos().mean()
        )

    train_with(loss)


def times_that_rounding_leaves():
    """Multiples of 4 are BF16 numbers up to 1024; times in [0, 1] are rounded, and stay certain to a tenth of a radian."""

    def loss(batch):
        x = model(batch[0])
        exact = (4 * torch.arange(200.0)).bfloat16().float() * 0.7
        short = torch.linspace(0, 1, 64).bfloat16().float() * 50
        learned = (700 * x).bfloat16().float() * 1.1
        return x.mean() + exact.cos().mean() + short.sin().mean() + learned.tanh().mean()

    train_with(loss)


def moments_in_fp32():
    for opt in train_in(torch.float32, torch.optim.AdamW, lr=1e-3):
        opt.step()


def moments_that_fall_fast():
    for opt in train_in(torch.bfloat16, torch.optim.Adam, lr=1e-2, betas=(0.9, 0.95)):
        opt.step()


def moments_of_adamax_and_adagrad_in_fp32():
    for kind in (torch.optim.Adamax, torch.optim.Adagrad, torch.optim.NAdam):
        for opt in train_in(torch.float32, kind):
            opt.step()


def eps_that_no_format_decides():
    for opt in train_in(torch.float32, torch.optim.Adafactor):
        opt.step()
    for opt in train_in(torch.bfloat16, torch.optim.Adafactor, lr=0.1, eps=(1e-7, 1e-3)):
        opt.step()


def momentum_in_bf16():
    for opt in train_in(torch.bfloat16, torch.optim.SGD, lr=0.5, momentum=0.9):
        opt.step()


def moments_of_masters():
    import mezzo

    net = nn.Linear(6, 2).bfloat16()
    opt = mezzo.AdamW(net.parameters(), lr=1e-3)
    for batch in batches[:STEPS]:
        opt.zero_grad()
        F.mse_loss(net(batch[0].bfloat16()).float(), batch[1]).backward()
        opt.step()


def last_window_divided_by_its_own():
    for _ in range(2):
        for number, batch in enumerate(batches[:10], 1):
            scaler.scale(loss_of(batch) / (4 if number <= 8 else 2)).backward()
            if number % 4 == 0 or number == 10:
                scaled_step()


def last_window_left_out():
    for _ in range(2):
        for number, batch in enumerate(batches[:8], 1):
            (plain_loss(batch) / 4).backward()
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()


def weight_of_a_loss():
    for batch in windows(3, 9):
        (0.25 * plain_loss(batch)).backward()


def windows_that_shrink():
    first = 0
    for count in (4, 2, 3, 1):
        for batch in batches[first : first + count]:
            (plain_loss(batch) / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        first += count


def running_loss_in_fp32():
    total = torch.zeros(())

    def loss(batch):
        value = plain_loss(batch)
        total.add_(value.detach().to(torch.bfloat16))
        return value

    train_with(loss)


def sum_within_a_step():
    def loss(batch):
        total = torch.zeros((), dtype=torch.bfloat16)
        for value in plain_loss(batch).detach().expand(4):
            total += value
        return plain_loss(batch) + 0 * total.float()

    train_with(loss)


def buffer_that_decays():
    spread = torch.ones(2, dtype=torch.bfloat16)

    def loss(batch):
        spread.mul_(0.9).add_(model(batch[0]).detach().square().mean(0) * 0.1)
        return plain_loss(batch)

    train_with(loss)


def residual_stream():
    state = torch.zeros(16, 2, dtype=torch.bfloat16)

    def loss(batch):
        state.add_(model(batch[0]).detach() - 1)
        return plain_loss(batch)

    train_with(loss)


def cumulative_sum_of_few():
    def loss(batch):
        place = torch.ones(200, dtype=torch.bfloat16).cumsum(0)
        return plain_loss(batch) * place[:10].float().mean()

    train_with(loss)


def train_checkpointed(reentrant, *, frozen=False, needs_input=False):
    block = nn.Sequential(nn.Linear(6, 16), nn.Tanh()).requires_grad_(not frozen)
    head = nn.Linear(16, 2)
    opt = torch.optim.SGD([p for p in (*block.parameters(), *head.parameters()) if p.requires_grad], lr=0.1)
    for batch in batches[:STEPS]:
        x = batch[0].clone().requires_grad_(needs_input)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hidden = checkpoint(block, x, use_reentrant=reentrant)
            with torch.no_grad():
                checkpoint(block, x, use_reentrant=True)
        opt.zero_grad()
        F.mse_loss(head(hidden), batch[1]).backward()
        opt.step()


def checkpoint_that_is_not_reentrant():
    train_checkpointed(False)


def checkpoint_of_frozen_weights():
    train_checkpointed(True, frozen=True)


def checkpoint_of_an_input_with_gradient():
    train_checkpointed(True, needs_input=True)


def state_in_fp32_beside_bf16_weights():
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).bfloat16()
    opt = Moments(net.parameters())
    for _ in before_updates(net, torch.bfloat16):
        opt.step()


def state_quantized_with_scales():
    opt = Moments(model.parameters())
    for state in opt.state.values():
        state["scales"] = torch.ones(1, dtype=torch.bfloat16)
        state["codes"] = torch.zeros(4, dtype=torch.uint8)
    for _ in before_updates():
        opt.step()


def state_of_zeros_and_powers_of_two():
    net = nn.Linear(6, 2, bias=False)
    opt = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
    for k in range(STEPS):
        net.weight.grad = torch.zeros(2, 6).fill_diagonal_(2.0**-k)
        opt.step()


def copies_of_bf16_gradients():
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in before_updates():
        for p in model.parameters():
            p.grad.copy_(p.grad.bfloat16())
            opt.state[p]["last_gradient"] = p.grad.clone()
        opt.step()


def fp32_state_loaded():
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    opt.load_state_dict(checkpoint_of(model))
    for _ in before_updates():
        opt.step()


def weights_from_bf16_and_no_state():
    net = network().bfloat16().float()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    opt.load_state_dict(torch.optim.Adam(net.parameters()).state_dict())
    for _ in before_updates(net):
        opt.step()


def rows_without_gradient():
    net = nn.Sequential(nn.Embedding(200, 8), nn.Linear(8, 2)).bfloat16().float()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for k in range(STEPS):
        opt.zero_grad()
        net(torch.tensor([k, 7])).square().mean().backward()
        opt.step()


def region_in_other_steps():
    for number, batch in enumerate(batches[:STEPS]):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number == 3):
            out = model(batch[0])
        F.mse_loss(out.float(), batch[1]).backward()
        optimizer.step()


def prepared():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    net, opt = accelerator.prepare(model, optimizer)
    for batch in batches[:STEPS]:
        opt.zero_grad()
        accelerator.backward(plain_loss(batch, net))
        opt.step()


def reduced_in_fp32():
    begin_group(1)
    for _ in before_updates():
        for p in model.parameters():
            dist.all_reduce(p.grad)
        loss = torch.zeros(1, dtype=torch.bfloat16)
        optimizer.step()
        dist.all_reduce(loss)
    dist.destroy_process_group()


def bf16_weights_reduced_in_bf16():
    net = nn.Linear(6, 2).bfloat16()
    opt = torch.optim.SGD(net.parameters(), lr=0.5)
    begin_group(1)
    for _ in before_updates(net, torch.bfloat16):
        dist.all_reduce(net.weight.grad)
        opt.step()
    dist.destroy_process_group()


def norm_in_fp32_of_bf16_gradients():
    net = nn.Linear(6, 2).bfloat16()
    opt = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in before_updates(net, torch.bfloat16):
        total = sum(p.grad.float().norm() ** 2 for p in net.parameters()) ** 0.5
        norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in net.parameters()]
        assert torch.linalg.vector_norm(torch.stack(norms)).allclose(total)
        nn.utils.clip_grad_value_(net.parameters(), 1.0)
        nn.utils.clip_grads_with_norm_(net.parameters(), 1.0, total)
        opt.step()


class RoundedAtRandom(Moments):
    """Adds small updates to BF16 weights so that they are right on average."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            wide = (p.float() - 1e-4 * p.grad.float().sign()).view(torch.int32)
            noise = torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32, generator=self.generator)
            p.copy_(((wide + noise) & -65536).view(torch.float32))


def updates_rounded_at_random():
    net = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 2)).bfloat16()
    opt = RoundedAtRandom(net.parameters())
    opt.generator = torch.Generator().manual_seed(0)
    for _ in before_updates(net, torch.bfloat16):
        opt.step()


class Compensated(Moments):
    """Keeps what BF16 weights lose, and adds it to the next update."""

    @torch.no_grad()
    def step(self, closure=None):
        for p, state in self.state.items():
            rest = state.setdefault("compensation", torch.zeros_like(p))
            wide = p.float() + rest.float() - 1e-6 * p.grad.float().sign()
            rest.copy_(wide - wide.to(p.dtype).float())
            p.copy_(wide)


def updates_with_compensation():
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).bfloat16()
    opt = Compensated(net.parameters())
    for _ in before_updates(net, torch.bfloat16):
        opt.step()


def warm_up_from_zero():
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).bfloat16()
    opt = torch.optim.SGD(net.parameters(), lr=0.5)
    schedule = schedulers.LambdaLR(opt, lambda k: float(k >= 3))
    for _ in before_updates(net, torch.bfloat16):
        opt.step()
        schedule.step()


def loss_times_its_size():
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        wide = torch.cat([batch[0]] * 8)
        scaler.scale(128 * F.mse_loss(model(wide), torch.cat([batch[1]] * 8))).backward()
        scaler.step(optimizer)
        scaler.update()


def second_scale_divided_by_hand():
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        scaler.scale(plain_loss(batch) * 1024).backward()
        scaler.unscale_(optimizer)
        for p in model.parameters():
            p.grad.div_(1024)
        scaler.step(optimizer)
        scaler.update()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
