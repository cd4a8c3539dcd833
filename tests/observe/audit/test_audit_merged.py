"""Operations of an audit that are equal become one row."""

from __future__ import annotations

from mezzo.observe.audit.merged import AuditRow, ProductShape, products


def audited(*, flops: int, module: str = "fc") -> AuditRow:
    return AuditRow(op="mm", module=module, phase="forward", inputs=(), outputs=(), bytes=0, flops=flops, format="fp32")


def test_products_of_one_shape_are_one_row_and_the_largest_is_first() -> None:
    odd = ProductShape(m=4, n=3, k=8, problems={"dimension": "3 is odd"})
    rows = [
        (audited(flops=10), ProductShape(m=4, n=4, k=8)),
        (audited(flops=10), ProductShape(m=4, n=4, k=8)),
        (audited(flops=30), odd),
        (audited(flops=5, module="head"), ProductShape(m=4, n=4, k=8)),
    ]
    found = [(p.module, p.n, p.count, p.flops, p.eligible, p.problems) for p in products(rows)]
    assert found == [
        ("fc", 3, 1, 30, False, ["dimension: 3 is odd"]),
        ("fc", 4, 2, 20, True, []),
        ("head", 4, 1, 5, True, []),
    ]
