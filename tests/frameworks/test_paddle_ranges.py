"""Ranges of Paddle scripts: what is counted, and what the policy keeps in FP32, against NumPy and the tables of PyTorch's observer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from paddle_runs import batches, fit, network, numbers, observed, paddle

from mezzo.engine.kernels import exponents
from mezzo.launch.paddle.ranges import counted
from mezzo.observe.settings import RangesSettings
from mezzo.policy import Policy
from mezzo.records import RangesRecord

nn, F = paddle.nn, paddle.nn.functional


def test_values_are_counted_as_for_pytorch() -> None:
    draw = np.random.Generator(np.random.PCG64(3))
    values = (draw.standard_normal(20000) * 10.0 ** draw.uniform(-45, 38, 20000)).astype(np.float32)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 65504.0, 65520.0, 2.0**-24, 2.0**-25, 2.0**-14, 1.0]
    values = np.concatenate([values, np.array(special, np.float32)])
    table = exponents.tables(1)[0]
    exponents.add([torch.from_numpy(values)], [table])
    ours, theirs = counted(values), np.array(table.tolist())
    assert np.array_equal(ours[:-9], theirs[:-9])
    assert (ours[-9], ours[-8:].sum()) == (theirs[-9], theirs[-8:].sum())


def ranges_of(code: Any, policy: str = "fp16", *, steps: int = 2) -> RangesRecord:
    settings = RangesSettings(steps=tuple(range(1, steps + 1)), policy=Policy.parse(policy))
    observer, run = observed(code, "fp32", settings)
    record = observer.record(run)
    assert isinstance(record, RangesRecord)
    return record


def histogram(values: np.ndarray[Any, Any]) -> tuple[int, list[int], int]:
    """Return the first exponent, the counts from it on, and the zeros, by NumPy alone."""
    magnitudes = np.abs(values[values != 0].astype(np.float64))
    found = np.floor(np.log2(magnitudes)).astype(int)
    return int(found.min()), np.bincount(found - found.min()).tolist(), int((values == 0).sum())


def test_every_kind_of_value_is_counted() -> None:
    seen: dict[str, np.ndarray[Any, Any]] = {}

    def code() -> None:
        net, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), paddle.randn([32, 8])
        before = numbers(net[0].weight)
        optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())
        hidden = net(x)
        (hidden**2).mean().backward()
        gradient = numbers(net[0].weight.grad)
        optimizer.step()
        seen.update(
            {
                "Sequential (input)": numbers(x),
                "0": numbers(x) @ before,
                "2": numbers(hidden),
                "2 gradient": numbers(hidden) / hidden.size * 2,
                "0.weight gradient": gradient,
                "0.weight": before,
                "0.weight update": numbers(net[0].weight) - before,
            }
        )

    record = ranges_of(code, steps=1)
    assert record.steps_watched == [1]
    found = {(t.kind, t.name): t.histogram for t in record.tensors}
    keys = {
        ("activations", "Sequential (input)"): "Sequential (input)",
        ("activations", "0"): "0",
        ("activations", "2"): "2",
        ("activation gradients", "2"): "2 gradient",
        ("weight gradients", "0.weight"): "0.weight gradient",
        ("weights", "0.weight"): "0.weight",
        ("updates", "0.weight"): "0.weight update",
    }
    for key, name in keys.items():
        first, counts, zeros = histogram(seen[name])
        own = found[key]
        assert own.total == seen[name].size, key
        assert own.zeros == zeros, key
        assert own.first_exponent == pytest.approx(first, abs=1), key
        if name not in ("0", "2 gradient"):  # these two are rounded in another order here
            assert (own.first_exponent, own.counts) == (first, counts), key
    assert ("activations", "1") in found
    assert not any(name == "Sequential" for _, name in found)


def test_lost_updates_are_those_of_numpys_halves() -> None:
    kept: list[np.ndarray[Any, Any]] = []

    def code() -> None:
        net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
        optimizer = paddle.optimizer.SGD(1e-3, parameters=net.parameters())
        net(paddle.randn([32, 8])).mean().backward()
        kept.append(numbers(net[0].weight))
        optimizer.step()
        kept.append(numbers(net[0].weight))

    record = ranges_of(code, steps=1)
    old, new = kept
    narrow, update = old.astype(np.float16), new - old
    lost = ((narrow.astype(np.float32) + update).astype(np.float16) == narrow) & (update != 0)
    worst = next(loss for loss in record.updates if loss.format == "fp16").worst
    assert worst["0.weight"] == pytest.approx(lost.sum() / (update != 0).sum())


def test_what_the_lists_and_patterns_keep_in_fp32() -> None:
    def code() -> None:
        net, pairs = network(), batches(2)
        fit(lambda step: F.cross_entropy(net(pairs[step - 1][0]), pairs[step - 1][1]), net.parameters(), steps=2)

    kept = {(t.kind, t.name) for t in ranges_of(code).tensors if t.kept_fp32}
    assert ("activations", "0") not in kept
    assert ("weight gradients", "0.weight") not in kept
    assert ("activations", "4") not in kept
    assert ("activations", "CrossEntropyLoss") not in kept
    patterned = {(t.kind, t.name) for t in ranges_of(code, "fp16:fp32_modules=4").tensors if t.kept_fp32}
    assert {("activations", "4"), ("weight gradients", "4.weight")} <= patterned
    assert ("activations", "0") not in patterned


def test_planted_values_set_the_ends_of_the_window() -> None:
    def code() -> None:
        half = paddle.nn.initializer.Constant(0.5)
        layers = [nn.Linear(4, size, weight_attr=half, bias_attr=False) for size in (4, 1)]
        net, x = nn.Sequential(*layers), paddle.ones([1, 4])
        fit(lambda step: net(x).sum() * 2.0**-20, net.parameters(), steps=1)

    # Gradients are 2**-19 (the last weight), 2**-20 (the output) and 2**-21 (the rest): 2**34 makes the first 2**15, 2**-3 the last 2**-24.
    window = next(w for w in ranges_of(code, steps=1).windows if w.format == "fp16")
    assert (window.lowest, window.highest, window.suggested) == (-3, 34, 24)
    assert window.at_top[0] == "1.weight (weight gradients)"


def test_forward_overflow_is_named() -> None:
    def code() -> None:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        fit(lambda step: net(paddle.full([2, 4], 1e6)).mean(), net.parameters(), steps=1)

    notes = {note.what: note.value for note in ranges_of(code, steps=1).notes}
    assert "Sequential (input)" in notes["forward overflow"]
