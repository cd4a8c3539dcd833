"""Loops and arguments that would train wrongly without a word: each against the exact error or warning, and right ones against silence."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR

import mezzo
from helpers_engine import mlp, randn, spoil
from mezzo import MezzoError, PrecisionWarning, Session, SessionError
from mezzo.compat.grad_scaler import GradScaler
from mezzo.engine.state import Ownership

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
X = randn(4, 6)


def sgd(model: nn.Module, lr: float = 0.1) -> SGD:
    return SGD(model.parameters(), lr=lr)


def built(policy: str = "fp16", model: nn.Module | None = None, **settings: Any) -> tuple[Session, nn.Module]:
    held = mlp(6, 8, 3) if model is None else model
    return Session(held, sgd(held), policy=policy, **settings), held


def loss_of(session: Session, model: nn.Module) -> Tensor:
    with session.autocast():
        return model(X).float().square().mean()


def train(session: Session, model: nn.Module, count: int = 2) -> None:
    for _ in range(count):
        session.step(loss_of(session, model))


# --- what a session is built from ----------------------------------------------------------------------------------------

OPTIMIZER = "optimizer is {}; allowed: a torch optimizer, or several"
BUILD = "build one: torch.optim.AdamW(model.parameters(), lr=1e-3)"
MODEL = "model is {}; allowed: a torch.nn.Module, or several"
OUTPUT = "pass the module whose output the loss is computed from"
SCHEDULER = "scheduler is {}; allowed: a learning rate scheduler, or several"
FACTOR = "build one: torch.optim.lr_scheduler.LambdaLR(optimizer, factor_of_update)"
ORDER = (
    "build the optimizer from the parameters of the model that you pass to the session, after the model was copied or sharded; "
    "pass several models as a list"
)
EPS = (
    "{} keeps its state in torch.float16 under policy {}, and eps={} is 0 there: where a squared gradient underflows, 0 is divided by 0 "
    "and the weights become NaN"
)
EPS_HINT = "use mezzo.AdamW, whose moments are FP32, or policy fp16-master; or pass eps=1e-4"
HALF_HINT = "leave the model in FP32; policies ending in -master and -pure cast it themselves"


MANY = "{} has 4 parameters, none of which is the model's"
CLIP = "clip_norm='1.0'; allowed: a number above 0, or None"
KEEPS = "parameter '0.weight' is torch.{}, and policy {} keeps weights in FP32"
CASTS = "parameter '0.weight' is torch.bfloat16, and policy fp16-master casts weights from FP32 to torch.float16"
CASTS_HINT = "call model.float() before the optimizer is built, or choose the policy of the model's format"
EPSES = [
    (torch.optim.Adam, {}, "1e-08"),
    (torch.optim.AdamW, {}, "1e-08"),
    (torch.optim.AdamW, {"fused": True}, "1e-08"),
    (torch.optim.NAdam, {}, "1e-08"),
    (torch.optim.RMSprop, {}, "1e-08"),
    (torch.optim.Adagrad, {}, "1e-10"),
    (torch.optim.Adamax, {"eps": 2.9e-8}, "2.9e-08"),
]


def with_model(make: Callable[[nn.Module], Any], policy: str = "fp16", **settings: Any) -> Callable[[], Session]:
    def run() -> Session:
        model = mlp(6, 3)
        return Session(model, make(model), policy=policy, **settings)

    return run


def of(change: Callable[[nn.Module], nn.Module], policy: str) -> Callable[[], Session]:
    def run() -> Session:
        model = change(mlp(6, 3))
        return Session(model, sgd(model), policy=policy)

    return run


def model_of(change: Callable[[nn.Module], Any]) -> Session:
    model = mlp(6, 3)
    return Session(change(model), sgd(model))


def swapped() -> Session:
    model = mlp(6, 3)
    return Session(sgd(model), model)  # type: ignore[arg-type]


def other_scheduler() -> Session:
    model, other = mlp(6, 3), mlp(6, 3)
    return Session(model, sgd(model), scheduler=StepLR(sgd(other), 1))


def copied_first() -> Session:
    model = mlp(6, 3)
    optimizer = sgd(model)
    return Session(copy.deepcopy(model), optimizer)


def second_optimizer_elsewhere() -> Session:
    model, other = mlp(6, 3), mlp(6, 8, 3)
    return Session(model, [sgd(model), AdamW(other.parameters())])


ARGUMENTS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "parameters": (with_model(lambda m: m.parameters()), OPTIMIZER.format("the model's parameters"), BUILD),
    "a list of them": (with_model(lambda m: list(m.parameters())), OPTIMIZER.format("the model's parameters"), BUILD),
    "named parameters": (with_model(lambda m: m.named_parameters()), OPTIMIZER.format("of type tuple"), BUILD),
    "a class": (with_model(lambda m: SGD), OPTIMIZER.format("the class SGD"), BUILD),
    "None": (with_model(lambda m: None), OPTIMIZER.format("None"), BUILD),
    "no optimizer": (with_model(lambda m: []), OPTIMIZER.format("an empty list"), BUILD),
    "a rate": (with_model(lambda m: 1e-3), OPTIMIZER.format("of type float"), BUILD),
    "swapped": (swapped, MODEL.format("of type SGD"), "write Session(model, optimizer)"),
    "parameters for the model": (lambda: model_of(lambda m: m.parameters()), MODEL.format("of type Parameter"), OUTPUT),
    "a class for the model": (lambda: model_of(lambda m: nn.Linear), MODEL.format("the class Linear"), OUTPUT),
    "a function for the scheduler": (
        with_model(sgd, scheduler=max),
        SCHEDULER.format("of type builtin_function_or_method"),
        FACTOR,
    ),
    "a class for the scheduler": (with_model(sgd, scheduler=StepLR), SCHEDULER.format("the class StepLR"), FACTOR),
    "a scheduler of another optimizer": (
        other_scheduler,
        "scheduler StepLR belongs to another SGD than the session's",
        "build the scheduler from the optimizer that you pass to the session; this one would never be stepped",
    ),
    "an optimizer of another model": (with_model(lambda m: sgd(mlp(6, 8, 3))), MANY.format("SGD"), ORDER),
    "a model copied after": (copied_first, "SGD has 2 parameters, none of which is the model's", ORDER),
    "one of two optimizers elsewhere": (second_optimizer_elsewhere, MANY.format("AdamW"), ORDER),
    "clip_norm text": (with_model(sgd, clip_norm="1.0"), CLIP, "leave clip_norm out to train without clipping"),
    "half under fp16": (of(lambda m: m.half(), "fp16"), KEEPS.format("float16", "fp16"), HALF_HINT),
    "half under fp32": (of(lambda m: m.half(), "fp32"), KEEPS.format("float16", "fp32"), HALF_HINT),
    "bf16 under tf32": (of(lambda m: m.bfloat16(), "tf32"), KEEPS.format("bfloat16", "tf32"), HALF_HINT),
    "bf16 under fp16-master": (of(lambda m: m.bfloat16(), "fp16-master"), CASTS, CASTS_HINT),
    **{
        f"{kind.__name__} under fp16-pure, {more}": (
            with_model(lambda m, k=kind, more=more: k(m.parameters(), **more), "fp16-pure"),  # type: ignore[misc]
            EPS.format(kind.__name__, "fp16-pure", eps),
            EPS_HINT,
        )
        for kind, more, eps in EPSES
    },
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_wrong_arguments(name: str) -> None:
    run, message, hint = ARGUMENTS[name]
    with pytest.raises(SessionError) as caught:
        run()
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_eps_is_refused_where_torchs_state_divides_by_zero_and_nowhere_else() -> None:
    """The oracle is torch: its optimizers on FP16 weights, whose small gradients have squares below FP16's range."""
    kinds = (torch.optim.Adam, torch.optim.NAdam, torch.optim.Adamax, torch.optim.RMSprop, torch.optim.Adagrad)
    for kind in kinds:
        for eps in (1e-10, 1e-8, 2.9e-8, 3.0e-8, 1e-6, 1e-4):
            weight = nn.Parameter(torch.zeros(4, dtype=torch.float16))
            optimizer = kind([weight], lr=1e-3, eps=eps)
            weight.grad = torch.tensor([0.0, 1e-5, 1e-4, 1.0], dtype=torch.float16)
            optimizer.step()
            broken = not bool(weight.isfinite().all())
            model = mlp(6, 3)
            refused = False
            try:
                Session(model, kind(model.parameters(), eps=eps), policy="fp16-pure")
            except SessionError:
                refused = True
            assert refused == broken, (kind.__name__, eps)


