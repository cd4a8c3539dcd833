"""Public reports of "configured X, got Y", rebuilt small and without their code, and correct set-ups: ``python configured.py NAME``.

Each report's docstring has its address below ``https://github.com/``, what was configured and what was got, as the report says. Classes
stand in for libraries that are not installed.
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules

from faults import data, net

STEPS = 6


def narrow(**arguments):
    return net(torch.tanh, width=32, **arguments).bfloat16()


def train(model, optimizer, *, after=lambda: None):
    """Train in the format of the weights."""
    dtype = next(p.dtype for p in model.parameters() if p.requires_grad)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        optimizer.zero_grad()
        F.mse_loss(model(x.to(dtype)).float(), y).backward()
        optimizer.step()
        after()


def adam_state(parameters, dtype=None):
    """Return the state of Adam after 10,000 updates, as a checkpoint has it."""
    generator = torch.Generator().manual_seed(0)
    saved = torch.optim.Adam(parameters, betas=(0.9, 0.95))
    for p in saved.param_groups[0]["params"]:
        mean = torch.randn(p.shape, generator=generator) / 100
        moments = {"exp_avg": mean, "exp_avg_sq": mean.square()}
        saved.state[p] = {name: value.to(dtype or p.dtype) for name, value in moments.items()}
        saved.state[p]["step"] = torch.tensor(10_000.0)
    return saved.state_dict()


def mean_and_square(p, state):
    """Update Adam's moments in FP32 and return them."""
    mean = state.setdefault("exp_avg", torch.zeros(p.shape)).float().lerp(p.grad.float(), 0.1)
    square = state.setdefault("exp_avg_sq", torch.zeros(p.shape)).float().lerp(p.grad.float().square(), 0.01)
    return mean, square


class Adam(torch.optim.Optimizer):
    """Adam in FP32, whatever the format of the weights; subclasses store as the libraries of the reports do."""

    def __init__(self, parameters, lr=1e-2, **settings):
        super().__init__(parameters, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                mean, square = mean_and_square(p, self.state[p])
                self.store(p, self.state[p], mean, square, group["lr"] * mean / (square.sqrt() + 1e-8))

    def store(self, p, state, mean, square, update):
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)
        p.copy_(p.float() - update)


def rounded_at_random(wide, generator):
    noise = torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32, generator=generator)
    return ((wide.view(torch.int32) + noise) & -65536).view(torch.float32)


# --- an optimizer's state ------------------------------------------------------------------------


def state_in_the_format_of_the_weights():
    """NVIDIA-NeMo/Automodel/pull/2248: configured: gradients reduced in FP32; got: AdamW's moments in BF16, as the weights are."""
    model = narrow()
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-5))


def state_promoted_by_the_update():
    """google/tunix/pull/1880: configured: BF16 moments; got: FP32 ones, since injected hyperparameters promote them in the update."""

    class Injected(Adam):
        def store(self, p, state, mean, square, update):
            state.update(exp_avg=mean, exp_avg_sq=square)
            p.copy_(p.float() - update)

    model = narrow()
    optimizer = Injected(model.parameters())
    for p in model.parameters():
        optimizer.state[p] = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
    train(model, optimizer)


def state_stored_through_the_weights_format():
    """databricks/flashoptim/issues/2: configured: unquantized FP32 state; got: each update casts it to the weights' BF16."""

    class Unquantized(Adam):
        def store(self, p, state, mean, square, update):
            state["exp_avg"].copy_(mean.to(p.dtype))
            state["exp_avg_sq"].copy_(square.to(p.dtype))
            p.copy_(p.float() - update)

    model = narrow()
    train(model, Unquantized(model.parameters()))


def moments_saved_in_bf16():
    """TensorAuto/OpenTau/issues/184: configured: FP32 masters and moments; got: moments from a checkpoint in BF16, cast in silence."""
    model = net(torch.tanh, width=32)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(adam_state(model.parameters(), torch.bfloat16))
    train(model, optimizer)


