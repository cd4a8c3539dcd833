"""Moments in 8 and 16 bits and stochastic rounding: formats against their definition, kernels against each other, training against FP32."""

from __future__ import annotations

import copy
import importlib
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mezzo
from helpers_engine import REFERENCE as reference
from mezzo.engine.kernels import cpu, fused, storage
from mezzo.engine.kernels.reference import AdamWSettings, Batch, SGDSettings
from mezzo.engine.kernels.storage import as_fp32, mix, round_to_bf16, split, stored_as, streams, zero_moment
from mezzo.engine.optimizers.one_pass import choose

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
EVERY_NOISE = torch.arange(65536)

needs_compiler = pytest.mark.skipif(cpu.library()[0] is None, reason=cpu.library()[1])
both = pytest.mark.parametrize("cls", [mezzo.AdamW, mezzo.SGD], ids=["AdamW", "SGD"])


def normal(count: int, seed: int, *, spread: float = 1.0) -> Tensor:
    """Values whose exponents vary by about ``spread`` decades."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator) * 10 ** (spread * torch.randn(count, generator=generator))


def lowbias32(x: int) -> int:
    """Wellons' hash with Python's own integers."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
    x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
    return x ^ (x >> 16)


@pytest.mark.parametrize("number", [0, 1, 2**31, 2**32 - 1, 123456789])
def test_the_hash_is_that_of_its_definition(number: int) -> None:
    assert mix(torch.tensor([number])).item() == lowbias32(number)


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 256, 300])
def test_a_moment_says_how_many_values_it_has(count: int) -> None:
    for kind in ("fp32", "bf16", "8bit"):
        assert storage.values_in(zero_moment(kind, torch.empty(count))) == count


def test_streams_follow_the_formula_of_the_file_s_head() -> None:
    weight, first, second = streams(5, 7, torch.tensor(3.0))
    for i in range(5):
        h = lowbias32((i + lowbias32((lowbias32(3) + 7 * 0x9E3779B9) % 2**32)) % 2**32)
        expected = [h % 65536, h >> 16, (h * 0x9E3779B1 % 2**32) >> 16]
        assert [weight[i], first[i], second[i]] == expected


def test_streams_are_even_and_do_not_repeat() -> None:
    for stream in streams(1 << 18, 0, torch.tensor(1.0)):
        counts = torch.bincount(stream >> 8, minlength=256)  # 1024 expected in each, standard deviation 32
        assert (counts - 1024).abs().max() < 6 * 32
    one, other = streams(4096, 0, torch.tensor(1.0))[0], streams(4096, 0, torch.tensor(2.0))[0]
    assert (one == other).float().mean() < 0.01
    assert (one == streams(4096, 1, torch.tensor(1.0))[0]).float().mean() < 0.01


@pytest.mark.parametrize("value", [1.0, 1.003, -1.0011, 3e-5, 1e38, 1e-39, -7e-41])
def test_bf16_is_right_on_average_over_all_noise(value: float) -> None:
    exact = torch.tensor(value)
    rounded = round_to_bf16(exact.repeat(65536), EVERY_NOISE).double()
    assert rounded.mean().item() == exact.double().item()  # every one of 2**16 places between two BF16 numbers
    assert rounded.unique().numel() == (1 if exact.bfloat16().float() == exact else 2)


def test_bf16_keeps_what_is_not_finite() -> None:
    values = torch.tensor([math.inf, -math.inf, math.nan])
    for noise in (0, 65535):
        rounded = round_to_bf16(values, torch.full((3,), noise))
        assert rounded[0] == math.inf
        assert rounded[1] == -math.inf
        assert rounded[2].isnan()


def decoded(byte: int, largest: int, *, signed: bool) -> float:
    """A code's value from the format's definition in words."""
    magnitude = byte % 128 if signed else byte
    if magnitude == 0:
        return 0.0
    exponent, mantissa = divmod(magnitude, 8)
    value = math.ldexp(1 + mantissa / 8, largest - 127 + exponent - (15 if signed else 31))
    return -value if signed and byte >= 128 else value


