"""Paddle's own lines in odd layouts, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from mezzo.patching import Patch, PatchStyle, Refused, make_patch
from mezzo.policy import Policy

LOOP = """import paddle
from paddle import nn
model = nn.Linear(2, 1)
optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
for x, y in data:
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
"""
TWO = LOOP.replace("for x", "other = paddle.optimizer.SGD(0.1, parameters=net.parameters())\nfor x").replace(
    "    optimizer.step()\n", "    optimizer.step()\n    other.step()\n"
)
FIT = """import paddle
model = paddle.Model(net)
model.prepare(paddle.optimizer.SGD(), paddle.nn.MSELoss(){more})
model.fit(data{evaluated})
"""
OWN = """import paddle
optimizer = paddle.optimizer.SGD(parameters=model.parameters())
scaler = paddle.amp.GradScaler({scaler})
for x in data:
    with paddle.amp.auto_cast({region}):
        loss = model(x).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def outcome_of(source: str, policy: str, tmp_path: Path, style: PatchStyle = "auto") -> Patch | Refused:
    path = tmp_path / "script.py"
    path.write_text(source, encoding="utf-8")
    return make_patch(path, policy=Policy.parse(policy), style=style)


REFUSED = [
    # source, policy, the beginning of the reason, of the instruction
    (LOOP, "fp8", "policy fp8: paddle.amp does not train in FP8", "choose a policy in FP16 or BF16"),
    (LOOP, "tf32", "Paddle computes FP32 products in TF32", "set NVIDIA_TF32_OVERRIDE=0"),
    (
        LOOP,
        "fp16:fp32_modules=head",
        "policy fp16:fp32_modules=head: fp32_modules not honoured: head",
        "run the script under",
    ),
    (
        LOOP,
        "bf16:loss_scale=dynamic",
        "policy bf16:loss_scale=dynamic: loss scale not honoured: dynamic",
        "run the script",
    ),
    (TWO, "fp16", "the script updates optimizer and other, and Paddle's GradScaler forgets", "use bf16"),
    (
        LOOP.replace("optimizer.step()", "optimizer.step(closure)"),
        "fp16",
        "line 8 passes a closure to optimizer.step()",
        "use bf16",
    ),
    (
        LOOP.replace("loss.backward()", "paddle.autograd.backward([loss])"),
        "fp16",
        "line 7 differentiates a list",
        "call backward()",
    ),
    (
        LOOP.replace("loss.backward()", "paddle.grad(loss, x)\n    loss.backward()"),
        "fp16",
        "line 7 calls paddle.grad",
        "use bf16",
    ),
    (LOOP.replace("for x", "model.weight.register_hook(print)\nfor x"), "fp16", "line 5 registers a hook", "use bf16"),
    (
        LOOP.replace("import paddle\n", "import paddle\npaddle.enable_static()\n"),
        "bf16",
        "line 2 builds a static graph",
        "decorate its",
    ),
    (
        LOOP.replace("for x", "optimizer = paddle.distributed.fleet.distributed_optimizer(optimizer)\nfor x"),
        "bf16",
        "line 5 lets fleet update the weights",
        "write paddle.amp.auto_cast and fleet.distributed_scaler",
    ),
    (LOOP + "print(model(test))\n", "fp16-master", "line 10 calls a model outside of auto_cast", "put that line under"),
    (
        LOOP.replace("parameters=model.parameters()", "parameters=weights"),
        "bf16-master",
        "the model of optimizer cannot be told from the call that creates it",
        "write paddle.amp.decorate(models=...",
    ),
    (
        LOOP.replace("optimizer = ", "model = paddle.DataParallel(model)\noptimizer = "),
        "bf16-master",
        "line 4 makes the model parallel before line 5 creates the optimizer",
        "call paddle.amp.decorate",
    ),
    (FIT.format(more="", evaluated=""), "bf16", "paddle.Model computes in float16 at O1", "write the loop with"),
    (FIT.format(more="", evaluated=", test"), "fp16-master", "line 4 evaluates the model", "choose fp16"),
    (
        FIT.format(more=', amp_configs="O1"', evaluated=""),
        "fp16",
        "line 3 passes amp_configs of the script's own",
        "make them {",
    ),
    (
        FIT.format(more=", amp_configs=configs", evaluated=""),
        "fp16",
        "line 3 passes amp_configs of the script's own",
        "make them {",
    ),
    (
        OWN.format(scaler="", region='level="O2"'),
        "fp16",
        "line 5 is at level O2, and policy fp16 is Paddle's O1",
        "choose a policy",
    ),
    (
        OWN.format(scaler="", region='level="O2"'),
        "fp16-master",
        "line 5 is at level O2, and paddle.amp.decorate",
        "decorate the",
    ),
    (OWN.format(scaler="", region="dtype=args.dtype"), "bf16", "line 5 takes dtype from args.dtype", "set dtype there"),
    (OWN.format(scaler="", region="**settings"), "bf16", "line 5 unpacks its arguments", "set level there"),
    (
        OWN.format(scaler="", region="enable=False"),
        "bf16",
        "line 3 has mixed precision, but no auto_cast is on",
        "put the",
    ),
    ("import paddle\nprint(paddle.__version__)\n", "fp16", "no training loop was found", "pass the file"),
]


