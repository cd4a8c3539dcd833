"""One misuse of mixed precision each; the line that is to blame ends with its code."""

import copy
import io
import pickle
import sys
import tempfile
import types
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers
from torch.utils.checkpoint import checkpoint

STEPS = 4
generator = torch.Generator().manual_seed(3)
batches = [(torch.randn(16, 6, generator=generator), torch.randn(16, 2, generator=generator)) for _ in range(12)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def half():
    return torch.autocast("cpu", dtype=torch.float16)


def loss_of(batch, net=model):
    with half():
        return F.mse_loss(net(batch[0]).float(), batch[1])


def plain_loss(batch, net=model):
    return F.mse_loss(net(batch[0]), batch[1])


def stepped(opt=optimizer, use=scaler):
    """Yield after each update."""
    for batch in batches[:STEPS]:
        opt.zero_grad()
        use.scale(loss_of(batch)).backward()
        use.step(opt)
        use.update()
        yield batch


def scaled(opt=optimizer):
    """Yield between each backward pass and its update."""
    for batch in batches[:STEPS]:
        opt.zero_grad()
        scaler.scale(loss_of(batch)).backward()
        yield batch
        scaler.step(opt)
        scaler.update()


def windows(size, number=12):
    """Yield batches whose gradients add up; update after each window of them."""
    for place, batch in enumerate(batches[:number], 1):
        yield batch
        if place % size == 0:
            optimizer.step()
            optimizer.zero_grad()


def skipping(opt=optimizer):
    """Train with a scale from which every update overflows."""
    return stepped(opt, torch.amp.GradScaler("cpu", init_scale=2.0**40))


def clip_norm():
    for _ in scaled():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # A601


def clip_value():
    for _ in scaled():
        torch.nn.utils.clip_grad.clip_grad_value_(list(model.parameters()), 0.5)  # A601


def clip_by_hand():
    for _ in scaled():
        total = sum(p.grad.data.norm(2) ** 2 for p in model.parameters()) ** 0.5  # A601
        for p in model.parameters():
            p.grad.mul_(min(1.0, 1.0 / (total.item() + 1e-6)))


def clip_by_squares():
    for _ in scaled():
        gradients = [p.grad for p in model.parameters()]
        total = torch.stack([g.float().pow(2).sum() for g in gradients]).sum().sqrt()  # A601
        torch._foreach_mul_(gradients, (1.0 / (total + 1e-6)).clamp(max=1.0))


def clamp_by_hand():
    for _ in scaled():
        for p in model.parameters():
            p.grad.data.clamp_(-1.0, 1.0)  # A601


def clip_one_of_two():
    ends = [torch.optim.SGD(model[0].parameters(), lr=0.05), torch.optim.Adam(model[3].parameters(), lr=0.01)]
    for batch in batches[:STEPS]:
        scaler.scale(loss_of(batch)).backward()
        scaler.unscale_(ends[0])
        for end in ends:
            nn.utils.clip_grad_norm_(end.param_groups[0]["params"], 1.0)  # A601
        for end in ends:
            scaler.step(end)
        scaler.update()
        model.zero_grad()


def clip_data_by_hand():
    for _ in scaled():
        total = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))  # A601
        for p in model.parameters():
            p.grad.data = p.grad.data / (total + 1e-6)