def masters_rebuilt_from_live_weights():
    """TensorAuto/OpenTau/issues/185: configured: FP32 masters; got: after a resume, masters that are the BF16 weights, widened."""
    live = narrow()
    masters = [nn.Parameter(p.detach().float()) for p in live.parameters()]
    optimizer = torch.optim.AdamW(masters)
    optimizer.load_state_dict(adam_state(masters))
    for step in range(1, STEPS + 1):
        x, y = data(step)
        live.zero_grad()
        F.mse_loss(live(x.bfloat16()).float(), y).backward()
        for p, master in zip(live.parameters(), masters, strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(live.parameters(), masters, strict=True):
                p.copy_(master)


def bf16_moments_resumed_as_fp32():
    """pytorch/torchtitan/pull/4615: configured: BF16 moments of FP32 weights; got: after a resume, FP32 ones, of twice the memory."""
    model = net(torch.tanh, width=32)
    saved = adam_state(model.parameters(), torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.load_state_dict(saved)
    train(model, optimizer)


def resumed_in_pure_bf16():
    """NVIDIA/Model-Optimizer/pull/2322: configured: FP32 masters; got: a resume that reads BF16 from the config goes on without them."""
    saved = adam_state(net(torch.tanh, width=32).parameters())
    model = narrow()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"] = 1e-6
    train(model, optimizer)


def master_weight_becomes_bf16():
    """NVIDIA/Megatron-LM/issues/1359: configured: FP32 masters in the state; got: after loading, masters in BF16."""

    class WithMasters(Adam):
        def store(self, p, state, mean, square, update):
            state["exp_avg"].copy_(mean)
            state["exp_avg_sq"].copy_(square)
            master = state.setdefault("master_param", p.detach().float())
            p.copy_(master.sub_(update.to(master.dtype)))

    model = narrow()
    first = WithMasters(model.parameters())
    train(model, first)
    optimizer = WithMasters(model.parameters())
    optimizer.load_state_dict(first.state_dict())
    train(model, optimizer)


def checkpoint_cast_whole():
    """vllm-project/speculators/pull/899: configured: a checkpoint of the optimizer; got: all of it in BF16, also the count of steps."""
    model = net(torch.tanh, width=32)
    saved = adam_state(model.parameters())
    for state in saved["state"].values():
        state.update((name, value.bfloat16()) for name, value in state.items())
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(saved)
    train(model, optimizer)


# --- weights -------------------------------------------------------------------------------------


def upcast_of_a_local_name():
    """huggingface/accelerate/issues/3979: configured: weights upcast to FP32 for mixed precision; got: BF16 ones, a loop changed names."""
    model = narrow()
    for parameter in model.parameters():
        parameter = parameter.to(torch.float32)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-5))


def decay_in_bf16():
    """Nerogar/OneTrainer/issues/996: configured: weight decay; got: none, for it multiplies BF16 weights before the random rounding."""

    class RandomlyRounded(Adam):
        def store(self, p, state, mean, square, update):
            group = self.param_groups[0]
            state["exp_avg"].copy_(mean)
            state["exp_avg_sq"].copy_(square)
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.copy_(rounded_at_random(p.float() - update, generator))

    generator = torch.Generator().manual_seed(0)
    model = narrow()
    train(model, RandomlyRounded(model.parameters(), lr=1e-4, weight_decay=0.01))


def rate_below_the_spacing():
    """NVIDIA-NeMo/Automodel/pull/3444: configured: AdamW at 6e-6; got: BF16 weights that round back to what they were."""
    model = narrow()
    train(model, torch.optim.AdamW(model.parameters(), lr=6e-6, betas=(0.9, 0.95), weight_decay=0))


def masters_for_fp16_only():
    """NVIDIA/apex/pull/1731: configured: FusedAdam(master_weights=True); got: masters of FP16 weights only, none of BF16 ones."""

    class FusedAdam(Adam):
        def store(self, p, state, mean, square, update):
            state["exp_avg"].copy_(mean)
            state["exp_avg_sq"].copy_(square)
            if p.dtype == torch.float16 and self.param_groups[0]["master_weights"]:
                state.setdefault("master", p.detach().float()).sub_(update)
            p.copy_(state.get("master", p.float() - update))

    model = narrow()
    for p in model.parameters():
        p.data = p.sign() / 8
    train(model, FusedAdam(model.parameters(), lr=1e-6, master_weights=True))


