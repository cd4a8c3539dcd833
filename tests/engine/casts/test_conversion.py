"""What is cast and what stays: weights, buffers, norms, named modules, inputs and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers_engine import casting, copied, mlp, parameters, randn, same_bits
from mezzo import PolicyError, Session
from mezzo.engine.casts.casting import Casting
from mezzo.engine.casts.conversion import (
    OwnForward,
    cast_model,
    fp32_modules,
    is_norm,
    keep_fp32,
    keep_own_norms,
    to_format,
    unwrap,
    where_16_bits,
    wrap,
)
from mezzo.policy import Policy

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class LlamaRMSNorm(nn.Module):
    """A norm that torch does not know, as in models of Hugging Face."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 6)
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.batch = nn.BatchNorm1d(8)
        self.rms = LlamaRMSNorm(8)
        self.block = mlp(8, 8, 8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("table", torch.linspace(0, 1, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("exact", torch.ones(8, dtype=FP64), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embed(tokens))
        x = self.rms(self.batch(self.norm(x))) + self.table
        return self.head(F.relu(x) + self.block(x))  # type: ignore[no-any-return]


TOKENS, CLASSES = torch.tensor([1, 4, 7, 2]), torch.tensor([0, 1, 2, 0])


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in [*model.named_parameters(), *model.named_buffers()]}


NORMS = ("norm.", "batch.", "rms.")
KEPT: list[tuple[str, Callable[[str], bool]]] = [
    ("fp16-master", lambda name: name.startswith(NORMS)),
    ("bf16-master", lambda name: name.startswith(NORMS)),
    ("fp16-pure", lambda name: False),
    ("bf16-pure", lambda name: False),
    ("fp16-master:norms=compute", lambda name: False),
    ("fp16-master:fp32_modules=head", lambda name: name.startswith((*NORMS, "head."))),
    ("fp16-master:fp32_modules=block", lambda name: name.startswith((*NORMS, "block."))),
    ("fp16-master:fp32_modules=block.?+first", lambda name: name.startswith((*NORMS, "block.", "first."))),
    ("fp16-pure:fp32_modules=*", lambda name: name != "table"),
    ("bf16-pure:fp32_modules=norm", lambda name: name.startswith("norm.")),
]


@pytest.mark.parametrize("arithmetic", ["emulated", "native"])
@pytest.mark.parametrize(("policy", "kept"), KEPT, ids=[p for p, _ in KEPT])
def test_which_tensors_are_cast_and_what_comes_out(policy: str, kept: Callable[[str], bool], arithmetic: str) -> None:
    reference = F.cross_entropy(Net()(TOKENS), CLASSES)
    model, parsed = Net(), Policy.parse(f"{policy}:arithmetic={arithmetic}")
    cast_model(model, parsed, "cpu")
    never = {"exact": FP64, "count": torch.int64, "batch.num_batches_tracked": torch.int64}
    low = parsed.storage.dtype
    assert dtypes(model) == {name: never.get(name, FP32 if kept(name) else low) for name in dtypes(model)}
    with Casting.of(parsed, "cpu").region():
        out = model(TOKENS)
    assert out.dtype is FP32
    loss = F.cross_entropy(out, CLASSES)
    assert loss.item() == pytest.approx(reference.item(), rel=3e-2)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype is parameter.dtype, name
        assert parameter.grad.isfinite().all()


def test_norms_compute_in_fp32_and_give_back_what_they_got() -> None:
    model = Net()
    cast_model(model, Policy.parse("fp16-master"), "cpu")
    x = randn(4, 8).half()
    for norm in (model.norm, model.rms):
        y = norm(x)
        assert y.dtype is FP16
        assert torch.equal(y, norm.forward.args[0](x.float()).half())
    assert model.batch(x).dtype is FP16
    assert set(model.rms.seen) == {FP32}


@pytest.mark.parametrize("keeps", [cast_model, keep_own_norms])
def test_a_norm_may_be_called_by_keyword(keeps: Callable[[nn.Module, Policy, str], None]) -> None:
    model, x = Net(), randn(4, 8).half()
    keeps(model, Policy.parse("fp16-master"), "cpu")
    assert torch.equal(model.rms(x=x), model.rms(x))
    assert model.rms(x=x).dtype is FP16
    assert set(model.rms.seen) == {FP32}


NORM_KINDS = [nn.BatchNorm2d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.RMSNorm, nn.LocalResponseNorm, LlamaRMSNorm]


def test_is_norm() -> None:
    assert all(is_norm(norm) for norm in (nn.LayerNorm(3), nn.GroupNorm(1, 3), *(kind(3) for kind in NORM_KINDS)))
    assert not is_norm(nn.Linear(3, 3))
    assert not is_norm(nn.Sequential(nn.LayerNorm(3)))


# --- modules that are named -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        (("head",), ["head"]),
        (("block.*",), ["block.0", "block.1", "block.2"]),
        (("*norm",), ["norm"]),
        (("b????",), ["batch", "block"]),
        (("norm", "batch"), ["norm", "batch"]),
        (("b*", "block.0"), ["batch", "block", "block.0", "block.1", "block.2"]),
    ],
)
def test_patterns(patterns: tuple[str, ...], wanted: list[str]) -> None:
    model = Net()
    names = {module: name for name, module in model.named_modules()}
    for outer in (model, torch.compile(model, backend="eager")):
        found = fp32_modules(outer, Policy.parse("fp16").replace(fp32_modules=patterns))
        assert [names[module] for module in found] == wanted


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(PolicyError) as caught:
        fp32_modules(Net(), Policy.parse("fp16:fp32_modules=head+haed"))
    assert caught.value.message.startswith(
        "no module is named 'haed'; did you mean head? Allowed: embed, first, norm, "
    )
    assert caught.value.hint == "patterns match whole names as model.named_modules() gives them, with * and ?"


