"""What a script says to CUDA's autocast, on a CPU: the formats that torch's CUDA dispatch gives (oracles/cuda_forms.py)."""

from __future__ import annotations

import json

import pytest
import torch

from mezzo.launch.torch import switched
from mezzo.policy import Policy
from oracles.cuda_forms import DATA, FORMS, Script

EXPECTED = json.loads(DATA.read_text())
needs_no_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU stands in only where there is no CUDA device"
)


def test_the_file_has_every_form() -> None:
    assert len(FORMS) >= 30
    assert set(EXPECTED["float16"]) == set(EXPECTED["bfloat16"]) == set(FORMS)


@needs_no_cuda
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", ["fp16", "bf16"])
def test_a_form_has_the_formats_that_cuda_gives(policy: str, form: str) -> None:
    script = Script()
    emulated = Policy.parse(policy).replace(arithmetic="emulated")
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")
    with switched(emulated):
        FORMS[form](script)
    low = str(emulated.storage.dtype).removeprefix("torch.")
    assert script.seen == EXPECTED[low][form]
    assert (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
    ) == before
