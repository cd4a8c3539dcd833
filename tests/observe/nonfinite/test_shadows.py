"""True values alongside lost ones: kept by storage, visible through views, dropped where they no longer differ."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers_values import existing
from mezzo.observe.nonfinite.evidence import FaultSource
from mezzo.observe.nonfinite.shadows import RangeEnd, Shadows, differs, rounded, tolerance
from mezzo.observe.tensors import Storages

HALF, BRAIN = torch.float16, torch.bfloat16
INF, NAN = math.inf, math.nan


def half(*values: float) -> Tensor:
    return torch.tensor(values, dtype=HALF)


ROUNDED = [
    # a value in FP32, the format, what it is without an upper end, and without any
    (1.0, HALF, 1.0, 1.0),
    (1.0009, HALF, 1.0009765625, 1.0009765625),
    (65504.0, HALF, 65504.0, 65504.0),
    (65520.0, HALF, 65520.0, 65520.0),
    (1e9, HALF, 1e9, 1e9),
    (-3.4028234663852886e38, HALF, -3.4028234663852886e38, -3.4028234663852886e38),
    (1e-8, HALF, 0.0, 1e-8),
    (6e-8, HALF, 2.0**-24, 2.0**-24),
    (9e-8, HALF, 2.0**-23, 2.0**-23),  # a subnormal number is rounded as it is
    (0.0, HALF, 0.0, 0.0),
    (INF, HALF, INF, INF),
    (3.4e38, BRAIN, 3.4e38, 3.4e38),
    (1e-8, BRAIN, 1.0011717677116394e-08, 1.0011717677116394e-08),
]


@pytest.mark.parametrize(("value", "dtype", "above", "below"), ROUNDED)
def test_a_value_without_one_end_of_the_range(value: float, dtype: torch.dtype, above: float, below: float) -> None:
    wide = torch.tensor([value])
    assert rounded(wide, dtype, RangeEnd.ABOVE).item() == torch.tensor(above).item()
    assert rounded(wide, dtype, RangeEnd.BELOW).item() == torch.tensor(below).item()


def test_what_rounding_may_change_is_no_difference() -> None:
    actual = half(1.0, 1.0, INF, INF, NAN, NAN, 0.0, 5.0)
    true = torch.tensor([1.003, 1.005, INF, 1e9, NAN, 1.0, 1e-9, 5.0])
    assert differs(actual, true).tolist() == [False, True, False, True, False, True, True, False]
    assert differs(torch.tensor([True, False]), torch.tensor([True, True])).tolist() == [False, True]


def test_views_share_what_is_kept() -> None:
    shadows: Shadows[str] = Shadows(RangeEnd.ABOVE)
    whole = half(1, 2, INF, 4, 5, INF).reshape(2, 3)
    assert shadows.write(whole, torch.tensor([[1.0, 2, 7e4], [4, 5, 8e4]]), ("a",))
    for view, expected in ((whole.T, [[1, 4], [2, 5], [7e4, 8e4]]), (whole[1], [4, 5, 8e4]), (whole[:, 2], [7e4, 8e4])):
        found = existing(shadows.read(view))
        assert (found[0].tolist(), found[1]) == (expected, ("a",))
    assert shadows.read(whole[:, :2]) is None  # nothing differs there
    shadows.write(whole[0], torch.tensor([1.0, 2, INF]), ("b",))
    found = existing(shadows.read(whole))
    assert (found[0].flatten().tolist(), found[1]) == ([1, 2, INF, 4, 5, 8e4], ("a",))  # what was written last agrees


def test_a_write_into_a_view_replaces_only_what_the_view_covers() -> None:
    shadows: Shadows[str] = Shadows(RangeEnd.ABOVE)
    buffer = torch.full((12,), INF, dtype=HALF)
    assert shadows.write(buffer[:8].view(2, 4), 1e5 + torch.arange(8.0).view(2, 4), ("a",))
    assert shadows.write(buffer[8:], torch.full((4,), 2e5), ("b",))
    assert shadows.write(buffer[2:5], torch.tensor([3e5, INF, 4e5]), ("c",))
    assert not shadows.write(buffer[6:7], half(INF).float(), ("d",))
    expected = [
        (buffer, [1e5, 1e5 + 1, 3e5, INF, 4e5, 1e5 + 5, INF, 1e5 + 7, 2e5, 2e5, 2e5, 2e5], {"a", "b", "c"}),
        (buffer[:2], [1e5, 1e5 + 1], {"a"}),
        (buffer[2:5], [3e5, INF, 4e5], {"c"}),
        (buffer[4:6], [4e5, 1e5 + 5], {"a", "c"}),
        (buffer[7:9], [1e5 + 7, 2e5], {"a", "b"}),
        (buffer[0:6:5], [1e5, 1e5 + 5], {"a", "c"}),
    ]
    for view, values, sources in expected:
        found = existing(shadows.read(view))
        assert (found[0].tolist(), set(found[1])) == (values, sources)
    assert shadows.read(buffer[3:4]) is None
    buffer[0] = 3  # a write that was not seen
    assert shadows.read(buffer[:1]) is None
    rest = existing(shadows.read(buffer[1:2]))
    assert rest[0].tolist() == [1e5 + 1]


class Elements(TorchDispatchMode):
    """Counts the elements of all results."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += sum(t.numel() for t in tree_leaves(result) if isinstance(t, Tensor))
        return result