class Inputs(NamedTuple):
    x: Tensor
    index: Tensor
    label: str


class Takes(nn.Module):
    """A module with inputs of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))
        self.seen: list[Any] = []

    def forward(self, inputs: Inputs, *, scale: Tensor, more: dict[str, Any]) -> dict[str, Any]:
        self.seen.append([inputs.x.dtype, inputs.index.dtype, scale.dtype, more["deep"][0].dtype, more["wide"].dtype])
        return {"y": inputs.x @ self.weight, "index": inputs.index, "label": inputs.label}


def takes(module: nn.Module) -> Any:
    inputs = Inputs(randn(2, 3), torch.tensor([1, 2]), "name")
    more = {"deep": [randn(2).half()], "wide": randn(2).double()}
    return module(inputs, scale=randn(1).bfloat16(), more=more)


@pytest.mark.parametrize(
    ("text", "convert", "low"), [("fp16:fp32_modules=inner", keep_fp32, FP32), ("bf16-pure", cast_model, BF16)]
)
def test_a_module_receives_its_format_in_every_argument_and_gives_fp32(text: str, convert: Any, low: Any) -> None:
    module, policy = Takes(), Policy.parse(text)
    convert(nn.ModuleDict({"inner": module}) if convert is keep_fp32 else module, policy, "cpu")
    with Casting.of(policy, "cpu").region():
        out = takes(module)
    assert module.seen == [[low, torch.int64, low, low, FP64]]
    assert (out["y"].dtype, out["index"].dtype, out["label"]) == (FP32, torch.int64, "name")


def test_to_format() -> None:
    values = [randn(2), {"a": (randn(1).half(), 3)}, None, torch.tensor([True]), randn(1).to(torch.float8_e4m3fn)]
    out: Any = to_format(values, BF16)
    assert (out[0].dtype, out[1]["a"][0].dtype, out[1]["a"][1], out[2]) == (BF16, BF16, 3, None)
    assert (out[3].dtype, out[4].dtype) == (torch.bool, torch.float8_e4m3fn)
    kept = randn(2)
    assert to_format(kept, FP32) is kept


@pytest.mark.parametrize("value", [np.array([1.0, 2.0]), np.array([]), None, "", 0])
def test_to_format_asks_no_value_for_its_truth(value: Any) -> None:
    """A module may return an array, as MAML's does, which has no truth value."""
    assert to_format(value, torch.float32) is value
    assert to_format((value, torch.ones(1).half()), torch.float32)[1].dtype is torch.float32