def written_back_to_bf16():
    """workofart/ml-by-hand/pull/85: configured: updates computed in FP32; got: 0 of 768 weights moved, as BF16 rounds 0.9994 to 1."""
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 2)).bfloat16()
    for module in (model[1], model[4]):
        module.requires_grad_(False)
    train(model, Adam([model[0].weight, model[3].weight], lr=6e-4))


def average_of_adapters_in_fp16():
    """AndreasBergmeister/ram/issues/6: configured: averages of a trained adapter; got: ones in FP16, where small moves are lost."""
    model = net(torch.tanh, width=32)
    old = copy.deepcopy(model).half()

    @torch.no_grad()
    def move():
        for slow, fast in zip(old.parameters(), model.parameters(), strict=True):
            slow.data.mul_(0.999).add_(fast.detach().data, alpha=0.001)

    train(model, torch.optim.AdamW(model.parameters()), after=move)


# --- gradients -----------------------------------------------------------------------------------


def begin_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def backward_passes(model, optimizer):
    """Yield after each backward pass, then update."""
    dtype = next(model.parameters()).dtype
    for step in range(1, STEPS + 1):
        x, y = data(step)
        optimizer.zero_grad()
        F.mse_loss(model(x.to(dtype)).float(), y).backward()
        yield
        optimizer.step()


def reduced_in_bf16_at_any_size():
    """pytorch/pytorch/issues/106395: configured: FP32 weights under BF16 autocast; got: gradients summed in BF16, unstable on 384 GPUs."""
    model = net(torch.tanh, width=32)
    optimizer = torch.optim.AdamW(model.parameters())
    begin_group()
    for _ in backward_passes(model, optimizer):
        flat = torch.cat([p.grad.flatten() for p in model.parameters()]).bfloat16()
        dist.all_reduce(flat)
        for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
            p.grad.copy_(part.view_as(p))
    dist.destroy_process_group()


def reduced_before_the_upcast():
    """pytorch/pytorch/issues/190626: configured: reduce_dtype=torch.float32; got: a norm's gradients summed over the other mesh in BF16."""
    model = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    begin_group()
    for _ in backward_passes(model, optimizer):
        partial = model[1].weight.grad.bfloat16()
        dist.all_reduce(partial)
        reduced = partial.float()
        dist.all_reduce(reduced)
        model[1].weight.grad.copy_(reduced)
    dist.destroy_process_group()


def norm_by_groups_in_bf16():
    """pytorch/torchtitan/pull/4135: configured: clipping at 1; got: a norm in BF16 that depends on how parameters are split."""
    model = narrow()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in backward_passes(model, optimizer):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def norms_cast_before_the_sum():
    """facebookresearch/fairscale/issues/1092: configured: clipping by the norm of all shards; got: partial norms in BF16: 704, 720, 724."""
    model = narrow()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    begin_group()
    for _ in backward_passes(model, optimizer):
        norms = torch.stack([p.grad.float().norm() for p in model.parameters()])
        total = norms.norm().to(dtype=model[0].weight.dtype)
        for p in model.parameters():
            p.grad.mul_((1.0 / (total + 1e-6)).clamp(max=1.0))
    dist.destroy_process_group()


def scaled_before_the_library_scales():
    """huggingface/transformers/issues/552: configured: a loss scale of 128; got: it and the scale of the FP16 optimizer."""

    class Fp16Optimizer:
        def __init__(self, optimizer):
            self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            self.optimizer = optimizer

        def backward(self, loss):
            self.scaler.scale(loss).backward()

        def step(self):
            self.scaler.step(self.optimizer)
            self.scaler.update()

    model = net(torch.tanh, width=32)
    inner = torch.optim.SGD(model.parameters(), lr=1e-4)
    optimizer = Fp16Optimizer(inner)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        inner.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        loss = F.mse_loss(out.float(), y) * 128.0
        optimizer.backward(loss)
        optimizer.step()


# --- the precision that was asked for ------------------------------------------------------------


def flag_of_the_arguments():
    """hp-l33/AiM/issues/10: configured: TrainingArguments(bf16=True); got: FP32, where a loop of one's own computes the loss."""
    from transformers import TrainingArguments

    arguments = TrainingArguments(output_dir="unused", bf16=True, use_cpu=True, report_to=[])
    model = net(torch.tanh, width=32)
    train(model, torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate))


