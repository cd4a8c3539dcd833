"""cuDNN's workspaces, counted by hand, and where a tape has them: copies in the other layout, and Winograd's buffers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from helpers_predict import trained_tape
from mezzo.gpus import gpu_named
from mezzo.measure.predict.plan import matrix_formats
from mezzo.measure.predict.tape import MemoryBlock, TrainingTape
from mezzo.measure.predict.tape_memory import MIB, predict_memory

# Two images of 8x8: 2 x 2 x 2 tiles of 4x4, each with 36 values a channel; 36 values a pair of channels.
VALUES = 36 * (8 * (4 + 6) + 4 * 6)


def _tape(
    layer: nn.Module, policy: str, size: int = 8, layout: torch.memory_format = torch.contiguous_format
) -> TrainingTape:
    def inputs(n: int) -> dict[str, Tensor]:
        return {"x": torch.empty(n, 3, size, size).to(memory_format=layout)}

    return trained_tape(lambda: nn.Sequential(nn.Conv2d(3, 4, 1), layer), inputs=inputs, batch=2, policy=policy)


def _tried_bytes(tape: TrainingTape) -> list[int]:
    return [block.size_bytes for block in tape.blocks if block.kind == "workspaces" and not block.matrix_format]


def _copied(tape: TrainingTape) -> list[tuple[int, str]]:
    return [(block.size_bytes, block.matrix_format) for block in tape.blocks if block.matrix_format]


@pytest.fixture
def trying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)


@pytest.mark.usefixtures("trying")
@pytest.mark.parametrize(
    ("policy", "found"),
    [
        # forward and backward of two steps: FP32 goes on with this algorithm
        ("fp32", [4 * VALUES] * 4),
        # 16 bits only try it in the first step
        ("bf16", [2 * VALUES] * 2),
    ],
)
def test_a_convolution_of_three_by_three_has_winograds_buffers(policy: str, found: list[int]) -> None:
    assert _tried_bytes(_tape(nn.Conv2d(4, 6, 3, padding=1), policy)) == found


@pytest.mark.usefixtures("trying")
def test_a_tile_that_is_not_full_counts_whole() -> None:
    # 9x9 without padding leaves 7x7: again 2 x 2 tiles
    assert _tried_bytes(_tape(nn.Conv2d(4, 6, 3), "fp32", size=9)) == [4 * VALUES] * 4


@pytest.mark.usefixtures("trying")
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 1),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.Conv2d(4, 6, 3, dilation=2),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.ConvTranspose2d(4, 6, 3),
        nn.Conv2d(4, 6, (3, 1)),
    ],
    ids=str,
)
def test_other_convolutions_have_none(layer: nn.Module) -> None:
    assert _tried_bytes(_tape(layer, "fp32")) == []


def test_nothing_is_tried_unless_the_training_lets_cudnn() -> None:
    tape = _tape(nn.Conv2d(4, 6, 3, padding=1), "fp32")
    assert (_tried_bytes(tape), tape.tries_algorithms) == ([], False)


def test_the_buffers_count_at_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Conv2d(4, 256, 3, padding=1)
    plain = predict_memory(_tape(layer, "fp32"), workspace_bytes=0).allocated_bytes
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    tape = _tape(layer, "fp32")
    assert tape.tries_algorithms
    assert plain < max(_tried_bytes(tape)) < predict_memory(tape, workspace_bytes=0).allocated_bytes


# --- copies in the other layout ---------------------------------------------------------------------------------------------

# Two images of 4 channels and 8x8 points in, of 6 channels and 8x8 points out, and 6 x 4 windows of 3x3.
OPERANDS = 2 * 4 * 64 + 2 * 6 * 64 + 6 * 4 * 9


@pytest.mark.parametrize(
    ("policy", "found"),
    [
        ("fp32", [(4 * OPERANDS, "fp32")] * 4),  # forward and backward of two steps
        ("bf16", [(2 * OPERANDS, "bf16")] * 4),
    ],
)
def test_a_channels_first_convolution_is_copied(policy: str, found: list[tuple[int, str]]) -> None:
    assert _copied(_tape(nn.Conv2d(4, 6, 3, padding=1), policy)) == found


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(4, 6, 1), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 8, 3, groups=2)],
    ids=["window of one point", "depthwise", "grouped"],
)
def test_what_is_a_plain_product_or_has_groups_is_not_copied(layer: nn.Module) -> None:
    assert _copied(_tape(layer, "bf16")) == []


def test_channels_last_is_not_copied() -> None:
    assert _copied(_tape(nn.Conv2d(4, 6, 3, padding=1), "bf16", layout=torch.channels_last)) == []


def _one_product(matrix_format: str = "fp32") -> TrainingTape:
    # 20 MiB of operands stay; the copy of 12 MiB comes and goes
    blocks = [MemoryBlock(20 * MIB, "activations"), MemoryBlock(12 * MIB, "workspaces", matrix_format)]
    return TrainingTape(batch=1, blocks=blocks, events=[0, 1, ~1, ~0])


@pytest.mark.parametrize(
    ("formats", "limit", "peak", "reserved", "fits"),
    [
        ((), None, 20, 20, True),  # no matrix units
        (("fp16", "bf16"), None, 20, 20, True),  # none for FP32
        (("fp16", "bf16", "fp32"), None, 32, 32, True),
        (("fp32",), 32, 32, 32, True),
        (("fp32",), 31, 20, 20, True),  # no room: torch takes another algorithm
        (("fp32",), 19, 0, 0, False),  # no room for the operands
    ],
)
def test_copies_count_where_matrix_units_compute_the_format_and_there_is_room(
    formats: tuple[str, ...], limit: int | None, peak: int, reserved: int, fits: bool
) -> None:
    limit_bytes = None if limit is None else limit * MIB
    found = predict_memory(_one_product(), limit_bytes=limit_bytes, matrix_formats=formats)
    assert (found.allocated_bytes, found.reserved_bytes, found.fits) == (peak * MIB, reserved * MIB, fits)
    assert not fits or sum(found.by_kind_bytes.values()) == peak * MIB


@pytest.mark.parametrize(
    ("gpu", "policy", "formats"),
    [
        ("a100-80gb", "fp32", ("fp16", "bf16")),
        ("a100-80gb", "tf32", ("fp16", "bf16", "fp32")),
        ("a100-80gb", "bf16", ("fp16", "bf16", "fp32")),
        ("v100-16gb", "tf32", ("fp16", "bf16")),
        ("mi210", "fp16", ()),  # no cuDNN
    ],
)
def test_formats_of_matrix_units(gpu: str, policy: str, formats: tuple[str, ...]) -> None:
    assert matrix_formats(gpu_named(gpu), policy) == formats
