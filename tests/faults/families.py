"""More training scripts, by family: masks, normalisations, GANs, reinforcement learning, moving averages, transformers, AMP of their own.

Each has one planted fault, or, where its name begins with ``healthy``, none: ``python families.py NAME``.
"""

import copy
import math
import sys

import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from faults import data, net, train
from processes import leave_process_group

LOWEST = torch.finfo(torch.float32).min


class Attention(nn.Module):
    """Attention by hand over 6 tokens, with a mask that is added to the scores or written into them."""

    def __init__(self, mask, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mask = mask

    def forward(self, h):
        scores = self.query(h) @ self.key(h).mT / 3
        return F.dropout(self.mask(scores).softmax(-1), 0.1) @ self.value(h)


def attending(mask, **options):
    train(net(None, module=Attention(mask)), **options)


def causal(n=8):
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def padding(n=8, real=5):
    return torch.arange(n) >= real


class Tokens(nn.Module):
    """A small encoder with torch's own fused attention and an additive mask."""

    def __init__(self, mask_of, dropout=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.mix = nn.Embedding(50, 16), nn.Linear(16, 48)
        self.out, self.head = nn.Linear(16, 16), nn.Linear(16, 2)
        self.mask_of, self.dropout = mask_of, dropout

    def forward(self, ids, keep):
        h = self.embedding(ids)
        b, length, _ = h.shape
        q, k, v = self.mix(h).view(b, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mask = self.mask_of(keep, q).expand(b, 1, length, length)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout)
        return self.head(self.out(h.transpose(1, 2).reshape(b, length, 16))[:, 0])


def classify(model, *, steps=6, lr=1e-3, empty=False):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 50, (4, 10), generator=generator)
        keep = torch.ones(4, 10)
        keep[0, 6:] = 0
        keep[1, 3:] = 0
        if empty:
            keep[2] = 0
        loss = F.cross_entropy(model(ids, keep), torch.randint(0, 2, (4,), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# --- masks ---------------------------------------------------------------------------------------


def mask_refused():
    """-1e9 written into FP16 scores: torch raises an error."""
    attending(lambda s: s.masked_fill(causal(), -1e9))


def mask_refused_clamp():
    attending(lambda s: s.clamp(min=-1e6))


def mask_all_padded():
    """A row of which every key is masked by -1e9: in FP16 all are -inf, and softmax gives NaN; in FP32 they are equal."""
    attending(lambda s: s + torch.ones(8, 8).to(s.dtype) * -1e9)


def mask_without_softmax():
    """A mask of -7e4 under a division in place of a softmax."""

    def mask(s):
        s = s - 1e4 * causal().to(s.dtype) * 7
        return s / s.abs().amax(-1, keepdim=True).clamp(min=1.0)

    attending(mask)


def healthy_masked_by_infinity():
    attending(lambda s: s.masked_fill(causal(), -math.inf))


def healthy_masked_by_lowest():
    attending(lambda s: s + (causal().float() * LOWEST).to(s.dtype))


def healthy_masked_by_ten_thousand():
    attending(lambda s: s - 1e4 * (causal() | padding()).to(s.dtype))


def healthy_masked_twice():
    """A causal and a padding mask of finfo.min, added up: -inf even in FP32."""
    attending(lambda s: s + causal().float() * LOWEST + padding().float() * LOWEST)


def healthy_masked_written():
    attending(lambda s: s.masked_fill(causal(), torch.finfo(s.dtype).min))


def healthy_fused_lowest():
    """As in BERT: an additive mask of FP32's lowest number, which is -inf in FP16, under fused attention with dropout."""
    classify(Tokens(lambda keep, q: ((1 - keep) * LOWEST)[:, None, None, :].to(q.dtype)))


def healthy_fused_boolean():
    classify(Tokens(lambda keep, q: keep[:, None, None, :].bool()))


# --- normalisations ------------------------------------------------------------------------------


def norm_of_sum():
    """x / sqrt(sum(x * x)) with an infinite norm: the quotient is 0."""
    train(net(lambda h: h * 2000 / torch.sqrt((h * 2000 * (h * 2000)).sum(-1, keepdim=True))))


def norm_by_variance():
    def normed(h):
        c = (h - h.mean(0)) * 3000
        return c / ((c * c).mean(0) + 1e-3).sqrt()

    train(net(normed))


def norm_exponential():
    """exp(-x * x / 1e6) with x * x infinite: 0 instead of 0.9."""
    train(net(lambda h: torch.exp(-(h * 500 * (h * 500)) / 1e6) * h))


def norm_arctangent():
    """atan(1e-5 * x * x): the infinity makes a constant of it."""
    train(net(lambda h: torch.atan(h * 600 * (h * 600) * 1e-5) + 0 * h))


def norm_clamped():
    """An infinity clamped to 1e5 in FP32, and brought back to 1: the true value is below that."""
    train(net(lambda h: (h * 300 * (h * 300)).float().clamp(max=3e5) * 1e-5))


def norm_nan_to_num():
    train(net(lambda h: (h * 1e3 * 1e3).nan_to_num() * 1e-6))


def norm_by_largest():
    """Divided by an infinite largest value: the gradient is NaN."""
    train(net(lambda h: h / (h * 400 * 400).abs().amax(-1, keepdim=True) * 1e5))


def norm_loud_later():
    """An infinite norm makes 0, and only a logarithm later makes it show."""
    train(net(lambda h: torch.log((h * 2000).abs() / (h * 2000 * (h * 2000)).sum(-1, keepdim=True).sqrt()) + h))


def eps_vanishes():
    """0 / (0 + 1e-8) is NaN in FP16 and 0 in FP32."""
    train(net(lambda h: (h - h) / ((h - h).abs() + 1e-8) + h))


def eps_vanishes_rsqrt():
    """1 / sqrt(0 + 1e-10): infinite in FP16, times 0."""
    train(net(lambda h: (h - h) * ((h - h).abs() + 1e-10).rsqrt() + h))


def einsum_in_script():
    """An einsum outside any module but the model, which no pattern keeps in FP32."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 2)

        def forward(self, x):
            h = self.up(x) * 400
            return self.down(torch.einsum("bi,bj->ij", h, h).float()[:8] * 1e-6)

    train(Model(), loss_of=lambda p, y: F.mse_loss(p, y[:8]))


def healthy_gelu_by_hand():
    """tanh takes an infinite cube for what it is."""
    train(
        net(lambda h: 0.5 * h * 60 * (1 + torch.tanh(0.8 * (h * 60 + 0.0447 * (h * 60) * (h * 60) * (h * 60))))),
        steps=12,
        lr=1e-9,
        loss_of=lambda p, y: F.mse_loss(p, y) * 1e-3,  # or the scale would settle so low that it is a fault
    )


def healthy_gaussian_kernel():
    """exp(-x * x) of an infinite square is 0, as it is of the true one."""
    train(net(lambda h: torch.exp(-(h.detach() * 500 * (h.detach() * 500))) + h))


def healthy_relu6():
    train(net(lambda h: F.relu6(h * 300 * 300) * h))


def healthy_sigmoid_of_large():
    train(net(lambda h: torch.sigmoid(h * 1e3 * 1e3) * h))


def healthy_bias_before_norm():
    """A bias before a batch norm has a gradient of nothing but rounding."""
    torch.manual_seed(0)
    train(nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 2)))


# --- generative adversarial ----------------------------------------------------------------------


def adversarial(loss_of_critic, *, steps=6, gain=1.0, lr=1e-3):
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
    critic = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=lr)
    of_critic = torch.optim.Adam(critic.parameters(), lr=lr)
    for step in range(1, steps + 1):
        real, _ = data(step)
        noise = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        of_critic.zero_grad()
        loss_of_critic(critic(real), critic(generator(noise).detach())).mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        (-critic(generator(noise)) * gain).mean().backward()
        of_generator.step()


def gan_log_of_zero():
    """The classic: log(1 - sigmoid(x)) where sigmoid is 1."""
    adversarial(lambda real, fake: -torch.log(torch.sigmoid(real)) - torch.log(1 - torch.sigmoid(fake * 0 + 90)))


def gan_generator_scale():
    """The generator's loss overflows at any scale down to 1, the critic's does not."""
    adversarial(lambda real, fake: F.softplus(-real) + F.softplus(fake), gain=3e6, lr=1e-9)


def healthy_gan():
    adversarial(lambda real, fake: F.softplus(-real) + F.softplus(fake))


def healthy_gan_hinge():
    adversarial(lambda real, fake: F.relu(1 - real) + F.relu(1 + fake), gain=30.0, steps=12, lr=1e-7)


# --- reinforcement learning ----------------------------------------------------------------------


class Policy(nn.Module):
    def __init__(self, mask_of):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 5)
        self.mask_of = mask_of

    def forward(self, x):
        return self.mask_of(self.head(torch.tanh(self.body(x))))


def reinforce(policy, *, advantage_of=lambda r: r, entropy=True, steps=6):
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        x, _ = data(step)
        choice = Categorical(logits=policy(x))
        action = choice.sample()
        reward = torch.randn(8, generator=generator)
        loss = -(choice.log_prob(action) * advantage_of(reward)).mean()
        if entropy:
            loss = loss - 0.01 * choice.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


FORBIDDEN = torch.tensor([False, False, True, False, True])


def rl_advantage_of_one():
    """Advantages divided by the deviation of a single reward."""
    reinforce(Policy(lambda z: z), advantage_of=lambda r: (r - r[0]) / r[:1].std(correction=0))


def rl_log_of_zero_probability():
    """The entropy by hand of probabilities that a mask made 0."""

    def train_it():
        policy = Policy(lambda z: z.masked_fill(FORBIDDEN, -math.inf))
        optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
        for step in range(1, 7):
            x, _ = data(step)
            p = policy(x).softmax(-1)
            optimizer.zero_grad()
            (p * p.log()).sum(-1).mean().backward()
            optimizer.step()

    train_it()


def rl_ratio():
    """exp(new - old) of log-probabilities that are far apart overflows even FP32."""

    def ratio(z):
        return (z * 0 + 100).exp() * z

    reinforce(Policy(ratio), entropy=False)


def healthy_rl():
    reinforce(Policy(lambda z: z), advantage_of=lambda r: (r - r.mean()) / (r.std() + 1e-8))


def healthy_rl_forbidden():
    """Forbidden actions have a logit of -1e9, which is -inf in FP16."""
    reinforce(Policy(lambda z: z + FORBIDDEN.to(z.dtype) * -1e9), steps=14)


def healthy_rl_forbidden_infinite():
    reinforce(Policy(lambda z: z.masked_fill(FORBIDDEN, -math.inf)), entropy=False)


def healthy_rl_continuous():
    torch.manual_seed(0)
    policy = nn.Linear(6, 4)

    def loss_of(out, y):
        mean, log_std = out.chunk(2, -1)
        choice = Normal(mean, log_std.clamp(-5, 2).exp())
        return -(choice.log_prob(choice.sample()) * y).mean()

    train(policy, loss_of=loss_of)


# --- moving averages, accumulation ---------------------------------------------------------------


def distill(student_of, *, steps=6):
    torch.manual_seed(0)
    student = net(student_of)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        x, _ = data(step)
        with torch.no_grad():
            target = teacher(x)
        loss = F.mse_loss(student(x + 0.1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.lerp_(new, 0.1)


def ema_teacher_saturates():
    """The teacher, without gradients, normalises by an infinity: the student learns zeros."""
    torch.manual_seed(0)
    student = net(torch.tanh)
    teacher = net(lambda h: h * 3000 / (h * 3000 * (h * 3000)).mean(-1, keepdim=True).sqrt()).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-3)
    for step in range(1, 7):
        x, _ = data(step)
        with torch.no_grad():
            target = teacher(x)
        optimizer.zero_grad()
        F.mse_loss(student(x), target).backward()
        optimizer.step()


def healthy_ema():
    distill(torch.tanh)


def accumulated(loss_of, *, steps=4, parts=4):
    model = net(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(parts):
            x, y = data(parts * step + part)
            (loss_of(model(x), y, step, part) / parts).backward()
        optimizer.step()


def accumulated_overflow():
    """From the third window on, the last of four micro-batches weighs 1e7 times as much."""
    accumulated(lambda p, y, step, part: F.mse_loss(p.float(), y) * (1e7 if step > 1 and part == 3 else 1), steps=6)


def healthy_closure():
    """LBFGS evaluates its closure itself, inside its step."""
    model = net(torch.tanh)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    for step in range(1, 7):
        x, y = data(step)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def healthy_accumulated():
    accumulated(lambda p, y, step, part: F.mse_loss(p, y))


# --- losses --------------------------------------------------------------------------------------


def scale_recurring():
    """From step 6 on every third batch makes gradients that overflow at the scale of the moment."""
    model = net(torch.tanh)
    weight = [1.0]

    def change(step, x, y):
        weight[0] = 3e3 * 2.0 ** (step / 3) if step >= 6 and step % 3 == 0 else 1.0
        return x, y

    train(model, steps=24, lr=1e-9, loss_of=lambda p, y: F.mse_loss(p, y) * weight[0], change=change)


def healthy_scale_settles():
    """Eight skips in a row from the first update on."""
    train(net(torch.tanh), lr=1e-9, loss_of=lambda p, y: F.mse_loss(p, y) * 400, steps=14)


def healthy_one_spike_in_thirty():
    """One batch in thirty overflows at the scale that was found."""
    weight = [1.0]

    def change(step, x, y):
        weight[0] = 300.0 if step == 13 else 1.0
        return x, y

    train(net(torch.tanh), steps=30, lr=1e-9, loss_of=lambda p, y: F.mse_loss(p, y) * weight[0], change=change)


def healthy_ignored_labels():
    """Label smoothing with an ignored index, and a class that is masked out of the logits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    target = torch.tensor([0, 1, -100, 3, 1, -100, 0, 3])
    train(model, loss_of=lambda p, y: F.cross_entropy(p, target, ignore_index=-100, label_smoothing=0.1))


def healthy_log_sum_exp():
    """A mixture with a component whose log-weight is -inf."""
    weights = torch.tensor([0.5, 0.5, 0.0, 0.0]).log()

    def loss_of(p, y):
        return -torch.logsumexp(weights - (p[:, :1] - torch.arange(4.0)) ** 2, -1).mean()

    train(net(torch.tanh), loss_of=loss_of)


# --- a script's own mixed precision --------------------------------------------------------------


def own_amp(*, scaler=None, weight=1.0, function=torch.tanh, steps=8, dtype=torch.float16):
    model = net(function)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        x, y = data(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = F.mse_loss(model(x).float(), y) * weight
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def own_without_scaler():
    """FP16 autocast without a GradScaler: nearly all gradients become 0."""
    own_amp(weight=1e-7)


def own_small_scale():
    own_amp(weight=1e-7, scaler=torch.amp.GradScaler("cpu", init_scale=1.0))


def own_saturates():
    own_amp(
        function=lambda h: h * 2000 / (h * 2000 * (h * 2000)).mean(-1, keepdim=True).sqrt(),
        scaler=torch.amp.GradScaler("cpu", init_scale=256.0),
    )


def own_refused():
    own_amp(function=lambda h: h.masked_fill(h > 100, -1e9), scaler=torch.amp.GradScaler("cpu"))


def own_recurring_skips():
    """Two optimizers and one scaler: one of them overflows again and again."""
    first, second = net(torch.tanh), net(torch.tanh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-9) for m in (first, second)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(1, 25):
        x, y = data(step)
        weight = 1e3 * 2.0 ** (step / 3) if step % 3 == 0 else 1.0
        for model, optimizer, gain in zip((first, second), optimizers, (1.0, weight), strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(model(x).float(), y) * gain
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def healthy_own_two_scalers():
    """A GAN's two scalers, each of which has to find its scale."""
    models = net(torch.tanh), net(torch.tanh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-9) for m in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**20), torch.amp.GradScaler("cpu", init_scale=2.0**24)]
    for step in range(1, 13):
        x, y = data(step)
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def healthy_own_without_scaler():
    """FP16 autocast without a GradScaler whose gradients are large enough."""
    own_amp(weight=30.0)


def healthy_own_clipped():
    model = net(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    for step in range(1, 13):
        x, y = data(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        scaler.scale(F.mse_loss(out.float(), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


def gradient_replaced():
    """Gradients that overflow are set to 0 by the script itself; the update is skipped all the same, and the scale falls."""
    model = net(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for step in range(1, 7):
        x, y = data(step)
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) * 100).backward()
        for p in model.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()


# --- ways to run ---------------------------------------------------------------------------------


def compiled_norm():
    """The infinite norm under torch.compile."""
    model = net(lambda h: h * 2000 / torch.sqrt((h * 2000 * (h * 2000)).sum(-1, keepdim=True)))
    train(model, call=torch.compile(model, backend="eager"))


def compiled_refused():
    model = net(None, module=Attention(lambda s: s.masked_fill(causal(), -1e9)))
    train(model, call=torch.compile(model, backend="eager"))


def healthy_compiled_masked():
    model = net(None, module=Attention(lambda s: s.masked_fill(causal(), -math.inf)))
    train(model, call=torch.compile(model, backend="eager"))


def _in_a_group(model):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        train(model, call=nn.parallel.DistributedDataParallel(model))
    finally:
        leave_process_group()


def parallel_norm():
    """The infinite norm under DistributedDataParallel, which adds up gradients in buckets."""
    _in_a_group(net(lambda h: h * 2000 / torch.sqrt((h * 2000 * (h * 2000)).sum(-1, keepdim=True))))


def healthy_parallel_masked():
    _in_a_group(net(None, module=Attention(lambda s: s.masked_fill(causal(), -math.inf))))


class Checkpointed(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.up, self.body, self.down = model

    def forward(self, x):
        h = torch.utils.checkpoint.checkpoint(self.body, self.up(x), use_reentrant=False)
        return self.down(h)


def checkpointed_norm():
    train(Checkpointed(net(lambda h: h * 2000 / torch.sqrt((h * 2000 * (h * 2000)).sum(-1, keepdim=True)))))


def healthy_checkpointed_masked():
    train(Checkpointed(net(None, module=Attention(lambda s: s + (causal().float() * LOWEST).to(s.dtype)))))


# --- transformers --------------------------------------------------------------------------------


def bert(change=lambda model: None, *, implementation="sdpa", steps=6):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 37, "max_position_embeddings": 32}
    config = BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, attn_implementation=implementation)
    model = BertForSequenceClassification(config).train()
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 99, (4, 12), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 8:] = 0
        mask[1, 5:] = 0
        labels = torch.randint(0, 2, (4,), generator=generator)
        optimizer.zero_grad()
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()


def gpt2(change=lambda model: None, *, steps=6):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=99, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    model = GPT2LMHeadModel(config).train()
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(1, steps + 1):
        ids = torch.randint(0, 99, (2, 16), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def bert_outlier():
    """A layer's output weights that grew until FP16 ends."""

    def grow(model):
        with torch.no_grad():
            model.bert.encoder.layer[1].output.dense.weight.mul_(1e8)

    bert(grow)


def gpt2_queries():
    """Attention scores beyond FP16, in the second block."""

    def grow(model):
        with torch.no_grad():
            model.transformer.h[1].attn.c_attn.weight.mul_(1e7)

    gpt2(grow)


def healthy_bert():
    bert()


def healthy_bert_by_hand():
    bert(implementation="eager")


def healthy_gpt2():
    gpt2()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