def test_a_named_module_in_the_middle_may_leave_the_range_of_16_bits() -> None:
    """What a module kept in FP32 gives on is FP32: its way out of FP16's range is why it is kept."""

    class Big(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1e6

    for policy in ("fp16:fp32_modules=1", "fp16-master:fp32_modules=1"):
        model = nn.Sequential(nn.Linear(4, 4), Big(), nn.LayerNorm(4), nn.Linear(4, 2))
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
        with session.autocast():
            x = randn(3, 4)
            out = model(x)
            between = model[1](model[0](x.to(model[0].weight.dtype)))
        assert between.dtype is FP32
        assert between.abs().max() > 65504
        assert out.isfinite().all()


@pytest.mark.parametrize("policy", ["fp16:fp32_modules=0", "fp16-master:fp32_modules=0", "bf16-master:fp32_modules=0"])
def test_training_with_a_named_module_moves_it_in_fp32(policy: str) -> None:
    model = mlp(6, 8, 3)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=1e-4), policy=policy)
    assert model[0].weight.dtype is FP32
    before = parameters(model)
    for _ in range(3):
        with session.autocast():
            loss = F.cross_entropy(model(randn(4, 6)), CLASSES % 3)
        session.step(loss)
    assert session.updates == 3
    assert (model[0].weight != before[0]).float().mean() > 0.9


# --- a converted model is still a model -----------------------------------------------------------------------------------


def converted(policy: str) -> tuple[nn.Module, Casting]:
    model, parsed = Net(), Policy.parse(policy)
    (cast_model if parsed.casting == "model" else keep_fp32)(model, parsed, "cpu")
    return model.eval(), Casting.of(parsed, "cpu")


@pytest.mark.parametrize("policy", ["fp16:fp32_modules=block+head", "fp16-master", "fp16-pure"])
def test_names_and_state_dicts_stay(policy: str) -> None:
    model, _ = converted(policy)
    assert list(model.state_dict()) == list(Net().state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in Net().named_modules()]
    fresh = Net()
    model.load_state_dict(fresh.state_dict())
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


def test_deleting_forward_takes_it_back() -> None:
    model, used = converted("fp16:fp32_modules=head")
    with used.region():
        assert model(TOKENS).dtype is FP32
        del model.head.forward
        assert model(TOKENS).dtype is FP16


def test_a_forward_of_the_instance_is_kept_inside() -> None:
    model = mlp(4, 4, 4)
    plain = model[2].forward
    model[2].forward = lambda x: plain(x) + 100.0  # as another library's patch
    policy = Policy.parse("fp16:fp32_modules=2")
    keep_fp32(model, policy, "cpu")
    with Casting.of(policy, "cpu").region():
        out = model(randn(2, 4))
    assert out.dtype is FP32
    assert (out > 50).all()


def test_hooks_of_a_converted_module_run_once() -> None:
    model, used = converted("fp16:fp32_modules=head")
    seen: list[torch.dtype] = []
    model.head.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    with used.region():
        model(TOKENS)
    assert seen == [FP32]


def test_modules_shared_by_two_names_are_converted_once() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    policy = Policy.parse("fp16:fp32_modules=0")
    keep_fp32(model, policy, "cpu")
    assert type(shared.forward.args[0]) is OwnForward
    with Casting.of(policy, "cpu").region():
        assert model(randn(2, 4)).dtype is FP32


def test_a_region_without_conversion_leaves_the_model_alone() -> None:
    model = Net()
    before = [t.clone() for t in model.state_dict().values()]
    with casting("fp16").region():
        model.eval()(TOKENS)
    assert same_bits(before, list(model.state_dict().values()))
    assert "forward" not in model.__dict__


# --- what other libraries read of a model -----------------------------------------------------------------------------------


