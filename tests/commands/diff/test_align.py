"""Which event of one run is which of another."""

from __future__ import annotations

import pytest

from helpers_diff import Edit, edited, place, text_of, unedited, values_of
from mezzo.commands.diff.align import aligned, family
from mezzo.observe.values.log import ValuesLog

Named = list[tuple[str, str]]


def alone(a: ValuesLog, b: ValuesLog) -> tuple[list[str], list[str]]:
    """Return what has no counterpart, in the first run and in the second."""
    pairs = aligned(a, b)
    others = set(pairs.values())
    assert len(others) == len(pairs)
    return (
        [place(event) for n, event in enumerate(a.events) if n not in pairs],
        [place(event) for n, event in enumerate(b.events) if n not in others],
    )


def test_the_same_run_is_itself() -> None:
    a, again, _ = unedited("masks")
    assert aligned(a, again) == {n: n for n in range(len(a.events))}


def test_modules_and_weights_of_other_names() -> None:
    a = unedited("masks", 1)[0]
    text = text_of("masks").replace("self.down", "self.left").replace("self.up", "self.right")
    b = values_of(text, steps=(1,))
    pairs = aligned(a, b)
    assert alone(a, b) == ([], [])
    assert {(a.events[n].op, a.events[n].phase) for n in pairs} == {
        (b.events[m].op, b.events[m].phase) for m in pairs.values()
    }
    assert all(n == m for n, m in pairs.items())


@pytest.mark.parametrize(
    ("old", "new", "only_a", "only_b"),
    [
        ("self.larger(up), one", "self.larger(up), 2 * one", [], ["mul Masks forward 1", "mul Masks backward 1"]),
        ("self.larger(middle), two", "self.larger(middle), two.contiguous()", [], []),
        ("model(x), y)", "model(x) + 0, y)", [], ["add (script) forward 1"]),
    ],
)
def test_an_operation_that_only_one_run_has(old: str, new: str, only_a: list[str], only_b: list[str]) -> None:
    a, b = unedited("masks", 1)[0], edited(Edit("", "masks", old, new), steps=1)
    assert alone(a, b) == (only_a, only_b)
    assert alone(b, a) == (only_b, only_a)


def paired_with(new: str, op: str) -> Named:
    """Return the forward operations of a name that an edited U-Net has another one for."""
    a, b = unedited("masks", 1)[0], edited(Edit("", "masks", "# model", new), steps=1)
    pairs = aligned(a, b)
    found = [(a.events[n], b.events[m]) for n, m in pairs.items() if a.events[n].op != b.events[m].op]
    return [(place(one), place(other)) for one, other in found if one.op == op and one.phase == "forward"]


@pytest.mark.parametrize(
    ("new", "other"),
    [
        ("model.middle[2] = nn.Tanh()", "tanh"),
        ("model.middle[2].forward = lambda x: x * torch.sigmoid(x)", "mul"),
    ],
)
def test_what_replaces_an_operation(new: str, other: str) -> None:
    assert paired_with(new, "silu") == [("silu middle.2 forward 1", f"{other} middle.2 forward 1")]


def test_a_result_of_another_shape_replaces_nothing() -> None:
    a, b = (
        unedited("masks", 1)[0],
        edited(Edit("", "masks", "# model", "model.middle[2].forward = lambda x: x.sum() + 0 * x"), steps=1),
    )
    pairs = aligned(a, b)
    (silu,) = [n for n, event in enumerate(a.events) if place(event) == "silu middle.2 forward 1"]
    assert b.events[pairs[silu]].op == "add"  # the last operation, not the sum


def test_a_product_of_a_half_is_not_the_whole_product() -> None:
    m = "m = model.blocks[2].mlp[2]\nm.forward = lambda x: "
    halves = "x[..., :32] @ m.weight[:, :32].T + x[..., 32:] @ m.weight[:, 32:].T + m.bias"
    a, b = unedited("decoder", 1)[0], edited(Edit("", "decoder", "# model", m + halves), steps=1)
    only_a, only_b = (
        [one for one in found if one.endswith("blocks.2.mlp.2 forward 1") and "view" not in one]
        for found in alone(a, b)
    )
    assert (only_a, [one.partition(" ")[0] for one in only_b]) == ([], ["mm", "mm", "add"])


def test_micro_batches_have_losses_without_a_counterpart() -> None:
    once = "    loss = F.cross_entropy(model(x), y)\n    loss.backward()\n"
    parts = "    for i in (0, 3):\n        loss = F.cross_entropy(model(x[i:i + 3]), y[i:i + 3]) / 2\n        loss.backward()\n"
    a, b = unedited("images", 1)[0], edited(Edit("", "images", once, parts), steps=1)
    only_a, only_b = alone(a, b)
    assert (only_a.count("loss (script) forward 1"), only_b.count("loss (script) forward 1")) == (1, 2)
    pairs = aligned(a, b)
    named = [n for n, event in enumerate(a.events) if event.kind in ("gradient", "update", "state")]
    assert all(n in pairs and place(a.events[n]) == place(b.events[pairs[n]]) for n in named)


@pytest.mark.parametrize(
    ("op", "name"), [("addmm", "product"), ("bmm", "product"), ("linear", "product"), ("relu", "relu")]
)
def test_products_are_one_family(op: str, name: str) -> None:
    assert family(op) == name
