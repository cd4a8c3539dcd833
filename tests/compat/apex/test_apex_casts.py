"""O1: which format each listed function returns, what it refuses, whose casts are kept; users' own functions."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers_apex import clean
from mezzo.compat.apex import amp
from mezzo.compat.apex.amp.handle import begin, clear_cache

HALF, FLOAT = torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield from clean()


def kept_casts() -> dict[Tensor, Tensor]:
    assert amp._amp_state.handle is not None
    return amp._amp_state.handle.mode.table.kept.items()


def positive(*shape: int) -> Tensor:
    return torch.rand(shape) * 0.5 + 0.25


SQUARE = positive(4, 4)
IMAGE, VOLUME = positive(1, 2, 4, 4), positive(1, 2, 4, 4, 4)
KERNEL1, KERNEL2, KERNEL3 = positive(2, 2, 1), positive(2, 2, 1, 1), positive(2, 2, 1, 1, 1)
ROW, GRID = positive(4), positive(1, 2, 2, 2)

Case = tuple[str, Callable[..., Any], Tensor]
LOWER: list[Case] = [
    ("conv1d", lambda x: torch.conv1d(x, KERNEL1), positive(1, 2, 4)),
    ("F.conv2d", lambda x: F.conv2d(x, KERNEL2), IMAGE),
    ("conv3d", lambda x: torch.conv3d(x, KERNEL3), VOLUME),
    ("conv_transpose1d", lambda x: torch.conv_transpose1d(x, KERNEL1), positive(1, 2, 4)),
    ("conv_transpose2d", lambda x: F.conv_transpose2d(x, KERNEL2), IMAGE),
    ("conv_transpose3d", lambda x: torch.conv_transpose3d(x, KERNEL3), VOLUME),
    ("prelu", lambda x: torch.prelu(x, torch.ones(1)), SQUARE),
    ("F.linear", lambda x: F.linear(x, SQUARE, ROW), SQUARE),
    ("addmm", lambda x: torch.addmm(SQUARE, x, SQUARE), SQUARE),
    ("addmv", lambda x: torch.addmv(ROW, x, ROW), SQUARE),
    ("addr", lambda x: torch.addr(SQUARE, x, ROW), ROW),
    ("matmul", lambda x: torch.matmul(x, SQUARE), SQUARE),
    ("mm", lambda x: x.mm(SQUARE), SQUARE),
    ("mv", lambda x: x.mv(ROW), SQUARE),
    ("@", lambda x: x @ SQUARE, SQUARE),
    ("bmm", lambda x: torch.bmm(x, SQUARE[None]), SQUARE[None]),
    ("baddbmm", lambda x: torch.baddbmm(SQUARE[None], x, SQUARE[None]), SQUARE[None]),
    ("addbmm", lambda x: torch.addbmm(SQUARE, x, SQUARE[None]), SQUARE[None]),
]

POINTWISE = [
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log"),
    *("log10", "log2", "reciprocal", "rsqrt", "sinh", "tan"),
]
REDUCTIONS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("cumprod", "cumsum"), (0,)),
    **dict.fromkeys(("norm", "prod", "std", "sum", "var"), ()),
}
LOSSES = [
    *("l1_loss", "mse_loss", "smooth_l1_loss", "poisson_nll_loss"),
    *("binary_cross_entropy_with_logits", "soft_margin_loss"),
]
CLASSES = torch.tensor([0, 1, 2, 3])
ONES = torch.ones(4)
WIDE: list[Case] = [
    *((name, getattr(torch, name), SQUARE) for name in POINTWISE),
    *((f"Tensor.{name}", getattr(Tensor, name), SQUARE) for name in POINTWISE),
    *((name, lambda x, n=name, a=args: getattr(torch, n)(x, *a), SQUARE) for name, args in REDUCTIONS.items()),
    *((f"Tensor.{name}", lambda x, n=name, a=args: getattr(x, n)(*a), SQUARE) for name, args in REDUCTIONS.items()),
    *((f"F.{name}", lambda x, n=name: getattr(F, n)(x, SQUARE), SQUARE) for name in LOSSES),
    ("pow", lambda x: torch.pow(x, 2.0), SQUARE),
    ("**", lambda x: x**2.0, SQUARE),
    ("2.0 ** x", lambda x: 2.0**x, SQUARE),
    ("dist", lambda x: torch.dist(x, SQUARE), SQUARE),
    ("renorm", lambda x: torch.renorm(x, 2, 0, 1.0), SQUARE),
    ("Tensor.cpu", lambda x: x.cpu(), SQUARE),
    ("F.interpolate", lambda x: F.interpolate(x, scale_factor=2.0), IMAGE),
    ("F.grid_sample", lambda x: F.grid_sample(x, GRID, align_corners=False), IMAGE),
    ("F.kl_div", lambda x: F.kl_div(x, SQUARE, reduction="batchmean"), SQUARE),
    ("F.softplus", F.softplus, SQUARE),
    ("F.softmin", lambda x: F.softmin(x, 0), SQUARE),
    ("F.log_softmax", lambda x: F.log_softmax(x, 0), SQUARE),
    ("F.softmax", lambda x: F.softmax(x, 0), SQUARE),
    ("Tensor.softmax", lambda x: x.softmax(0), SQUARE),
    ("F.gelu", F.gelu, SQUARE),
    ("F.layer_norm", lambda x: F.layer_norm(x, (4,), ROW, ROW), SQUARE),
    ("F.group_norm", lambda x: F.group_norm(x, 2), IMAGE),
    ("F.local_response_norm", lambda x: F.local_response_norm(x, 2), IMAGE),
    ("F.normalize", F.normalize, SQUARE),
    ("F.cosine_similarity", lambda x: F.cosine_similarity(x, SQUARE), SQUARE),
    ("F.cross_entropy", lambda x: F.cross_entropy(x, CLASSES), SQUARE),
    ("F.nll_loss", lambda x: F.nll_loss(x, CLASSES), SQUARE),
    ("F.multi_margin_loss", lambda x: F.multi_margin_loss(x, CLASSES), SQUARE),
    ("F.multilabel_margin_loss", lambda x: F.multilabel_margin_loss(x, CLASSES), ROW),
    ("F.multilabel_soft_margin_loss", lambda x: F.multilabel_soft_margin_loss(x, SQUARE), SQUARE),
    ("F.cosine_embedding_loss", lambda x: F.cosine_embedding_loss(x, SQUARE, ONES), SQUARE),
    ("F.hinge_embedding_loss", lambda x: F.hinge_embedding_loss(x, ONES), SQUARE),
    ("F.margin_ranking_loss", lambda x: F.margin_ranking_loss(x, ROW, ONES), ROW),
    ("F.triplet_margin_loss", lambda x: F.triplet_margin_loss(x, SQUARE, SQUARE), SQUARE),
]

PAIRS: list[tuple[str, Callable[[Tensor, Tensor], Tensor]]] = [
    ("addcdiv", lambda x, y: torch.addcdiv(x, y, y)),
    ("addcmul", lambda x, y: x.addcmul(y, y)),
    ("atan2", torch.atan2),
    ("cross", lambda x, y: torch.cross(x[:3], y[:3], dim=0)),
    ("bilinear", lambda x, y: torch.bilinear(x, y, x.new_ones(2, 4, 4), None)),
    ("dot", lambda x, y: torch.dot(x[0], y[0])),
    ("cat", lambda x, y: torch.cat([x, y])),
    ("stack", lambda x, y: torch.stack([x, y])),
    ("a one-element operand", lambda x, y: x.add(y[0, 0])),
    *((name, getattr(torch, name)) for name in ("add", "mul", "div")),
    *((f"Tensor.{n}", getattr(Tensor, f"__{n}__")) for n in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv")),
]


@pytest.mark.parametrize(("function", "x"), [c[1:] for c in LOWER], ids=[c[0] for c in LOWER])
@pytest.mark.parametrize("given", [HALF, FLOAT])
def test_products_return_half(function: Callable[..., Any], x: Tensor, given: torch.dtype) -> None:
    exact = function(x)
    begin("cpu")
    leaf = x.to(given, copy=True).requires_grad_()
    out = function(leaf)
    assert out.dtype is HALF
    out.float().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype is given
    torch.testing.assert_close(out.float(), exact, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(("function", "x"), [c[1:] for c in WIDE], ids=[c[0] for c in WIDE])
def test_sensitive_functions_return_float(function: Callable[..., Any], x: Tensor) -> None:
    exact = [function(x.to(given).float()) for given in (HALF, FLOAT)]
    begin("cpu")
    for given, expected in zip((HALF, FLOAT), exact, strict=True):
        out = function(x.to(given))
        assert out.dtype is FLOAT
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("function", [p[1] for p in PAIRS], ids=[p[0] for p in PAIRS])
def test_mixed_operands_meet_in_the_widest(function: Callable[..., Tensor]) -> None:
    begin("cpu")
    for formats in ((HALF, HALF), (HALF, FLOAT), (FLOAT, HALF), (FLOAT, FLOAT)):
        out = function(SQUARE.to(formats[0]), SQUARE.to(formats[1]))
        assert out.dtype is (FLOAT if FLOAT in formats else HALF)


def test_comparisons_take_mixed_operands() -> None:
    x = torch.tensor([1.0, 2.0])
    begin("cpu")
    for name, expected in {"eq": True, "ge": True, "gt": False, "le": True, "lt": False, "ne": False}.items():
        found = [getattr(torch, name)(x.half(), x), getattr(Tensor, f"__{name}__")(x, x.half())]
        assert [bool(f.all()) for f in found] == [expected] * 2
    assert torch.equal(x.half(), x)


def test_operators_in_place_widen_and_methods_in_place_do_not() -> None:
    begin("cpu")
    x = torch.ones(2, dtype=HALF)
    x += torch.ones(2)
    x **= 2.0
    assert (x.dtype, x.tolist()) == (FLOAT, [4.0, 4.0])
    y = torch.ones(2, 2, dtype=HALF)
    assert y.add_(torch.ones(2, 2)).dtype is HALF
    assert y.addmm_(torch.ones(2, 2), torch.ones(2, 2)).dtype is HALF
    assert y.tolist() == [[4.0, 4.0], [4.0, 4.0]]


@pytest.mark.parametrize("name", [*POINTWISE, "pow", "cumprod", "cumsum", "renorm"])
def test_what_cannot_widen_in_place_is_refused(name: str) -> None:
    given: tuple[Any, ...] = {"pow": (2,), "cumprod": (0,), "cumsum": (0,), "renorm": (2, 0, 1.0)}.get(name, ())
    begin("cpu")
    x = SQUARE.half()
    with pytest.raises(NotImplementedError, match=f"Cannot call the in-place function {name}_ on FP16 tensors"):
        getattr(x, f"{name}_")(*given)
    getattr(x.float(), f"{name}_")(*given)
    with amp.disable_casts():
        getattr(x, f"{name}_")(*given)


def test_binary_cross_entropy_of_half_is_refused_or_run_in_float() -> None:
    p, target = SQUARE.half(), SQUARE
    begin("cpu")
    for function in (F.binary_cross_entropy, nn.BCELoss()):
        with pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits"):
            function(p, target)
    assert F.binary_cross_entropy(p.float(), target).dtype is FLOAT


def test_what_is_in_no_list_is_left_alone() -> None:
    begin("cpu")
    for function in (F.relu, torch.tanh, torch.mean, nn.BatchNorm2d(2), nn.MaxPool2d(2), nn.Dropout(0.5)):
        assert [function(IMAGE.to(d)).dtype for d in (HALF, FLOAT)] == [HALF, FLOAT]
    assert (SQUARE.double() @ SQUARE.double()).dtype is torch.float64
    assert torch.ones(2, 2, dtype=torch.int64).sum().dtype is torch.int64


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM, nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_recurrent_layers_run_in_half(kind: type[nn.Module]) -> None:
    layer = kind(4, 4)
    begin("cpu")
    for given in (HALF, FLOAT):
        x = positive(*((3, 2, 4) if issubclass(kind, nn.RNNBase) else (2, 4))).to(given, copy=True).requires_grad_()
        out = layer(x)
        out = out[0] if isinstance(out, tuple) else out
        assert out.dtype is HALF
        out.float().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype is given
    assert {p.grad.dtype for p in layer.parameters() if p.grad is not None} == {FLOAT}


def test_casts_end_where_they_are_ended_and_nothing_is_left() -> None:
    def product() -> torch.dtype:
        return (SQUARE @ SQUARE).dtype

    with torch.device("cpu"):  # begun inside another mode, ended outside
        handle = begin("cpu")
        assert product() is HALF
    assert product() is HALF
    with torch.device("cpu"):
        assert product() is HALF
    torch.set_default_device("cpu")
    assert product() is HALF
    third = begin("cpu")  # above a default device, which expects to be the lowest mode when it goes
    torch.set_default_device(None)
    assert product() is HALF
    third._deactivate()
    handle = begin("cpu")
    with amp.disable_casts():
        assert product() is FLOAT
        assert not handle.is_active()
    with pytest.raises(ZeroDivisionError), amp.disable_casts():
        raise ZeroDivisionError
    assert product() is HALF
    second = begin("cpu")
    handle._deactivate()  # ended already, by the second
    assert product() is HALF
    second._deactivate()
    assert product() is FLOAT
    assert torch.overrides._len_torch_function_stack() == 0
    assert not torch.is_autocast_enabled("cpu")


def test_a_weight_is_cast_once_and_again_when_it_changed() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    begin("cpu")
    x = torch.ones(2, 2)

    def product() -> Tensor:
        return x.mm(weight)

    product()
    (kept,) = [c for w, c in kept_casts().items() if w is weight]
    product()
    assert next(c for w, c in kept_casts().items() if w is weight) is kept
    with torch.no_grad():
        assert product()[0, 0] == 2.0
        weight.mul_(3.0)
        assert product()[0, 0] == 6.0  # Apex gave 2 until the next scale_loss
    out = product()
    out.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    clear_cache()
    assert kept_casts() == {}


def test_steps_and_losses_let_go_of_casts_and_steps_cast_nothing() -> None:
    model = nn.Linear(2, 2)
    seen: list[torch.dtype] = []

    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append((SQUARE @ SQUARE).dtype)
            return super().step(closure)

    _, optimizer = amp.initialize(model, Watching(model.parameters(), lr=0.1), verbosity=0, loss_scale=1.0)
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as loss:
        assert kept_casts()
        loss.backward()
    assert not kept_casts()
    model(torch.ones(1, 2))
    optimizer.step()
    assert not kept_casts()
    assert seen == [FLOAT]


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_computes_again_in_the_same_formats(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4))
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    begin("cpu")
    x = SQUARE.clone().requires_grad_()
    model(x).float().sum().backward()
    assert x.grad is not None
    expected, x.grad = x.grad, None
    checkpoint(model, x, use_reentrant=reentrant).float().sum().backward()
    assert torch.equal(x.grad, expected)
    assert seen == [HALF] * 3


class Checkpointed(nn.Module):
    """A block whose activations are recomputed in the backward pass, or kept."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps
        self.block = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        self.recurrent = nn.LSTM(4, 4)  # torch has no FP16 kernel for it on CPUs

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x) if self.keeps else checkpoint(self.block, x, use_reentrant=False)
        return self.recurrent(y)[0]


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_half_models_recompute_what_they_computed(level: str) -> None:
    gradients = []
    for keeps in (True, False):
        torch.manual_seed(0)
        model = Checkpointed(keeps)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
        seen: list[torch.dtype] = []
        model.block[0].register_forward_hook(lambda module, args, out, seen=seen: seen.append(out.dtype))
        out = model(torch.ones(3, 2, 4))
        with amp.scale_loss(out.mean(), optimizer) as loss:
            loss.backward()
        assert seen == [HALF] * (1 if keeps else 2)
        assert out.dtype is FLOAT
        gradients.append([p.grad for p in amp.master_params(optimizer)])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def own() -> types.ModuleType:
    module = types.ModuleType("own")
    module.mix = lambda x, *, y: (x.dtype, y.dtype)  # type: ignore[attr-defined]
    return module