@pytest.mark.parametrize("policy", ["fp16-master", "bf16-pure", "fp16", "fp32"])
def test_the_usual_eps_is_right_elsewhere(policy: str) -> None:
    model = mlp(6, 8, 3)
    session = Session(model, torch.optim.Adam(model.parameters(), lr=1e-2), policy=policy)
    train(session, model, 5)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_what_the_hint_of_eps_says_trains() -> None:
    for build in (lambda p: mezzo.AdamW(p, lr=1e-2), lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4)):
        model = mlp(6, 8, 3)
        session = Session(model, build(model.parameters()), policy="fp16-pure")
        first = loss_of(session, model).item()
        train(session, model, 20)
        assert loss_of(session, model).item() < first


# --- warned of ---------------------------------------------------------------------------------------------------------------


def scheduled(kind: Any, *factors: Any, policy: str = "bf16", held: bool = True) -> tuple[Session, nn.Module, Any]:
    """Return a session and a scheduler, which the session steps if it is ``held``."""
    model = mlp(6, 8, 3)
    optimizer = sgd(model)
    scheduler = kind(optimizer, *factors)
    return Session(model, optimizer, policy=policy, scheduler=scheduler if held else None), model, scheduler


def layers_replaced() -> None:
    model = mlp(6, 8, 3)
    optimizer = sgd(model)
    model[2] = nn.Linear(8, 3)
    Session(model, optimizer)


