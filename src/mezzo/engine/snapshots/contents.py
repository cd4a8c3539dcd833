"""The contents of a session's snapshot and of its state dict, which are loaded completely or not at all.

A state dict has the models by their own names and in FP32. It loads under another policy, and from ``DistributedDataParallel`` into one
process or back: models are saved without the prefix of a wrapper. Each process saves its own part of sharded tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.engine import session_errors
from mezzo.engine.gradients import all_parameters, trained_by
from mezzo.engine.optimizers.one_pass import OnePass
from mezzo.engine.processes.shards import bare, local
from mezzo.engine.randomness import check_generators, random_states, set_random_states
from mezzo.engine.snapshots.background import Copies
from mezzo.engine.snapshots.structure import Shard, placed, placed_model, placed_optimizer, put_together, take_apart
from mezzo.engine.state import SessionParts, open_window
from mezzo.errors import MezzoError, SessionError, SnapshotError
from mezzo.policy import Policy


def state_of(session: SessionParts, *, window_calls: int) -> dict[str, Any]:
    """Return everything that training needs to resume.

    Args:
        session: the session.
        window_calls: backward passes since its last update.

    Raises:
        SessionError: a window is open; its gradients are not part of the state.
    """
    _refuse_open_window("state_dict()", window_calls)
    optimizers = [o.state_dict() for o in session.optimizers]
    masters = session.masters.saved(optimizers)
    return {
        "policy": str(session.policy),
        "models": [_fp32_state(bare(model), masters) for model in session.models],
        "optimizers": optimizers,
        "schedulers": [s.state_dict() for s in session.schedulers],
        "scales": [s.state_dict() for s in session.scales],
        "updates": session.updates,
        "skipped": session.skipped,
    }


def load_state(session: SessionParts, state: dict[str, Any], *, window_calls: int) -> None:
    """Load what ``state_of`` returned, without the counts.

    Args:
        session: the session that loads it.
        state: the saved state.
        window_calls: backward passes since the session's last update.

    Raises:
        SessionError: the state has other numbers of models, optimizers, schedulers or losses, or a window is open.
    """
    _refuse_open_window("load_state_dict()", window_calls)
    models = [bare(model) for model in session.models]
    parts = {part: getattr(session, part) for part in ("models", "optimizers", "schedulers", "scales")}
    session_errors.check_state(state, parts)
    for model, saved in zip(models, state["models"], strict=True):
        model.load_state_dict(saved)
    for part in ("optimizers", "schedulers", "scales"):
        for item, saved in zip(getattr(session, part), state[part], strict=True):
            item.load_state_dict(saved)
    session.masters.load(models, state["models"])


def _fp32_state(model: nn.Module, masters: dict[nn.Parameter, Tensor]) -> dict[str, Tensor]:
    """Return the model's state dict with the FP32 masters that it has: it loads into a model of any format."""
    state = dict(model.state_dict())
    named = model.named_parameters(remove_duplicate=False)
    return {**state, **{name: masters[parameter] for name, parameter in named if parameter in masters}}


def _refuse_open_window(call: str, window_calls: int) -> None:
    if window_calls:
        raise SessionError(
            f"{call} after {window_calls} backward passes of an open window",
            hint="call update() first: gradients of an open window are not saved",
        )


def contents_of(session: SessionParts, extra: Any = None) -> dict[str, Any]:
    """Return all state of a session that a resumed run needs to be bit-identical, including an open window.

    The tensors are the session's own: copy them before training continues.
    """
    parameters = all_parameters(session.models, session.optimizers)
    is_open = session.state.window.calls > 0
    return {
        "session": state_of(session, window_calls=0),
        "kinds": _kinds(session),
        "accumulate": session.accumulate,
        "window": session.state.window.state_dict() if is_open else None,
        "gradients": {n: p.grad for n, p in enumerate(parameters) if p.grad is not None} if is_open else {},
        "norm": session.state.progress.norm,
        "buffers": [_unsaved_buffers(model) for model in session.models],
        "random": random_states(),
        "position": session.state.position.state_dict(),
        "extra": extra,
    }