REGISTERED = [(amp.register_half_function, (HALF, HALF)), (amp.register_float_function, (FLOAT, FLOAT))]


@pytest.mark.parametrize(("register", "expected"), [*REGISTERED, (amp.register_promote_function, (FLOAT, FLOAT))])
def test_registered_functions_are_cast_and_given_back(register: Any, expected: tuple[torch.dtype, ...]) -> None:
    module = own()
    original = module.mix
    register(module, "mix")
    assert module.mix(SQUARE.half(), y=SQUARE) == (HALF, FLOAT)
    handle = begin("cpu")
    assert module.mix(SQUARE.half(), y=SQUARE) == expected
    promotes = register is amp.register_promote_function
    assert module.mix(SQUARE.half(), y=SQUARE.half())[0] is (HALF if promotes else expected[0])
    with amp.disable_casts():
        assert module.mix(SQUARE.half(), y=SQUARE) == (HALF, FLOAT)
    handle._deactivate()
    assert module.mix is original
    with pytest.raises(ValueError, match="No function named mixed"):
        register(module, "mixed")


def test_registered_functions_of_torch_leave_their_list() -> None:
    amp.register_float_function(torch, "sigmoid")
    amp.register_half_function(F, "softmax")
    amp.register_float_function(torch, "matmul")
    handle = begin("cpu")
    assert torch.sigmoid(SQUARE.half()).dtype is FLOAT
    assert F.softmax(SQUARE, 0).dtype is HALF
    assert torch.matmul(SQUARE.half(), SQUARE.half()).dtype is FLOAT
    handle._deactivate()
    assert torch.sigmoid(SQUARE.half()).dtype is HALF


@pytest.mark.parametrize(
    ("decorate", "expected"), [(amp.half_function, HALF), (amp.float_function, FLOAT), (amp.promote_function, FLOAT)]
)
def test_decorated_functions_are_cast(decorate: Any, expected: torch.dtype) -> None:
    @decorate
    def first(x: Tensor, others: list[Tensor]) -> tuple[torch.dtype, torch.dtype]:
        """Say the formats."""
        return x.dtype, others[0].dtype

    assert first.__doc__ == "Say the formats."
    assert first(SQUARE.half(), [SQUARE]) == (HALF, FLOAT)
    begin("cpu")
    assert first(SQUARE.half(), [SQUARE]) == (expected, expected)


def test_verbose_prints_every_listed_call(capsys: pytest.CaptureFixture[str]) -> None:
    begin("cpu", verbose=True)
    torch.relu(SQUARE.mm(SQUARE)).sum()
    assert capsys.readouterr().out == "mm: lower\nsum: fp32\n"
