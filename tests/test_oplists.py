"""The op lists against torch's own registry and documentation."""

import functools
import subprocess
import sys
from collections import Counter

import pytest

from mezzo import oplists
from mezzo.engine.casts.registration import find_op
from mezzo.errors import PolicyError
from mezzo.oplists import FAMILIES, SYNONYMS, Precision, assign, python_name, resolve

# Operations that the lists lower, widen or keep in FP32 and that CUDA's autocast does not register: whole recurrent layers, by
# the name that Python calls rather than by the cuDNN kernel.
BEYOND_CUDA = {f"{kind}.{given}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for given in ("input", "data")}
CUDNN = "_cudnn_rnn"
"""The kernel of those layers, which builds with cuDNN register."""


REGISTERED = "import torch; print(*torch._C._dispatch_get_registrations_for_dispatch_key('AutocastCUDA'))"


@functools.cache
def registered() -> set[str]:
    """Return what torch itself registers, read in a fresh process, where no cast table has registered kernels of ours."""
    done = subprocess.run([sys.executable, "-c", REGISTERED], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")} - {CUDNN}


def listed(*precisions: Precision) -> set[str]:
    return {op for family in FAMILIES for op in family.ops if family.precision in precisions}


def test_the_lists_are_what_cuda_autocast_registers_overload_by_overload() -> None:
    assert len(registered()) > 110
    assert listed("lower", "fp32", "widest") - BEYOND_CUDA == registered()
    assert listed("lower") >= BEYOND_CUDA


def test_followed_operations_are_left_alone_by_cuda_autocast() -> None:
    assert listed("follow") & registered() == set()
    assert len(listed("follow")) > 30


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_every_operation_exists_in_torch(family: oplists.Family) -> None:
    for op in family.ops:
        assert find_op(op) is not None, op


def test_every_operation_is_listed_once_and_has_a_reason() -> None:
    counts = Counter(op for family in FAMILIES for op in family.ops)
    assert [op for op, count in counts.items() if count > 1] == []
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    assert all(family.reason for family in FAMILIES)


def test_one_operation_name_is_never_in_two_families() -> None:
    homes: dict[str, set[str]] = {}
    for family in FAMILIES:
        for op in family.ops:
            homes.setdefault(python_name(op), set()).add(family.name)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}
    # a family named like an operation contains that operation
    assert {f.name for f in FAMILIES if homes.get(f.name, {f.name}) != {f.name}} == set()


# "Autocast Op Reference" of torch's documentation (torch.amp), CUDA part.
# The reflected operators are Python functions around a listed operation, which is what is cast.
REFLECTED = {"__rpow__": "pow", "__rdiv__": "reciprocal", "__rtruediv__": "reciprocal"}
COMPOSED = {"cross_entropy_loss": "nll_loss"}
"""Documented as listed; torch registers a part."""
DOCUMENTED: dict[Precision, str] = {
    "lower": """__matmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul multi_dot conv1d conv2d
        conv3d conv_transpose1d conv_transpose2d conv_transpose3d gru_cell linear lstm_cell matmul
        mm mv prelu rnn_tanh_cell rnn_relu_cell""",
    "fp32": """__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits
        cosh cosine_embedding_loss cdist cosine_similarity cross_entropy_loss cumprod cumsum dist
        erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10
        log_softmax log1p log2 margin_ranking_loss mse_loss multilabel_margin_loss
        multi_margin_loss nll_loss norm pdist poisson_nll_loss pow prod reciprocal rsqrt sinh
        smooth_l1_loss soft_margin_loss softmax softplus sum renorm tan triplet_margin_loss""",
    "widest": """addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add
        tensordot""",
}


@pytest.mark.parametrize(
    ("precision", "name"),
    [(precision, name) for precision, names in DOCUMENTED.items() for name in names.split()],
)
def test_precision_is_the_documented_one(precision: Precision, name: str) -> None:
    chosen = assign((), (), ())
    for names in (REFLECTED, COMPOSED, SYNONYMS):
        name = names.get(name, name)
    assert {p for op, p in chosen.items() if python_name(op) == name} == {precision}


def test_binary_cross_entropy_runs_where_cuda_autocast_refuses() -> None:
    assert assign((), (), ())["binary_cross_entropy"] == "fp32"


RESOLVED = [
    ("softplus", ("softplus",)),
    ("gelu", ("gelu",)),
    ("cumsum", ("cumsum",)),
    ("linear", ("linear",)),
    ("log_softmax", ("log_softmax.int",)),
    ("vector_norm", ("linalg_vector_norm",)),
    ("linalg_vector_norm", ("linalg_vector_norm",)),
    ("__matmul__", ("matmul",)),
    ("arccos", ("acos",)),
    ("pow", ("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")),
    ("sum", ("sum", "sum.dim_IntList")),
    ("softmax", ("softmax.int", "log_softmax.int")),  # the family, of which the operation is a part
]


@pytest.mark.parametrize(("name", "ops"), RESOLVED, ids=[name for name, _ in RESOLVED])
def test_resolve(name: str, ops: tuple[str, ...]) -> None:
    assert resolve(name) == ops


def test_every_family_and_operation_resolves() -> None:
    for family in FAMILIES:
        assert resolve(family.name) == family.ops
        for op in family.ops:
            assert op in resolve(python_name(op))


FAMILY_NAMES = ", ".join(f.name for f in FAMILIES)
UNKNOWN = [
    ("sofmax", "did you mean softmax or log_softmax? Allowed: "),
    ("conv2", "did you mean conv2d or conv or conv3d? Allowed: "),
    ("crossentropy", "did you mean cross_entropy or cross_entropy_loss or binary_cross_entropy? Allowed: "),
    ("zzz", "allowed: "),
]


@pytest.mark.parametrize(("name", "offered"), UNKNOWN)
def test_unknown_names_are_answered_with_the_nearest(name: str, offered: str) -> None:
    with pytest.raises(PolicyError) as caught:
        resolve(name)
    assert caught.value.message == (
        f"unknown operation or family {name!r}; {offered}{FAMILY_NAMES}, and the operations in them"
    )
    assert caught.value.hint == "name a family such as 'softmax' or an operation such as 'log_softmax'"


def test_assign_without_user_lists_is_the_families_own() -> None:
    assert assign((), (), ()) == {op: f.precision for f in FAMILIES for op in f.ops}


ASSIGNED: list[tuple[dict[Precision, tuple[str, ...]], dict[str, Precision]]] = [
    ({"lower": ("layer_norm",)}, {"layer_norm": "lower", "native_layer_norm": "lower"}),
    ({"fp32": ("bmm",)}, {"bmm": "fp32"}),
    ({"fp32": ("gelu",)}, {"gelu": "fp32"}),
    ({"widest": ("add",)}, dict.fromkeys(resolve("add"), "widest")),
    (
        {"lower": ("exp",), "fp32": ("relu",), "widest": ("mm",)},
        {
            **dict.fromkeys(resolve("exp"), "lower"),
            **dict.fromkeys(resolve("relu"), "fp32"),
            "mm": "widest",
        },
    ),
    ({"fp32": ("softmax", "log_softmax")}, {}),  # they are in that list already
]


@pytest.mark.parametrize(("lists", "changed"), ASSIGNED)
def test_assign_changes_what_the_user_names_and_nothing_else(
    lists: dict[Precision, tuple[str, ...]], changed: dict[str, Precision]
) -> None:
    own = assign((), (), ())
    chosen = assign(lists.get("lower", ()), lists.get("fp32", ()), lists.get("widest", ()))
    assert {op: p for op, p in chosen.items() if p != own[op]} == changed


TWICE = [
    (("softmax",), ("softmax",), (), "softmax", "lower", "fp32", "softmax"),
    (("log_softmax",), ("softmax",), (), "log_softmax", "lower", "fp32", "softmax"),
    ((), ("exp",), ("expm1",), "expm1", "fp32", "widest", "expm1"),
    (("mm",), (), ("matmul",), "mm", "lower", "widest", "matmul"),
]


@pytest.mark.parametrize(("lower", "fp32", "widest", "op", "first", "second", "name"), TWICE)
def test_an_operation_in_two_lists_is_refused(
    lower: tuple[str, ...],
    fp32: tuple[str, ...],
    widest: tuple[str, ...],
    op: str,
    first: str,
    second: str,
    name: str,
) -> None:
    with pytest.raises(PolicyError) as caught:
        assign(lower, fp32, widest)
    assert caught.value.message == f"operation {op} is in the lists {first!r} and {second!r}"
    assert caught.value.hint == f"leave {name!r} in one of the lists lower, fp32, widest"
