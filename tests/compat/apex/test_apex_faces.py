"""What else scripts import from apex: LARC, fused optimizers and norms, and ``python -m mezzo.compat.apex``."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from forked_processes import in_forks
from helpers_apex import Small, clean
from helpers_engine import copied, spoil
from mezzo import cli
from mezzo.cli.script import stand_in_for
from mezzo.compat.apex import amp, normalization, optimizers
from mezzo.compat.apex.parallel import DistributedDataParallel, SyncBatchNorm, convert_syncbn_model
from mezzo.compat.apex.parallel.LARC import LARC
from mezzo.launch.targets import Target
from mezzo.policy import Policy
from processes import Ended, leave_process_group


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield from clean()


def updated(optimizer: Any, parameter: nn.Parameter, gradients: list[Tensor]) -> Tensor:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


GRADIENTS = list(torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1)))


def fresh() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("decoupled", "oracle"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_fused_adam_is_adamw_or_adam(decay: float, decoupled: bool, oracle: Any) -> None:
    mine, theirs = fresh(), fresh()
    found = updated(optimizers.FusedAdam([mine], lr=0.1, weight_decay=decay, adam_w_mode=decoupled), mine, GRADIENTS)
    torch.testing.assert_close(found, updated(oracle([theirs], lr=0.1, weight_decay=decay), theirs, GRADIENTS))


def test_fused_adam_without_bias_correction() -> None:
    p = fresh()
    x, mean, square = p.detach().double(), torch.zeros(3, 4).double(), torch.zeros(3, 4).double()
    for g in GRADIENTS:
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g * g
        x = x - 0.1 * mean / (square.sqrt() + 1e-8)
    found = updated(optimizers.FusedAdam([p], lr=0.1, bias_correction=False), p, GRADIENTS)
    torch.testing.assert_close(found.double(), x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}])
def test_fused_sgd_is_sgd(settings: dict[str, Any]) -> None:
    mine, theirs = fresh(), fresh()
    found = updated(optimizers.FusedSGD([mine], lr=0.1, **settings), mine, GRADIENTS)
    torch.testing.assert_close(found, updated(torch.optim.SGD([theirs], lr=0.1, **settings), theirs, GRADIENTS))


def test_fused_optimizers_keep_moments_in_fp32_and_masters_on_request() -> None:
    for masters in (False, True):
        p = nn.Parameter(fresh().detach().half())
        optimizer = optimizers.FusedAdam([p], lr=1e-4, master_weights=masters)
        updated(optimizer, p, [g.half() for g in GRADIENTS])
        state = optimizer.state[p]
        assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {torch.float32}
        assert ("master" in state) is masters
    sgd = optimizers.FusedSGD([p], lr=0.1, momentum=0.9)
    updated(sgd, p, [GRADIENTS[0].half()])
    assert "master" not in sgd.state[p]


def test_fused_optimizers_clear_gradients_and_take_closures() -> None:
    p = fresh()
    for optimizer, expected in ((optimizers.FusedAdam([p]), None), (optimizers.FusedSGD([p], lr=0.1), 0.0)):
        p.grad = torch.ones(3, 4)
        assert optimizer.step(lambda: "loss") == "loss"
        optimizer.zero_grad()
        assert (None if p.grad is None else p.grad.sum().item()) == expected
        twin = copy.deepcopy(optimizer)
        assert twin.set_grad_none is optimizer.set_grad_none
        optimizer.zero_grad(set_to_none=True)
        assert p.grad is None


def test_what_the_fused_optimizers_do_not_offer_is_refused() -> None:
    p = [fresh()]
    for settings in ({"amsgrad": True}, {"capturable": True}):
        with pytest.raises(RuntimeError, match=r"FusedAdam.*Use mezzo\."):
            optimizers.FusedAdam(p, **settings)
    with pytest.raises(RuntimeError, match="wd_after_momentum=True"):
        optimizers.FusedSGD(p, wd_after_momentum=True)
    with pytest.raises(RuntimeError, match="got grads, scale"):
        optimizers.FusedAdam(p).step(grads=[], scale=1.0)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize(
    "build", [optimizers.FusedAdam, optimizers.FusedSGD, lambda p: LARC(torch.optim.SGD(p, lr=0.1))]
)
def test_they_train_under_every_level(level: str, build: Any) -> None:
    model = nn.Linear(4, 2)
    x = torch.randn(8, 4)
    optimizer = build(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (model(x).float() - 1).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_larc_follows_its_formula(clip: bool, decay: float) -> None:
    big, zero = nn.Parameter(torch.tensor([3.0, 4.0])), nn.Parameter(torch.zeros(2))
    optimizer = LARC(torch.optim.SGD([big, zero], lr=0.5, weight_decay=decay), trust_coefficient=0.02, clip=clip)
    big.grad, zero.grad = torch.tensor([0.6, 0.8]), torch.ones(2)
    optimizer.step()
    local = 0.02 * 5.0 / (1.0 + decay * 5.0 + 1e-8)
    rate = min(local, 0.5) if clip else 0.5 * local
    gradient = torch.tensor([0.6, 0.8]) + decay * torch.tensor([3.0, 4.0])
    torch.testing.assert_close(big.detach(), torch.tensor([3.0, 4.0]) - rate * gradient)
    torch.testing.assert_close(zero.detach(), torch.full((2,), -0.5))  # of no length: the optimizer's own rate
    assert optimizer.param_groups[0]["weight_decay"] == decay


def test_larc_passes_the_rest_on() -> None:
    p = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([p], lr=0.5, momentum=0.5)
    optimizer = LARC(inner)
    assert optimizer.state is inner.state
    assert repr(optimizer) == repr(inner)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    p.grad = torch.ones(2)
    optimizer.step()
    other = LARC(torch.optim.SGD([p], lr=0.1, momentum=0.5))
    other.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.5
    optimizer.zero_grad()
    assert p.grad is None


def test_norms_are_torchs() -> None:
    x = torch.randn(2, 3, 4)
    n = normalization
    pairs = [
        (n.FusedLayerNorm(4), nn.LayerNorm(4)),
        (n.FusedLayerNorm((3, 4), eps=1e-3, elementwise_affine=False), nn.LayerNorm((3, 4), 1e-3, False)),
        (n.FusedRMSNorm(4), nn.RMSNorm(4, 1e-5)),
    ]
    for mine, theirs in pairs:
        assert torch.equal(mine(x), theirs(x))
    for mixed in (n.MixedFusedLayerNorm(4), n.MixedFusedRMSNorm(4)):
        assert mixed(x.half()).dtype is torch.float32
        torch.testing.assert_close(mixed(x), type(mixed).__mro__[2](4, 1e-5)(x))
    w, b = torch.randn(4), torch.randn(4)
    assert torch.equal(n.fused_layer_norm_affine(x, w, b, 4), nn.functional.layer_norm(x, (4,), w, b, 1e-6))
    assert torch.equal(n.fused_layer_norm(x, (3, 4)), nn.functional.layer_norm(x, (3, 4), eps=1e-6))
    assert torch.equal(n.fused_rms_norm_affine(x, w, 4), nn.functional.rms_norm(x, (4,), w, 1e-6))
    assert torch.equal(n.fused_rms_norm(x, 4), nn.functional.rms_norm(x, (4,), eps=1e-6))


def test_batch_norms_become_synchronised() -> None:
    model = convert_syncbn_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert isinstance(model[1], SyncBatchNorm)  # type: ignore[index]


def test_the_distributed_wrapper_takes_apex_settings(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        wrapped = DistributedDataParallel(model, delay_allreduce=True, retain_allreduce_buffers=False)
        with amp.scale_loss(wrapped(torch.ones(1, 2)).sum() / 16, optimizer) as loss:
            loss.backward()
        assert [p.grad.unique().item() for p in amp.master_params(optimizer) if p.grad is not None] == [0.0625] * 2
        assert wrapped.state_dict()["module.weight"].dtype is torch.float32
        with pytest.raises(RuntimeError, match=r"instance of mezzo\.compat\.apex\.parallel\.DistributedDataParallel"):
            amp.initialize(wrapped, verbosity=0)
    finally:
        leave_process_group()


SCRIPT = """
import sys
import torch
import apex
from apex import amp
from apex.amp import _amp_state
from apex.amp._amp_state import _amp_state as same, master_params
from apex.parallel.LARC import LARC
from apex.parallel import DistributedDataParallel, convert_syncbn_model
from apex.optimizers import FusedAdam, FusedSGD
from apex.normalization import FusedLayerNorm
from apex.normalization.fused_layer_norm import MixedFusedLayerNorm
import own

