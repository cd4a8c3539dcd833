"""A loss has the name that the script gives it in the line of its backward pass, if the line leaves no doubt."""

from __future__ import annotations

from pathlib import Path

import pytest

from mezzo.launch.torch.backward import loss_name

NAMES = [
    ("loss_d.backward()", False, "loss_d"),
    ("self.loss_g.backward(retain_graph=True)", False, "loss_g"),
    ("losses['actor'].backward()", False, "actor"),
    ("(errD_real + errD_fake).backward()", False, "errD_real + errD_fake"),
    ("(loss_d / 4).backward()", False, "loss_d"),
    ("errG.backward(minus_one)", False, "errG"),
    ("scaler.scale(loss_d).backward()", False, "loss_d"),
    ("scaler.scale(loss_d / steps).backward()", False, "loss_d"),
    ("torch.autograd.backward(g_loss)", False, "g_loss"),
    ("self.manual_backward(d_loss)", True, "d_loss"),
    ("accelerator.backward(d_loss)", True, "d_loss"),
    ("accelerator.backward()", True, ""),
    ("critic(x).mean().backward()", False, ""),
    ("(a + critic(x)).backward()", False, ""),
    ("losses[0].backward()", False, ""),
    ("a.backward(); b.backward()", False, ""),
    ("train()", False, ""),
    ("loss_d.backward(", False, ""),
]


@pytest.mark.parametrize(("text", "by_library", "name"), NAMES, ids=[text for text, *_ in NAMES])
def test_the_name_is_read_from_the_line(text: str, by_library: bool, name: str, tmp_path: Path) -> None:
    script = tmp_path / "a b: c.py"
    script.write_text(f"first.backward()\n{text}\n", encoding="utf-8")
    assert loss_name(f"{script}:2", by_library=by_library) == name


def test_a_call_may_fill_several_lines(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("(\n    loss_d\n    .backward()\n)\n", encoding="utf-8")
    assert [loss_name(f"{script}:{line}", by_library=False) for line in (2, 3, 4)] == ["loss_d", "loss_d", ""]


@pytest.mark.parametrize("line", ["", "<stdin>:1", "/no/such/file.py:3"])
def test_what_cannot_be_read_has_no_name(line: str) -> None:
    assert loss_name(line, by_library=False) == ""