def clip_two_at_once():
    other = network()
    second = torch.optim.SGD(other.parameters(), lr=0.05)
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        second.zero_grad()
        scaler.scale(loss_of(batch) + loss_of(batch, other)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([*model.parameters(), *other.parameters()], 1.0)  # A601
        scaler.step(optimizer)
        scaler.step(second)
        scaler.update()


def clip_micro_batches():
    for number, batch in enumerate(batches, 1):
        scaler.scale(loss_of(batch) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # A601
        if number % 3 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def clip_before_unscale():
    for _ in scaled():
        nn.utils.clip_grad_norm_(filter(lambda p: p.requires_grad, model.parameters()), 1.0)  # A601
        scaler.unscale_(optimizer)


def clip_in_compiled_script():
    compiled = torch.compile(model, backend="eager")
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        scaler.scale(loss_of(batch, compiled)).backward()
        for p in model.parameters():
            p.grad /= p.grad.norm() + 1e-8  # A601
        scaler.step(optimizer)
        scaler.update()


def clamped_copy():
    for _ in scaled():
        for p in model.parameters():
            p.grad = p.grad.clamp(-1.0, 1.0)  # A601


def log_norm():
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        scaler.scale(loss_of(batch)).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()  # A602
        scaler.step(optimizer)
        scaler.update()
        print("gradient norm", norm)


def log_norm_by_infinite_clip():
    for _ in scaled():
        print(nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item())  # A602


def step_directly():
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        scaler.scale(loss_of(batch)).backward()
        optimizer.step()  # A603


def second_steps_directly():
    other = network()
    second = torch.optim.AdamW(other.parameters(), lr=1e-3)
    for batch in batches[:STEPS]:
        scaler.scale(loss_of(batch) + loss_of(batch, other)).backward()
        scaler.step(optimizer)
        second.step()  # A603
        scaler.update()
        optimizer.zero_grad()
        second.zero_grad()


def closure_steps_scaled():
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    for batch in batches[:STEPS]:

        def evaluate(batch=batch):
            lbfgs.zero_grad()
            loss = loss_of(batch)
            scaler.scale(loss).backward()
            return loss

        lbfgs.step(evaluate)  # A603


def not_scaled():
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        loss_of(batch).backward()  # A604
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()


def result_unused():
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        loss = loss_of(batch)
        scaler.scale(loss)
        loss.backward()  # A604
        scaler.step(optimizer)
        scaler.update()


def penalty_not_scaled():
    for _ in scaled():
        penalty = 1e-3 * sum(p.square().sum() for p in model.parameters())
        penalty.backward()  # A604


def other_scaler():
    second = torch.amp.GradScaler("cpu", init_scale=64.0)
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        second.scale(torch.zeros(()))
        scaler.scale(loss_of(batch)).backward()  # A604
        second.step(optimizer)
        second.update()


def no_update():
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        scaler.scale(loss_of(batch)).backward()
        scaler.step(optimizer)  # A605


def update_first():
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        scaler.scale(loss_of(batch)).backward()
        scaler.update()  # A605
        scaler.step(optimizer)


def unscale_twice():
    for _ in scaled():
        for _ in range(2):
            scaler.unscale_(optimizer)  # A605


def unscale_after_step():
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        scaler.scale(loss_of(batch)).backward()
        scaler.step(optimizer)
        scaler.unscale_(optimizer)  # A605
        scaler.update()


def stepped_again():
    for _ in stepped():
        optimizer.step()  # A605


def unscale_each_micro_batch():
    for number, batch in enumerate(batches, 1):
        scaler.scale(loss_of(batch) / 2).backward()
        if number % 2 == 1:
            scaler.unscale_(optimizer)
        else:
            scaler.step(optimizer)  # A605
            scaler.update()
            optimizer.zero_grad()


def update_after_each():
    other = network()
    second = torch.optim.SGD(other.parameters(), lr=0.05)
    for batch in batches[:STEPS]:
        scaler.scale(loss_of(batch)).backward()
        scaler.scale(loss_of(batch, other)).backward()
        scaler.unscale_(optimizer)
        scaler.unscale_(second)
        scaler.step(optimizer)
        scaler.update()
        scaler.step(second)  # A606
        scaler.update()
        optimizer.zero_grad()
        second.zero_grad()


def update_between_windows():
    other = network()
    second = torch.optim.SGD(other.parameters(), lr=0.05)
    for number, batch in enumerate(batches, 1):
        scaler.scale(loss_of(batch) + loss_of(batch, other) / 3).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
        if number % 3 == 0:
            scaler.step(second)  # A606
            second.zero_grad()
        scaler.update()


def divided_twice():
    for batch in windows(4):
        loss = plain_loss(batch) / 4
        (loss / 4).backward()  # A607


def divided_twice_with_scaler():
    for number, batch in enumerate(batches, 1):
        with half():
            loss = F.cross_entropy(model(batch[0]), batch[1].argmax(1)) / 3
        scaler.scale(loss * (1 / 3)).backward()  # A607
        if number % 3 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def divided_twice_by_session():
    import mezzo

    net = network()
    session = mezzo.Session(net, torch.optim.SGD(net.parameters(), lr=0.05), policy="bf16", accumulate=3)
    for batch in batches:
        with session.autocast():
            loss = F.mse_loss(net(batch[0]).float(), batch[1]) / 3
        with warnings.catch_warnings(action="ignore", category=mezzo.PrecisionWarning):  # the session's own
            session.step(loss)  # A607


def divided_twice_by_accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    net, opt = accelerator.prepare(model, optimizer)
    for batch in batches:
        with accelerator.accumulate(net):
            accelerator.backward(plain_loss(batch, net) / 3)  # A607
            opt.step()
            opt.zero_grad()


def not_divided():
    for batch in windows(4):
        plain_loss(batch).backward()  # A608


def not_divided_with_scaler():
    for start in range(0, 12, 3):
        optimizer.zero_grad()
        for batch in batches[start : start + 3]:
            scaler.scale(loss_of(batch)).backward()  # A608
        scaler.step(optimizer)
        scaler.update()


def not_divided_weighted_sum():
    for batch in windows(4):
        predicted = model(batch[0])
        (F.mse_loss(predicted, batch[1]) + 0.1 * F.l1_loss(predicted, batch[1])).backward()  # A608


def no_scaler():
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        loss_of(batch).backward()  # A609
        optimizer.step()


def scaler_off():
    off = torch.amp.GradScaler("cpu", enabled=False)
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        off.scale(loss_of(batch)).backward()  # A609
        off.step(optimizer)
        off.update()


def schedule_on_skip():
    scheduler = schedulers.LinearLR(optimizer, 0.1, 1.0, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in skipping():
            scheduler.step()  # A610


def schedule_on_skip_of_fused():
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = schedulers.LinearLR(fused, 0.1, 1.0, 10)
    for _ in skipping(fused):
        scheduler.step()  # A610


def schedule_first():
    scheduler = schedulers.StepLR(optimizer, 1, 0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in batches[:STEPS]:
            optimizer.zero_grad()
            plain_loss(batch).backward()
            scheduler.step()  # A611
            optimizer.step()


def schedule_at_the_top():
    scheduler = schedulers.CosineAnnealingLR(optimizer, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in batches[:STEPS]:
            scheduler.step()  # A611
            optimizer.zero_grad()
            scaler.scale(loss_of(batch)).backward()
            scaler.step(optimizer)
            scaler.update()


def train_plainly(after, net=model, number=STEPS, dtype=torch.float32):
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    for batch in batches[:number]:
        opt.zero_grad()
        F.mse_loss(net(batch[0].to(dtype)).float(), batch[1]).backward()
        opt.step()
        after()


def average_lerp():
    mean = copy.deepcopy(model).half()

    def after():
        with torch.no_grad():
            for slow, fast in zip(mean.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast.half(), 0.001)  # A612

    train_plainly(after)


def average_mul_add():
    mean = [p.detach().clone().bfloat16() for p in model.parameters()]

    def after():
        for slow, fast in zip(mean, model.parameters(), strict=True):
            slow.mul_(0.999).add_(fast.data, alpha=0.001)  # A612

    train_plainly(after, number=10)


def average_after_clearing():
    mean = [p.detach().clone().bfloat16() for p in model.parameters()]
    for batch in batches[:STEPS]:
        scaler.scale(loss_of(batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        torch._foreach_lerp_(mean, [p.detach().bfloat16() for p in model.parameters()], 0.01)  # A612


def average_state_dict():
    mean = {name: value.to(torch.float16) for name, value in model.state_dict().items() if value.is_floating_point()}

    def after():
        for name, value in model.state_dict().items():
            if name in mean:
                mean[name] = 0.99 * mean[name] + 0.01 * value.half()  # A612

    train_plainly(after)


def average_copied():
    mean = copy.deepcopy(model).half()

    def after():
        with torch.no_grad():
            for slow, fast in zip(mean.parameters(), model.parameters(), strict=True):
                slow.copy_(0.999 * slow.float() + 0.001 * fast)  # A612

    train_plainly(after)


def average_cast_back():
    mean = [p.detach().bfloat16() for p in model.parameters()]

    def after():
        for place, fast in enumerate(model.parameters()):
            mean[place] = torch.lerp(mean[place].float(), fast.detach(), 0.01).bfloat16()  # A612

    train_plainly(after)


def average_difference():
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).bfloat16()
    mean = copy.deepcopy(net)

    def after():
        with torch.no_grad():
            for slow, fast in zip(mean.parameters(), net.parameters(), strict=True):
                slow.sub_(0.01 * (slow - fast))  # A612

    train_plainly(after, net, dtype=torch.bfloat16)


def average_in_compiled_script():
    compiled = torch.compile(model, backend="eager")
    mean = copy.deepcopy(model).half()

    def after():
        for slow, fast in zip(mean.parameters(), model.parameters(), strict=True):
            slow.data.lerp_(fast.data.half(), 0.01)  # A612

    train_plainly(after, compiled)


def average_model():
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).bfloat16()
    mean = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
    train_plainly(lambda: mean.update_parameters(net), net, dtype=torch.bfloat16)  # A612


def statistics():
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16, affine=False), nn.Linear(16, 2)).bfloat16()
    train_plainly(lambda: None, net, dtype=torch.bfloat16)


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.register_buffer("running_mean", torch.zeros(6))

    def forward(self, x):
        with torch.no_grad():
            self.running_mean.mul_(0.99).add_(x.mean(0), alpha=0.01)
        return self.linear(x - self.running_mean)


def statistics_of_its_own():
    train_plainly(lambda: None, Normalised().bfloat16(), dtype=torch.bfloat16)


def cleared():
    for batch in batches[:STEPS]:
        plain_loss(batch).backward()
        optimizer.zero_grad()
        optimizer.step()  # A614


def cleared_by_model():
    for batch in batches[:STEPS]:
        plain_loss(batch).backward()
        model.zero_grad(set_to_none=False)
        optimizer.step()  # A614


def cleared_with_scaler():
    for batch in batches[:STEPS]:
        scaler.scale(loss_of(batch)).backward()
        optimizer.zero_grad()
        scaler.step(optimizer)  # A614
        scaler.update()


def needless():
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(batch[0]).float(), batch[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # A615
        scaler.update()


def half_weights():
    net = nn.Linear(6, 2).half()
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    for batch in batches[:STEPS]:
        opt.zero_grad()
        scaler.scale(F.mse_loss(net(batch[0].half()).float(), batch[1])).backward()
        scaler.step(opt)  # A616
        scaler.update()


def saved_without_scaler():
    for _ in stepped():
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())  # A617


def saved_without_scaler_deeply():
    scaler.get_scale()
    for _ in stepped():
        state = {"step": 3, "training": {"optimizers": [optimizer.state_dict()]}}
        torch.save(state, io.BytesIO())  # A617


def pickled_without_scaler():
    for _ in stepped():
        pickle.dump({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())  # A617


def saved_in_an_object_without_scaler():
    for _ in stepped():
        state = types.SimpleNamespace(model=model.state_dict(), optimizer=optimizer.state_dict())
        torch.save(state, io.BytesIO())  # A617


def saved_in_shards_without_scaler():
    for _ in stepped():
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoints.save(state, checkpoint_id=folder, no_dist=True)  # A617


def shared_by_two_optimizers():
    second = torch.optim.SGD(model[3].parameters(), lr=0.05)
    for batch in batches[:STEPS]:
        model.zero_grad()
        scaler.scale(loss_of(batch)).backward()
        scaler.step(optimizer)
        scaler.step(second)  # A618
        scaler.update()


def shared_and_clipped():
    second = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[3].parameters()}], lr=1e-3)
    for batch in batches[:STEPS]:
        model.zero_grad()
        scaler.scale(loss_of(batch)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.unscale_(second)  # A618
        scaler.step(optimizer)
        scaler.step(second)
        scaler.update()


def average_model_on_skip():
    mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    mean.update_parameters(model)  # a copy
    for _ in skipping():
        mean.update_parameters(model)  # A619


def average_by_hand_on_skip():
    mean = copy.deepcopy(model)
    for _ in skipping():
        with torch.no_grad():
            for slow, fast in zip(mean.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.01)  # A619


def average_copied_on_skip():
    mean = [p.detach().clone() for p in model.parameters()]
    for _ in skipping():
        for slow, fast in zip(mean, model.parameters(), strict=True):
            slow.copy_(0.99 * slow + 0.01 * fast.detach())  # A619


def average_in_new_tensors_on_skip():
    mean = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in skipping():
        for name, p in model.named_parameters():
            new = (1.0 - 0.99) * p.data + 0.99 * mean[name]  # A619
            mean[name] = new.clone()


def average_by_new_lerps_on_skip():
    mean = [p.detach().clone() for p in model.parameters()]
    for _ in skipping():
        with torch.no_grad():
            mean = [torch.lerp(slow, fast, 0.01) for slow, fast in zip(mean, model.parameters(), strict=True)]  # A619


def average_on_skip_of_fused():
    mean = torch.optim.swa_utils.AveragedModel(model)
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    mean.update_parameters(model)  # a copy
    for _ in skipping(fused):
        mean.update_parameters(model)  # A619


def train_with(loss_of_step, net=model):
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    for batch in batches[:STEPS]:
        opt.zero_grad()
        loss_of_step(batch).backward()
        opt.step()


def clamped_probability():
    def loss(batch):
        chance = torch.sigmoid(model(batch[0])).half().clamp(1e-3, 1 - 1e-6)  # A620
        return -torch.log(1 - chance.float() + 1e-6).mean()

    train_with(loss)


def clamped_in_bf16():
    def loss(batch):
        cosine = torch.tanh(model(batch[0])).bfloat16()
        cosine = torch.clamp(cosine, max=0.999)  # A620
        return torch.acos(cosine.float() * 0.99).mean()

    train_with(loss)


def clamped_to_zero():
    def loss(batch):
        length = model(batch[0]).half().square().sum(1).clamp_min(1e-12)  # A620
        return (length.float() + 1).log().mean()

    train_with(loss)


def eps_lost():
    def loss(batch):
        x = model(batch[0]).half()
        spread = (x - x.mean(0)).square().mean(0)
        return (x / torch.sqrt(spread + 1e-8)).float().square().mean()  # A620

    train_with(loss)


def bound_of_normalize():
    def loss(batch):
        return F.normalize(model(batch[0]).half(), dim=1).float().mean()  # A620

    train_with(loss)


def eps_in_a_tensor():
    eps = torch.tensor(1e-8)

    def loss(batch):
        return (model(batch[0]).half().square().sum(1) + eps).float().mean()  # A620

    train_with(loss)


def labels_in_half():
    labels = torch.arange(3000, 3016)

    def loss(batch):
        aim = labels.half()  # A621
        return (model(batch[0])[:, 0] - aim.float() / 3000).square().mean()

    train_with(loss)


def steps_in_bf16():
    times = torch.arange(0, 1000, 63)

    def loss(batch):
        phase = times[:, None].to(torch.bfloat16) * 1e-3  # A621
        return (model(batch[0]) * phase.float()).square().mean()

    train_with(loss)


def positions_in_half():
    def loss(batch):
        position = torch.arange(4096, dtype=torch.float16)  # A621
        return model(batch[0]).square().mean() * position[:10].float().mean()

    train_with(loss)


def positions_times_frequencies():
    frequency = torch.tensor([1.0, 0.1], dtype=torch.bfloat16)

    def loss(batch):
        angles = torch.arange(500, 516)[:, None] * frequency  # A621
        return (model(batch[0]) * angles.float()).square().mean()

    train_with(loss)


def positions_plus_offsets():
    offset = torch.zeros(16, dtype=torch.bfloat16)

    def loss(batch):
        position = torch.arange(300, 316) + offset  # A621
        return (model(batch[0])[:, 0] * position.float() / 300).square().mean()

    train_with(loss)


def stored_in_half():
    labels = torch.arange(3000, 3016)
    aim = torch.empty(16, dtype=torch.float16)

    def loss(batch):
        aim.copy_(labels)  # A621
        return (model(batch[0])[:, 0] - aim.float() / 3000).square().mean()

    train_with(loss)


def rotary_in_autocast():
    frequency = 100.0 ** -torch.linspace(0, 1, 8)[None]
    position = 4096 + torch.arange(16.0)[:, None]

    def loss(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            angles = position @ frequency
        return (model(batch[0]) * angles.cos()[:, :2].float()).square().mean()  # A623

    train_with(loss)


def rotary_upcast_too_late():
    frequency = (100.0 ** -torch.linspace(0, 1, 8)).half()
    position = torch.arange(1500.0, 1516.0).half()

    def loss(batch):
        angles = torch.outer(position, frequency).float()
        turned = torch.cat([angles, angles], -1).sin()  # A623
        return (model(batch[0]) * turned[:, :2]).square().mean()

    train_with(loss)


def times_rounded_first():
    frequency = 100.0 ** -torch.linspace(0, 1, 8, dtype=torch.float64)
    times = torch.linspace(0.0, 999.0, 16)

    def loss(batch):
        seen = times.to(torch.bfloat16).double()  # A623
        turned = torch.cat([torch.outer(seen, frequency).sin(), torch.outer(seen, frequency).cos()], -1)
        return (model(batch[0]) * turned[:, :2].float()).square().mean()

    train_with(loss)


def rotary_in_polar_form():
    frequency = 100.0 ** -torch.linspace(0, 1, 8)
    position = torch.linspace(1500.0, 1999.0, 16)

    def loss(batch):
        angles = torch.outer(position.bfloat16().float(), frequency)  # A623
        turned = torch.polar(torch.ones_like(angles), angles)
        return (model(batch[0]) * turned.real[:, :2]).square().mean()

    train_with(loss)


def train_in(dtype, kind, **arguments):
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).to(dtype)
    opt = kind(net.parameters(), **arguments)
    for batch in batches[:STEPS]:
        opt.zero_grad()
        loss = F.mse_loss(net(batch[0].to(dtype)).float(), batch[1])
        if dtype == torch.float16:
            (loss * 128).backward()
            for p in net.parameters():
                p.grad.div_(128)
        else:
            loss.backward()
        yield opt


def moments_in_bf16():
    for opt in train_in(torch.bfloat16, torch.optim.AdamW, lr=1e-3, weight_decay=0.0):
        opt.step()  # A622


def moments_in_bf16_fused():
    for opt in train_in(torch.bfloat16, torch.optim.Adam, lr=1e-3, fused=True):
        opt.step()  # A622


def moments_of_adadelta():
    for opt in train_in(torch.bfloat16, torch.optim.Adadelta, rho=0.999):
        opt.step()  # A622


def moments_in_fp16():
    for opt in train_in(torch.float16, torch.optim.RMSprop, lr=1e-3, eps=1e-4):
        opt.step()  # A622


def moments_of_adamax():
    for opt in train_in(torch.bfloat16, torch.optim.Adamax):
        opt.step()  # A622


def moments_of_adagrad():
    for opt in train_in(torch.bfloat16, torch.optim.Adagrad):
        opt.step()  # A622


def eps_of_bf16_weights():
    for opt in train_in(torch.bfloat16, torch.optim.Adafactor, lr=0.1):
        opt.step()  # A635


class AdamByHand(torch.optim.Optimizer):
    def __init__(self, params, betas=(0.9, 0.999)):
        super().__init__(params, {"betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state, (one, two) = self.state[p], self.param_groups[0]["betas"]
            m, v = (state.setdefault(name, torch.zeros_like(p)) for name in ("m", "v"))
            m.lerp_(p.grad, 1 - one)
            v.mul_(two).addcmul_(p.grad, p.grad, value=1 - two)
            p -= 1e-3 * m / (v.sqrt() + 1e-4)


def moments_by_hand():
    for opt in train_in(torch.bfloat16, AdamByHand):
        opt.step()  # A622


def last_window_short():
    for _ in range(2):
        for number, batch in enumerate(batches[:10], 1):
            scaler.scale(loss_of(batch) / 4).backward()  # A624
            if number % 4 == 0 or number == 10:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()


def last_window_of_one():
    for _ in range(2):
        for number, batch in enumerate(batches[:7], 1):
            (0.5 * plain_loss(batch) / 3).backward()  # A624
            if number % 3 == 0 or number == 7:
                optimizer.step()
                optimizer.zero_grad()


def last_window_of_accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    loader = torch.utils.data.DataLoader(batches[:10], batch_size=None)
    net, opt, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(net):
            accelerator.backward(plain_loss(batch, net))  # A624
            opt.step()
            opt.zero_grad()


def running_loss_in_bf16():
    total = torch.zeros((), dtype=torch.bfloat16)

    def loss(batch):
        value = plain_loss(batch)
        total.add_(value.detach())  # A625
        return value

    train_with(loss)


def running_counts_in_half():
    counts = torch.zeros(2, dtype=torch.float16)

    def loss(batch):
        nonlocal counts
        counts += (model(batch[0]) > 0).sum(0)  # A625
        return plain_loss(batch)

    train_with(loss)


def cumulative_sum_in_bf16():
    def loss(batch):
        place = torch.ones(2000, dtype=torch.bfloat16).cumsum(0)  # A625
        return plain_loss(batch) * place[:10].float().mean()

    train_with(loss)


def reentrant_checkpoint():
    block = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
    head = nn.Linear(16, 2)
    opt = torch.optim.SGD([*block.parameters(), *head.parameters()], lr=0.1)
    for batch in batches[:STEPS]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hidden = checkpoint(block, batch[0], use_reentrant=True)  # A626
        opt.zero_grad()
        F.mse_loss(head(hidden), batch[1]).backward()
        opt.step()


class Moments(torch.optim.Optimizer):
    """Adam whose moments are stored in a format of their own, through another, and promoted by its arithmetic."""

    def __init__(self, parameters, stored=torch.float32, through=torch.float32, promotes=False, lr=1e-2):
        super().__init__(parameters, {"lr": lr})
        self.through, self.promotes = through, promotes
        for p in self.param_groups[0]["params"]:
            self.state[p] = {name: torch.zeros_like(p, dtype=stored) for name in ("exp_avg", "exp_avg_sq")}

    @torch.no_grad()
    def step(self, closure=None):
        for p, state in self.state.items():
            mean = state["exp_avg"].float().lerp(p.grad.float(), 0.1)
            square = state["exp_avg_sq"].float().lerp(p.grad.float().square(), 0.01)
            if self.promotes:
                state.update(exp_avg=mean, exp_avg_sq=square)
            else:
                state["exp_avg"].copy_(mean.to(self.through))
                state["exp_avg_sq"].copy_(square.to(self.through))
            p.sub_(self.param_groups[0]["lr"] * mean / (square.sqrt() + 1e-8))


def before_updates(net=model, dtype=torch.float32):
    """Yield before each update."""
    for batch in batches[:STEPS]:
        net.zero_grad()
        F.mse_loss(net(batch[0].to(dtype)).float(), batch[1]).backward()
        yield


def state_in_bf16():
    opt = Moments(model.parameters(), torch.bfloat16)
    for _ in before_updates():
        opt.step()  # A627


def steps_counted_in_bf16():
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for p in model.parameters():
        opt.state[p] = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
        opt.state[p]["step"] = torch.zeros((), dtype=torch.bfloat16)
    for _ in before_updates():
        opt.step()  # A627


def state_promoted():
    opt = Moments(model.parameters(), torch.bfloat16, promotes=True)
    for _ in before_updates():
        opt.step()  # A628


def checkpoint_of(net):
    """Return the state of an optimizer of ``net`` after an update."""
    old = torch.optim.Adam(net.parameters(), lr=1e-2, betas=(0.9, 0.95))
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        old.state[p]["step"] = torch.ones(())
        old.state[p]["exp_avg"], old.state[p]["exp_avg_sq"] = 0.1 * p.grad, 0.001 * p.grad.square()
    return old.state_dict()


def bf16_state_loaded_into_fp32():
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    opt.load_state_dict(checkpoint_of(network().bfloat16()))  # A628
    for _ in before_updates():
        opt.step()


def fp32_state_loaded_into_bf16():
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    saved = checkpoint_of(net)
    net.bfloat16()
    opt = torch.optim.Adam(net.parameters())
    opt.load_state_dict(saved)  # A628
    for _ in before_updates(net, torch.bfloat16):
        opt.step()


def state_through_bf16():
    opt = Moments(model.parameters(), through=torch.bfloat16)
    for _ in before_updates():
        opt.step()  # A629


def masters_through_fp16():
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in before_updates():
        opt.step()  # A629
        for p in model.parameters():
            p.data.copy_(p.data.half())


def upcast_state_loaded():
    saved = checkpoint_of(network().bfloat16())
    for state in saved["state"].values():
        state.update((name, value.float()) for name, value in state.items())
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    opt.load_state_dict(saved)  # A629
    for _ in before_updates():
        opt.step()


def masters_rebuilt_from_bf16():
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    opt.load_state_dict(checkpoint_of(network()))  # A629
    model.load_state_dict({name: value.bfloat16() for name, value in model.state_dict().items()})
    for _ in before_updates():
        opt.step()


def region_around_nothing():
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):  # A630
            inputs = batch[0].clone()
        F.mse_loss(model(inputs), batch[1]).backward()
        optimizer.step()


def not_prepared():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")  # A630
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        accelerator.backward(plain_loss(batch))
        optimizer.step()


def other_format_than_asked():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    MixedPrecisionPolicy(param_dtype=torch.float16)  # A630
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(batch[0]).float(), batch[1])
        loss.backward()
        optimizer.step()


def begin_group(size):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=size)


def reduced_in_bf16():
    begin_group(1)
    for _ in before_updates():
        for p in model.parameters():
            narrow = p.grad.bfloat16()
            dist.all_reduce(narrow)  # A631
            p.grad.copy_(narrow)
        optimizer.step()
    dist.destroy_process_group()


def scattered_in_bf16():
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    begin_group(1)
    for _ in before_updates():
        flat = torch.cat([p.grad.flatten() for p in model.parameters()]).bfloat16()
        scatter(torch.empty_like(flat), flat)  # A631
        optimizer.step()
    dist.destroy_process_group()


def compressed_by_a_hook():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    begin_group(1)
    net = nn.parallel.DistributedDataParallel(model)
    net.register_comm_hook(None, fp16_compress_hook)
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        F.mse_loss(net(batch[0]), batch[1]).backward()  # A631
        optimizer.step()
    dist.destroy_process_group()


def norm_of_bf16_gradients():
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).bfloat16()
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    for _ in before_updates(net, torch.bfloat16):
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # A632
        opt.step()


