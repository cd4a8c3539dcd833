"""Odd layouts of loops under torch.amp: each file of ``layouts`` is a script and its reviewed patch in one, a diff with all its context."""

from __future__ import annotations

from pathlib import Path

import pytest

from mezzo.patching import Patch, PatchStyle, Refused, make_patch
from mezzo.policy import Policy
from paths import SCRIPTS, TESTS

LAYOUTS = sorted((TESTS / "patching" / "layouts").glob("*.diff"))
LOOP = """import torch
from torch import nn
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    loss = {loss}
    loss.backward()
    optimizer.step()
"""


def outcome_of(source: str, tmp_path: Path, policy: str = "fp16", style: PatchStyle = "torch.amp") -> Patch | Refused:
    path = tmp_path / "script.py"
    path.write_bytes(source.encode())
    return make_patch(path, policy=Policy.parse(policy), style=style)


def side(layout: Path, sign: str) -> str:
    """Return the text before (``-``) or after (``+``) a diff with all its context."""
    lines = layout.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line[1:] if line.strip() else line for line in lines if line[0] in (" ", "\n", sign))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda path: path.stem)
def test_layouts(layout: Path, tmp_path: Path) -> None:
    patch = outcome_of(side(layout, "-"), tmp_path)
    assert isinstance(patch, Patch), patch
    assert patch.patched == side(layout, "+")
    compile(patch.patched, layout.name, "exec")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda path: path.stem)
def test_layouts_with_tabs_and_windows_line_endings(layout: Path, tmp_path: Path) -> None:
    def other(text: str) -> str:
        return text.replace("    ", "\t").replace("\n", "\r\n")

    patch = outcome_of(other(side(layout, "-")), tmp_path)
    assert isinstance(patch, Patch), patch
    assert patch.patched == other(side(layout, "+"))


def test_the_encoding_is_kept(tmp_path: Path) -> None:
    for declared, encoding in (("# -*- coding: latin-1 -*-\n", "latin-1"), ("", "utf-8-sig"), ("", "utf-8")):
        source = declared + LOOP.format(loss="(model(x) - y).abs().mean()  # é").replace("data", "daten_é")
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


REFUSED = [
    # source, reason
    (
        LOOP.format(loss="model(x).mean()").replace("\n    loss.backward", "; loss.backward"),
        "line 6 has several statements",
    ),
    (
        LOOP.format(loss="model(x).mean()").replace("optimizer.step()", "optimizer.step(lambda: loss)"),
        "line 8 passes a closure to optimizer.step()",
    ),
    (LOOP.format(loss="torch.autograd.grad(model(x).mean(), x)[0].norm()"), "line 6 calls torch.autograd.grad"),
    (
        LOOP.format(loss="model(x).mean()") + "model.weight.register_hook(print)\n",
        "line 9 registers a hook on gradients",
    ),
    (LOOP.format(loss="model(x).mean()").replace("    optimizer.step()\n", ""), "no update was found"),
    (
        LOOP.format(loss="model(x).mean()")
        .replace("for x", "x.backward()\nfor x")
        .replace("optimizer = ", "x = f()\nx.backward()\noptimizer = "),
        "line 5 runs a backward pass before line 6 creates the optimizer",
    ),
    (
        LOOP.format(loss="model(x).mean()")
        .replace("    optimizer.step()", "    if x:\n        optimizer.step()")
        .replace("backward()", "backward()\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),
        "line 8 clips the gradients in passes without an update",
    ),
    (
        "import torch\ndef a(m):\n  o = torch.optim.SGD(m.parameters())\n  l = m(1)\n  l.backward()\n  o.step()\n"
        "def b(m):\n  o = torch.optim.SGD(m.parameters())\n  l = m(1)\n  l.backward()\n  o.step()\n",
        "the script has several training loops",
    ),
    (
        "import torch\ndef a(m, optimizer):\n  l = m(1)\n  l.backward()\n  optimizer.step()\n",
        "a() gets its optimizer from another file",
    ),
    (
        "import torch\n@torch.compile\ndef step(o, m):\n  l = m(1)\n  l.backward()\n  o.step()\n"
        "o = torch.optim.SGD(m.parameters())\nstep(o, m)\n",
        "line 6 updates inside a compiled function",
    ),
]


@pytest.mark.parametrize(("source", "reason"), REFUSED)
def test_what_would_need_a_guess_is_refused(source: str, reason: str, tmp_path: Path) -> None:
    outcome = outcome_of(source, tmp_path)
    assert isinstance(outcome, Refused), outcome.diff
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
    loop = "for x in data:\n    loss = model(x).mean()\n    loss.backward()\n"
    patch = outcome_of(f"{imports}\nmodel.train()\n{loop}", tmp_path, "bf16")
    assert isinstance(patch, Patch), patch
    assert patch.patched.startswith(f"{patched}\nmodel.train()\n")
    assert ("th.autocast(" in patch.patched) is imports.endswith("th")


def test_bf16_needs_no_scale(tmp_path: Path) -> None:
    for source, _ in REFUSED[1:4]:
        patch = outcome_of(source, tmp_path, "bf16")
        assert isinstance(patch, Patch), patch
        assert "GradScaler" not in patch.patched


def test_the_settings_of_the_scale_are_passed_on(tmp_path: Path) -> None:
    patch = outcome_of(LOOP.format(loss="model(x).mean()"), tmp_path, "fp16:init_scale=1024:growth_interval=100")
    assert isinstance(patch, Patch)
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
    source = LOOP.format(loss="model(x).mean()")
    assert outcome_of(source, tmp_path, policy) == Refused(
        reason=f"policy {policy}: {why}", by_hand="choose the style mezzo, or another policy"
    )
    chosen = outcome_of(source, tmp_path, policy, "auto")
    assert isinstance(chosen, Patch)
    assert chosen.style == "mezzo"
    assert f'policy="{policy}"' in chosen.patched


def test_bce_inside_one_expression_takes_a_session(tmp_path: Path) -> None:
    source = LOOP.format(loss="criterion(model(x), y)").replace("model =", "criterion = nn.BCELoss()\nmodel =")
    refused = outcome_of(source, tmp_path)
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("line 7 uses binary cross entropy on probabilities")
    chosen = outcome_of(source, tmp_path, style="auto")
    assert isinstance(chosen, Patch)
    assert chosen.style == "mezzo"


def test_validation_that_makes_numpy_arrays_is_left_alone(tmp_path: Path) -> None:
    source = LOOP.format(loss="model(x).mean()") + "with torch.no_grad():\n    print(model(x).numpy())\n"
    patch = outcome_of(source, tmp_path, "bf16")
    assert isinstance(patch, Patch)
    assert patch.patched.endswith("with torch.no_grad():\n    print(model(x).numpy())\n")
    left = [reason for reason in patch.reasons if reason.value == "validation left as it is"]
    assert [(reason.what, reason.reason.split(",")[0]) for reason in left] == [
        ("line 9", "line 10 creates a NumPy array")
    ]


def test_public_scripts_of_the_tests_are_patched() -> None:
    """Scripts written for other tests, in layouts that were not chosen with patches in mind."""
    for name in (
        "plain",
        "accumulation",
        "gan",
        "two_optimizers",
        "recurrent",
        "schedule",
        "evaluation",
        "several_losses",
    ):
        assert isinstance(make_patch(SCRIPTS / f"{name}.py", policy=Policy.parse("fp16")), Patch), name
