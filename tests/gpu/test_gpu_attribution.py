"""``mezzo audit`` on a GPU: the module of every product, with backward passes in CUDA's own thread, and what its kernels' names say."""

from __future__ import annotations

from collections import Counter

import pytest
from attribution_script import VARIANTS
from gpu_jobs import NEEDS_A_GPU, Ask, mezzo, plan

POLICIES = {"fp32": False, "tf32": True, "bf16": True, "fp16": True}
"""Whether products run on Tensor Cores."""
LINEAR = ("attention.inputs", "attention.outputs", "block.0", "block.2", "last")
SCRIPT = ("{here}/attribution_script.py", "{device}")
CASES = [*((policy, "plain") for policy in POLICIES), *(("bf16", variant) for variant in VARIANTS[1:])]
plan("test_gpu_attribution", **{f"{p} {v}": mezzo("audit", "--policy", p, "--at", "3", *SCRIPT, v) for p, v in CASES})
every_audit = pytest.mark.parametrize(
    ("policy", "variant", "device"),
    [
        pytest.param("bf16", "reentrant", "cpu", marks=pytest.mark.slow),
        *(pytest.param(policy, variant, "cuda", marks=NEEDS_A_GPU) for policy, variant in CASES),
    ],
)


@every_audit
def test_every_product_has_its_module_and_phase(ended: Ask, policy: str, variant: str, device: str) -> None:
    record = ended(f"{policy} {variant}", device).record
    found = Counter(
        {(o["module"], o["phase"]): o["count"] for o in record["operations"] if o["flops"] and "mm" in o["op"]}
    )
    expected = Counter({(layer, phase): 1 for layer in LINEAR for phase in ("forward", "dgrad", "wgrad")})
    if variant in ("checkpoint", "reentrant"):
        expected["block.0", "recompute"] = 1
    if variant == "reentrant":  # the other kind stops once it has all that the backward pass asks for
        expected["block.2", "recompute"] = 1
    assert {key: count for key, count in found.items() if key[0] in LINEAR} == expected
    others = {o["module"] for o in record["operations"] if o["flops"]} - {*LINEAR}
    assert others == {"stem", "attention"}


@every_audit
def test_formats_are_the_policys(ended: Ask, policy: str, variant: str, device: str) -> None:
    record = ended(f"{policy} {variant}", device).record
    assert {o["format"] for o in record["operations"] if o["flops"]} == {policy}


@every_audit
def test_kernels_of_tensor_cores_are_told_by_their_names(ended: Ask, policy: str, variant: str, device: str) -> None:
    """By the products' formats and what the audit itself says of shapes and layouts.

    Attention is left out in FP32: torch's memory-efficient kernels multiply there in three TF32 products on Tensor Cores. So are
    products of less than a MFLOP, for which cuBLAS takes whatever starts first.
    """
    record = ended(f"{policy} {variant}", device).record
    if device == "cpu":
        assert record["kernels"] == []
        return
    judged = [p for p in record["products"] if p["flops"] >= 1e6 and (p["eligible"] or policy == "fp32")]
    judged = [p for p in judged if policy != "fp32" or "attention" not in p["op"]]
    said = {(p["module"], p["phase"], p["op"]): (p["on_tensor_cores"], p["kernels"]) for p in judged}
    assert {one[0] for one in said} >= {"block.0", "block.2"}
    wrong = {key: value for key, value in said.items() if value[0] is not POLICIES[policy]}
    assert wrong == {}


@every_audit
def test_a_profile_has_the_kernels_of_every_product(ended: Ask, policy: str, variant: str, device: str) -> None:
    record = ended(f"{policy} {variant}", device).record
    without = [(p["module"], p["phase"], p["op"]) for p in record["products"] if not p["kernels"]]
    assert len(without) == (0 if device == "cuda" else len(record["products"]))