def set_contents(
    session: SessionParts, contents: Mapping[str, Any], *, in_all: Callable[[bool], bool] = lambda here: here
) -> None:
    """Replace a session's state by a snapshot's contents; if any part does not fit, nothing changes.

    Args:
        session: the session.
        contents: the result of ``contents_of``.
        in_all: takes whether the contents fit in this process, and returns whether they fit in all processes.

    Raises:
        SnapshotError: the contents are of another model, or of an open window of another policy or length.
    """
    if not isinstance(contents, dict) or "session" not in contents:
        raise SnapshotError("it contains no session", hint="pass a snapshot that session.save wrote")
    tree, tensors = take_apart(contents_of(session))
    before = put_together(tree, Copies().of(tensors))
    try:
        _refuse_other(session, contents)
        _set(session, contents)
    except Exception as error:  # a forged state may make torch raise anything: load all of it or nothing
        _set(session, before)
        in_all(False)
        if isinstance(error, MezzoError):
            raise SnapshotError(error.message, hint=error.hint) from None
        raise SnapshotError(
            f"its contents do not fit this session: {type(error).__name__}: {str(error)[:200]}",
            hint="build the session as it was when it saved the snapshot",
        ) from None
    if not in_all(True):
        _set(session, before)
        raise SnapshotError(
            "it does not fit the session of another process",
            hint="build the session as it was when it saved the snapshot",
        )


def _set(session: SessionParts, contents: Mapping[str, Any]) -> None:
    state, window = contents["session"], contents["window"]
    state = {
        **state,
        "models": [placed_model(s, bare(m)) for s, m in zip(state["models"], session.models, strict=True)],
        "optimizers": [placed_optimizer(s, o) for s, o in zip(state["optimizers"], session.optimizers, strict=True)],
    }
    open_window(session)
    session.state.loop_checks.gradients_moved()
    load_state(session, state, window_calls=0)
    if state["policy"] == str(session.policy):
        for optimizer, saved in zip(session.optimizers, state["optimizers"], strict=True):
            keep_formats(optimizer, saved)
    for model, buffers in zip(session.models, contents["buffers"], strict=True):
        _set_buffers(bare(model), buffers)
    parameters = all_parameters(session.models, session.optimizers)
    for number, parameter in enumerate(parameters):
        gradient = placed(contents["gradients"].get(number), parameter)
        parameter.grad = None if gradient is None else gradient.to(parameter.device)
    if window is not None:
        session.state.window.load_state_dict(window, session.device)
    session.state.progress.restore(updates=state["updates"], skipped=state["skipped"])
    session.state.progress.measured(contents["norm"].to(session.device))
    check_generators(contents["position"])
    session.state.position.load_state_dict(contents["position"], contents["random"])
    set_random_states(contents["random"])


def load_or_refuse(session: SessionParts, state: Mapping[str, Any], *, window_calls: int) -> None:
    """Load a state dict with its counts, or refuse it before anything changes, without a copy of the session.

    Raises:
        SessionError: it does not fit, or a window is open.
        SnapshotError: it is of another model.
    """
    try:
        _refuse_unfit(session, state)
    except MezzoError:
        raise
    except Exception as error:
        raise SessionError(
            f"the state does not fit this session, which is as it was: {type(error).__name__}: {str(error)[:200]}",
            hint="pass what state_dict() returned, of a session with the same models, optimizers and schedulers",
        ) from error
    load_state(session, dict(state), window_calls=window_calls)
    session.state.progress.restore(updates=state["updates"], skipped=state["skipped"])


def _refuse_unfit(session: SessionParts, state: Mapping[str, Any]) -> None:
    """Raise for counts, shapes, groups and scales that would fail while they are loaded; any error says that the state does not fit."""
    counts = state["updates"], state["skipped"]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError(f"{counts[0]!r} updates and {counts[1]!r} skipped; allowed: whole numbers of 0 or more")
    for model, saved in zip(
        session.models, state["models"], strict=False
    ):  # other numbers of them are refused with their own words
        _refuse_other_model(bare(model), saved, "the model")
        _refuse_not_finite(bare(model), saved)
    has_scale = Policy.of(state["policy"]).loss_scale != "none"
    for optimizer, saved in zip(session.optimizers, state["optimizers"], strict=False):
        own, theirs = (
            [len(group["params"]) for group in groups] for groups in (optimizer.param_groups, saved["param_groups"])
        )
        if own != theirs or not all(isinstance(values, Mapping) for values in saved["state"].values()):
            raise ValueError(f"an optimizer with groups of {theirs} parameters; this one has {own}")
    for saved in state["scales"]:
        if has_scale and "scale" not in saved:
            raise ValueError(
                f"a loss scale of {saved!r}; allowed: a finite number above 0, under policy {state['policy']}"
            )
        scale = saved.get("scale", 1.0)
        if not math.isfinite(scale) or scale <= 0:
            raise ValueError(f"a loss scale of {scale!r}; allowed: finite, above 0")
    for saved in state["schedulers"]:
        dict(saved)


