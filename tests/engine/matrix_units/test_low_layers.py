"""Which linear layers compute in blocks, in sessions and launched scripts; torchao's MXFP8 layers where a GPU has units for them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers_engine import batches, gradients, parameters, randn, same_bits, through_a_file, train
from mezzo import Choice, PolicyError, PrecisionWarning, Session
from mezzo.devices import Device
from mezzo.engine.casts import conversion
from mezzo.engine.casts.casting import Casting
from mezzo.engine.matrix_units import low_layers, native_units
from mezzo.errors import NoKernelError, SessionError
from mezzo.launch.torch.state import TorchRun
from mezzo.measure.flops import FlopCounter
from mezzo.policy import Policy

BF16 = torch.bfloat16
FIRST = (
    "the first linear layer in the order of modules: it reads what no norm has levelled; end_layers=compute includes it"
)
LAST = "the last linear layer: its errors reach the loss undamped; end_layers=compute includes it"
OWN = "it has code of its own, which a layer in fewer bits would not run"


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128)) for _ in range(2)
        )
        self.odd = nn.Linear(128, 100)
        self.back = nn.Linear(100, 128)
        self.own = Scaled(128, 128)
        self.kept = nn.Linear(128, 128)
        self.head = nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.kept(self.own(self.back(self.odd(x)))))


def session_of(model: nn.Module, policy: str) -> Session:
    return Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)


def chosen(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def odd(multiple: int) -> str:
    return f"a size is not a multiple of {multiple}, so its blocks would not be whole"


IN_BLOCKS = ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2"]
CHOSEN = [
    (
        "mxfp8:fp32_modules=kept",
        [*IN_BLOCKS, "kept"],
        4,
        [("first (64 to 128)", FIRST)],
    ),  # kept: wrapped to stay in FP32
    ("mxfp4", [*IN_BLOCKS, "kept"], 5, [("odd (128 to 100), back (100 to 128)", odd(32))]),
    ("nvfp4:end_layers=compute", ["first", *IN_BLOCKS, "kept", "head"], 7, [("own (128 to 128)", OWN)]),
    (
        "fp8-block:end_layers=compute",
        [*IN_BLOCKS, "kept"],
        5,
        [("first (64 to 128), odd (128 to 100), back (100 to 128), head (128 to 32)", odd(128))],
    ),
    (
        "mxfp8:bf16_products=blocks.0.*.*+kept.wgrad",
        ["blocks.1.0", "blocks.1.2", "kept"],
        3,
        [("2 x blocks.*.* (128 to 128)", "the policy keeps it in BF16")],
    ),
]


@pytest.mark.parametrize(("policy", "converted", "count", "left"), CHOSEN, ids=[row[0] for row in CHOSEN])
def test_layers_that_compute_in_blocks(
    policy: str, converted: list[str], count: int, left: list[tuple[str, str]]
) -> None:
    model = Net()
    session = session_of(model, policy)
    assert chosen(model) == converted
    compute = Policy.parse(policy).compute
    explained = session.explain()
    assert [c.value for c in explained if c.what == f"{compute} layers"] == [f"{count} of 10 linear layers"]
    apart = [Choice(what=f"not in {compute}", value=value, reason=reason) for value, reason in left]
    assert [c for c in explained if c in apart] == apart


@pytest.mark.parametrize("name", ["blocks.9.*.wgrad", "heads.*"])
def test_a_product_of_no_layer_is_refused(name: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(f"no module is named {name.rpartition('.')[0]!r}")):
        session_of(Net(), f"mxfp8:bf16_products={name}")


def test_a_model_whose_layers_all_stay_warns() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    message = f"policy nvfp4 computes no linear layer in NVFP4 here, and all in bf16; 0 (64 to 64): {FIRST}; 2 (64 to 10): {LAST}"
    with pytest.warns(PrecisionWarning, match=re.escape(message)):
        session_of(model, "nvfp4")


def test_transformer_engines_layers_are_named_and_left_alone() -> None:
    """A stand-in: TransformerEngine needs a GPU; its class is known by the module that defines it."""

    class Linear(nn.Module):
        def __init__(self, in_features: int, out_features: int) -> None:
            super().__init__()
            self.in_features, self.out_features = in_features, out_features
            self.weight = nn.Parameter(torch.zeros(out_features, in_features))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.mT

    Linear.__module__ = "transformer_engine.pytorch.module.linear"
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), Linear(64, 64), nn.Linear(64, 64))
    explained = session_of(model, "nvfp4").explain()
    reason = "a layer of TransformerEngine, whose own recipe decides in which format it computes"
    assert Choice(what="not in nvfp4", value="2 (64 to 64)", reason=reason) in explained
    assert chosen(model) == ["1"]


def test_sharded_layers_compute_in_blocks() -> None:
    """``fully_shard`` gives a module a class of its own, made of ``FSDPModule`` and the module's."""

    class FSDPModule:
        pass

    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model[1].__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    model[2].__class__ = type("FSDPScaled", (FSDPModule, Scaled), {})
    session_of(model, "mxfp8")
    assert chosen(model) == ["1"]


