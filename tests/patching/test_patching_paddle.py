"""Paddle's own lines in odd layouts, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers_patching import added, patch_of, refusal_of

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
HEAD, SCALED = "fp16:fp32_modules=head", "bf16:loss_scale=dynamic"


def fitted(more: str = "", *, evaluated: str = "") -> str:
    return f"""import paddle
model = paddle.Model(net)
model.prepare(paddle.optimizer.SGD(), paddle.nn.MSELoss(){more})
model.fit(data{evaluated})
"""


def own(region: str, scaler: str = "") -> str:
    return f"""import paddle
optimizer = paddle.optimizer.SGD(parameters=model.parameters())
scaler = paddle.amp.GradScaler({scaler})
for x in data:
    with paddle.amp.auto_cast({region}):
        loss = model(x).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


HOOKED = ("for x", "model.weight.register_hook(print)\nfor x")
FLEET = ("for x", "optimizer = paddle.distributed.fleet.distributed_optimizer(optimizer)\nfor x")
PARALLEL = ("optimizer = ", "model = paddle.DataParallel(model)\noptimizer = ")
CHANGED = [
    # what the loop has, and what in its place; the policy; the beginning of the reason, and of the instruction
    ("", "", "fp8", "policy fp8: paddle.amp does not train in FP8", "choose a policy in FP16 or BF16"),
    ("", "", "tf32", "Paddle computes FP32 products in TF32", "set NVIDIA_TF32_OVERRIDE=0"),
    ("", "", HEAD, f"policy {HEAD}: fp32_modules not honoured: head", "run the script under"),
    ("", "", SCALED, f"policy {SCALED}: loss scale not honoured: dynamic", "run the script"),
    ("optimizer.step()", "optimizer.step(closure)", "fp16", "line 8 passes a closure to optimizer.step()", "use bf16"),
    ("loss.backward()", "paddle.autograd.backward([loss])", "fp16", "line 7 differentiates a list", "call backward()"),
    ("loss.b", "paddle.grad(loss, x)\n    loss.b", "fp16", "line 7 calls paddle.grad", "use bf16"),
    (*HOOKED, "fp16", "line 5 registers a hook", "use bf16"),
    ("paddle\nf", "paddle\npaddle.enable_static()\nf", "bf16", "line 2 builds a static graph", "decorate its"),
    (*FLEET, "bf16", "line 5 lets fleet update the weights", "write paddle.amp.auto_cast and fleet.distributed_scaler"),
    ("=model.parameters()", "=weights", "bf16-master", "the model of optimizer cannot be told from the call", "write"),
    (*PARALLEL, "bf16-master", "line 4 makes the model parallel before line 5", "call paddle.amp.decorate"),
]
REFUSED = [
    (TWO, "fp16", "the script updates optimizer and other, and Paddle's GradScaler forgets", "use bf16"),
    (LOOP + "print(model(test))\n", "fp16-master", "line 10 calls a model outside of auto_cast", "put that line under"),
    (fitted(), "bf16", "paddle.Model computes in float16 at O1", "write the loop with"),
    (fitted(evaluated=", test"), "fp16-master", "line 4 evaluates the model", "choose fp16"),
    (fitted(', amp_configs="O1"'), "fp16", "line 3 passes amp_configs of the script's own", "make them {"),
    (fitted(", amp_configs=configs"), "fp16", "line 3 passes amp_configs of the script's own", "make them {"),
    (own('level="O2"'), "fp16", "line 5 is at level O2, and policy fp16 is Paddle's O1", "choose a policy"),
    (own('level="O2"'), "fp16-master", "line 5 is at level O2, and paddle.amp.decorate", "decorate the"),
    (own("dtype=args.dtype"), "bf16", "line 5 takes dtype from args.dtype", "set dtype there"),
    (own("**settings"), "bf16", "line 5 unpacks its arguments", "set level there"),
    (own("enable=False"), "bf16", "line 3 has mixed precision, but no auto_cast is on", "put the"),
    ("import paddle\nprint(paddle.__version__)\n", "fp16", "no training loop was found", "pass the file"),
]
REFUSED += [(LOOP.replace(old, new), *row) if old else (LOOP, *row) for old, new, *row in CHANGED]


@pytest.mark.parametrize(("source", "policy", "reason", "by_hand"), REFUSED)
def test_refused_by_name(source: str, policy: str, reason: str, by_hand: str, tmp_path: Path) -> None:
    outcome = refusal_of(source, policy, tmp_path)
    assert outcome.reason.startswith(reason)
    assert outcome.by_hand.startswith(by_hand)


def test_a_session_is_pytorchs(tmp_path: Path) -> None:
    refused = refusal_of(LOOP, "fp16", tmp_path, "mezzo")
    assert refused.reason == "the script trains in Paddle, and mezzo.Session in PyTorch"


def lines_of(source: str, policy: str, tmp_path: Path) -> list[str]:
    """Return what a patch adds, without the lists of operations."""
    lines = [line.strip() for line in added(patch_of(source, policy, tmp_path))]
    return [line for line in lines if line and '": [' not in line and line not in ("amp_lists = {", "}")]


def test_bf16_without_a_scaler_takes_two_optimizers_and_decorates_both(tmp_path: Path) -> None:
    assert lines_of(TWO, "bf16-master", tmp_path) == [
        'paddle.amp.decorate(models=[model, net], optimizers=[optimizer, other], level="O2", dtype="bfloat16", master_weight=True)',
        'with paddle.amp.auto_cast(level="O2", dtype="bfloat16", **amp_lists):',
        "loss = ((model(x) - y) ** 2).mean()",
    ]


def test_the_scaler_has_the_policys_numbers_and_is_saved(tmp_path: Path) -> None:
    saved = LOOP + 'paddle.save({"opt": optimizer.state_dict()}, "last")\n'
    lines = lines_of(saved, "fp16:init_scale=8:growth_interval=5:growth_factor=4", tmp_path)
    assert lines[0] == (
        "scaler = paddle.amp.GradScaler(init_loss_scaling=8.0, incr_ratio=4.0, incr_every_n_steps=5, decr_every_n_nan_or_inf=1)"
    )
    assert lines[-1] == 'paddle.save({"opt": optimizer.state_dict(), "scaler": scaler.state_dict()}, "last")'


def test_a_static_scale(tmp_path: Path) -> None:
    lines = lines_of(LOOP, "fp16:loss_scale=static:init_scale=128", tmp_path)
    assert lines[0] == (
        "scaler = paddle.amp.GradScaler(use_dynamic_loss_scaling=False, init_loss_scaling=128.0, incr_every_n_steps=2000, "
        "decr_every_n_nan_or_inf=1)"
    )


@pytest.mark.parametrize("region", ["", "True", 'dtype="float16"', 'True, None, None, "O1", "float16"'])
def test_a_scripts_own_auto_cast_gets_the_format(region: str, tmp_path: Path) -> None:
    lines = lines_of(own(region), "bf16", tmp_path)
    assert lines[0] == "scaler = paddle.amp.GradScaler(enable=False)"
    assert "bfloat16" in lines[1]
    assert refusal_of(own(region), "fp16", tmp_path).already


def test_a_scaler_that_is_off_is_turned_on(tmp_path: Path) -> None:
    assert lines_of(own("", "enable=False"), "fp16", tmp_path) == ["scaler = paddle.amp.GradScaler(enable=True)"]
