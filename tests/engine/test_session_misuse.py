"""Wrong calls of a session under every kind of policy: a clear error before any weight has changed, or the right result."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo import Session
from mezzo.errors import MezzoError, SessionError, SnapshotError

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {}),
    ("fp16", {"accumulate": 2}),
    ("fp16-master", {"clip_norm": 1.0}),
]
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def build(policy: str, **settings: Any) -> Session:
    model = net()
    return Session(model, mezzo.AdamW(model.parameters(), lr=0.01), policy=policy, **settings)


def loss_of(session: Session) -> Tensor:
    with session.autocast():
        return nn.functional.cross_entropy(session.models[0](X).float(), Y)


def train(session: Session, windows: int = 1) -> None:
    for _ in range(windows * session.accumulate):
        session.step(loss_of(session))


def everything(session: Session) -> list[Tensor]:
    """Return copies of the weights and of the optimizer's state, in the formats in which they are kept."""
    states = session.optimizers[0].state.values()
    return [t.detach().clone() for t in (*session.models[0].parameters(), *(t for s in states for t in s.values()))]


def set_rate(session: Session, rate: float) -> None:
    session.optimizers[0].param_groups[0]["lr"] = rate
    train(session)


def under(context: Any, session: Session) -> None:
    loss = loss_of(session)
    with context:
        session.step(loss)


def twice(session: Session) -> None:
    loss = loss_of(session)
    session.backward(loss)
    session.backward(loss)


def loads(change: Callable[[dict[str, Any]], Any]) -> Callable[[Session], None]:
    def load(session: Session) -> None:
        state = copy.deepcopy(session.state_dict())
        change(state)
        session.load_state_dict(state)

    return load


def frozen(session: Session) -> None:
    session.models[0].requires_grad_(False)
    train(session)


def other_model(session: Session) -> None:
    session.step(nn.functional.cross_entropy(net()(X), Y))


