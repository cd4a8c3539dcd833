"""Why a product in a Keras layer ran in FP32, as a table; and which findings say another thing in Keras."""

from __future__ import annotations

import pytest
from torch import nn

from mezzo.observe.audit.causes import FIXES, compute_dtype, why_wide_in_layer
from mezzo.observe.audit.findings import RULES


class Layer(nn.Module):
    """What the audit reads of a Keras layer."""

    compute_dtype, dtype_policy = "float16", "mixed_float16"


@pytest.mark.parametrize(
    ("dtype", "lowers_elsewhere", "promoted", "cause"),
    [
        ("float32", False, False, "off"),
        ("float32", True, False, "excluded"),
        ("float64", True, False, "excluded"),
        ("float16", True, False, "list"),
        ("bfloat16", True, True, "promotion"),
    ],
)
def test_causes(dtype: str, lowers_elsewhere: bool, promoted: bool, cause: str) -> None:
    found, why = why_wide_in_layer(dtype, "head", "mm", lowers_elsewhere=lowers_elsewhere, promoted=promoted)
    assert found == cause
    assert why


def test_only_layers_have_a_compute_dtype() -> None:
    assert (compute_dtype(Layer()), compute_dtype(nn.Linear(1, 1)), compute_dtype(None)) == ("float16", "", "")


def test_fixes_belong_to_findings_and_are_not_those_of_torch() -> None:
    rules = {rule.code: rule.fix for rule in RULES}
    assert set(FIXES) <= set(rules)
    assert [code for code, fix in FIXES.items() if fix == rules[code] or "torch." in fix or "autocast" in fix] == []
    torchs = [code for code, fix in rules.items() if "autocast" in fix or ".float()" in fix]
    assert [code for code in torchs if code not in FIXES] == []