@pytest.mark.parametrize("signed", [True, False], ids=["first", "second"])
@pytest.mark.parametrize("largest", [100, 127, 254])
def test_every_code_has_the_value_of_the_definition(signed: bool, largest: int) -> None:
    codes = [b for b in range(256) if (b % 128 if signed else b) == 0 or (b % 128 if signed else b) >= 8]
    packed = torch.tensor([*codes, *[largest] * -(-len(codes) // 128)], dtype=torch.uint8)
    expected = [decoded(b, largest, signed=signed) for b in codes]
    assert storage.unpack(packed, len(codes), signed=signed).tolist() == expected


@pytest.mark.parametrize("signed", [True, False], ids=["first", "second"])
@pytest.mark.parametrize("value", [1.0, 1.07, 0.6301, 2.0**-13, 1.3 * 2.0**-14, 0.7 * 2.0**-16])
def test_8_bits_are_right_on_average_over_all_noise(signed: bool, value: float) -> None:
    # 4096 blocks, each with a 2 that is exact and fixes the exponent, and with noise of its own from the whole range.
    values = torch.zeros(4096, 128)
    values[:, 0], values[:, 1] = 2.0, value
    noise = (16 * torch.arange(4096) + 8).repeat_interleave(128)
    back = storage.unpack(storage.pack(values.flatten(), noise, signed=signed), values.numel(), signed=signed)
    expected = max(value, 2.0**-29) if not signed else value
    assert back.double().view(4096, 128)[:, 1].mean().item() == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("signed", [True, False], ids=["first", "second"])
@given(seed=st.integers(0, 10**6), count=st.integers(1, 400), spread=st.sampled_from([0.0, 1.0, 4.0, 12.0]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_values_are_within_an_eighth_and_packed_again_the_same(
    signed: bool, seed: int, count: int, spread: float
) -> None:
    values = normal(count, seed, spread=spread).clamp(-1e18, 1e18)  # squares within FP32's range
    values[:: 1 + seed % 5] = 0
    values = values if signed else values.square()
    noise = torch.randint(65536, (count,), generator=torch.Generator().manual_seed(seed))
    packed = storage.pack(values, noise, signed=signed)
    assert packed.numel() == storage.packed_bytes(count)
    back = storage.unpack(packed, count, signed=signed)
    exponents = packed[count:].int().repeat_interleave(128)[:count] - 127
    smallest = torch.ldexp(torch.ones(count), exponents - (14 if signed else 30))
    held = values.abs() >= smallest
    assert ((back - values).abs() <= values.abs() / 8)[held].all()
    assert ((back.abs() == smallest) | (back == 0))[~held].all()
    if not signed:
        assert ((back > 0) == (values > 0)).all()  # a square that is there never becomes 0
    for other in (torch.zeros_like(noise), torch.full_like(noise, 65535), noise.flip(0)):
        assert torch.equal(storage.pack(back, other, signed=signed), packed)


@pytest.mark.parametrize("signed", [True, False], ids=["first", "second"])
@pytest.mark.parametrize("bad", [math.inf, math.nan, -math.nan])
def test_a_block_with_a_value_that_is_not_finite_reads_as_nan(signed: bool, bad: float) -> None:
    values = torch.ones(300)
    values[130] = bad
    back = storage.unpack(storage.pack(values, torch.zeros(300).long(), signed=signed), 300, signed=signed)
    assert back[128:256].isnan().all()
    assert torch.equal(back[:128], torch.ones(128))
    assert torch.equal(back[256:], torch.ones(44))


SHAPES = [(1,), (127,), (128,), (1025,), (7, 5), (3000,)]
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), "sgd": ("momentum_buffer",)}


def trained(
    kernels: ModuleType,
    rule: str,
    kind: str,
    weights: str,
    *,
    updates: int = 12,
    shapes: list[tuple[int, ...]] = SHAPES,
    odd: bool = False,
    device: str = "cpu",
) -> Batch:
    """Updates, some of them skipped, with gradients over many decades; ``odd`` ones begin at no multiple of 16 bytes."""
    values = [normal(math.prod(s), i).view(s).to(device) for i, s in enumerate(shapes)]
    masters = values
    if weights == "fp16 master":
        values = [v.half() for v in masters]
    elif weights == "bf16 split":
        values, masters = [split(v)[0] for v in masters], [split(v)[1] for v in masters]
    elif weights != "fp32":
        values = masters = [v.bfloat16() for v in masters]
    batch = Batch(
        weights=values,
        gradients=[],
        masters=masters,
        steps=[torch.zeros((), device=device) for _ in values],
        moments={name: [zero_moment(kind, v) for v in values] for name in MOMENTS[rule]},
        numbers=list(range(len(values))),
        stochastic=weights == "stochastic",
    )
    common = {"lr": 1e-2, "weight_decay": 0.01, "maximize": False}
    for step in range(updates):
        drawn = [normal(v.numel() + odd, 100 * step + i).to(device)[int(odd) :] for i, v in enumerate(values)]
        batch.gradients = [d.view(v.shape) for d, v in zip(drawn, values, strict=True)]
        factor = torch.tensor(0.5, device=device)
        found = torch.tensor(float(step in (0, 7)), device=device)
        if rule == "adamw":
            kernels.adamw(batch, AdamWSettings(beta1=0.9, beta2=0.999, eps=1e-8, amsgrad=True, **common), factor, found)
        else:
            kernels.sgd(batch, SGDSettings(momentum=0.9, dampening=0.1, nesterov=False, **common), factor, found)
    return batch


def assert_same(batch: Batch, other: Batch) -> None:
    for one, two in zip(batch.weights + batch.masters, other.weights + other.masters, strict=True):
        assert torch.equal(one.cpu(), two.cpu())
    for name, tensors in batch.moments.items():
        for one, two in zip(tensors, other.moments[name], strict=True):
            assert torch.equal(one.cpu(), two.cpu()), name


COMBINATIONS = [
    (rule, kind, weights)
    for rule in MOMENTS
    for kind in ("fp32", "bf16", "8bit")
    for weights in ("fp32", "fp16 master", "bf16 split", "bf16", "stochastic")
]
combinations = pytest.mark.parametrize(("rule", "kind", "weights"), COMBINATIONS)


@needs_compiler
@combinations
def test_compiled_kernels_are_bit_identical_to_the_reference(rule: str, kind: str, weights: str) -> None:
    assert_same(trained(cpu, rule, kind, weights), trained(reference, rule, kind, weights))


@combinations
def test_fused_kernels_come_close_to_the_reference(rule: str, kind: str, weights: str) -> None:
    # torch's kernels fuse multiplications: a last bit here and there may turn a rounding.
    batch, other = trained(fused, rule, kind, weights), trained(reference, rule, kind, weights)
    for one, two in zip(batch.weights, other.weights, strict=True):
        spacing = {BF16: 2.0**-7, FP16: 2.0**-10, FP32: 1e-5}[one.dtype]
        assert torch.allclose(one.float(), two.float(), rtol=spacing, atol=1e-5)


@pytest.mark.slow
def test_triton_kernels_are_bit_identical_to_the_reference_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    code = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[2])!r}]
from helpers_engine import REFERENCE as reference
from mezzo.engine.kernels import gpu
from test_kernels_low_memory import COMBINATIONS, assert_same, trained