assert _amp_state is same is apex.amp._amp_state and own.here
model = torch.nn.Linear(2, 1)
model, optimizer = amp.initialize(model, FusedAdam(model.parameters(), lr=0.5), opt_level="O2", verbosity=0)
for _ in range(3):
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(__name__, sys.argv[1:], {p.dtype for p in master_params(optimizer)})
sys.exit(3)
"""


def run(folder: Path, *arguments: str) -> Ended:
    (ended,) = in_forks(arguments, program=("-m", "mezzo.compat.apex"), size=1, launched=False, folder=folder)
    return ended


@pytest.mark.parametrize("as_module", [False, True])
def test_a_script_that_imports_apex_runs_unchanged(tmp_path: Path, as_module: bool) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "own.py").write_text("here = True")
    done = run(tmp_path, *(["-m", "train"] if as_module else ["train.py"]), "--epochs", "3")
    assert (done.code, done.printed) == (3, "__main__ ['--epochs', '3'] {torch.float32}\n")


def test_a_missing_script_is_reported(tmp_path: Path) -> None:
    for arguments, text in (((), "got nothing"), (("-m",), "got -m"), (("none.py",), "there is no script 'none.py'")):
        done = run(tmp_path, *arguments)
        assert done.code == 2
        assert text in done.printed
        assert "Traceback" not in done.printed


SCRIPTS = """
import json, sys
from mezzo.cli.script import stand_in_for
from mezzo.launch import child
from mezzo.launch.request import Request
from mezzo.launch.targets import Target
from mezzo.policy import Policy
from mezzo.records import read_record

