"""A script's models checkpointed from outside: the same training to the bit, what is recorded, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

from mezzo.engine import checkpointing
from mezzo.errors import MezzoError, ScriptError, SessionError, UsageError
from mezzo.launch.request import ModelChanges
from mezzo.launch.torch import TorchTraining, switched
from mezzo.policy import Policy
from mezzo.records import Note

POLICIES = ["as-is", "fp32", "tf32", "bf16", "fp16", "bf16-master", "fp16-pure", "fp8"]
CASES = [
    *((policy, "full") for policy in POLICIES),
    *(("fp16", plan) for plan in ("selective", "every-2", "8KiB")),
    ("fp8", "selective"),
]
"""How a policy casts, and which modules run again, do not touch each other."""


class Block(nn.Module):
    """Normalisation, dropout, and Python's generator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + random.random() * self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
        self.blocks = nn.ModuleList([Block(16) for _ in range(3)])
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x) * scale
        return out


class Result:
    """What a training left, and what was recorded of it."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.drawn: list[float] = []
        self.explanation: list[Note] = []
        self.activations_bytes: int | None = None
        self.model: nn.Module = nn.Identity()

    @property
    def checkpointed(self) -> list[Note]:
        return [one for one in self.explanation if one.what == "activation checkpointing"]

    def same(self, other: Result) -> bool:
        pairs = list(zip(self.tensors, other.tensors, strict=True))
        return self.drawn == other.drawn and all(torch.equal(a, b) for a, b in pairs)


def trained(
    policy: str = "fp32",
    checkpoint: str = "",
    *,
    build: Callable[[], nn.Module] = Net,
    compiles: bool = False,
    call: Callable[[Any, Tensor], Tensor] = lambda model, x: model(x, scale=0.5),
    evaluates: bool = False,
) -> Result:
    """Train as an unmodified script does."""
    found = Result()
    with switched(None if policy == "as-is" else Policy.of(policy)) as (run, counted):
        training = TorchTraining(run, counted)
        training.change_models(ModelChanges(checkpoint=checkpoint, compiles=compiles))
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = found.model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)  # in 16 bits the default eps is 0
        if evaluates:
            model.eval()
            model(torch.randn(2, 8))
            model.train()
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=policy == "as-is"):
                loss = call(model, torch.randn(6, 8)).float().square().mean()
            loss.backward()
            found.tensors += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
        run.close_update()
        found.explanation, found.activations_bytes = training.explanation(), training.memory().activations_bytes
    found.tensors += [p.detach().clone() for p in (*model.parameters(), *model.buffers())]
    found.drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]
    return found


PLAIN: dict[str, Result] = {}


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    yield
    PLAIN.clear()


@pytest.mark.filterwarnings("ignore::mezzo.PrecisionWarning")
@pytest.mark.parametrize(("policy", "plan"), CASES)
def test_training_is_the_same_to_the_bit(policy: str, plan: str) -> None:
    if policy not in PLAIN:
        PLAIN[policy] = trained(policy)
    found = trained(policy, plan)
    assert found.same(PLAIN[policy])
    assert len(found.checkpointed) == 1
    assert "run again in the backward pass" in found.checkpointed[0].reason
    how = [checkpointing._checkpointed(module) for module in found.model.modules()]
    assert any(one is not None and one.keeps for one in how)


def test_the_record_says_what_is_kept_and_the_counted_bytes_agree() -> None:
    plain = trained()
    assert plain.checkpointed == []
    kept = {"none": plain.activations_bytes}
    for plan in ("full", "selective"):
        found = trained("fp32", plan)
        kept[plan] = found.activations_bytes
        reason = found.checkpointed[0]
        assert reason.value == plan
        assert reason.reason.startswith(
            "Net: 3 modules (blocks.0, blocks.1, blocks.2) run again in the backward pass; "
        )
    # A block without checkpointing: its input is the residual's sum, which full keeps (6 x 16), as the next block's.
    product_bytes = 3 * 4 * 6 * (64 + 16)
    assert kept["full"] is not None
    assert kept["selective"] == kept["full"] + product_bytes
    assert kept["none"] is not None
    assert kept["selective"] < kept["none"]


def test_an_evaluation_before_the_training_makes_no_plan() -> None:
    plain, found = trained(evaluates=True), trained("fp32", "full", evaluates=True)
    assert found.same(plain)
    assert len(found.checkpointed) == 1


def test_several_models_each_have_a_plan() -> None:
    def two() -> nn.Module:
        return nn.ModuleList([Net(), nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 1))])

    def call(models: Any, x: Tensor) -> Tensor:
        out: Tensor = models[1](models[0](x))
        return out

    plain, found = (trained("fp32", plan, build=two, call=call) for plan in ("", "full"))
    assert found.same(plain)
    assert [one.reason.partition(":")[0] for one in found.checkpointed] == ["Net", "Sequential"]


def test_a_model_is_checkpointed_before_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []

    def compile(function: Any, **kwargs: Any) -> Any:
        blocks = [module for module in function.__self__.modules() if isinstance(module, Block)]
        made.append(all(checkpointing._checkpointed(block) is not None for block in blocks))
        return function

    monkeypatch.setattr(torch, "compile", compile)
    found = trained("fp32", "full", compiles=True, evaluates=True)
    assert made == [True]
    assert {one.what for one in found.explanation} >= {"activation checkpointing", "torch.compile"}


class Counter(nn.Module):
    """Changes plain attributes in each pass, and makes one once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.seen = nn.Linear(16, 16), 0, []  # type: ignore[var-annotated]
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        if self.cache is None:
            self.cache = torch.full((16,), 0.5)
        out: Tensor = torch.tanh(self.layer(x)) * self.calls * self.cache
        return out


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, Counter())