for case in COMBINATIONS:
    results = [trained(kernels, *case, updates=2, shapes=[(7, 5), (1100,)]) for kernels in (gpu, reference)]
    assert_same(*results)
for odd in (False, True):  # two chunks; whole tiles of 16 bytes at a time, and element by element
    assert_same(*[trained(k, "adamw", "fp32", "bf16 split", updates=2, shapes=[(4500,)], odd=odd) for k in (gpu, reference)])
print("identical", len(COMBINATIONS))
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"identical {len(COMBINATIONS)}", done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@combinations
def test_triton_kernels_on_a_gpu_are_bit_identical_to_the_reference(rule: str, kind: str, weights: str) -> None:
    kernels, reason = choose("cuda")
    assert reason.startswith("Triton"), reason
    for odd in (False, True):
        case = {"updates": 9, "shapes": [*SHAPES, (9000,)], "odd": odd}
        ours = trained(kernels, rule, kind, weights, **case, device="cuda")
        assert_same(ours, trained(reference, rule, kind, weights, **case))
    gradients = [normal(size, size).to(dtype) for size in (1, 4097, 100_000) for dtype in (FP32, FP16, BF16)]
    total = kernels.sum_of_squares([g.cuda() for g in gradients])
    assert float(total) == pytest.approx(float(reference.sum_of_squares(gradients)), rel=1e-6)