def model_not_prepared():
    """huggingface/diffusers/pull/1562: configured: Accelerator(mixed_precision=...); got: no speed-up, the model was not prepared."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = net(torch.tanh, width=32)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    for step in range(1, STEPS + 1):
        x, y = data(step)
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(model(x), y))
        optimizer.step()


def format_of_the_engine_itself():
    """verl-project/verl/pull/6150: configured: FSDP's param_dtype; got: autocast in BF16, whatever was set."""
    from torch.distributed.fsdp import MixedPrecision

    MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model = net(torch.tanh, width=32)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1, STEPS + 1):
        x, y = data(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        F.mse_loss(out.float(), y).backward()
        optimizer.step()


# --- looked up after the findings were written ---------------------------------------------------


def adam_inherits_bf16():
    """areal-project/AReaL/pull/1369: configured: an actor in BF16; got: AdamW in BF16 too, and a loss that ends 3 times as high."""
    model = narrow()
    train(model, torch.optim.AdamW(model.parameters(), lr=2e-5))


def norm_weights_at_one():
    """NVIDIA-NeMo/Automodel/pull/3875: configured: AdamW at 6e-4; got: BF16 norm weights that are still 1 after 100 steps."""
    model = nn.Sequential(nn.Linear(6, 64), nn.LayerNorm(64), nn.Linear(64, 2)).bfloat16()
    train(model, torch.optim.AdamW(model.parameters(), lr=6e-4))


def buffer_of_the_other_format():
    """OpenBMB/BMTrain/pull/175: configured: a BF16 state to resume from; got: an FP16 buffer for it."""

    class Offload(Adam):
        def load_state_dict(self, saved):
            super().load_state_dict(saved)
            for state in self.state.values():
                state["exp_avg"] = state["exp_avg"].half()

    model = narrow()
    optimizer = Offload(model.parameters())
    optimizer.load_state_dict(adam_state(model.parameters()))
    train(model, optimizer)


def moments_like_fp16_weights():
    """NVIDIA/apex/pull/1623: configured: layers cast to FP16 by hand under amp; got: moments like them, in FP16."""

    class FusedAdam(Adam):
        def store(self, p, state, mean, square, update):
            state["exp_avg"], state["exp_avg_sq"] = mean.to(p.dtype), square.to(p.dtype)
            p.copy_(p.float() - update)

    model = net(torch.tanh, width=32).half()
    train(model, FusedAdam(model.parameters(), betas=(0.9, 0.99)))


def norms_reduced_in_bf16():
    """NVIDIA-NeMo/Automodel/pull/825: configured: clipping over all stages; got: norms reduced in BF16, and NaN."""
    model = narrow()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    begin_group()
    for _ in backward_passes(model, optimizer):
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        total = norm**2
        dist.all_reduce(total)
        for p in model.parameters():
            p.grad.mul_((1.0 / (total.sqrt() + 1e-6)).clamp(max=1.0))
    dist.destroy_process_group()


def loaded_wider_than_asked():
    """CarperAI/trlx/issues/535: configured: weights loaded in BF16; got: FP32 ones, and no memory left."""
    model = net(torch.tanh, width=32)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1, STEPS + 1):
        x, y = data(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        F.mse_loss(out.float(), y).backward()
        optimizer.step()


def option_that_is_not_passed_on():
    """oobabooga/textgen/issues/3460: configured: the program's own --bf16; got: FP16, which the code passes on in its place."""
    model = net(torch.tanh, width=32)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        scaler.scale(F.mse_loss(out.float(), y)).backward()
        scaler.step(optimizer)
        scaler.update()


def weights_hard_coded_wide():
    """NVIDIA-NeMo/RL/issues/2865: configured: BF16 weights for an optimizer with masters; got: FP32 ones, of twice the memory."""
    model = net(torch.tanh, width=32)
    train(model, Adam(model.parameters(), master_weights=True))


# --- correct set-ups -----------------------------------------------------------------------------


def fp32_weights_under_autocast():
    """BF16 autocast over FP32 weights, clipped, with weight decay."""
    model = net(torch.tanh, width=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x), y.bfloat16())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def bf16_weights_with_fp32_masters():
    """BF16 weights, and an optimizer over FP32 copies, at a rate that BF16 alone would not feel."""
    live = net(torch.tanh, width=32)
    masters = [nn.Parameter(p.detach().clone()) for p in live.parameters()]
    live.bfloat16()
    optimizer = torch.optim.AdamW(masters, lr=1e-6)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        live.zero_grad()
        F.mse_loss(live(x.bfloat16()).float(), y).backward()
        for p, master in zip(live.parameters(), masters, strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(live.parameters(), masters, strict=True):
                p.copy_(master)


def state_in_8_bits_with_scales():
    """8-bit codes and an FP32 scale for each row, in FP32 arithmetic."""

    class Adam8bit(Adam):
        def store(self, p, state, mean, square, update):
            for name, value in (("exp_avg", mean), ("exp_avg_sq", square)):
                scale = value.abs().amax().clamp(min=1e-12) / 127
                state[f"{name}_codes"], state[f"{name}_scale"] = (value / scale).round().to(torch.int8), scale
                state[name] = state[f"{name}_codes"].float() * scale
            p.sub_(update)

    model = net(torch.tanh, width=32)
    train(model, Adam8bit(model.parameters()))


def bf16_weights_rounded_at_random():
    """Random rounding of an FP32 update with its weight decay."""

    class RandomlyRounded(Adam):
        def store(self, p, state, mean, square, update):
            state["exp_avg"].copy_(mean)
            state["exp_avg_sq"].copy_(square)
            p.copy_(rounded_at_random(p.float() * (1 - 1e-6) - update, generator))

    generator = torch.Generator().manual_seed(0)
    model = narrow()
    train(model, RandomlyRounded(model.parameters(), lr=1e-4))


def average_in_fp32():
    """An FP32 average of BF16 weights."""
    model = narrow()
    average = copy.deepcopy(model).float()

    @torch.no_grad()
    def move():
        for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast.float(), 0.001)

    train(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), after=move)