def test_state_in_plain_attributes_changes_as_without_checkpointing() -> None:
    plain, found = trained(build=Counting), trained("fp32", "full", build=Counting)
    assert found.same(plain)
    for one in (plain, found):
        counter = one.model.blocks[1]  # type: ignore[index]
        assert (counter.calls, counter.seen) == (4, [6] * 4)


def wrapped() -> nn.Module:
    model = Net()
    inner = model.blocks[0].forward
    model.blocks[0].forward = lambda x: inner(x)  # type: ignore[assignment]
    return model


def own() -> nn.Module:
    class Own(Net):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            out: Tensor = torchs_checkpoint(super().forward, x, use_reentrant=False)
            return out * scale

    return Own()


def compiled_part() -> nn.Module:
    model = Net()
    model.blocks[1].compile(backend="eager")
    return model


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(1))


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, parts: Iterator[Tensor]) -> Tensor:
        return torch.stack([self.net(part) for part in parts])


CALL: dict[str, Any] = {"call": lambda model, x: model(x)}
COMPILED = {"build": lambda: torch.compile(Net(), backend="eager")}
FUNCTION = {"call": lambda model, x: torch.compile(lambda x: model(x), backend="eager")(x)}
ITERATOR: dict[str, Any] = {"build": Reading, "call": lambda model, x: model(iter([x]))}
STATE = {"build": lambda: nn.Sequential(nn.Linear(8, 16), Counter()), **CALL}
REFUSED: dict[str, tuple[dict[str, Any], str, type[MezzoError], str]] = {
    "a library's forward": ({"build": wrapped}, "full", ScriptError, "wraps the forward of its part blocks.0"),
    "own checkpointing": ({"build": own}, "full", SessionError, "the model checkpoints itself already"),
    "compiled part": ({"build": compiled_part}, "full", ScriptError, "Net: the script compiles its part blocks.1"),
    "compiled": (COMPILED, "full", ScriptError, "cannot be applied to Net: the script compiles it"),
    "compiled function": (FUNCTION, "full", ScriptError, "to Net: a function that the script compiles calls it"),
    "lazy": ({"build": lazy, **CALL}, "full", ScriptError, "shapes in its first call"),
    "iterator": (ITERATOR, "full", ScriptError, "it is called with a list_iterator, which can be read only once"),
    "too small a budget": ({}, "1KiB", UsageError, "no plan keeps what waits for the backward pass within 1 KiB"),
    "state everywhere": (STATE, "every-1", ScriptError, "1 changes its attribute 'calls' in each pass"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize(("how", "plan", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_checkpointed_is_refused_by_name(
    how: dict[str, Any], plan: str, kind: type[MezzoError], message: str
) -> None:
    torch._dynamo.reset()
    with pytest.raises(kind) as caught:
        trained("fp32", plan, **how)
    assert message in str(caught.value)


def test_a_script_that_trains_no_module_is_told_so() -> None:
    def bare() -> nn.Module:
        return nn.ParameterList([nn.Parameter(torch.ones(8, 1))])

    found = trained("fp32", "full", build=bare, call=lambda model, x: x @ model[0])
    assert [(one.value, one.reason) for one in found.checkpointed] == [
        ("not applied", "no model with weights to train was called in training mode")
    ]