def undocumented(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate as libraries do that forget functools.wraps: pickle cannot find the result by its name."""

    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    inner.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return inner


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    @undocumented
    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, **rest: Any) -> Tensor:
        """Compute logits."""
        hidden = torch.relu(self.norm(self.first(x)))
        hidden = hidden if mask is None else hidden * mask
        return self.head(hidden) * scale  # type: ignore[no-any-return]


KINDS = ["fp16", "fp16:fp32_modules=head", "fp16-master", "bf16-master:fp32_modules=head", "fp16-pure"]


@pytest.mark.parametrize("policy", KINDS)
def test_a_models_forward_has_its_own_signature(policy: str) -> None:
    wanted = {name: inspect.signature(module.forward) for name, module in Decorated().named_modules()}
    model = Decorated()
    Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
    found = {name: inspect.signature(module.forward) for name, module in model.named_modules()}
    assert found == wanted
    assert list(found[""].parameters) == ["x", "mask", "scale", "rest"]


def test_a_wrapped_forward_has_its_own_name_and_words() -> None:
    model = Net()
    cast_model(model, Policy.parse("fp16-master"), "cpu")
    assert model.forward.__name__ == "forward"
    assert model.forward.__qualname__ == "Net.forward"
    assert inspect.signature(model.forward) == inspect.signature(Net().forward)


@pytest.mark.parametrize(
    ("policy", "way"),
    [*((policy, "pickle") for policy in KINDS), ("fp16-master", "deepcopy"), (KINDS[1], "torch.save")],
)
def test_a_model_that_was_trained_copies_and_pickles(policy: str, way: str) -> None:
    """While its session, its optimizer and its hooks are alive, and without them."""
    model, x = Decorated(), randn(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(model, optimizer, policy=policy)
    for _ in range(2):
        with session.autocast():
            loss = model(x, scale=2.0).float().square().mean()
        session.step(loss)
    twin = copied(model, way)
    with session.autocast():
        ours, theirs = model(x), twin(x)
    assert torch.equal(ours, theirs)
    for p in twin.parameters():
        p.data.zero_()
    with session.autocast():
        assert twin(x).abs().max() == 0
        assert torch.equal(model(x), ours)
    assert inspect.signature(twin.forward) == inspect.signature(Decorated().forward)
    other = Session(twin, torch.optim.SGD(twin.parameters(), lr=0.1), policy=policy)  # a model of its own
    with other.autocast():
        loss = twin(x).float().square().mean() + sum(p.float().sum() for p in twin.parameters())
    other.step(loss)
    with session.autocast():
        loss = model(x).float().square().mean()
    session.step(loss)  # nobody took its model


def doubled(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs) * 2


def added(call: Callable[..., Any], amount: float, *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs) + amount


def test_unwrapping_gives_the_forward_back() -> None:
    model, x = mlp(4, 3), randn(2, 4)
    plain = model(x)
    wrap(model, doubled)
    wrap(model, added, 1.0)
    assert torch.equal(model(x), plain * 2 + 1)
    unwrap(model, doubled)  # not the outermost: stays
    assert torch.equal(model(x), plain * 2 + 1)
    unwrap(model, added)
    assert torch.equal(model(x), plain * 2)
    unwrap(model, doubled)
    assert torch.equal(model(x), plain)
    assert "forward" not in model.__dict__
    model.forward = own = lambda x: plain  # type: ignore[method-assign]
    wrap(model, doubled)
    unwrap(model, doubled)
    assert model.forward is own


@pytest.mark.parametrize(
    "policy", ["fp16:fp32_modules=head:arithmetic=native:op_lists=device", "bf16-master:arithmetic=native"]
)
def test_a_wrapped_model_compiles_whole(policy: str) -> None:
    torch._dynamo.reset()
    model, x = Net(), TOKENS
    parsed = Policy.parse(policy)
    (cast_model if parsed.casting == "model" else keep_fp32)(model, parsed, "cpu")
    model.eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with Casting.of(parsed, "cpu").region():
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("policy", "how"), [("fp16:fp32_modules=head:init_scale=64", "torch.compile"), ("bf16-master", "compile()")]
)
def test_a_compiled_model_trains_in_a_session_as_it_does_eagerly(policy: str, how: str) -> None:
    losses = []
    for compiles in (False, True):
        torch._dynamo.reset()
        bare = Decorated()
        model: Any = torch.compile(bare, backend="aot_eager") if compiles and how == "torch.compile" else bare
        if compiles and how == "compile()":
            bare.compile(backend="aot_eager")
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
        seen = []
        for number in range(3):
            with session.autocast():
                loss = F.cross_entropy(model(randn(4, 6, seed=number)), CLASSES)
            session.step(loss)
            seen.append(loss.item())
        losses.append(seen)
        assert inspect.signature(bare.forward) == inspect.signature(Decorated().forward)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def half_of(*names: str) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(5)))
    for name in names:
        model.get_submodule(name).bfloat16()
    return model


@pytest.mark.parametrize(
    ("names", "where"),
    [
        ([""], "Sequential"),
        (["1"], "1 in Sequential (20% of its weights)"),
        (["0", "1", "2", "4"], "0, 1, 2 and 1 more in Sequential (80% of its weights)"),
    ],
)
def test_the_weights_in_16_bits_are_named(names: list[str], where: str) -> None:
    assert where_16_bits(half_of(*names)) == where
