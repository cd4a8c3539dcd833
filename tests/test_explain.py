"""Choices print as a table and stay a list; a policy's repr says what it does."""

from __future__ import annotations

import pytest

from mezzo import Choice, Policy
from mezzo.explain import Choices

MADE = Choices(
    [
        Choice(what="compute", value="fp16", reason="it is asked for"),
        Choice(what="loss scale", value="dynamic from 65536, grows every 2000 updates", reason="word " * 20),
        Choice(what="modules", value="<head>", reason=""),
    ]
)


def test_choices_print_as_a_table() -> None:
    assert str(MADE) == repr(MADE)
    assert repr(MADE).splitlines() == [
        "compute     fp16                                      it is asked for",
        "loss scale  dynamic from 65536, grows every 2000      word word word word word word word word word word word",
        "            updates                                   word word word word word word word word word",
        "modules     <head>",
    ]
    assert repr(Choices()) == ""


def test_choices_are_escaped_in_a_notebook() -> None:
    text = Choices(MADE[2:])._repr_html_()
    cell = '<td style="text-align:left">'
    assert text == f"<table><tr>{cell}modules</td>{cell}&lt;head&gt;</td>{cell}</td></tr></table>"


def test_choices_are_a_list() -> None:
    found = Policy.parse("bf16").explain()
    assert [choice.what for choice in found] == ["compute", "weights", "loss scale", "op lists"]
    assert found == list(found)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("fp32", "<Policy fp32: computes in fp32, casts nothing>"),
        ("tf32", "<Policy tf32: computes in tf32, casts nothing>"),
        ("O1", "<Policy fp16: fp16 chosen operation by operation; weights fp32; loss scale dynamic from 65536>"),
        ("bf16-pure", "<Policy bf16-pure: bf16 for the whole model; weights bf16 only>"),
        (
            "fp16-master:loss_scale=static:init_scale=8:fp32_modules=a+b*",
            "<Policy fp16-master:loss_scale=static:init_scale=8:fp32_modules=a+b*: fp16 for the whole model; "
            "weights fp16 with fp32 masters; loss scale static 8; a, b* in fp32>",
        ),
    ],
)
def test_a_policy_says_what_it_does(text: str, printed: str) -> None:
    assert repr(Policy.parse(text)) == printed