def test_views_of_one_buffer_cost_no_more_than_tensors_of_their_own() -> None:
    """Gradients of DDP are views of one buffer: each once cost as much as the whole buffer."""

    def cost(tensors: list[Tensor]) -> int:
        shadows: Shadows[str] = Shadows(RangeEnd.ABOVE)
        with Elements() as elements:
            for tensor in tensors:
                assert shadows.write(tensor, torch.full((50,), 1e5), ("a",))
                assert shadows.read(tensor) is not None
        return elements.count

    views = list(torch.full((5000,), INF, dtype=HALF).view(100, 50))
    assert cost(views) == cost([view.clone() for view in views])


def test_what_no_longer_differs_is_forgotten() -> None:
    shadows: Shadows[str] = Shadows(RangeEnd.ABOVE)
    value = half(INF)
    assert shadows.write(value, torch.tensor([1e9]), ("a",))
    assert shadows
    assert not shadows.write(value, torch.tensor([INF]), ("a",))
    assert not shadows


def test_what_was_written_unseen_is_not_believed() -> None:
    shadows: Shadows[str] = Shadows(RangeEnd.ABOVE)
    value = half(INF, 1)
    shadows.write(value, torch.tensor([1e9, 1.0]), ("a",))
    value.fill_(3)
    assert shadows.read(value) is None
    assert not shadows


def test_another_step_begins_with_what_was_kept_after_the_mark() -> None:
    shadows: Shadows[str] = Shadows(RangeEnd.ABOVE)
    old, new = half(INF), half(INF)
    shadows.write(old, torch.tensor([1e9]), ("old",))
    shadows.mark()
    shadows.write(new, torch.tensor([1e9]), ("new",))
    shadows.turn()
    assert shadows.read(old) is None
    assert shadows.read(new) is not None


def test_a_storage_in_the_memory_of_a_dead_one_has_nothing() -> None:
    kept: Storages[int] = Storages()
    numbers = set()
    for number in range(2000):
        tensor = torch.ones(4)
        assert kept.get(tensor) is None
        kept.put(tensor, number)
        numbers.add(tensor.data_ptr())
    del tensor
    gc.collect()
    assert len(numbers) < 2000  # memory was used again
    assert len(kept) < 1000  # dead ones do not pile up


# --- How far a gradient may be off and still be rounding ---


def source(form: str) -> FaultSource:
    return FaultSource(0, "made", "mm", None, "", backward=False, format=form, operands=[], wide=None, scale=1.0)


@pytest.mark.parametrize(
    ("forms", "most"),
    [
        ([], 0.0),
        (["fp16"], 40 * 2.0**-11),  # forty unit roundoffs, half an eps each
        (["bf16"], 40 * 2.0**-8),
        (["fp16", "bf16"], 40 * 2.0**-8),
        (["int64"], 0.0),
    ],
)
def test_the_tolerance_is_forty_roundoffs_of_the_widest(forms: list[str], most: float) -> None:
    assert tolerance([source(form) for form in forms]) == most