@pytest.mark.parametrize(("source", "policy", "reason", "by_hand"), REFUSED)
def test_refused_by_name(source: str, policy: str, reason: str, by_hand: str, tmp_path: Path) -> None:
    outcome = outcome_of(source, policy, tmp_path)
    assert isinstance(outcome, Refused), outcome.diff
    assert outcome.reason.startswith(reason)
    assert outcome.by_hand.startswith(by_hand)


def test_a_session_is_pytorchs(tmp_path: Path) -> None:
    outcome = outcome_of(LOOP, "fp16", tmp_path, "mezzo")
    assert isinstance(outcome, Refused)
    assert outcome.reason == "the script trains in Paddle, and mezzo.Session in PyTorch"


def added(outcome: Patch | Refused) -> list[str]:
    assert isinstance(outcome, Patch), outcome
    lines = [line[1:].strip() for line in outcome.diff.splitlines() if line[:1] == "+" and line[:3] != "+++"]
    return [line for line in lines if line and '": [' not in line and line not in ("amp_lists = {", "}")]


def test_bf16_without_a_scaler_takes_two_optimizers_and_decorates_both(tmp_path: Path) -> None:
    assert added(outcome_of(TWO, "bf16-master", tmp_path)) == [
        'paddle.amp.decorate(models=[model, net], optimizers=[optimizer, other], level="O2", dtype="bfloat16", master_weight=True)',
        'with paddle.amp.auto_cast(level="O2", dtype="bfloat16", **amp_lists):',
        "loss = ((model(x) - y) ** 2).mean()",
    ]


def test_the_scaler_has_the_policys_numbers_and_is_saved(tmp_path: Path) -> None:
    saved = LOOP + 'paddle.save({"opt": optimizer.state_dict()}, "last")\n'
    lines = added(outcome_of(saved, "fp16:init_scale=8:growth_interval=5:growth_factor=4", tmp_path))
    assert lines[0] == (
        "scaler = paddle.amp.GradScaler(init_loss_scaling=8.0, incr_ratio=4.0, incr_every_n_steps=5, decr_every_n_nan_or_inf=1)"
    )
    assert lines[-1] == 'paddle.save({"opt": optimizer.state_dict(), "scaler": scaler.state_dict()}, "last")'


def test_a_static_scale(tmp_path: Path) -> None:
    lines = added(outcome_of(LOOP, "fp16:loss_scale=static:init_scale=128", tmp_path))
    assert lines[0] == (
        "scaler = paddle.amp.GradScaler(use_dynamic_loss_scaling=False, init_loss_scaling=128.0, incr_every_n_steps=2000, "
        "decr_every_n_nan_or_inf=1)"
    )


@pytest.mark.parametrize("region", ["", "True", 'dtype="float16"', 'True, None, None, "O1", "float16"'])
def test_a_scripts_own_auto_cast_gets_the_format(region: str, tmp_path: Path) -> None:
    lines = added(outcome_of(OWN.format(scaler="", region=region), "bf16", tmp_path))
    assert lines[0] == "scaler = paddle.amp.GradScaler(enable=False)"
    assert "bfloat16" in lines[1]
    already = outcome_of(OWN.format(scaler="", region=region), "fp16", tmp_path)
    assert isinstance(already, Refused)
    assert already.already


def test_a_scaler_that_is_off_is_turned_on(tmp_path: Path) -> None:
    assert added(outcome_of(OWN.format(scaler="enable=False", region=""), "fp16", tmp_path)) == [
        "scaler = paddle.amp.GradScaler(enable=True)"
    ]
