"""The kernels of an update against float64 torch.optim, real casts and each other; and building the compiled ones."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from helpers_engine import REFERENCE, ulps
from mezzo.engine.kernels import cpu, fused, reference
from mezzo.engine.kernels.reference import AdamWSettings, Batch, SGDSettings
from mezzo.engine.kernels.storage import has_gaps, join, split
from mezzo.engine.optimizers.one_pass import choose

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
KERNELS = {"cpu": cpu, "fused": fused, "reference": REFERENCE}
ZERO, ONE = torch.zeros(()), torch.ones(())
SHAPES = [(1,), (), (1023,), (1024,), (1025,), (0,), (7, 5), (3, 11, 41)]

needs_compiler = pytest.mark.skipif(cpu.library()[0] is None, reason=cpu.library()[1])
every_kernel = pytest.mark.parametrize(
    "kernels", [pytest.param(m, id=n, marks=needs_compiler if n == "cpu" else ()) for n, m in KERNELS.items()]
)


def adamw_settings(**changed: Any) -> AdamWSettings:
    beta1, beta2 = changed.pop("betas", (0.9, 0.999))
    rest = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False, "maximize": False, **changed}
    return AdamWSettings(beta1=beta1, beta2=beta2, **rest)


def sgd_settings(**changed: Any) -> SGDSettings:
    base = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
    return SGDSettings(**{**base, **changed})


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@dataclass
class Problem:
    """Tensors of one kind: their weights, masters, moments and steps, and the values that an update starts from."""

    weights: list[Tensor]
    masters: list[Tensor]
    steps: list[Tensor]
    moments: dict[str, list[Tensor]]

    @classmethod
    def of(cls, kind: str, moments: tuple[str, ...], shapes: list[tuple[int, ...]] = SHAPES) -> Problem:
        fp32 = [normal(shape, 10 + i) for i, shape in enumerate(shapes)]
        if kind == "fp32":
            weights = masters = fp32
        elif kind == "fp16":
            weights, masters = [m.half() for m in fp32], fp32
        elif kind == "bf16 split":
            pairs = [split(m) for m in fp32]
            weights, masters = [high for high, _ in pairs], [low for _, low in pairs]
        else:
            weights = masters = [m.to(FP16 if kind == "fp16 alone" else BF16) for m in fp32]
        steps = [torch.zeros(()) for _ in shapes]
        return cls(weights, masters, steps, {n: [torch.zeros(s) for s in shapes] for n in moments})

    def batch(self, gradients: list[Tensor | None]) -> Batch:
        chosen = [i for i, g in enumerate(gradients) if g is not None]
        given = [g for g in gradients if g is not None]
        lists = [[tensors[i] for i in chosen] for tensors in (self.weights, self.masters, self.steps)]
        moments = {name: [tensors[i] for i in chosen] for name, tensors in self.moments.items()}
        return Batch(weights=lists[0], gradients=given, masters=lists[1], steps=lists[2], moments=moments)

    def values(self) -> list[Tensor]:
        """Return what the update works on, in FP32."""
        pairs = zip(self.weights, self.masters, strict=True)
        return [join(w, m) if m.dtype is torch.int16 else m.float() for w, m in pairs]

    def all(self) -> list[Tensor]:
        return [*self.weights, *self.masters, *self.steps, *(t for ts in self.moments.values() for t in ts)]


def gradients_at(step: int, dtype: torch.dtype) -> list[Tensor | None]:
    """Return scaled gradients; each tensor misses some steps, so step counts differ, and sizes shrink and grow."""
    size = 1024.0 * 2.0 ** -(3 * (step % 2))
    made = [normal(shape, 1000 * step + i) * size for i, shape in enumerate(SHAPES)]
    return [None if (step + i) % 4 == 3 else g.to(dtype) for i, g in enumerate(made)]


KINDS = {"fp32": FP32, "fp16": FP16, "bf16 split": BF16, "fp16 alone": FP16, "bf16 alone": BF16}
every_kind = pytest.mark.parametrize("kind", list(KINDS))

ADAMW_CASES: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.0, "lr": 1e-1},
    {"amsgrad": True},
    {"maximize": True, "lr": 1e-2},
    {"betas": (0.0, 0.9)},
    {"betas": (0.5, 0.99), "lr": 1e-5},
    {"eps": 1e-3, "weight_decay": 0.5, "lr": 3e-2},
    {"amsgrad": True, "maximize": True, "weight_decay": 0.1, "betas": (0.8, 0.5)},
]
SGD_CASES: list[dict[str, Any]] = [
    {},
    {"lr": 1e-1, "weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    {"momentum": 0.5, "nesterov": True, "lr": 1e-2},
    {"maximize": True, "momentum": 0.9, "weight_decay": 0.2, "lr": 1e-2},
    {"maximize": True, "lr": 1e-4},
]
CASES = [("adamw", c) for c in ADAMW_CASES] + [("sgd", c) for c in SGD_CASES]
every_case = pytest.mark.parametrize(("name", "changed"), CASES, ids=[f"{n} {c}" for n, c in CASES])


def moments_of(name: str, changed: dict[str, Any]) -> tuple[str, ...]:
    if name == "sgd":
        return ("momentum_buffer",) if changed.get("momentum") else ()
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if changed.get("amsgrad") else ()))


def settings_of(name: str, changed: dict[str, Any]) -> Any:
    return (adamw_settings if name == "adamw" else sgd_settings)(**changed)


@every_kernel
@every_kind
@every_case
def test_updates_as_float64_torch_does(kernels: ModuleType, kind: str, name: str, changed: dict[str, Any]) -> None:
    problem = Problem.of(kind, moments_of(name, changed))
    wide = [nn.Parameter(v.double()) for v in problem.values()]
    oracle = (torch.optim.AdamW if name == "adamw" else torch.optim.SGD)(wide, **{"lr": 1e-3, **changed})
    factor = torch.tensor(0.75 / 1024)
    for step in range(6):
        gradients = gradients_at(step, KINDS[kind])
        kept = [None if g is None else g.clone() for g in gradients]
        for parameter, gradient in zip(wide, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.double() * factor.double()
        oracle.step()
        getattr(kernels, name)(problem.batch(gradients), settings_of(name, changed), factor, ZERO)
        for gradient, before in zip(gradients, kept, strict=True):
            assert gradient is None or torch.equal(gradient, before), "the kernel changed a gradient"
        compare(problem, wide, kind)
    assert [float(s) for s in problem.steps] == [sum((t + i) % 4 != 3 for t in range(6)) for i in range(len(SHAPES))]


def compare(problem: Problem, wide: list[nn.Parameter], kind: str) -> None:
    for weight, value, expected in zip(problem.weights, problem.values(), wide, strict=True):
        if "alone" in kind:  # the update is rounded into the weight: where float64 is near a tie, the other way
            apart = ulps(weight, expected.detach().to(weight.dtype))
            assert apart.numel() == 0 or (int(apart.max()) <= 1 and int((apart > 0).sum()) <= 1 + 0.002 * apart.numel())
            expected.data.copy_(weight)
        else:
            torch.testing.assert_close(value.double(), expected.detach(), rtol=2e-6, atol=2e-7)
            apart_from_rounding = bits_of(weight) != bits_of(value.to(weight.dtype))
            assert not bool(apart_from_rounding.any()) or kind == "bf16 split"
            ties = (bits_of(value) & 0xFFFF) == 0x8000
            assert not bool((apart_from_rounding & ~ties).any())


@needs_compiler
@every_kind
@every_case
def test_compiled_kernels_are_bit_exact_to_the_reference(kind: str, name: str, changed: dict[str, Any]) -> None:
    # The same FP32 operations in the same order, none of them contracted: nothing is left to differ.
    problems = [Problem.of(kind, moments_of(name, changed)) for _ in range(2)]
    for step in range(5):
        gradients = gradients_at(step, KINDS[kind])
        for problem, kernels in zip(problems, (cpu, REFERENCE), strict=True):
            getattr(kernels, name)(problem.batch(gradients), settings_of(name, changed), torch.tensor(1e-3), ZERO)
    for a, b in zip(problems[0].all(), problems[1].all(), strict=True):
        assert torch.equal(a, b)


@every_kernel
def test_small_beta1_leaves_nothing_of_a_large_old_mean(kernels: ModuleType) -> None:
    # m + (g - m) * 1 is not g where m is large: the error would be the size of the gradient.
    problem = Problem.of("fp32", ("exp_avg", "exp_avg_sq"), [(64,)])
    for size in (1e4, 1e-4):
        start, gradient = problem.weights[0].clone(), normal((64,), 3) * size
        kernels.adamw(
            problem.batch([gradient]), adamw_settings(betas=(0.0, 0.0), eps=0.0, lr=0.1, weight_decay=0.0), ONE, ZERO
        )
    torch.testing.assert_close(problem.moments["exp_avg"][0], gradient, rtol=1e-6, atol=0)
    torch.testing.assert_close(start - problem.weights[0], 0.1 * gradient.sign(), rtol=1e-3, atol=1e-6)


@every_kernel
def test_one_call_accepts_all_kinds_together(kernels: ModuleType) -> None:
    names = ("exp_avg", "exp_avg_sq")
    apart = {kind: Problem.of(kind, names) for kind in KINDS}
    together = {kind: Problem.of(kind, names) for kind in KINDS}
    gradients = {kind: gradients_at(0, dtype) for kind, dtype in KINDS.items()}
    for kind, problem in apart.items():
        kernels.adamw(problem.batch(gradients[kind]), adamw_settings(), ONE, ZERO)
    parts = [p.batch(gradients[kind]) for kind, p in together.items()]
    whole = Batch(
        weights=[t for b in parts for t in b.weights],
        gradients=[t for b in parts for t in b.gradients],
        masters=[t for b in parts for t in b.masters],
        steps=[t for b in parts for t in b.steps],
        moments={name: [t for b in parts for t in b.moments[name]] for name in names},
    )
    kernels.adamw(whole, adamw_settings(), ONE, ZERO)
    for kind, problem in apart.items():
        assert all(torch.equal(a, b) for a, b in zip(problem.all(), together[kind].all(), strict=True)), kind


@every_kernel
@every_kind
@pytest.mark.parametrize(("name", "changed"), [CASES[0], CASES[7], CASES[8], CASES[11], CASES[13]])
def test_found_inf_leaves_every_byte(kernels: ModuleType, kind: str, name: str, changed: dict[str, Any]) -> None:
    problem = Problem.of(kind, moments_of(name, changed))
    run = getattr(kernels, name)
    run(problem.batch(gradients_at(0, KINDS[kind])), settings_of(name, changed), torch.tensor(1e-3), ZERO)
    before = [bits_of(t).clone() for t in problem.all()]
    bad = [torch.full_like(w, float("nan") if i % 2 else float("inf")) for i, w in enumerate(problem.weights)]
    for factor in (torch.tensor(1e-3), torch.tensor(float("nan")), torch.tensor(0.0)):
        run(problem.batch([g.to(KINDS[kind]) for g in bad]), settings_of(name, changed), factor, ONE)
    assert all(torch.equal(a, bits_of(b)) for a, b in zip(before, problem.all(), strict=True))
    assert sum(float(s) for s in problem.steps) == sum(g is not None for g in gradients_at(0, FP32))


@needs_compiler
@every_kind
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_two_threads_give_the_same_bits(kind: str, name: str) -> None:
    shapes = [(600_001,), (3,), (1000, 71), (0,), (1025,)]
    changed = {"momentum": 0.9} if name == "sgd" else {}
    results, sums, before = [], [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            problem = Problem.of(kind, moments_of(name, changed), shapes)
            gradients = [normal(shape, 77 + i).to(KINDS[kind]) for i, shape in enumerate(shapes)]
            for _ in range(2):
                getattr(cpu, name)(problem.batch(list(gradients)), settings_of(name, changed), ONE, ZERO)
            sums.append(float(cpu.sum_of_squares(gradients)))
        finally:
            torch.set_num_threads(before)
        results.append(problem.all())
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    expected = sum(float(g.double().square().sum()) for g in gradients)
    assert sums == pytest.approx([expected] * 3, rel=1e-12)


# --- finite or not ---------------------------------------------------------------------------------------------------

PLACES = [(1, 0), (7, 6), (8, 3), (1023, 1022), (1025, 1024), (5000, 2500)]


@every_kernel
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_shows(kernels: ModuleType, dtype: torch.dtype, bad: float) -> None:
    for size, place in PLACES:
        gradients = [torch.ones(3, dtype=dtype), torch.ones(size, dtype=dtype), torch.ones((), dtype=FP32)]
        assert float(kernels.sum_of_squares(gradients)) == pytest.approx(4 + size, rel=1e-6)
        gradients[1][place] = bad
        assert not bool(kernels.sum_of_squares(gradients).isfinite()), (size, place)


@every_kernel
def test_finite_gradients_never_look_infinite(kernels: ModuleType) -> None:
    for dtype in (FP32, FP16, BF16):
        largest = torch.full((100_003,), torch.finfo(dtype).max, dtype=dtype)
        total = kernels.sum_of_squares([largest, -largest])
        assert total.dtype is FP64
        assert float(total) == pytest.approx(200_006 * torch.finfo(dtype).max ** 2, rel=1e-6)
        smallest = torch.full((64,), torch.finfo(dtype).smallest_normal, dtype=dtype)
        assert float(kernels.sum_of_squares([smallest])) == pytest.approx(64 * float(smallest[0]) ** 2, rel=1e-6)


@every_kernel
def test_sum_of_squares_reads_elements_not_memory(kernels: ModuleType) -> None:
    wide = normal((12, 10), 1)
    views = [wide[:, ::2], wide.t(), wide[3], torch.tensor(3.0).expand(4, 5), wide.view(2, 6, 2, 5).permute(3, 1, 0, 2)]
    assert has_gaps(views[0])
    assert has_gaps(views[3])
    assert not has_gaps(views[4])
    for view in views:
        expected = float(view.double().square().sum())
        assert float(kernels.sum_of_squares([view, view])) == pytest.approx(2 * expected, rel=1e-6)


# --- 16-bit conversions ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generic(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Return the kernels built without F16C: the conversions that every other processor gets."""
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None or platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("needs a C++ compiler for x86, whose F16C instructions can be switched off")
    path = tmp_path_factory.mktemp("generic") / "kernels.so"
    flags = [flag for flag in cpu._FLAGS if flag != "-march=native"]
    subprocess.run([compiler, *flags, "-mno-f16c", str(cpu._SOURCE), "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path))
    cpu._declare(library)
    return library


@pytest.fixture(params=[pytest.param("native", marks=needs_compiler), "generic"])
def conversions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "generic":
        library = request.getfixturevalue("generic")
        monkeypatch.setattr(cpu, "_lib", lambda: library)


def carried(gradient: Tensor, weight: Tensor, master: Tensor) -> None:
    """Move a gradient into master and weight: from -0, a learning rate of -1 adds it exactly, both zeros included."""
    batch = Batch(weights=[weight], gradients=[gradient], masters=[master], steps=[torch.zeros(())])
    cpu.sgd(batch, sgd_settings(lr=-1.0), ONE, ZERO)


def assert_same_values(a: Tensor, b: Tensor) -> None:
    assert torch.equal(a.isnan(), b.isnan())
    there = ~a.isnan()
    assert torch.equal(bits_of(a)[there], bits_of(b)[there])  # bits: zeros have their signs


@pytest.mark.usefixtures("conversions")
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_every_16_bit_value_is_widened_exactly(dtype: torch.dtype) -> None:
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    assert bool(halves.isnan().any())
    assert bool((halves.abs() == torch.finfo(dtype).smallest_normal / 2).any())  # subnormals
    weight = torch.full((2**16,), -0.0)
    carried(halves, weight, weight)
    assert_same_values(weight, halves.float())
    finite = halves[halves.isfinite()]
    assert float(cpu.sum_of_squares([finite])) == pytest.approx(float(finite.double().square().sum()), rel=1e-12)


def awkward_floats() -> Tensor:
    """Return a million FP32 values: random bits, halves' neighbours, exact ties, and the edges of FP16's range."""
    generator = torch.Generator().manual_seed(5)
    anything = torch.randint(-(2**31), 2**31, (500_000,), generator=generator).to(torch.int32).view(FP32)
    halves = torch.randint(-(2**15), 2**15, (500_000,), generator=generator).to(torch.int16).view(FP16).float()
    between = bits_of(halves) + torch.randint(-(2**13), 2**13, halves.shape, generator=generator).to(torch.int32)
    ties = bits_of(halves[:100_000]) + 2**12
    bf16_ties = (bits_of(anything[:100_000]) & ~0xFFFF) | 0x8000
    edges = [65504.0, 65519.996, 65520.0, 65536.0, 2.0**-14, 2.0**-24, 2.0**-25, 2.0**-25 * 1.0000001, 2.0**-26, 1e-40]
    edges += [0.0, float("inf"), float("nan"), 3.4e38, 2.0**-14 - 2.0**-25]
    signed = torch.tensor([*edges, *(-e for e in edges)])
    return torch.cat([anything, *(t.view(FP32) for t in (between, ties, bf16_ties)), signed])


@pytest.mark.usefixtures("conversions")
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("alone", [False, True])
def test_a_million_floats_are_rounded_as_torch_rounds(dtype: torch.dtype, alone: bool) -> None:
    values = awkward_floats()
    weight = torch.full_like(values, -0.0, dtype=dtype)
    master = weight if alone else torch.full_like(values, -0.0)
    carried(values, weight, master)
    assert_same_values(weight, values.to(dtype))
    assert bool(weight.isinf().sum() > values.isinf().sum())  # some round to infinity
    if not alone:
        assert_same_values(master, values)


def test_split_masters_are_bit_exact() -> None:
    values = awkward_floats()
    high, low = split(values)
    assert (high.dtype, low.dtype) == (BF16, torch.int16)
    assert torch.equal(bits_of(join(high, low)), bits_of(values))
    ties = (bits_of(values) & 0xFFFF) == 0x8000
    assert int(ties.sum()) > 90_000
    rounded, there = values.to(BF16), ~values.isnan()
    assert torch.equal(bits_of(high)[there & ~ties], bits_of(rounded)[there & ~ties])
    at = ties & there & high.isfinite()
    exact, chosen = values[at].double(), high[at].double()
    other = (bits_of(values[at]) & ~0xFFFF).view(FP32).double()
    assert torch.equal((chosen - exact).abs(), (exact - other).abs())  # both neighbours are as near
    assert bool((chosen.abs() > other.abs()).all())  # the one away from zero was taken


@pytest.mark.usefixtures("conversions")
def test_compiled_split_and_join_are_those_of_the_reference() -> None:
    values = awkward_floats()
    values = values[values.isfinite()]
    high, low = split(values)
    weight, master = high.clone(), low.clone()
    batch = Batch(weights=[weight], gradients=[torch.zeros_like(high)], masters=[master], steps=[torch.zeros(())])
    cpu.sgd(batch, sgd_settings(lr=0.0), ONE, ZERO)
    assert torch.equal(bits_of(weight), bits_of(high))
    assert torch.equal(master, low)
    carried(values, weight.fill_(-0.0), master.zero_())
    assert torch.equal(bits_of(weight), bits_of(high))
    assert torch.equal(master, low)


# --- building --------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    cpu.library.cache_clear()
    choose.cache_clear()
    yield
    cpu.library.cache_clear()
    choose.cache_clear()


def one_step() -> Tensor:
    parameter = nn.Parameter(torch.ones(5))
    parameter.grad = torch.arange(5.0)
    mezzo.AdamW([parameter], lr=0.1).step()
    return parameter.detach()


@pytest.mark.usefixtures("fresh_choice")
def test_without_a_compiler_torch_s_fused_kernels_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = one_step()
    cpu.library.cache_clear()
    choose.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    reason = "no C++ compiler (c++, g++, clang++) is on the PATH"
    assert cpu.library() == (None, reason)
    assert choose("cpu") == (fused, f"torch's fused kernels: {reason}")
    torch.testing.assert_close(one_step(), expected, rtol=1e-6, atol=1e-7)
    model = nn.Linear(2, 2)
    session = mezzo.Session(model, mezzo.AdamW(model.parameters()), policy="fp16")
    assert [(c.value, c.reason) for c in session.explain() if c.what == "update"] == [
        ("one pass", f"torch's fused kernels: {reason}")
    ]


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize(
    ("does", "says"), [("echo first >&2; echo no such processor >&2; exit 1", "no such processor"), ("exit 3", "")]
)
def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, does: str, says: str) -> None:
    compiler = tmp_path / "broken-c++"
    compiler.write_text(f"#!/bin/sh\n{does}\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(compiler) if name == "c++" else None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpu.library() == (None, f"{compiler} could not build the kernels: {says}")
    assert choose("cpu")[0] is fused


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Let a copy of the library stand for compiling it, and list where it went."""
    cpu.library.cache_clear()
    library, reason = cpu.library()
    if library is None:
        pytest.skip(reason)
    built, cached = [], Path(library._name).read_bytes()

    def build(command: list[str], **_: Any) -> None:
        built.append(Path(command[-1]))
        built[-1].write_bytes(cached)

    monkeypatch.setattr(subprocess, "run", build)
    return built


@pytest.mark.usefixtures("fresh_choice")
def test_the_library_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, builds: list[Path]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(3):
        cpu.library.cache_clear()  # as in another process
        library, reason = cpu.library()
        assert library is not None, reason
        assert reason == f"compiled with {shutil.which('c++') or shutil.which('g++')} for this processor"
    assert len(builds) == 1
    left = list((tmp_path / "mezzo").iterdir())
    assert [p.suffix for p in left] == [".so"]
    assert library._name == str(left[0])
    monkeypatch.setattr(cpu, "_FLAGS", [*cpu._FLAGS, "-DOTHER"])
    cpu.library.cache_clear()
    assert cpu.library()[0] is not None
    assert len(builds) == 2  # other flags, another library


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize("home", ["a file", "not ours", "nobody's"])
def test_without_a_cache_folder_it_is_built_for_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, builds: list[Path], home: str
) -> None:
    place = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", "" if home == "nobody's" else str(place))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if home == "a file":
        place.write_text("")
    elif home == "not ours":
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, mode, **_: "cache" not in str(path) and access(path, mode))
    else:

        def homeless() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", homeless)
    cpu.library.cache_clear()
    assert cpu.library()[0] is not None
    assert [p.parent.name.startswith("mezzo-") for p in builds] == [True]
    assert choose("cpu")[0] is cpu


@pytest.mark.usefixtures("fresh_choice")
def test_a_library_that_does_not_load_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: "some-c++")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: Path(command[-1]).write_text("not a library"))
    library, reason = cpu.library()
    assert library is None
    assert reason.startswith("some-c++ could not build the kernels: ")
    assert choose("cpu")[0] is fused


def test_other_devices_have_their_own_ways() -> None:
    assert choose("mps")[0] is fused
    assert choose("meta") == (reference, "plain torch operations: no fused kernels for meta")
