"""A contract in a script's own code: ``mezzo.expect(...)`` says what is expected, and ``check`` compares models and optimizers with it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from mezzo.engine.session_errors import PrecisionWarning
from mezzo.errors import ContractError, UsageError
from mezzo.observe.contracts.collected import (
    Held,
    TensorNames,
    gradients_held,
    models_hold,
    optimizer_holds,
    placed,
    reductions_by_replicas,
    sharded_exchanges,
    stored_format,
    weights_behind,
)
from mezzo.observe.contracts.contract import ROLES, Contract, breaches, contract_of, read_contract
from mezzo.observe.observer import ModuleTree
from mezzo.records import Breach, ContractRole, TensorFormat

ExpectedTable: TypeAlias = str | Sequence[str] | Mapping[str, str | Sequence[str]]
_NAMED = 10
"""The most breaches that an error names."""
_ALWAYS_THERE: tuple[ContractRole, ...] = ("weights", "buffers")
_SEEN_IN_A_RUN: tuple[ContractRole, ...] = ("activations", "checkpoints")
"""Roles of tensors that no model or optimizer holds."""


def expect(file: str | Path | None = None, /, **tables: ExpectedTable) -> Expectation:
    """Return the formats that a training is expected to keep its tensors in; nothing is checked, or costs anything, until ``check``.

    Args:
        file: a contract, as ``mezzo audit --write-expect`` writes it.
        tables: in place of a file, by role, a format or formats by pattern: ``weights="fp32"``, ``optimizer_state={"exp_avg*": "fp32"}``.

    Raises:
        UsageError: both or neither were given, the file cannot be read, or a role or a format does not exist.
    """
    if (file is None) == (not tables):
        given = f"{str(file)!r} and {', '.join(tables)}" if tables else "neither a file nor a table"
        raise UsageError(
            f"expect() was given {given}; allowed: a file, or tables {', '.join(ROLES)}",
            hint='write mezzo.expect("precision.toml") or mezzo.expect(weights="fp32")',
        )
    return Expectation(read_contract(file) if file is not None else contract_of(tables))


class Expectation:
    """Formats that are expected of a training's tensors."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._warned = False

    def check(self, *objects: nn.Module | Optimizer, ema: nn.Module | None = None) -> tuple[ContractRole, ...]:
        """Compare what models and optimizers hold now with what is expected; of sharded tensors, this process's part.

        Call it after set-up, after the first update, and after a resume.

        Args:
            objects: the models and optimizers; a contract's lines must match their tensors.
            ema: the model that holds averages of the weights.

        Returns:
            The roles with lines of which nothing is there yet, such as gradients before the first backward pass.

        Raises:
            ContractError: a tensor is stored in another format, or a line matches nothing.
            UsageError: an object is neither a model nor an optimizer.
        """
        models = [one for one in objects if isinstance(one, nn.Module)]
        optimizers = [one for one in objects if isinstance(one, Optimizer)]
        if len(models) + len(optimizers) < len(objects) or not models:
            kinds = ", ".join(type(one).__name__ for one in objects) or "nothing"
            raise UsageError(
                f"check() was given {kinds}; allowed: models (torch.nn.Module) and torch optimizers",
                hint="write expectation.check(model, optimizer)",
            )
        self._warn_of_unseen()
        found = _formats(models, optimizers, ema)
        there = {*_ALWAYS_THERE, *(one.role for one in found)}
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else None
        broken = breaches(self._contract, found, rank=rank, roles=there)
        if broken:
            raise ContractError(_message(broken, self._contract.file, rank), hint=_HINT)
        return tuple(role for role in ROLES if role in self._contract.roles() - there)

    def _warn_of_unseen(self) -> None:
        unseen = [role for role in _SEEN_IN_A_RUN if role in self._contract.roles()]
        if unseen and not self._warned:
            self._warned = True
            tables = " and ".join(f"[{role}]" for role in unseen)
            text = f"check() does not see {tables}: no model or optimizer holds them. mezzo audit --expect checks them in a run"
            warnings.warn(text, PrecisionWarning, stacklevel=3)


_HINT = "store these tensors as expected, or change the contract; mezzo audit --expect names the line that made each"


def _formats(models: list[nn.Module], optimizers: list[Optimizer], ema: nn.Module | None) -> list[TensorFormat]:
    names = TensorNames()
    names.learn(models, ModuleTree())
    found = []
    for held in _held(models, optimizers, ema):
        module, tensor = names.of(held)
        one = TensorFormat(
            role=held.role, module=module, tensor=tensor, formats=list(held.formats), moment="set-up", step=0
        )
        found.append(one)
    return found


def _held(models: list[nn.Module], optimizers: list[Optimizer], ema: nn.Module | None) -> Iterator[Held]:
    yield from models_hold(models)
    yield from reductions_by_replicas(models)
    yield from sharded_exchanges(models)
    behind = weights_behind(optimizers, models)
    for optimizer in optimizers:
        for held in (*gradients_held(optimizer), *optimizer_holds(optimizer)):
            yield placed(held, behind)
    if ema is not None:
        tree = ModuleTree()
        for path, module in tree.modules(ema):
            for name, average in tree.parameters(module):
                yield Held("ema", ".".join(filter(None, (path, name))), "", (stored_format(average),))


def _message(broken: list[Breach], file: str, rank: int | None) -> str:
    where = "" if rank is None else f"rank {rank}: "
    texts = [_sentence(one) for one in broken[:_NAMED]]
    more = f"; and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
    return f"{where}not stored as {file or 'expect()'} says: {'; '.join(texts)}{more}"


def _sentence(one: Breach) -> str:
    expected = " or ".join(one.expected)
    if one.problem == "nothing":
        return f'no tensor in [{one.role}] has a name like "{one.pattern}", expected {expected}'
    name = ".".join(filter(None, (one.module, one.tensor)))
    return f"{name} ({one.role}) is {' and '.join(one.found)}, expected {expected}"
