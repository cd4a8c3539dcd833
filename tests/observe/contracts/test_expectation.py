"""``mezzo.expect`` in a script's own code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

import mezzo
from mezzo.engine.session_errors import PrecisionWarning
from mezzo.errors import ContractError, UsageError


def trained(num_steps: int = 1, *, form: torch.dtype = torch.float32) -> tuple[nn.Module, Optimizer]:
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).to(form)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        model(torch.ones(3, 4, dtype=form)).float().square().sum().backward()
        optimizer.step()
    return model, optimizer


def kept_in_mezzo() -> tuple[nn.Module, Optimizer]:
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = mezzo.AdamW(model.parameters())
    session = mezzo.Session(model, optimizer, policy="bf16-master")
    with session.autocast():
        loss = model(torch.ones(3, 4)).float().sum()
    session.step(loss)
    return model, optimizer


CHECKS: list[tuple[dict[str, Any], Callable[[], tuple[nn.Module, Optimizer]], list[str]]] = [
    # tables, what was trained, the sentences of the error
    ({"weights": "fp32", "optimizer_state": {"exp_avg*": "fp32"}, "gradients": "fp32"}, trained, []),
    ({"weights": "bf16", "optimizer_state": "bf16"}, lambda: trained(form=torch.bfloat16), []),
    (
        {"optimizer_state": {"*.weight.exp_avg": "fp32"}},
        lambda: trained(form=torch.bfloat16),
        [
            "0.weight.exp_avg (optimizer_state) is bf16, expected fp32",
            "1.weight.exp_avg (optimizer_state) is bf16, expected fp32",
        ],
    ),
    (
        {"buffers": {"running_mean": ["bf16", "fp16"]}},
        trained,
        ["1.running_mean (buffers) is fp32, expected bf16 or fp16"],
    ),
    (
        {"weights": {"haed.*": "fp32"}},
        trained,
        ['no tensor in [weights] has a name like "haed.*", expected fp32'],
    ),
    ({"weights": "bf16", "master_weights": "fp32"}, kept_in_mezzo, []),
    (
        {"master_weights": {"0.bias": "bf16"}},
        kept_in_mezzo,
        ["0.bias (master_weights) is fp32, expected bf16"],
    ),
]


@pytest.mark.parametrize(("tables", "training", "sentences"), CHECKS)
def test_what_models_and_optimizers_hold(
    tables: dict[str, Any], training: Callable[[], tuple[nn.Module, Optimizer]], sentences: list[str]
) -> None:
    model, optimizer = training()
    expectation = mezzo.expect(**tables)
    if not sentences:
        assert expectation.check(model, optimizer) == ()
        return
    with pytest.raises(ContractError) as error:
        expectation.check(model, optimizer)
    assert error.value.message == f"not stored as expect() says: {'; '.join(sentences)}"


def test_what_is_not_there_yet_is_returned() -> None:
    model, optimizer = trained(0)
    expectation = mezzo.expect(weights="fp32", gradients="fp32", optimizer_state="fp32", ema="fp32")
    assert expectation.check(model, optimizer) == ("gradients", "optimizer_state", "ema")
    assert expectation.check(*trained(1), ema=copy.deepcopy(model)) == ()


def test_an_average_in_another_format_is_found() -> None:
    model, _ = trained(0)
    with pytest.raises(ContractError, match=r"0.weight \(ema\) is bf16, expected fp32"):
        mezzo.expect(ema={"0.*": "fp32"}).check(model, ema=copy.deepcopy(model).bfloat16())


def test_a_file_is_named_and_what_only_a_run_shows_is_said_once(tmp_path: Path) -> None:
    path = tmp_path / "precision.toml"
    path.write_text('weights = "bf16"\nactivations = "bf16"\ncheckpoints = "fp32"\n', encoding="utf-8")
    expectation = mezzo.expect(path)
    model, optimizer = trained(1, form=torch.bfloat16)
    with pytest.warns(PrecisionWarning, match=r"does not see \[activations\] and \[checkpoints\]") as warned:
        assert expectation.check(model, optimizer) == ("activations", "checkpoints")
    assert [one.filename for one in warned] == [__file__]
    assert expectation.check(model, optimizer) == (
        "activations",
        "checkpoints",
    )  # without a warning, which would be an error


def test_an_error_names_ten_tensors_and_counts_the_others() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    with pytest.raises(ContractError) as error:
        mezzo.expect(weights="bf16").check(model)
    assert error.value.message.count("expected bf16") == 10
    assert error.value.message.endswith("; and 2 more")


WRONG_CALLS: list[tuple[Callable[[], object], str]] = [
    (mezzo.expect, "expect() was given neither a file nor a table; allowed: a file, or tables weights"),
    (lambda: mezzo.expect("a.toml", weights="fp32"), "expect() was given 'a.toml' and weights; allowed: a file"),
    (lambda: mezzo.expect(weigths="fp32"), "expect(): [weigths] is no role of a tensor; did you mean weights"),
    (lambda: mezzo.expect(weights="fp23"), "expect(): [weights] \"*\" = 'fp23' is no format; did you mean fp32"),
    (lambda: mezzo.expect(weights="fp32").check(), "check() was given nothing; allowed: models"),
    (lambda: mezzo.expect(weights="fp32").check(trained()[1]), "check() was given AdamW; allowed: models"),
    (lambda: mezzo.expect(weights="fp32").check(trained()[0], 3), "check() was given Sequential, int; allowed"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "message"), WRONG_CALLS)
def test_a_wrong_call_says_what_is_allowed(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError) as error:
        call()
    assert error.value.message.startswith(message)


def test_sharded_weights_are_read_in_this_process_and_exchanges_as_they_are_set_up(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(4, 2))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(3, 4)).float().sum().backward()
        optimizer.step()
        expected = {"weights": "fp32", "gather": "bf16", "reduction": "fp32", "optimizer_state": "fp32"}
        assert mezzo.expect(**expected).check(model, optimizer) == ()
        model(torch.ones(3, 4))  # the whole weights stand for the shards now, in BF16
        assert mezzo.expect(**expected).check(model, optimizer) == ()
        with pytest.raises(ContractError, match=r"^rank 0: .* 0.weight \(gather\) is bf16, expected fp32"):
            mezzo.expect(gather="fp32").check(model, optimizer)
    finally:
        dist.destroy_process_group()
