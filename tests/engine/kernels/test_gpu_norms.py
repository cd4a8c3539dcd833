"""The GPU's sum of squares against float64, under Triton's interpreter: FP32 where it is enough, FP64 where it is not."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from mezzo.engine.kernels import reference
from tape import refuse_an_old_interpreter

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
FORMATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def gpu() -> Any:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU; tests marked gpu run there")
    refuse_an_old_interpreter()
    return importlib.import_module("mezzo.engine.kernels.gpu")


def normal(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


CASES: dict[str, Tensor] = {
    "normal, in two chunks and a rest": normal(5001),
    "elsewhere than at 16 bytes": normal(4400)[1:],
    "of many magnitudes": normal(4500)
    * 2.0 ** torch.randint(-60, 1, (4500,), generator=torch.Generator().manual_seed(1)),
    "equal": torch.full((4096,), 1.1),
    "squares beyond FP32": torch.full((4099,), 1e20),
    "squares below FP32": torch.full((64,), 1e-30),
    "squares at the line": torch.full((4096,), 2.0**-56),
    "one among zeros": torch.cat([torch.zeros(4099), torch.full((1,), 1e-30)]),
    "zeros": torch.zeros(4100),
    "none": torch.zeros(0),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_sums_of_squares_are_exact_to_a_millionth(gpu: Any, name: str, dtype: torch.dtype) -> None:
    values = CASES[name].to(dtype)
    values = values[values.isfinite()]  # 1e20 is none in FP16
    expected = float(reference.sum_of_squares([values, values]))
    assert float(gpu.sum_of_squares([values, values])) == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_shows(gpu: Any, dtype: torch.dtype, bad: float) -> None:
    for size, place in ((1, 0), (4097, 4096), (4097, 2)):
        values = torch.ones(size, dtype=dtype)
        values[place] = bad
        assert not gpu.sum_of_squares([torch.ones(3), values]).isfinite()
