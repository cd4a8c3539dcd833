"""The audit of a Keras script on TensorFlow, from its graph, against a count by hand."""

from __future__ import annotations

import json

import pytest
from keras_runs import printed

from mezzo.records import AuditRecord, Operation

pytest.importorskip("keras")
pytest.importorskip("tensorflow")
B = 8
CONV, INNER, HEAD = 2 * B * 6 * 6 * 4 * 9, 2 * B * 144 * 8, 2 * B * 8 * 1
"""FLOPs of a forward pass; the layer ``inner`` is called twice."""
POLICIES = ["fp16", "as-is"]


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return printed("keras_audited.py", *POLICIES, KERAS_BACKEND="tensorflow")


@pytest.fixture
def audits(lines: list[str]) -> dict[str, AuditRecord]:
    return {name: AuditRecord.model_validate_json(line) for name, line in zip(POLICIES, lines, strict=False)}


@pytest.mark.parametrize(("policy", "narrow"), [("fp16", "fp16"), ("as-is", "fp32")])
def test_products_by_layer_and_phase(policy: str, narrow: str, audits: dict[str, AuditRecord]) -> None:
    audit = audits[policy]
    found = {(o.module, o.phase): (o.op, o.format, o.count, o.flops) for o in audit.operations if o.flops}
    assert found == {
        ("conv", "forward"): ("Conv2D", narrow, 1, CONV),
        ("conv", "wgrad"): ("Conv2DBackpropFilter", narrow, 1, CONV),  # the images need no gradient
        ("block.inner", "forward"): ("MatMul", narrow, 2, 2 * INNER),
        ("block.inner", "dgrad"): ("MatMul", narrow, 2, 2 * INNER),
        ("block.inner", "wgrad"): ("MatMul", narrow, 2, 2 * INNER),
        ("head", "forward"): ("MatMul", "fp32", 1, HEAD),
        ("head", "dgrad"): ("MatMul", "fp32", 1, HEAD),
        ("head", "wgrad"): ("MatMul", "fp32", 1, HEAD),
    }
    assert audit.run.effective.flops_by_format == audit.flops_by_format


def test_the_script_ends_after_its_last_step_to_record(audits: dict[str, AuditRecord]) -> None:
    assert [len(audit.run.steps) for audit in audits.values()] == [2, 2]


def test_why_products_are_wide(audits: dict[str, AuditRecord]) -> None:
    assert [(p.module, p.cause, p.flops) for p in audits["fp16"].wide_products] == [("head", "excluded", 3 * HEAD)]
    assert {(p.module, p.cause) for p in audits["as-is"].wide_products} == {
        ("conv", "off"),
        ("block.inner", "off"),
        ("head", "off"),
    }


def test_casts_by_layer(audits: dict[str, AuditRecord]) -> None:
    weights = {(c.module, c.source, c.target, c.count, c.bytes) for c in audits["fp16"].casts if c.of == "weight"}
    inner, conv = 144 * 8 + 8, 9 * 4 + 4
    assert weights == {
        ("block.inner", "fp32", "fp16", 4, 2 * inner * (4 + 2)),  # kernel and bias, in both calls
        ("conv", "fp32", "fp16", 2, conv * (4 + 2)),
    }
    assert audits["as-is"].casts == []


def test_other_operations_have_their_layer_and_format(audits: dict[str, AuditRecord]) -> None:
    relu = next(o for o in audits["fp16"].operations if o.op == "Relu")
    assert relu == Operation(
        op="Relu",
        module="block.inner",
        phase="forward",
        inputs=["fp16"],
        outputs=["fp16"],
        count=2,
        bytes=2 * 2 * B * 8 * 2,
    )


def test_a_step_without_a_graph_is_refused(lines: list[str]) -> None:
    refused = json.loads(lines[-2])
    assert refused.startswith("mezzo audit reads the graph of a traced step, and the script trains eagerly")


def test_checks_of_the_scripts_own_do_not_see_what_mezzo_records(lines: list[str]) -> None:
    """A step without a loss scale is recorded with NaN, at which ``enable_check_numerics`` would end a healthy script."""
    assert json.loads(lines[-1]) == 64 // B