def keep_formats(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore the formats in which state tensors were saved: torch loads them in the formats of their parameters."""
    if isinstance(optimizer, OnePass):
        return
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, trained_by([optimizer]), strict=True):
        for name, value in saved["state"].get(number, {}).items():
            loaded = optimizer.state[parameter].get(name)
            if isinstance(loaded, Tensor) and isinstance(value, Tensor) and loaded.dtype is not value.dtype:
                optimizer.state[parameter][name] = value.to(loaded.device, copy=True)


def _kinds(session: SessionParts) -> list[str]:
    """Return the names of the optimizers' and schedulers' classes: torch would silently load the state of one into another."""
    return [type(one).__name__ for one in (*session.optimizers, *session.schedulers)]


def _refuse_other(session: SessionParts, contents: Mapping[str, Any]) -> None:
    """Refuse contents that would fail too late: other names or shapes, moments of other shapes, a window of another kind."""
    for number, (model, saved) in enumerate(zip(session.models, contents["session"]["models"], strict=False)):
        _refuse_other_model(bare(model), saved, f"model {number}" if len(session.models) > 1 else "the model")
    if contents["kinds"] != _kinds(session):
        raise SnapshotError(
            f"it contains the state of {', '.join(contents['kinds'])}; this session has {', '.join(_kinds(session))}",
            hint="build optimizer and scheduler as in the run that was stopped",
        )
    for optimizer, saved in zip(session.optimizers, contents["session"]["optimizers"], strict=False):
        if isinstance(optimizer, OnePass):
            _refuse_other_moments(optimizer, saved)
    if contents["window"] is None:
        return
    policy = contents["session"]["policy"]
    if policy != str(session.policy) or contents["accumulate"] != session.accumulate:
        raise SnapshotError(
            f"it was saved inside an accumulation window, of {contents['accumulate']} micro-batches under policy {policy}; this session "
            f"has {session.accumulate} under {session.policy!s}",
            hint="load it under the same policy and accumulate, or load a snapshot that was saved after an update",
        )


def _refuse_other_model(model: nn.Module, saved: Mapping[str, Any], what: str) -> None:
    own = {name: value.shape for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    theirs = {name: torch.Size(value.shape) for name, value in saved.items() if isinstance(value, (Tensor, Shard))}
    if own == theirs:
        return
    for name in [*own, *theirs]:
        if own.get(name) != theirs.get(name):
            raise SnapshotError(
                f"{name!r} {_shape(theirs.get(name))} in the snapshot, and {_shape(own.get(name))} in {what}: it belongs to another model",
                hint="build the model as in the run that was stopped",
            )


def _refuse_not_finite(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Refuse weights that no training continues from; reads each once."""
    for name, _ in model.named_parameters():
        value = saved.get(name)
        tensor = value.part if isinstance(value, Shard) else local(value)
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel() and _has_nan_or_inf(tensor):
            raise SnapshotError(
                f"the weight {name!r} has values that are not finite: its training had diverged",
                hint="load the state of an earlier update",
            )


def _has_nan_or_inf(tensor: Tensor) -> bool:
    return any(not math.isfinite(one) for one in torch.stack(torch.aminmax(tensor)).tolist())  # no memory for a mask


def _shape(shape: torch.Size | None) -> str:
    return "is not" if shape is None else f"has shape {tuple(shape)}"


def _refuse_other_moments(optimizer: OnePass, saved: Mapping[str, Any]) -> None:
    """Refuse moments and masters of other shapes than their weights': the kernels walk through memory by address."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, optimizer.parameters(), strict=False):
        for name, value in saved["state"].get(number, {}).items():
            if not isinstance(value, (Tensor, Shard)) or name == "step":
                continue
            own = optimizer.whole_shape(parameter, name)
            expected = tuple(parameter.shape if own is None else own)
            if tuple(value.shape) != expected:
                raise SnapshotError(
                    f"{name!r} of parameter {number} has shape {tuple(value.shape)}, and the parameter {tuple(parameter.shape)}",
                    hint="build the model and the optimizer as in the run that was stopped",
                )


def _unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are not in a model's state dict, which training may still change."""
    inner = bare(model)
    saved = inner.state_dict().keys()
    return {name: buffer for name, buffer in inner.named_buffers() if name not in saved}


def _set_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    for name, value in buffers.items():
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        before = module._buffers.get(last)
        if before is not None and before.shape == value.shape:
            before.copy_(value)
        else:
            module.register_buffer(last, value.to(next(iter(model.parameters())).device), persistent=False)