def test_stochastic_rounding_keeps_small_updates_that_nearest_loses() -> None:
    # 1 - 1000 * 1e-4 = 0.9: each update is a fortieth of BF16's spacing below 1 (2**-8).
    ended = {}
    for rounding in ("nearest", "stochastic"):
        weights = nn.Parameter(torch.ones(4096, dtype=BF16))
        optimizer = mezzo.SGD([weights], lr=1e-4, rounding=rounding)
        optimizer.master_weights = False
        for _ in range(1000):
            weights.grad = torch.ones_like(weights)
            optimizer.step()
        ended[rounding] = weights.detach().float()
    assert torch.equal(ended["nearest"], torch.ones(4096))
    # A sum of 1000 chances of 1/39 to move by 2**-8: standard deviation 0.0196 a weight, 0.0003 of the mean.
    assert ended["stochastic"].mean().item() == pytest.approx(0.9, abs=4 * 0.0196 / 64)
    assert ended["stochastic"].std().item() == pytest.approx(0.0196, rel=0.1)


@both
@pytest.mark.parametrize("kind", ["bf16", "8bit"])
@pytest.mark.parametrize("strided", [False, True], ids=["rows", "channels_last"])
def test_a_resumed_run_continues_bit_for_bit(cls: type, kind: str, strided: bool) -> None:
    def begin() -> tuple[nn.Parameter, torch.optim.Optimizer]:
        value = normal(2 * 6 * 5 * 5, 1).view(2, 6, 5, 5)
        weight = nn.Parameter(value.to(memory_format=torch.channels_last) if strided else value)
        extra = {"momentum": 0.9} if cls is mezzo.SGD else {"amsgrad": True}
        return weight, cls([weight], lr=0.01, moments=kind, **extra)

    def train(weight: nn.Parameter, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            weight.grad = normal(weight.numel(), step).view(weight.shape).to(weight.dtype)
            optimizer.step()

    whole, one = begin()
    train(whole, one, range(12))
    first, two = begin()
    train(first, two, range(5))
    saved = copy.deepcopy(two.state_dict())
    state = saved["state"][0]
    assert all(v.dtype is FP32 and v.shape == whole.shape for n, v in state.items() if n != "step")
    second, three = begin()
    second.data.copy_(first.data)
    three.load_state_dict(saved)
    train(second, three, range(5, 12))
    assert torch.equal(second, whole)
    copied = copy.deepcopy(two)  # and a copy of the optimizer itself, moments packed
    train(copied.param_groups[0]["params"][0], copied, range(5, 12))
    assert torch.equal(copied.param_groups[0]["params"][0], whole)


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
def test_torch_s_state_loads_and_ours_loads_into_torch_s(kind: str) -> None:
    weight = nn.Parameter(normal(300, 1))
    theirs = torch.optim.AdamW([weight], lr=0.01)
    weight.grad = normal(300, 2)
    theirs.step()
    ours = mezzo.AdamW([weight], lr=0.01, moments=kind)
    ours.load_state_dict(theirs.state_dict())
    ours.step()
    back = torch.optim.AdamW([weight], lr=0.01)
    back.load_state_dict(ours.state_dict())
    back.step()
    mean = back.state_dict()["state"][0]["exp_avg"]
    # The same gradient three times: 0.1, 0.19, 0.271 of it, rounded to three bits once on the way.
    assert ((mean - 0.271 * weight.grad).abs() <= 0.271 * weight.grad.abs() / 8 + 1e-4 * weight.grad.abs().max()).all()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "8bit"])
