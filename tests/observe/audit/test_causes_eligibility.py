"""Which convolutions run in which layout, judged by torch's own rule; fake tensors take the place of a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers_audit import traced_operations
from mezzo.observe.audit import observer
from mezzo.observe.audit.causes import is_channels_last
from mezzo.observe.audit.findings import AuditedSteps, findings

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
FIRST, LAST = torch.contiguous_format, torch.channels_last


@pytest.fixture(autouse=True)
def addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake storages have no address; that of their description takes its place."""
    monkeypatch.setattr(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata)


@pytest.mark.parametrize("dimensions", [2, 3])
def test_a_layout_is_read_from_strides_as_torch_reads_it(dimensions: int) -> None:
    last = torch.channels_last if dimensions == 2 else torch.channels_last_3d
    for size in itertools.product((1, 2, 5), repeat=2 + dimensions):
        for layout in (FIRST, last):
            whole = torch.empty(size).to(memory_format=layout)
            for x in (whole, whole[:, :1], whole[..., :1], whole.transpose(-1, -2), whole[:1].expand(4, *size[1:])):
                expected = suggest_memory_format(x) is last
                assert is_channels_last(tuple(x.shape), x.stride()) == expected, (x.shape, x.stride())


class Convolution(nn.Conv2d):
    """A convolution that returns the layout it computed in, as with cuDNN; torch's CPU build has none for its fake tensors."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve."""
        is_last = LAST in (suggest_memory_format(x), suggest_memory_format(self.weight))
        return torch.empty_like(super().forward(x), memory_format=LAST if is_last else FIRST)


def block(norm: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(Convolution(16, 16, 3, padding=1), norm(), nn.SiLU(), Convolution(16, 16, 3, padding=1))


def on_cuda(*size: int, layout: torch.memory_format) -> Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device="cuda", memory_format=layout)


def on_gpu(model: nn.Module, *, layout: torch.memory_format) -> nn.Module:
    """Give a model fake weights in BF16 on a GPU."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            own = layout if parameter.dim() == 4 else FIRST
            setattr(module, name, nn.Parameter(on_cuda(*parameter.shape, layout=own)))
    return model


def judged(model: nn.Module, x: Tensor) -> dict[str, list[str]]:
    """Return the modules of each finding on a forward pass; ``model`` and ``x`` are on a GPU that is not there."""
    with torch.no_grad():
        seen = traced_operations(lambda: model(x), device_type=x.device.type)
    steps = AuditedSteps(
        operations=seen, wide=[], trips=[], products=observer.products(seen), device_type=x.device.type
    )
    return {one.code: one.modules for one in findings(steps) if one.code.startswith("A2")}


@pytest.mark.parametrize(
    ("norm", "model_layout", "images_layout", "expected"),
    [
        (nn.Identity, LAST, LAST, {}),
        (nn.Identity, FIRST, FIRST, {"A203": ["0", "3"]}),
        (nn.Identity, LAST, FIRST, {"A205": ["0"]}),
        (nn.Identity, FIRST, LAST, {}),
        (lambda: nn.GroupNorm(4, 16), LAST, LAST, {"A205": ["3"]}),
        (lambda: nn.GroupNorm(4, 16), FIRST, FIRST, {"A203": ["0", "3"]}),
        (lambda: nn.InstanceNorm2d(16), LAST, LAST, {"A205": ["3"]}),
    ],
    ids=["last", "first", "images first", "model first", "GroupNorm", "GroupNorm, first", "InstanceNorm"],
)
def test_an_input_that_is_channels_first_after_a_norm_is_copied_not_slow(
    norm: Callable[[], nn.Module],
    model_layout: torch.memory_format,
    images_layout: torch.memory_format,
    expected: object,
) -> None:
    with FakeTensorMode():
        model = on_gpu(block(norm), layout=model_layout)
        assert judged(model, on_cuda(2, 16, 8, 8, layout=images_layout)) == expected


@pytest.mark.parametrize(
    ("ins", "outs", "groups", "found"),
    [
        (3, 64, 1, False),  # images: cuDNN pads by itself
        (1, 8, 1, False),
        (4, 16, 1, False),
        (64, 3, 1, False),  # and images that come out
        (5, 16, 1, True),
        (16, 12, 1, True),
        (16, 16, 16, True),  # depthwise
        (16, 16, 4, True),
        (16, 16, 2, False),
    ],
)
def test_channels_of_images_are_no_finding(ins: int, outs: int, groups: int, found: bool) -> None:
    with FakeTensorMode():
        model = on_gpu(nn.Sequential(nn.Conv2d(ins, outs, 3, groups=groups)), layout=LAST)
        assert ("A201" in judged(model, on_cuda(2, ins, 8, 8, layout=LAST))) == found


@pytest.mark.parametrize(
    ("batch", "ins", "outs", "found"),
    [(33, 64, 1, False), (1, 64, 16, False), (33, 64, 16, False), (32, 64, 12, True), (32, 9, 16, True)],
)
def test_a_matrix_of_one_column_has_no_rows_to_align(batch: int, ins: int, outs: int, found: bool) -> None:
    model = nn.Sequential(nn.Linear(ins, outs)).bfloat16()
    assert ("A201" in judged(model, torch.randn(batch, ins).bfloat16())) == found