WRONG: dict[str, tuple[Callable[[Session], Any], type[MezzoError], str]] = {
    "a rate of NaN": (lambda s: set_rate(s, float("nan")), SessionError, "the learning rate of AdamW is nan"),
    "an infinite rate": (lambda s: set_rate(s, float("inf")), SessionError, "the learning rate of AdamW is inf"),
    "a complex loss": (lambda s: s.step(loss_of(s) * (1 + 0j)), SessionError, "backward() got a complex tensor"),
    "a loss of text": (lambda s: s.step("0.5"), SessionError, "backward() got '0.5'"),
    "a number": (lambda s: s.step(3), SessionError, "backward() got 3"),
    "None": (lambda s: s.step(None), SessionError, "backward() got None"),
    "a detached loss": (lambda s: s.step(loss_of(s).detach()), SessionError, "requires_grad=False"),
    "a loss with dimensions": (lambda s: s.step(loss_of(s).expand(3)), SessionError, "a tensor of shape (3,)"),
    "step under no_grad": (lambda s: under(torch.no_grad(), s), SessionError, "while gradients are off"),
    "step under inference_mode": (lambda s: under(torch.inference_mode(), s), SessionError, "while gradients are off"),
    "a loss used twice": (twice, SessionError, "a loss whose graph a backward pass has freed"),
    "another model's loss": (lambda s: (other_model(s), s.update()), SessionError, "no parameter of the optimizers"),
    "all frozen": (frozen, SessionError, "requires_grad=False"),
    "update without backward": (lambda s: s.update(), SessionError, "update() without a backward pass"),
    "unscale without backward": (lambda s: s.unscale(), SessionError, "unscale() without a backward pass"),
    "unknown loss_id": (lambda s: s.step(loss_of(s), loss_id=1), SessionError, "loss_id=1; allowed: 0 to 0"),
    "weight of 0": (lambda s: s.step(loss_of(s), weight=0.0), SessionError, "weight=0.0"),
    "another optimizer": (
        lambda s: (s.backward(loss_of(s)), s.update(torch.optim.SGD(net().parameters(), lr=0.1))),
        SessionError,
        "is not one of this session's 1 optimizers",
    ),
    "copy": (copy.deepcopy, SessionError, "a session was copied or pickled"),
    "accumulate of 0": (lambda s: setattr(s, "accumulate", 0), SessionError, "accumulate=0"),
    "accumulate of text": (lambda s: setattr(s, "accumulate", "2"), SessionError, "accumulate='2'"),
    "clip_norm of NaN": (lambda s: setattr(s, "clip_norm", float("nan")), SessionError, "clip_norm=nan"),
    "clip_norm of 0": (lambda s: setattr(s, "clip_norm", 0), SessionError, "clip_norm=0"),
    "an unknown attribute": (lambda s: setattr(s, "acumulate", 4), SessionError, "session.acumulate does not exist"),
    **{
        f"{name} is set": (
            lambda s, name=name: setattr(s, name, None),  # type: ignore[misc]
            SessionError,
            f"session.{name} is read-only",
        )
        for name in (
            "policy", "models", "optimizers", "schedulers", "clip_value", "device", "processes", "casting", "scales", "masters", "state",
            "train_batch", "updates", "skipped", "loss_scale", "grad_norm", "guardrails", "epoch", "step", "is_whole_loop",
        )
    },
    **{
        f"load: {name}": (loads(change), error, text)
        for name, (change, error, text) in {
            "NaN weights": (lambda s: s["models"][0]["0.weight"].fill_(float("nan")), SnapshotError, "'0.weight' has values"),
            "an infinite bias": (lambda s: s["models"][0]["2.bias"].fill_(float("inf")), SnapshotError, "'2.bias' has values"),
            "another shape": (lambda s: s["models"][0].update({"0.weight": torch.ones(8, 5)}), SnapshotError, "'0.weight'"),
            "a weight is missing": (lambda s: s["models"][0].pop("2.bias"), SnapshotError, "'2.bias'"),
            "no models": (lambda s: s.update(models=[]), SessionError, "the state has 0 models"),
            "no optimizers": (lambda s: s.update(optimizers=[]), SessionError, "the state has 0 optimizers"),
            "no groups": (lambda s: s.update(optimizers=[{}]), SessionError, "does not fit"),
            "a text as optimizer": (lambda s: s.update(optimizers=["x"]), SessionError, "does not fit"),
            "no counts": (lambda s: s.pop("updates"), SessionError, "does not fit"),
            "a text as count": (lambda s: s.update(updates="x"), SessionError, "does not fit"),
            "a count below 0": (lambda s: s.update(skipped=-1), SessionError, "does not fit"),
            "no schedulers": (lambda s: s.pop("schedulers"), SessionError, "does not fit"),
            "an unknown policy": (lambda s: s.update(policy="fp12"), MezzoError, "fp12"),
            "a scale of NaN": (lambda s: s.update(scales=[{"scale": float("nan")}]), SessionError, "a loss scale of nan"),
            "a scale below 0": (lambda s: s.update(scales=[{"scale": -1.0}]), SessionError, "a loss scale of -1.0"),
            "two scales": (lambda s: s.update(scales=[{}, {}]), MezzoError, "scale"),
        }.items()
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:a backward pass failed")
@pytest.mark.parametrize(("policy", "settings"), KINDS)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_before_anything_changes(name: str, policy: str, settings: dict[str, Any]) -> None:
    session = build(policy, **settings)
    train(session, 2)
    call, error, text = WRONG[name]
    before, updates = everything(session), (session.updates, session.loss_scale)

    with pytest.raises(error) as caught:
        call(session)

    assert text in caught.value.message
    assert caught.value.hint
    assert all(map(torch.equal, before, everything(session)))
    assert (session.updates, session.loss_scale) == updates


def test_a_scale_that_is_missing_is_refused() -> None:
    with pytest.raises(SessionError, match=r"a loss scale of \{\}"):
        loads(lambda state: state.update(scales=[{}]))(build("fp16"))


def test_a_state_without_a_scale_loads_where_its_policy_had_none() -> None:
    session, scaled = build("bf16"), build("fp16")
    train(session)

    scaled.load_state_dict(session.state_dict())

    assert scaled.loss_scale == 65536.0


BUILDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "on meta": (lambda policy: Session(*parts(torch.device("meta")), policy=policy), "on the meta device"),
    "in FP64": (lambda policy: Session(*parts(dtype=torch.float64), policy=policy), "is torch.float64"),
    "under inference_mode": (lambda policy: inside(lambda: Session(*parts(), policy=policy)), "torch.inference_mode()"),
    "a model made for inference": (lambda policy: Session(*inside(parts), policy=policy), "torch.inference_mode()"),
}


def parts(device: Any = "cpu", dtype: Any = torch.float32) -> tuple[nn.Module, mezzo.AdamW]:
    model = nn.Linear(4, 2, device=device, dtype=dtype)
    return model, mezzo.AdamW(model.parameters(), lr=0.01)


def inside(build: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return build()


@pytest.mark.filterwarnings("ignore:the model is in torch.float64")
@pytest.mark.parametrize("policy", ["fp32", "fp16-master"])
@pytest.mark.parametrize("name", BUILDS)
def test_a_session_that_cannot_train_is_not_built(name: str, policy: str) -> None:
    built, text = BUILDS[name]
    with pytest.raises(SessionError) as caught:
        built(policy)
    assert text in caught.value.message


def test_a_later_layer_that_was_cast_is_refused() -> None:
    session = build("bf16")
    train(session)
    session.models[0][2].half()

    with pytest.raises(SessionError, match=r"are torch\.float16, and were torch\.float32"):
        session.step(sum(p.float().sum() for p in session.models[0].parameters()))


# --- errors that the loop catches ----------------------------------------------------------------


class Interrupted(Exception):
    """What is raised at one of the points."""


class Points:
    """Raises at the ``at``-th of the points of a run."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, *arguments: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise Interrupted


def run_through(policy: str, points: Points | None, *, updates: int = 10) -> nn.Module:
    """Train; each update has a point in the forward pass, two in hooks of the backward pass, and one in the update's own hook."""
    model = net()
    opt = mezzo.AdamW(model.parameters(), lr=0.01)
    if points is not None:
        model[0].register_forward_hook(points)
        model[2].register_full_backward_hook(points)
        model[0].weight.register_hook(points)
        opt.register_step_pre_hook(points)
    session = Session(model, opt, policy=policy)
    done = 0
    while done < updates:
        try:
            session.step(loss_of(session))
        except Interrupted:
            continue
        done += 1
    return model


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
@pytest.mark.parametrize("at", [*range(1, 9), 30, 31, 32, 33])
def test_an_error_that_the_loop_catches_leaves_the_weights_of_a_loop_without_it(at: int, policy: str) -> None:
    caught, never = run_through(policy, Points(at)), run_through(policy, None)

    assert all(map(torch.equal, caught.parameters(), never.parameters()))
