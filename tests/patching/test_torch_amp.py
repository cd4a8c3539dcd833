"""Odd layouts of loops under torch.amp: each file of ``layouts`` is a script and its reviewed patch in one, a diff with all its context."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers_patching import patch_of, refusal_of
from mezzo.patching import Patch, Refused, make_patch
from mezzo.policy import Policy
from paths import SCRIPTS, TESTS

LAYOUTS = sorted((TESTS / "patching" / "layouts").glob("*.diff"))


def loop(loss: str = "model(x).mean()") -> str:
    return f"""import torch
from torch import nn
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    loss = {loss}
    loss.backward()
    optimizer.step()
"""


def side(layout: Path, sign: str) -> str:
    """Return the text before (``-``) or after (``+``) a diff with all its context."""
    lines = layout.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line[1:] if line.strip() else line for line in lines if line[0] in (" ", "\n", sign))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda path: path.stem)
def test_layouts(layout: Path, tmp_path: Path) -> None:
    patch = patch_of(side(layout, "-"), "fp16", tmp_path, "torch.amp")
    assert patch.patched == side(layout, "+")
    compile(patch.patched, layout.name, "exec")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda path: path.stem)
def test_layouts_with_tabs_and_windows_line_endings(layout: Path, tmp_path: Path) -> None:
    def other(text: str) -> str:
        return text.replace("    ", "\t").replace("\n", "\r\n")

    patch = patch_of(other(side(layout, "-")), "fp16", tmp_path, "torch.amp")
    assert patch.patched == other(side(layout, "+"))


def test_the_encoding_is_kept(tmp_path: Path) -> None:
    for declared, encoding in (("# -*- coding: latin-1 -*-\n", "latin-1"), ("", "utf-8-sig"), ("", "utf-8")):
        source = declared + loop("(model(x) - y).abs().mean()  # é").replace("data", "daten_é")
        path = tmp_path / "script.py"
        path.write_bytes(source.encode(encoding))
        patch = make_patch(path, policy=Policy.parse("fp16"))
        assert isinstance(patch, Patch)
        patch.write(path)
        text = path.read_bytes()
        assert text.startswith(source.encode(encoding)[:20])
        assert "daten_é".encode(encoding.removesuffix("-sig")) in text
        assert b"scaler.scale(loss).backward()" in text
        compile(text, "script.py", "exec")


BEFORE = loop().replace("for x", "x.backward()\nfor x").replace("optimizer = ", "x = f()\nx.backward()\noptimizer = ")
CLIPPED = (
    loop()
    .replace("    optimizer.step()", "    if x:\n        optimizer.step()")
    .replace("backward()", "backward()\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)")
)
FUNCTION = "def {}(m):\n  o = torch.optim.SGD(m.parameters())\n  l = m(1)\n  l.backward()\n  o.step()\n"
COMPILED = (
    "import torch\n@torch.compile\ndef step(o, m):\n  l = m(1)\n  l.backward()\n  o.step()\n"
    "o = torch.optim.SGD(m.parameters())\nstep(o, m)\n"
)
PASSED = "import torch\ndef a(m, optimizer):\n  l = m(1)\n  l.backward()\n  optimizer.step()\n"
REFUSED = [
    # source, reason
    (loop().replace("\n    loss.backward", "; loss.backward"), "line 6 has several statements"),
    (loop().replace("step()", "step(lambda: loss)"), "line 8 passes a closure to optimizer.step()"),
    (loop("torch.autograd.grad(model(x).mean(), x)[0].norm()"), "line 6 calls torch.autograd.grad"),
    (loop() + "model.weight.register_hook(print)\n", "line 9 registers a hook on gradients"),
    (loop().replace("    optimizer.step()\n", ""), "no update was found"),
    (BEFORE, "line 5 runs a backward pass before line 6 creates the optimizer"),
    (CLIPPED, "line 8 clips the gradients in passes without an update"),
    (f"import torch\n{FUNCTION.format('a')}{FUNCTION.format('b')}", "the script has several training loops"),
    (PASSED, "a() gets its optimizer from another file"),
    (COMPILED, "line 6 updates inside a compiled function"),
]


@pytest.mark.parametrize(("source", "reason"), REFUSED)
def test_what_would_need_a_guess_is_refused(source: str, reason: str, tmp_path: Path) -> None:
    outcome = refusal_of(source, "fp16", tmp_path, "torch.amp")
    assert outcome.reason.startswith(reason)
    assert not outcome.already


@pytest.mark.parametrize(
    ("imports", "patched"),
    [
        ("import torch", "import torch"),
        ("import torch as th", "import torch as th"),
        ("import torch.nn", "import torch.nn"),
        ("import torch.optim as optim", "import torch\nimport torch.optim as optim"),
        ("import os\nfrom torch import optim", "import os\nimport torch\nfrom torch import optim"),
        ("import os\n\ndef f():\n    import torch", "import os\nimport torch\n\ndef f():\n    import torch"),
    ],
)
def test_torch_is_imported_once(imports: str, patched: str, tmp_path: Path) -> None:
    body = "for x in data:\n    loss = model(x).mean()\n    loss.backward()\n"
    patch = patch_of(f"{imports}\nmodel.train()\n{body}", "bf16", tmp_path, "torch.amp")
    assert patch.patched.startswith(f"{patched}\nmodel.train()\n")
    assert ("th.autocast(" in patch.patched) is imports.endswith("th")


def test_bf16_needs_no_scale(tmp_path: Path) -> None:
    for source, _ in REFUSED[1:4]:
        assert "GradScaler" not in patch_of(source, "bf16", tmp_path, "torch.amp").patched


def test_the_settings_of_the_scale_are_passed_on(tmp_path: Path) -> None:
    patch = patch_of(loop(), "fp16:init_scale=1024:growth_interval=100", tmp_path, "torch.amp")
    assert "GradScaler(device_type, init_scale=1024.0, growth_interval=100)" in patch.patched


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("fp16-master", "torch.amp keeps weights in FP32; it has no 16-bit weights"),
        ("fp8", "torch.amp has no FP8"),
        ("fp16:loss_scale=static", "torch.amp has no static loss scale"),
        ("fp16:fp32_modules=head", "torch.amp has no fp32_modules"),
        ("bf16:arithmetic=emulated", "torch.amp has no arithmetic"),
        ("fp16:hysteresis=2", "torch.amp has no hysteresis"),
    ],
)
def test_what_torch_amp_cannot_express(policy: str, why: str, tmp_path: Path) -> None:
    expected = Refused(reason=f"policy {policy}: {why}", by_hand="choose the style mezzo, or another policy")
    assert refusal_of(loop(), policy, tmp_path, "torch.amp") == expected
    chosen = patch_of(loop(), policy, tmp_path)
    assert chosen.style == "mezzo"
    assert f'policy="{policy}"' in chosen.patched


def test_bce_inside_one_expression_takes_a_session(tmp_path: Path) -> None:
    source = loop("criterion(model(x), y)").replace("model =", "criterion = nn.BCELoss()\nmodel =")
    refused = refusal_of(source, "fp16", tmp_path, "torch.amp")
    assert refused.reason.startswith("line 7 uses binary cross entropy on probabilities")
    assert patch_of(source, "fp16", tmp_path).style == "mezzo"


def test_validation_that_makes_numpy_arrays_is_left_alone(tmp_path: Path) -> None:
    source = loop() + "with torch.no_grad():\n    print(model(x).numpy())\n"
    patch = patch_of(source, "bf16", tmp_path, "torch.amp")
    assert patch.patched.endswith("with torch.no_grad():\n    print(model(x).numpy())\n")
    left = [reason for reason in patch.reasons if reason.value == "validation left as it is"]
    assert [(reason.what, reason.reason.split(",")[0]) for reason in left] == [
        ("line 9", "line 10 creates a NumPy array")
    ]


def test_public_scripts_of_the_tests_are_patched() -> None:
    """Scripts written for other tests, in layouts that were not chosen with patches in mind."""
    names = "plain accumulation gan two_optimizers recurrent schedule evaluation several_losses"
    for name in names.split():
        assert isinstance(make_patch(SCRIPTS / f"{name}.py", policy=Policy.parse("fp16")), Patch), name