found = {}
for name in ("plain.py", "train.py"):
    request = Request(
        target=name,
        kind="script",
        arguments=("--lr", "0.1"),
        stand_in=stand_in_for(Target(name, module=False), policy=Policy.parse("fp16")),
        policy="fp16",
        record_path=name + ".json",
        command=(),
    )
    code = child.main([request.packed()])
    record = read_record(name + ".json")
    found[name] = [code, record.steps.loss, record.script, [r.what for r in record.effective.left_alone]]
json.dump(found, open("found.json", "w"))
"""
WITH_AMP = """
import sys
import torch
from apex import amp
from apex.optimizers import FusedAdam
assert sys.argv == ["train.py", "--lr", "0.1"], sys.argv
assert __name__ == "__main__" and sys.modules["__main__"].__file__ == "train.py"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
inputs = torch.randn(8, 4)
for _ in range(6):
    optimizer.zero_grad()
    loss = model(inputs).pow(2).mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""
WITHOUT = [
    ("from apex import amp\nfrom apex.optimizers import FusedAdam\n", ""),
    ('["train.py"', '["plain.py"'),
    ('== "train.py"', '== "plain.py"'),
    ('model, optimizer = amp.initialize(model, optimizer, opt_level="O2")\n', ""),
    ("with amp.scale_loss(loss, optimizer) as scaled_loss:", "if True:"),
    ("scaled_loss", "loss"),
]


