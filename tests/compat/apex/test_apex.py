"""Apex's optimization levels: what each sets, what each keyword changes, what is refused. The tables are Apex's documentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from helpers_apex import Small, clean, mean_loss, sample
from mezzo.compat.apex import amp

HALF, FLOAT = torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield from clean()


def initialized(level: str, **keywords: Any) -> tuple[Small, torch.optim.Optimizer]:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    returned: tuple[Small, torch.optim.Optimizer] = amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, **keywords
    )
    return returned


DOCUMENTED = {
    # level: cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale
    "O0": (FLOAT, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (HALF, False, True, True, "dynamic"),
    "O3": (HALF, False, False, False, 1.0),
}


@pytest.mark.parametrize(("level", "expected"), DOCUMENTED.items())
def test_a_level_sets_what_apex_documents(level: str, expected: tuple[Any, ...]) -> None:
    initialized(level)
    p = amp._amp_state.opt_properties
    found = (p.cast_model_type, p.patch_torch_functions, p.keep_batchnorm_fp32, p.master_weights, p.loss_scale)
    assert found == expected
    assert (p.enabled, p.opt_level) == (True, level)
    named = ["cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale"]
    assert list(p.options)[2:] == named


EFFECTS: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = [
    # level, keywords, formats of: conv weight, batch norm, its plain statistics, layer norm, input seen, output, updated weight
    ("O0", {}, (FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT)),
    ("O1", {}, (FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, HALF, FLOAT)),
    ("O2", {}, (HALF, FLOAT, HALF, HALF, HALF, FLOAT, FLOAT)),
    ("O3", {}, (HALF, HALF, HALF, HALF, HALF, FLOAT, HALF)),
    ("O0", {"cast_model_type": HALF}, (HALF, HALF, HALF, HALF, HALF, FLOAT, HALF)),
    ("O0", {"keep_batchnorm_fp32": True}, (FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT)),
    ("O0", {"master_weights": True}, (FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT)),
    ("O0", {"cast_model_outputs": HALF}, (FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, HALF, FLOAT)),
    ("O1", {"cast_model_type": False}, (FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, HALF, FLOAT)),
    ("O1", {"cast_model_type": FLOAT}, (FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT)),
    ("O1", {"patch_torch_functions": False}, (FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT)),
    ("O1", {"cast_model_outputs": FLOAT}, (FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT)),
    ("O2", {"keep_batchnorm_fp32": False}, (HALF, HALF, HALF, HALF, HALF, FLOAT, FLOAT)),
    ("O2", {"keep_batchnorm_fp32": "False"}, (HALF, HALF, HALF, HALF, HALF, FLOAT, FLOAT)),
    ("O2", {"master_weights": False}, (HALF, FLOAT, HALF, HALF, HALF, FLOAT, HALF)),
    ("O2", {"cast_model_type": FLOAT}, (FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT)),
    ("O2", {"cast_model_outputs": HALF}, (HALF, FLOAT, HALF, HALF, HALF, HALF, FLOAT)),
    ("O3", {"keep_batchnorm_fp32": True}, (HALF, FLOAT, HALF, HALF, HALF, FLOAT, HALF)),
    ("O3", {"keep_batchnorm_fp32": "True"}, (HALF, FLOAT, HALF, HALF, HALF, FLOAT, HALF)),
    ("O3", {"master_weights": True}, (HALF, HALF, HALF, HALF, HALF, FLOAT, FLOAT)),
]


@pytest.mark.parametrize(
    ("level", "keywords", "expected"), EFFECTS, ids=lambda x: str(x) if not isinstance(x, tuple) else ""
)
def test_levels_and_keywords_have_their_effect(level: str, keywords: dict[str, Any], expected: tuple[Any, ...]) -> None:
    model, optimizer = initialized(level, **keywords)
    before = [p.detach().clone() for p in model.parameters()]
    output = model(sample())
    with amp.scale_loss(mean_loss(output), optimizer) as loss:
        assert loss.dtype is FLOAT
        loss.backward()
    optimizer.step()
    running = model.plain_bn.running_mean
    assert running is not None
    updated = next(amp.master_params(optimizer)).dtype
    kept = (model.conv.weight, model.bn.weight, running, model.ln.weight)
    assert (*(t.dtype for t in kept), model.given, output.dtype, updated) == expected
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(t.dtype is not HALF for t in model.state_dict().values())


SCALES: list[tuple[str, Any, bool, float]] = [
    # level, keyword, dynamic, scale at the start
    ("O0", "dynamic", True, 65536.0),
    ("O1", 128.0, False, 128.0),
    ("O2", 128, False, 128.0),
    ("O3", "128.0", False, 128.0),
]


@pytest.mark.parametrize(("level", "given", "dynamic", "scale"), SCALES)
def test_a_loss_scale_may_be_given_in_every_level(level: str, given: Any, dynamic: bool, scale: float) -> None:
    initialized(level, loss_scale=given, num_losses=2)
    scalers = amp._amp_state.loss_scalers
    assert [(s.dynamic, s.loss_scale()) for s in scalers] == [(dynamic, scale)] * 2


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("01", {}, RuntimeError, "the letter O, not the number zero"),
    ("O4", {}, RuntimeError, "Options are 'O0', 'O1', 'O2', 'O3'"),
    ("O1", {"cast_model_type": HALF}, RuntimeError, "leaves weights in FP32"),
    ("O1", {"keep_batchnorm_fp32": True}, RuntimeError, "keep_batchnorm_fp32=True with opt_level='O1'"),
    ("O1", {"keep_batchnorm_fp32": False}, RuntimeError, "keep_batchnorm_fp32=False with opt_level='O1'"),
    ("O1", {"keep_batchnorm_fp32": "True"}, RuntimeError, "keep_batchnorm_fp32=True with opt_level='O1'"),
    ("O1", {"master_weights": True}, RuntimeError, "need no masters"),
    ("O1", {"master_weights": False}, RuntimeError, "need no masters"),
    ("O0", {"patch_torch_functions": True}, RuntimeError, "selecting opt_level='O1'"),
    ("O2", {"patch_torch_functions": True}, RuntimeError, "selecting opt_level='O1'"),
    ("O3", {"patch_torch_functions": True}, RuntimeError, "selecting opt_level='O1'"),
    ("O2", {"keep_batchnorm_fp32": "yes"}, TypeError, "allowed: True, False, None and the texts 'True' and 'False'"),
    ("O2", {"keep_batchnorm_fp32": 1}, TypeError, "keep_batchnorm_fp32=1"),
    ("O2", {"loss_scale": "static"}, ValueError, "loss_scale='static'; allowed: 'dynamic', a number"),
]


@pytest.mark.parametrize(("level", "keywords", "error", "text"), REFUSED)
def test_what_does_not_fit_is_refused(level: str, keywords: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        initialized(level, **keywords)
    assert text in str(caught.value)


def test_hard_override_warns_instead(capsys: pytest.CaptureFixture[str]) -> None:
    amp._amp_state.hard_override = True
    initialized("O1", master_weights=False)
    assert "Warning:  master_weights=False with opt_level='O1'" in capsys.readouterr().out


def test_models_and_optimizers_that_cannot_be_taken() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        (nn.Linear(2, 2).half(), None, RuntimeError, "Found param weight with type torch.HalfTensor, expected FP32"),
        (nn.BatchNorm1d(2, affine=False).half(), None, RuntimeError, "Found buffer running_mean"),
        (nn.DataParallel(model), None, RuntimeError, "instance of torch.nn.parallel.data_parallel.DataParallel"),
        ((model,), None, TypeError, "models must be either a single model or a list of models"),
        (model, (optimizer,), TypeError, "optimizers must be either a single optimizer or a list"),
    ]
    for models, optimizers, error, text in wrong:
        with pytest.raises(error) as caught:
            amp.initialize(models, optimizers, opt_level="O2", verbosity=0)
        assert text in str(caught.value)
    amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
    with pytest.raises(RuntimeError, match=r"only be passed through amp\.initialize once"):
        amp.initialize(model, optimizer, opt_level="O0", verbosity=0)


def test_half_models_are_taken_where_allowed() -> None:
    amp._amp_state.allow_incoming_model_not_fp32 = True
    model = amp.initialize(nn.Linear(2, 2).half(), opt_level="O0", verbosity=0)
    assert model.weight.dtype is FLOAT


def test_what_is_returned_has_the_shape_of_what_was_given() -> None:
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    assert amp.initialize(m := nn.Linear(2, 2), opt_level="O0", verbosity=0) is m
    assert amp.initialize([m := nn.Linear(2, 2)], opt_level="O0", verbosity=0) == [m]
    assert amp.initialize(m := nn.Linear(2, 2), [], opt_level="O0", verbosity=0) == (m, [])
    m, o = fresh()
    assert amp.initialize(m, o, opt_level="O0", verbosity=0) == (m, o)
    m, o = fresh()
    assert amp.initialize([m], [o], opt_level="O0", verbosity=0) == ([m], [o])


def test_off_does_nothing() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert amp.initialize(model, optimizer, enabled=False, opt_level="O2") == (model, optimizer)
    assert amp.initialize(model, enabled=False) is model
    loss = model(torch.ones(1, 2)).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    with amp.disable_casts():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is FLOAT
    assert amp.state_dict() == {}


def test_verbosity_prints_level_and_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    amp.initialize(model, opt_level="O2", loss_scale=64.0)
    printed = capsys.readouterr().out
    assert "Selected optimization level O2:" in printed
    assert "loss_scale             : dynamic" in printed
    assert printed.rstrip().endswith("loss_scale             : 64.0")


class Batch:
    """A user's own batch, which knows how to be cast."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, dtype: torch.dtype) -> Batch:
        return Batch(self.x.to(dtype))


