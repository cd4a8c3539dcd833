"""Sizes that depend on numbers, in a trace without numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers_predict import recorded
from mezzo.measure.predict.result_sizes import UnknownSize, largest_sizes

SCRIPT = """
import torch
from torch import nn
edges = torch.randint(0, 16, (2, 40))
edges = edges[:, edges[0] != edges[1]]
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    out = model(torch.randn(16, 8))[edges[0]]
    loss = out[out[:, 0] > 0].square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "computed",
    [
        lambda x: x.nonzero(),
        lambda x: x[x > 2],
        lambda x: x[:, x[0] > 1],
        lambda x: x.masked_select(x.bool()),
        lambda x: x.unique(),
        lambda x: x.unique(return_inverse=True)[1],
        lambda x: x.flatten().unique_consecutive(return_counts=True)[1],
    ],
)
def test_a_size_is_that_of_numbers_that_keep_all(computed: Callable[[Tensor], Tensor]) -> None:
    """All of them are different and pass every condition; 3 to 8 are."""
    expected = computed(torch.arange(3, 9).reshape(2, 3))
    with FakeTensorMode() as mode, largest_sizes(lambda: None):
        found = computed(mode.from_tensor(torch.arange(3, 9).reshape(2, 3)))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


def test_the_lines_are_kept(tmp_path: Path) -> None:
    assert recorded(tmp_path, SCRIPT, steps=2).sized_at == ["train.py:5", "train.py:10"]


LOOP = """
import torch
from torch import nn
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    x, c = torch.randn(8, 4), torch.randint(0, 8, (8,))
    s = x[:4] @ x[:4].t() + torch.eye(4)
    y = model(x)
    found = WRITTEN
    print(f"{c.float().mean():.3f}", c, y)
    (y.mean() + sum(part.float().sum() for part in found)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PREDICTED = {
    "y.nonzero()": [32],
    "torch.where(y > 0)": [32, 32],
    "y[y > 0]": None,
    "torch.unique(c, return_inverse=True)": [8, 8],
    "torch.unique(x, dim=0, return_counts=True)": [8, 8],
    "torch.unique_consecutive(x, dim=0)": [8],
    "torch.bincount(c, minlength=9)": [9],
    "torch.bincount(torch.tensor([0, 5, 2]))": [6],
    "torch.histc(x, bins=10)": [10],
    "torch.multinomial(x.abs(), 2)": [8],
    "y.repeat_interleave(c, dim=0, output_size=16)": [16],
    "y.repeat_interleave(torch.tensor([2] * 8), dim=0)": [16],
    "y.tensor_split(torch.tensor([2, 3]))": [2, 1, 5],
    "y.tensor_split(c[:1])": [4, 4],
    "torch.tensor_split(y, c[0])": [8],
    "y.split(c.tolist())": [1] * 8,
    "y.split(torch.tensor([3, 5]).tolist())": [3, 5],
    "y.split([4, 4])": [4, 4],
    "torch.linalg.lstsq(y, x)[:2]": [4, 4],
    "torch.linalg.lstsq(y, x[:, 0])[:1]": [4],
    "torch.linalg.svd(y)": [8, 4, 4],
    "torch.linalg.eigh(s)": [4, 4],
    "torch.linalg.inv(s)": [4],
    "torch.linalg.cholesky(s)": [4],
    "torch.linalg.lu(s)": [4, 4, 4],
    "torch.linalg.pinv(y)": [4],
    "nn.functional.ctc_loss(torch.randn(5, 8, 3).log_softmax(2), c[:, None].expand(8, 2), c, c)[None]": [1],
    "[torch.from_numpy(y.detach().numpy())]": [8],
    "[torch.tensor(y.tolist())]": [8],
    "[torch.arange(int(row) + 1) for row in c for _ in range(row.item() + 1)]": [1] * 8,
}
"""What a script computes, with the rows that it has."""
REFUSED = {
    "torch.bincount(c)": "pass minlength=",
    "y.repeat_interleave(c, dim=0)": "pass output_size=",
    "nn.functional.one_hot(c)": "pass num_classes=",
    "torch.lobpcg(s)": "pass niter=",
    "torch.nested.nested_tensor([x[0], x[1]])": "pad the batch",
}


@pytest.mark.parametrize("written", PREDICTED)
def test_a_size_that_numbers_decide_is_predicted(written: str, tmp_path: Path) -> None:
    rows = PREDICTED[written]
    check = (
        "" if rows is None else f"\n    assert [t.shape[0] if t.dim() else 1 for t in found][:{len(rows)}] == {rows}"
    )
    kind = "found if isinstance(found, (list, tuple)) else [found]"
    text = LOOP.replace("WRITTEN", f"{written}\n    found = {kind}{check}")
    assert recorded(tmp_path, text).num_steps == 2


@pytest.mark.parametrize("written", REFUSED)
def test_a_size_without_a_bound_is_refused_with_what_to_pass(written: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownSize, match=REFUSED[written]):
        recorded(tmp_path, LOOP.replace("WRITTEN", written))


LSTSQ = [((5, 3), (5, 2)), ((3, 5), (3, 2)), ((5, 3), (5,)), ((2, 5, 3), (2, 5)), ((2, 3, 3), (2, 3, 1))]


@pytest.mark.parametrize(("left", "right"), LSTSQ)
def test_least_squares_has_the_sizes_of_cudas_driver(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    expected = torch.linalg.lstsq(torch.randn(left), torch.randn(right), driver="gels")
    with FakeTensorMode(), largest_sizes(lambda: None):
        found = torch.linalg.lstsq(torch.randn(left), torch.randn(right))
    assert [t.shape for t in found] == [t.shape for t in expected]
    assert [t.dtype for t in found] == [t.dtype for t in expected]