@pytest.mark.slow
def test_under_a_policy_amp_gives_way(tmp_path: Path) -> None:
    """A script with Apex trains as one that never had it."""
    plain = WITH_AMP
    for words, instead in WITHOUT:
        assert words in plain
        plain = plain.replace(words, instead)
    (tmp_path / "train.py").write_text(WITH_AMP)
    (tmp_path / "plain.py").write_text(plain)
    command = [sys.executable, "-c", SCRIPTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["plain.py"] == [0, found["plain.py"][1], "plain.py", []]
    assert found["train.py"] == [0, found["plain.py"][1], "train.py", ["apex.amp"]]
    assert len(found["plain.py"][1]) == 6


AS_IS = [
    # what is typed, what to type instead, and the script's own words
    ("audit train.py -x", "audit --policy fp16 train.py -x", "train.py -x"),
    ("run --policy=as-is train.py", "run --policy=fp16 train.py", "train.py"),
    ("compare --policies fp32,as-is -m train", "compare --policies fp32,fp16 -m train", "-m train"),
]


@pytest.mark.parametrize(("words", "instead", "alone"), AS_IS)
def test_its_own_precision_cannot_be_recorded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    instead: str,
    alone: str,
) -> None:
    (tmp_path / "train.py").write_text(WITH_AMP)
    monkeypatch.chdir(tmp_path)
    assert cli.main(words.split()) == 2
    name = "train" if "-m" in words else "train.py"
    assert capsys.readouterr().err == (
        f"mezzo: {name} imports apex, which is not installed; Mezzo can run it only under a policy "
        f"that replaces apex.amp\n  hint: type: mezzo {instead}, or, without a record: python -m mezzo.compat.apex {alone}\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_script_that_may_do_without_apex_is_left_alone(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    target = Target(str(script), module=False)
    script.write_text("def half():\n    from apex import amp\n")
    assert stand_in_for(target, policy=None) is None
    assert stand_in_for(target, policy=Policy.parse("fp16")) is not None
    script.write_text("try:\n    from apex import amp\nexcept ImportError:\n    amp = None\n")
    assert stand_in_for(target, policy=Policy.parse("fp16")) is None


def test_a_folder_called_apex_is_no_installed_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("from apex import amp\n")
    (tmp_path / "apex" / "apex").mkdir(parents=True)  # as of a cloned repository
    monkeypatch.syspath_prepend(str(tmp_path))
    target = Target(str(script), module=False)
    assert stand_in_for(target, policy="fp16") is not None
    (tmp_path / "apex" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert stand_in_for(target, policy="fp16") is None


# --- the model's and the optimizer's faces ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "way"), [("O0", "pickle"), ("O1", "deepcopy"), ("O2", "pickle"), ("O3", "deepcopy")])
def test_a_model_under_a_level_keeps_its_signature_and_copies(level: str, way: str) -> None:
    model, x = Small(), torch.randn(3, 1, 1, 1)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    for _ in range(2):
        with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert inspect.signature(model.forward) == inspect.signature(Small().forward)
    twin = copied(model, way)
    assert inspect.signature(twin.forward) == inspect.signature(Small().forward)
    model.eval()
    twin.eval()
    assert torch.equal(model(x), twin(x))
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert twin(x).abs().max() == 0
    assert model(x).abs().max() > 0


@pytest.mark.parametrize("build", [torch.optim.SGD, optimizers.FusedSGD])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_step_hooks_run_on_updates_and_not_on_skips(level: str, build: Any) -> None:
    model = nn.Linear(3, 2)
    mezzo.SGD(model.parameters())  # torch puts its hooks into the base class's step as well
    optimizer, calls = build(model.parameters(), lr=0.1), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        with amp.scale_loss(spoil(model(torch.ones(2, 3)).float().mean(), factor), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert calls == ["before", "after"] * 2