class Formats(nn.Linear):
    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        batch, (pair, words), number = args
        seen = (batch.x.dtype, pair.dtype, words, number.dtype, kwargs["double"].dtype)
        return {"seen": seen, "out": [batch.x, number]}


def test_inputs_and_outputs_of_any_structure_are_cast() -> None:
    model = amp.initialize(Formats(2, 2), opt_level="O2", verbosity=0)
    x = torch.ones(2)
    out = model(Batch(x), (x, "words"), torch.ones(2, dtype=torch.int64), double=x.double())
    assert out["seen"] == (HALF, HALF, "words", torch.int64, HALF)
    assert [t.dtype for t in out["out"]] == [FLOAT, torch.int64]


def test_a_checkpoint_of_one_level_loads_under_another() -> None:
    model, _ = initialized("O2")
    saved = model.state_dict()
    assert saved["conv.weight"].dtype is FLOAT
    assert model.conv.weight.dtype is HALF
    plain = Small()
    plain.load_state_dict(saved)
    assert torch.equal(plain.conv.weight, model.conv.weight.float())
    again, _ = initialized("O3")
    again.load_state_dict(saved)
    assert torch.equal(again.conv.weight, model.conv.weight)
    nested = nn.Sequential(model)
    assert nested.state_dict()["0.conv.weight"].dtype is FLOAT