def results(model: nn.Module, policy: str, run: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    """Return the loss and the gradients of a model with fixed weights."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=number) / 8)
    session = session_of(model, policy)
    with session.autocast():
        loss = run(model, randn(40, 64).requires_grad_()).square().mean()
    with session.casting.backward():
        return [loss.detach(), *gradients(loss, model)]


def test_another_session_of_the_model_has_its_own_policy() -> None:
    x = randn(40, 64)

    def loss_of(*policies: str) -> Tensor:
        torch.manual_seed(0)
        model = Net()
        for policy in policies:
            session = session_of(model, policy)
        with session.autocast():
            return model(x).float().square().mean().detach()

    alone = {policy: loss_of(policy) for policy in ("nvfp4", "mxfp8", "bf16")}
    assert len({float(loss) for loss in alone.values()}) == 3
    assert torch.equal(loss_of("nvfp4", "mxfp8"), alone["mxfp8"])
    assert torch.equal(loss_of("nvfp4", "bf16"), alone["bf16"])


def test_a_converted_layer_that_was_wrapped_since_is_refused() -> None:
    model = Net()
    session_of(model, "mxfp8")
    conversion.wrap(model.kept, conversion.in_fp32, "cpu")
    with pytest.raises(SessionError, match="the layer 'kept' computes in blocks for an earlier session"):
        session_of(model, "bf16")


def test_what_kernels_in_blocks_cannot_do_is_refused_by_name() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    session = session_of(model, "mxfp8")
    with session.autocast():
        loss = model(randn(8, 64)).square().mean()
        with pytest.raises(NoKernelError, match="create_graph=True runs a linear layer in mxfp8"):
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        with pytest.raises(NoKernelError, match=r"torch\.func transforms a linear layer that computes in mxfp8"):
            torch.func.vmap(model)(randn(2, 8, 64))


def test_an_encoder_layer_is_evaluated_as_it_is_trained() -> None:
    """Torch's fused kernel for evaluation reads the memory of operands that a region casts."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).eval()
    x = randn(2, 8, 32)
    for policy in ("bf16:arithmetic=emulated", "mxfp8:end_layers=compute"):
        session = session_of(model, policy)
        with session.autocast():
            expected = model(x).detach()
            with torch.no_grad():
                assert torch.equal(model(x), expected)
        assert torch.backends.mha.get_fastpath_enabled()


def test_the_fused_encoder_is_on_again_when_the_last_region_of_all_threads_ends() -> None:
    regions = [Casting.of(Policy.parse("bf16:arithmetic=emulated"), "cpu").region() for _ in range(2)]
    first, second = (ThreadPoolExecutor(1) for _ in regions)
    enabled = torch.backends.mha.get_fastpath_enabled
    for pool, number, act, expected in (
        (first, 0, "__enter__", False),
        (second, 1, "__enter__", False),
        (first, 0, "__exit__", False),
        (second, 1, "__exit__", True),
    ):
        arguments = () if act == "__enter__" else (None, None, None)
        pool.submit(getattr(regions[number], act), *arguments).result()
        assert enabled() is expected
    for pool in (first, second):
        pool.shutdown()


def test_outside_a_region_nothing_changes() -> None:
    model, x = Net(), randn(40, 64)
    before = model(x)
    session = session_of(model, "mxfp8")
    assert same_bits([model(x)], [before])
    with session.autocast():
        assert not same_bits([model(x).float()], [before])
        with torch.autocast("cpu", enabled=False):
            assert same_bits([model(x)], [before])


def test_a_trained_session_resumes_to_the_bit() -> None:
    data = batches(6, size=40, width=64, classes=10)

    def start() -> tuple[nn.Module, Session]:
        torch.manual_seed(0)
        model = Net()
        return model, session_of(model, "nvfp4")

    whole, session = start()
    train(session, whole, data)
    half, session = start()
    train(session, half, data[:3])
    saved = through_a_file(session.state_dict())
    resumed, session = start()
    session.load_state_dict(saved)
    train(session, resumed, data[3:])
    assert same_bits(parameters(whole), parameters(resumed))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces
@pytest.mark.parametrize("policy", ["nvfp4", "fp8-block"])
def test_compiled_and_checkpointed_layers_compute_the_same(policy: str) -> None:
    plain = results(Net(), policy, lambda model, x: model(x))
    for way in (
        lambda model, x: checkpoint(model, x, use_reentrant=False),
        lambda model, x: torch.compile(model, backend="aot_eager", fullgraph=True)(x),
    ):
        for ours, theirs in zip(results(Net(), policy, way), plain, strict=True):
            assert float((ours - theirs).abs().max()) <= 2e-2 * float(theirs.abs().max())


def test_products_are_counted_in_their_formats() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    session = session_of(model, "mxfp8:bf16_products=1.wgrad")
    with FlopCounter(in_region=lambda: True) as counter:
        with session.autocast():
            loss = model(randn(32, 64)).square().sum()
        session.step(loss)
    product = 2 * 32 * 64 * 64
    # The first layer needs no gradient of its input: 2 products of it, 3 of the last, and the weight's gradient of the middle one.
    assert dict(counter.by_format) == {"mxfp8": 2 * product, "bf16": 6 * product}


def test_a_launched_script_records_layers_and_refuses_unknown_ones() -> None:
    run = TorchRun(Policy.parse("mxfp8:bf16_products=blocks.0.0.wgrad"))
    model = Net()
    run.precision.prepare(model, torch.device("cpu"))
    assert chosen(model) == [*IN_BLOCKS, "kept"]
    assert ("not in mxfp8", "head (128 to 32)") in [(r.what, r.value) for r in run.notes.left_alone.values()]
    run.precision.check_patterns([model])
    other = TorchRun(Policy.parse("mxfp8:bf16_products=blocks.7.0.wgrad"))
    other.precision.prepare(Net(), torch.device("cpu"))
    with pytest.raises(PolicyError, match=r"no module is named 'blocks\.7\.0'"):
        other.precision.check_patterns([Net()])


# --- torchao's layers -------------------------------------------------------------------------------------------------


@pytest.fixture
def mxfp8_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this CPU pass for a Blackwell GPU: torchao computes its products in FP32."""
    pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear", reason="needs pip install 'torchao>=0.18'")
    monkeypatch.setattr(native_units, "MX_KERNELS", ("emulated", "torch", "torch"))
    monkeypatch.setattr(Policy, "arithmetic_on", lambda policy, device: ("native", "as on a B200"))


@pytest.mark.usefixtures("mxfp8_units")
@pytest.mark.parametrize("policy", ["mxfp8", "mxfp8:scale_rule=floor", "mxfp8:bf16_products=*.wgrad"])
@pytest.mark.parametrize("rows", [64, 40])
def test_torchaos_layers_train_like_our_emulation(policy: str, rows: int) -> None:
    torch.manual_seed(0)
    model, x = Net(), randn(rows, 64)
    low = low_layers.MxLinear
    assert low is native_units.MxLinear
    layer, plain = nn.Linear(128, 128), randn(rows, 128).bfloat16()
    found = []
    for emulated in (False, True):
        twin, operand = nn.Sequential(copy.deepcopy(layer)), plain.clone().requires_grad_()
        low_layers.convert([twin], Policy.parse(f"{policy}:end_layers=compute"), emulated=emulated)
        with torch.autocast("cpu", dtype=BF16):
            y = twin(operand)
        found.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), [operand, *twin.parameters()])])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype is theirs.dtype
        assert float((ours.double() - theirs.double()).abs().max()) <= 2**-7 * float(theirs.double().abs().max())
        assert int((ours != theirs).sum()) <= 0.003 * ours.numel() + 1
    session = session_of(model, policy)
    with session.autocast():
        assert model(x).shape == (rows, 32)


def test_devices_with_units_for_blocks() -> None:
    b200, gb10 = (Device(kind="cuda", name="an NVIDIA GPU", capability=c) for c in ((10, 0), (12, 1)))
    policies = ("mxfp8", "mxfp4", "nvfp4", "fp8-block", "mxfp8:gradient_rounding=stochastic")
    assert [Policy.parse(p).arithmetic_on(b200)[0] for p in policies] == ["native", *["emulated"] * 4]
    assert {Policy.parse(p).arithmetic_on(gb10)[0] for p in policies} == {"emulated"}


def test_the_op_lists_beside_the_layers_are_bf16s() -> None:
    block, plain = (Casting.of(Policy.parse(f"{name}:arithmetic=emulated"), "cpu") for name in ("mxfp8", "bf16"))
    assert block.table is not None
    assert plain.table is not None
    assert {op: rule.precision for op, rule in block.table.rules.items()} == {
        op: rule.precision for op, rule in plain.table.rules.items()
    }
    assert not any(rule.keeps_weight for rule in block.table.rules.values())
