"""The errors of products in blocks, from the errors of layers by themselves."""

from __future__ import annotations

from mezzo.observe.fallback.evidence import LocalError, Measured, of_all, product_errors

EVERY = ["forward", "dgrad", "wgrad"]
LOCAL = [
    LocalError(module="Net", type="Net", unnamed=True, output=0.9, flops=1_000, reason=""),
    LocalError(module="up", type="Linear", output=0.1, dgrad=0.2, wgrad=0.7, rounded=0.8, flops=300),
    LocalError(module="first", type="Linear", output=0.1, wgrad=0.3, rounded=0.4, flops=200),
    LocalError(module="frozen", type="Linear", output=0.1, dgrad=0.25, rounded=0.3, flops=90),
    LocalError(module="odd", type="Linear", reason="RuntimeError: not by itself"),
    LocalError(module="norm", type="LayerNorm", output=0.2, dgrad=0.2, wgrad=0.2),
]
UNSEEN = "no gradient reached it in the first step"


def test_a_layer_becomes_its_products() -> None:
    layers = {"up": ["forward", "wgrad"], **dict.fromkeys(("first", "frozen", "odd", "expert"), EVERY)}
    found = product_errors(Measured(local=LOCAL, products=layers))

    assert found[0] == LocalError(module="Net", type="Net", unnamed=True, flops=1_000)  # its own error is no product's
    assert [(e.module, e.output, e.dgrad, e.wgrad, e.rounded, e.flops, e.reason) for e in found[1:]] == [
        ("up.forward", 0.1, None, None, 0.1, 100, ""),  # dgrad stays in BF16
        ("up.wgrad", None, None, 0.7, 0.7, 100, ""),
        ("first.forward", 0.1, None, None, 0.1, 100, ""),  # nothing reads the gradient of the data
        ("first.wgrad", None, None, 0.3, 0.3, 100, ""),
        ("frozen.forward", 0.1, None, None, 0.1, 45, ""),
        ("frozen.dgrad", None, 0.25, None, 0.25, 45, ""),
        *((f"odd.{product}", None, None, None, 0.0, 0, LOCAL[4].reason) for product in EVERY),
        *((f"expert.{product}", None, None, None, 0.0, 0, UNSEEN) for product in EVERY),
    ]


def test_ranks_have_the_same_products() -> None:
    ranks = [Measured(local=LOCAL, products={"up": EVERY}) for _ in range(2)]
    assert of_all(ranks).products == {"up": EVERY}
    again = Measured.model_validate_json(ranks[0].model_dump_json())
    assert again == ranks[0]