def test_moments_survive_other_strides(kind: str, signed: bool) -> None:
    values = torch.linspace(0.01, 1, 96).view(2, 3, 4, 4).to(memory_format=torch.channels_last)
    kept = stored_as(kind, values, signed=signed)
    back = as_fp32(kept, values.shape, values.stride(), signed=signed)
    assert back.stride() == values.stride()
    assert ((back - values).abs() <= values / 16).all()  # to nearest: half an eighth


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
def test_second_moments_follow_gradients_that_shrink(kind: str) -> None:
    # To nearest, 3 or 8 bits never move by a thousandth: the second moment would stay where it was for ever.
    weight = nn.Parameter(torch.zeros(8192))
    optimizer = mezzo.AdamW([weight], lr=0.0, betas=(0.9, 0.999), moments=kind)
    exact = 0.0
    for step in range(1500):
        size = 1.0 if step < 500 else 0.1
        exact = 0.999 * exact + 0.001 * size**2
        weight.grad = torch.full_like(weight, size)
        optimizer.step()
    kept = optimizer.state_dict()["state"][0]["exp_avg_sq"]
    assert kept.mean().item() == pytest.approx(exact, rel=0.02)


def final_loss(policy: str, kind: str, rounding: str) -> float:
    torch.manual_seed(3)
    inputs = torch.randn(512, 16)
    targets = torch.sin(inputs @ torch.randn(16, 4))
    model = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 4))
    optimizer = mezzo.AdamW(model.parameters(), lr=3e-3, moments=kind, rounding=rounding)  # type: ignore[arg-type]
    session = mezzo.Session(model, optimizer, policy=f"{policy}:arithmetic=emulated")
    steps, last = 400, []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / steps)
        with session.autocast():
            loss = nn.functional.mse_loss(model(inputs).float(), targets)
        session.step(loss)
        last.append(loss.item())
    return sum(last[-20:]) / 20


@pytest.mark.slow
def test_training_with_fewer_bits_ends_near_fp32() -> None:
    exact = final_loss("fp32", "fp32", "nearest")
    # python -m benchmarks low_memory has more cases and seeds; these are the bounds that a broken rounding would leave.
    limits = {
        ("fp32", "bf16", "nearest"): 1.03,
        ("fp32", "8bit", "nearest"): 1.10,
        ("bf16-master", "8bit", "nearest"): 1.15,
        ("bf16-pure", "8bit", "stochastic"): 1.30,
    }
    assert {case: round(loss, 2) for case in limits if (loss := final_loss(*case) / exact) > limits[case]} == {}
    assert final_loss("bf16-pure", "fp32", "nearest") / exact > 1.5  # what stochastic rounding is for


REFUSED = [
    ({"moments": "4bit"}, "moments='4bit'; allowed: fp32, bf16, 8bit"),
    ({"rounding": "up"}, "rounding='up'; allowed: nearest, stochastic"),
]


@both
@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_unknown_choices_are_refused(cls: type, arguments: dict[str, str], message: str) -> None:
    with pytest.raises(mezzo.PolicyError, match=message):
        cls([nn.Parameter(torch.ones(1))], **arguments)


def test_stochastic_rounding_with_masters_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = mezzo.AdamW(model.parameters(), rounding="stochastic")
    with pytest.raises(mezzo.SessionError, match="with master weights; allowed: policies without, such as bf16-pure"):
        mezzo.Session(model, optimizer, policy="bf16-master:arithmetic=emulated")


def test_stochastic_rounding_of_fp16_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=FP16))
    weight.grad = torch.ones_like(weight)
    optimizer = mezzo.AdamW([weight], rounding="stochastic")
    with pytest.raises(mezzo.SessionError, match=r"in torch\.float16; allowed: torch\.bfloat16 and torch\.float32"):
        optimizer.step()


def test_session_does_not_warn_of_lost_updates_where_none_is_lost() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = mezzo.SGD(model.parameters(), lr=1e-6, rounding="stochastic")
    session = mezzo.Session(model, optimizer, policy="bf16-pure:arithmetic=emulated")
    with session.autocast():
        loss = model(torch.randn(4, 64)).square().mean()
    session.step(loss)  # a warning would be an error
    assert (session.updates, session.skipped) == (1, 0)


def test_settings_travel_as_the_bits_of_their_numbers() -> None:
    pytest.importorskip("triton")
    gpu = importlib.import_module("mezzo.engine.kernels.gpu")
    settings = SGDSettings(lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.01, nesterov=False, maximize=True)
    expected = np.zeros(8, dtype=np.int64)
    expected[3:].view(np.float32)[:5] = [-1.0, 0.01, 0.1, 0.9, 0.5]
    assert gpu._head(settings) == tuple(expected.tolist())