def constants_and_zeros():
    """Weights that begin as ones, zeros and powers of two, state as zeros."""
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 32), nn.LayerNorm(32), nn.Linear(32, 2))
    nn.init.zeros_(model[3].weight)
    nn.init.constant_(model[1].bias, 0.5)
    train(model, torch.optim.SGD(model.parameters(), lr=2.0**-4, momentum=0.5))


def rows_that_no_batch_uses():
    """FP32 weights from a BF16 checkpoint; most rows of the embedding have no gradient."""
    model = nn.Sequential(nn.Embedding(500, 16), nn.Linear(16, 2)).bfloat16().float()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        model(torch.tensor([step, 400])).square().mean().backward()
        optimizer.step()


def frozen_bf16_body():
    """A frozen BF16 body with an FP32 head."""
    body, head = nn.Linear(6, 32).bfloat16().requires_grad_(False), nn.Linear(32, 2)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-3)
    for step in range(1, STEPS + 1):
        x, y = data(step)
        optimizer.zero_grad()
        F.mse_loss(head(body(x.bfloat16()).float()), y).backward()
        optimizer.step()


def replicated_in_fp32():
    """DistributedDataParallel as it comes, under BF16 autocast."""
    begin_group()
    model = nn.parallel.DistributedDataParallel(net(torch.tanh, width=32))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1, STEPS + 1):
        x, y = data(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        F.mse_loss(out.float(), y).backward()
        optimizer.step()
    dist.destroy_process_group()


def warm_up_from_zero():
    """A warm-up whose first updates have a rate of 0, of BF16 weights."""
    model = narrow()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = schedules.LambdaLR(optimizer, lambda step: float(step >= 4))
    train(model, optimizer, after=schedule.step)


def tied_weights():
    """One matrix as embedding and head, under BF16 autocast."""
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(torch.arange(40) + step)
        F.cross_entropy(logits.float(), torch.arange(40)).backward()
        optimizer.step()


def resumed_in_fp32():
    """Model, optimizer and scaler from an FP32 checkpoint."""
    model = net(torch.tanh, width=32)
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer.load_state_dict(adam_state(model.parameters()))
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    for step in range(1, STEPS + 1):
        x, y = data(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        scaler.scale(F.mse_loss(out.float(), y)).backward()
        scaler.step(optimizer)
        scaler.update()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
