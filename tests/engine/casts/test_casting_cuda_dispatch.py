"""The dtypes that operations and modules return, against CUDA's dispatcher: see oracles/cuda_dispatch.py."""

from __future__ import annotations

import json

import pytest
import torch

from oracles import cuda_dispatch as oracle

MADE_WITH = json.loads(oracle.DATA.read_text())["torch"]


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__.split("+")[0] != MADE_WITH, reason=f"the table was made with torch {MADE_WITH}")
@pytest.mark.parametrize("policy", ["fp16:arithmetic=emulated", "bf16:arithmetic=native"])
def test_results_have_the_dtypes_that_cuda_gives(policy: str) -> None:
    agree, apart = oracle.compare(policy, samples=1)
    assert apart == []
    assert agree >= 1200


def test_the_table_holds_what_a_wrong_list_would_change() -> None:
    table = oracle.table(torch.float16)
    assert table["op square  h"].split(",")[0] == "f"
    assert table["op trapezoid  h"].split(",")[0] == "f"
    assert "h" in table["op linalg.matrix_power  f"].split(",")
    assert table["op nn.functional.gelu  h"].split(",")[0] == "h"
    assert sum(line.count(",") + 1 for line in table.values()) > 10_000