def no_autocast(policy: str = "fp16") -> None:
    session, model = built(policy)
    for _ in range(3):
        session.step(model(X).square().mean())


def only_evaluated_under_autocast() -> None:
    session, model = built()
    with torch.no_grad(), session.autocast():
        model(X)
    session.step(model(X).square().mean())


def outer_autocast(policy: str, dtype: torch.dtype) -> None:
    session, model = built(policy)
    with torch.autocast("cpu", dtype=dtype):
        loss = loss_of(session, model)
    session.step(loss)


def inner_autocast(policy: str = "fp16") -> Callable[[], None]:
    def run() -> None:
        session, model = built(policy)
        for _ in range(2):
            with session.autocast(), torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(X).float().square().mean()
            session.step(loss)
        assert not any(m._forward_pre_hooks for m in model.modules())

    return run


def divided(how: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    def run() -> None:
        session, model = built(accumulate=4)
        for _ in range(4):
            session.step(how(loss_of(session, model)))

    return run


def clipped_between() -> None:
    session, model = built()
    for _ in range(4):
        session.backward(loss_of(session, model))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        session.update()


def clipped_in_the_window() -> None:
    session, model = built(accumulate=2)
    session.backward(loss_of(session, model))
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    session.backward(loss_of(session, model))


def zeroed_in_the_window() -> None:
    session, model = built("bf16", accumulate=3)
    for _ in range(6):
        train(session, model, 1)
        session.optimizers[0].zero_grad(set_to_none=False)


def stepped_twice() -> None:
    session, model, scheduler = scheduled(ExponentialLR, 0.9)
    for _ in range(6):
        train(session, model, 1)
        scheduler.step()


def stepped_by_hand_on_skips() -> None:
    session, model, scheduler = scheduled(ExponentialLR, 0.9, policy="fp16:init_scale=16777216", held=False)
    for _ in range(3):
        session.step(spoil(loss_of(session, model)))
        scheduler.step()


CHANGED = (
    "gradients were changed between backward() and update(), while they are multiplied by the loss scale; call session.unscale() before "
    "you clip or change them, or pass clip_norm="
)
IN_WINDOW = (
    "gradients were changed between two backward passes of a window, which adds them up; remove optimizer.zero_grad() and "
    "clipping from the loop, and pass clip_norm="
)
DIVIDED = (
    "the loss was divided by 4, and the session averages the 4 micro-batches of a window itself: gradients become too small; "
    "pass the loss undivided"
)
OUTSIDE = (
    "the first loss was computed outside session.autocast(): policy {} cast none of it; write `with session.autocast():` around the "
    "forward pass and the loss"
)
OUTER = "session.autocast() and a torch.autocast of {} are nested, and policy {} asks for another format; remove torch.autocast"
WARNED: dict[str, tuple[Callable[[], Any], str]] = {
    "layers replaced before": (
        layers_replaced,
        "2 parameters of the model are in no optimizer, and 2 parameters of the optimizers are not in the model: layers were "
        "replaced after the optimizer was built; build it afterwards",
    ),
    "FP64": (
        of(lambda m: m.double(), "fp16"),
        "the model is in torch.float64, which no policy casts: policy fp16 changes nothing; call model.float() before the optimizer "
        "is built",
    ),
    "no autocast": (no_autocast, OUTSIDE.format("fp16")),
    "no autocast, bf16": (lambda: no_autocast("bf16:op_lists=device"), OUTSIDE.format("bf16:op_lists=device")),
    "only evaluated under autocast": (only_evaluated_under_autocast, OUTSIDE.format("fp16")),
    "another format around": (lambda: outer_autocast("fp16", torch.bfloat16), OUTER.format("torch.bfloat16", "fp16")),
    "autocast of another format inside": (inner_autocast(), OUTER.format("torch.bfloat16", "fp16")),
    "autocast inside fp32": (inner_autocast("fp32"), OUTER.format("torch.bfloat16", "fp32")),
    "autocast around fp32": (lambda: outer_autocast("fp32", torch.float16), OUTER.format("torch.float16", "fp32")),
    "divided": (divided(lambda loss: loss / 4), DIVIDED),
    "divided in place": (divided(lambda loss: loss.div_(4.0)), DIVIDED),
    "multiplied by a quarter": (divided(lambda loss: 0.25 * loss), DIVIDED),
    "clipped before unscale": (clipped_between, CHANGED),
    "clipped in a window": (clipped_in_the_window, IN_WINDOW),
    "gradients made zero in a window": (zeroed_in_the_window, IN_WINDOW),
    "a scheduler stepped by both": (
        stepped_twice,
        "ExponentialLR is stepped by the script and by the session, so it runs ahead; remove scheduler.step(), or leave "
        "scheduler= out of Session(...)",
    ),
    "a scheduler stepped on skips": (
        stepped_by_hand_on_skips,
        "the learning rate changed from one skipped update to the next: a scheduler is stepped where nothing was updated; pass it as "
        "Session(..., scheduler=scheduler), which then makes it wait, and remove scheduler.step()",
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("name", WARNED)
def test_what_is_warned_of(name: str) -> None:
    run, message = WARNED[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    own = [w for w in caught if issubclass(w.category, PrecisionWarning)]
    assert [str(w.message) for w in own] == [message]
    assert own[0].filename == __file__  # the line of the script


# --- loops that are refused ------------------------------------------------------------------------------------------------------


def backward_inside(policy: str = "fp16", count: int = 1) -> None:
    session, model = built(policy)
    with session.autocast():
        for _ in range(count):
            session.step(model(X).float().square().mean())


def scaled_by(kind: Any, policy: str = "fp16") -> Callable[[], None]:
    def run() -> None:
        session, model = built(policy)
        scaler = kind("cpu", init_scale=1024.0)
        session.step(scaler.scale(loss_of(session, model)))

    return run


def loss_of_another_model() -> None:
    session, _ = built()
    session.step(loss_of(session, mlp(6, 8, 3)))


def one_update_of_the_other_player() -> None:
    first, second = mlp(6, 6), mlp(6, 3)
    optimizers = [sgd(first), sgd(second)]
    session = Session([first, second], optimizers, policy="fp32")
    session.backward(first(X).mean())
    session.update(optimizers[1])


def in_the_window(act: Callable[[torch.optim.Optimizer], Any]) -> Callable[[], None]:
    def run() -> None:
        session, model = built(accumulate=3)
        for _ in range(3):
            train(session, model, 1)
            act(session.optimizers[0])

    return run


def old_loop_with_backward() -> None:
    session, model = built()
    optimizer = session.optimizers[0]
    for _ in range(3):
        session.backward(loss_of(session, model))
        optimizer.step()
        optimizer.zero_grad()


def own_backward() -> None:
    session, model = built()
    loss_of(session, model).backward()  # type: ignore[no-untyped-call]
    train(session, model)


def gan_of_two_sessions() -> None:
    first, second = mlp(6, 6), mlp(6, 3)
    one, other = built(model=first)[0], built(model=second)[0]
    for _ in range(3):
        with other.autocast():
            loss = second(first(X).detach()).float().mean()
        other.step(loss)
        with one.autocast():
            loss = second(first(X)).float().mean()
        one.step(loss)


def two_sessions() -> None:
    model = mlp(6, 8, 3)
    optimizer = sgd(model)
    first, second = (Session(model, optimizer, policy="fp16") for _ in range(2))
    train(second, model)
    train(first, model)


def session_of_a_part() -> None:
    model = mlp(6, 8, 3)
    first = Session(model, sgd(model), policy="fp16")
    part = Session(model[0], sgd(model[0]), policy="fp16")
    with part.autocast():
        loss = model[0](X).float().mean()
    part.step(loss)
    train(first, model)


def half_afterwards(update: int, change: Callable[[nn.Module], Any]) -> Callable[[], None]:
    def run() -> None:
        session, model = built("bf16")
        train(session, model, update)
        change(model)
        with session.autocast():
            loss = model(X.to(model[0].weight.dtype)).float().mean()  # type: ignore[union-attr, arg-type]
        session.step(loss)

    return run


def moved() -> None:
    session, model = built()
    loss = loss_of(session, model)
    session.state.ownership._places = [(p, torch.device("meta")) for p, _ in session.state.ownership._places]
    session.step(loss)


def changed(change: Callable[[Any], Any]) -> Callable[[], None]:
    """Return a training of a model that was changed after its session was built."""

    def run() -> None:
        session, model = built()
        change(model)
        train(session, model)

    return run


def assigned(model: nn.Module) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


BLOCK = (
    "backward() while autocast is on for cpu; allowed: after the `with session.autocast():` block",
    "end the block before session.step(loss): casts of weights are reused until it ends, also after an update",
)
SCALED = (
    "the loss was multiplied by the 1024 of a GradScaler; allowed: the loss itself",
    "pass loss, not scaler.scale(loss), and remove the scaler from the loop: the session scales by its policy",
)
NOTHING = (
    "no parameter of the optimizers has a gradient after the backward pass: the loss does not depend on them",
    "compute the loss from the output of the session's own model, and pass the optimizers of the models that it reaches: update(optimizer)",
)
REMOVE = "remove optimizer.step() and optimizer.zero_grad() from the loop: session.step() and session.update() do both"
GONE = ("the gradients of a window's earlier backward passes are gone", REMOVE)
LEFT = (
    "a parameter of shape {} has a gradient before the first backward pass of a window, one that was not multiplied by this "
    "session's loss scale",
    "do not call loss.backward() yourself; give models whose losses reach each other's parameters to one session: "
    "Session([first, second], [first_optimizer, second_optimizer])",
)
TAKEN = (
    "backward() of a session whose model was passed to another session since; allowed: the newer session",
    "use one session at a time; models that are trained in turn can share one: Session([first, second], [first_optimizer, "
    "second_optimizer]), then update(first_optimizer)",
)
CAST_HINT = "remove model.half() and the like: the policy casts; evaluate a copy (copy.deepcopy(model).half())"
OTHERS = (
    "the model's parameters are not those that it had when the session was built: they would not be trained",
    "change the model first (layers, adapters, load_state_dict(assign=True), fully_shard), then build optimizer and session",
)
COPY = (
    "a session was copied or pickled; allowed: its state",
    "copy the model, build its optimizer and a new session, then new.load_state_dict(session.state_dict())",
)
MOVED = (
    "the model is on cpu, and was on meta when the session was built",
    "move the model first, then build optimizer and session",
)
CHANGED_WEIGHTS = ("weights were changed between two backward passes of a window", REMOVE)
NARROW = "weights of shape (8, 6) are torch.{}, and were torch.float32 when the session was built"
NO_GRAPH = (
    "backward() got a tensor of shape () with requires_grad=False; a loss is one number that depends on the model",
    "compute it from the model's output, outside torch.no_grad(), with parameters that require gradients",
)
SPARSE = (
    "a gradient of shape (9, 3) is torch.sparse_coo; allowed: dense gradients",
    "build the embedding with sparse=False, or use torch.optim.SparseAdam for it",
)


def sparse_for_one_pass() -> None:
    model = nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 2))
    session = Session(model, mezzo.AdamW(model.parameters()), policy="fp16")
    with session.autocast():
        loss = model(torch.tensor([1, 2])).float().square().mean()
    session.step(loss)


LOOPS: dict[str, tuple[Callable[[], Any], tuple[str, str]]] = {
    "step in the block": (backward_inside, BLOCK),
    "step in the block, CPU's own kernels": (lambda: backward_inside("bf16:op_lists=device"), BLOCK),
    "the loop in the block": (lambda: backward_inside(count=3), BLOCK),
    "torch's GradScaler": (scaled_by(torch.amp.GradScaler), SCALED),
    "torch's GradScaler under fp32": (scaled_by(torch.amp.GradScaler, "fp32"), SCALED),
    "our GradScaler": (scaled_by(GradScaler), SCALED),
    "a loss of another model": (loss_of_another_model, NOTHING),
    "an update of what the loss does not reach": (one_update_of_the_other_player, NOTHING),
    "zero_grad in the window": (in_the_window(lambda o: o.zero_grad()), GONE),
    "step in the window": (in_the_window(lambda o: o.step()), CHANGED_WEIGHTS),
    "the old step after backward": (old_loop_with_backward, GONE),
    "a backward pass of one's own": (own_backward, (LEFT[0].format((8, 6)), LEFT[1])),
    "two sessions of a GAN": (gan_of_two_sessions, (LEFT[0].format((3, 6)), LEFT[1])),
    "two sessions": (two_sessions, TAKEN),
    "a session of a part": (session_of_a_part, TAKEN),
    "half at first": (half_afterwards(0, lambda m: m.half()), (NARROW.format("float16"), CAST_HINT)),
    "bfloat16 later": (half_afterwards(5, lambda m: m.bfloat16()), (NARROW.format("bfloat16"), CAST_HINT)),
    "a sparse embedding for mezzo.AdamW": (sparse_for_one_pass, SPARSE),
    "moved": (moved, MOVED),
    "a layer replaced": (changed(lambda m: m.__setitem__(2, nn.Linear(8, 3))), OTHERS),
    "a layer taken out": (changed(lambda m: m.__setitem__(2, nn.Identity())), OTHERS),
    "parameters assigned": (changed(assigned), OTHERS),
    "a frozen model": (changed(lambda m: m.requires_grad_(False)), NO_GRAPH),
    "a copy": (lambda: copy.deepcopy(built()[0]), COPY),
    "a shallow copy": (lambda: copy.copy(built()[0]), COPY),
    "a pickle": (lambda: pickle.dumps(built()[0]), COPY),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_that_are_refused(name: str) -> None:
    run, (message, hint) = LOOPS[name]
    with pytest.raises(SessionError) as caught:
        run()
    assert (caught.value.message, caught.value.hint) == (message, hint)
    assert isinstance(caught.value, MezzoError)


# --- loops that are right: not a word ---------------------------------------------------------------------------------------------


def mean_by_hand() -> None:
    """A sum over 4 samples, divided by 4 in windows of 4: that is a mean."""
    session, model = built(accumulate=4)
    for _ in range(8):
        with session.autocast():
            per_sample = model(X).float().square().mean(1)
        session.step(per_sample.sum() / 4)
    with session.autocast():
        loss = nn.functional.cross_entropy(model(X), torch.zeros(4, dtype=torch.int64), reduction="sum")
    session.step(loss / 4)


def half_a_square() -> None:
    """Half of a mean of squares is a loss of its own, also in windows of two."""
    for how in (lambda e: 0.5 * e.square().mean(), lambda e: e.square().mean() / 2):
        session, model = built(accumulate=2)
        for _ in range(4):
            with session.autocast():
                error = model(X).float()
            session.step(how(error))


def scaled_on_purpose() -> None:
    session, model = built()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for _ in range(3):
        session.step(loss_of(session, model) * torch.tensor(8.0))


def notebook_cell_run_again() -> None:
    model = mlp(6, 8, 3)
    optimizer = sgd(model)
    for _ in range(3):
        session = Session(model, optimizer, policy="fp16")
        train(session, model)


def evaluation_between() -> None:
    session, model = built()
    for _ in range(4):
        train(session, model, 1)
        model.eval()
        with torch.no_grad(), session.autocast():
            model(X)
        model.train()


def unscaled_and_clipped() -> None:
    session, model = built()
    for _ in range(4):
        session.backward(loss_of(session, model))
        session.unscale()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        session.update()


def epoch_scheduler_by_hand() -> None:
    session, model, scheduler = scheduled(StepLR, 1, 0.5, policy="fp16:init_scale=64", held=False)
    for _ in range(3):
        train(session, model, 4)
        session.step(spoil(loss_of(session, model)))
        scheduler.step()


def loaded_scheduler() -> None:
    session, model, scheduler = scheduled(StepLR, 1, 0.5)
    train(session, model, 3)
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 40, "_step_count": 41})
    train(session, model, 3)


def head_only() -> None:
    model = mlp(6, 8, 3)
    session = Session(model, SGD(model[2].parameters(), lr=0.1), policy="fp16")
    train(session, model, 5)


def unfrozen_later() -> None:
    session, model = built()
    model[0].requires_grad_(False)
    train(session, model, 2)
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()  # type: ignore[union-attr, operator]
    train(session, model, 4)
    assert not torch.equal(before, model[0].weight)  # type: ignore[arg-type]


def several_losses_and_players() -> None:
    first, second = mlp(6, 6), mlp(6, 3)
    optimizers = [sgd(first), sgd(second)]
    session = Session([first, second], optimizers, policy="fp16", num_losses=2)
    for _ in range(4):
        with session.autocast():
            fake = first(X)
            critic = second(fake.detach()).float().square().mean()
        session.backward(critic, loss_id=1)
        session.update(optimizers[1])
        with session.autocast():
            loss = second(first(X)).float().mean()
        session.backward(loss)
        session.update(optimizers[0])


def same_autocast_around() -> None:
    outer_autocast("fp16", torch.float16)


def an_island_in_fp32() -> None:
    session, model = built()
    for _ in range(3):
        with session.autocast():
            hidden = model[0](X)  # type: ignore[operator]
            with torch.autocast("cpu", enabled=False):
                loss = model[2](hidden.float()).square().mean()  # type: ignore[operator]
        session.step(loss)


def a_frozen_part_in_two_sessions() -> None:
    shared = mlp(6, 6).requires_grad_(False)
    pairs = [(model := mlp(6, 3), Session([model, shared], sgd(model), policy="fp16")) for _ in range(2)]
    for _ in range(4):
        for model, session in pairs:
            with session.autocast():
                loss = model(shared(X)).float().square().mean()
            session.step(loss)


def a_frozen_table_made_on_the_way() -> None:
    session, model = built()
    train(session, model, 1)
    model.register_parameter("table", nn.Parameter(torch.ones(3), requires_grad=False))
    train(session, model, 3)


def two_models_two_sessions() -> None:
    pairs = [built(), built("bf16")]
    for _ in range(4):
        for session, model in pairs:
            train(session, model, 1)


RIGHT = [
    *(a_frozen_part_in_two_sessions, two_models_two_sessions, a_frozen_table_made_on_the_way, mean_by_hand),
    *(half_a_square, scaled_on_purpose, notebook_cell_run_again, evaluation_between, unscaled_and_clipped),
    *(epoch_scheduler_by_hand, loaded_scheduler, head_only, unfrozen_later, several_losses_and_players),
    *(same_autocast_around, an_island_in_fp32),
]


@pytest.mark.parametrize("run", RIGHT, ids=lambda run: run.__name__)
def test_right_loops_hear_nothing(run: Callable[[], None]) -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        run()
    assert [str(one.message) for one in heard] == []


def test_nothing_is_checked_after_the_first_windows() -> None:
    session, model = built()
    seen = []
    for _ in range(5):
        seen.append(type(session.state.loop_checks).__name__)
        train(session, model, 1)
    assert seen == ["LoopChecks"] * 3 + ["NoLoopChecks"] * 2


def test_an_unreferenced_session_owns_nothing() -> None:
    model = mlp(6, 8, 3)
    train(Session(model, sgd(model), policy="fp16"), model, 1)
    gc.collect()
    owners = [o for o in gc.get_objects() if type(o) is Ownership and model[0].weight in o._parameters]
    assert owners == []