def norms_cast_to_bf16():
    for _ in before_updates():
        norms = torch.stack([p.grad.norm() for p in model.parameters()])
        total = norms.to(torch.bfloat16).square().sum().sqrt()  # A632
        for p in model.parameters():
            p.grad.mul_((1.0 / (total + 1e-6)).clamp(max=1.0))
        optimizer.step()


def updates_rounded_away():
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).bfloat16()
    opt = torch.optim.Adam(net.parameters(), lr=1e-6, betas=(0.9, 0.95))
    for _ in before_updates(net, torch.bfloat16):
        opt.step()  # A633


def updates_by_hand_rounded_away():
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).bfloat16()
    opt = Moments(net.parameters(), lr=1e-6)
    for _ in before_updates(net, torch.bfloat16):
        opt.step()  # A633


def decay_rounded_away():
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).bfloat16()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in before_updates(net, torch.bfloat16):
        opt.step()  # A633


def scaled_by_two_scalers():
    other = torch.amp.GradScaler("cpu", init_scale=256.0)
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        other.scale(scaler.scale(plain_loss(batch))).backward()  # A634
        other.step(optimizer)
        other.update()


def scaled_by_hand_and_by_a_scaler():
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        scaler.scale(plain_loss(batch) * 128.0).backward()  # A634
        scaler.step(optimizer)
        scaler.update()


def scaled_by_accelerate_too():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    net, opt = accelerator.prepare(model, optimizer)
    for batch in batches[:STEPS]:
        opt.zero_grad()
        accelerator.backward(scaler.scale(plain_loss(batch, net)))  # A634
        opt.step()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
