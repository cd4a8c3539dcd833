"""The op lists against torch's own registry and documentation."""

from collections import Counter
from types import FunctionType, ModuleType

import pytest
import torch
from torch.nn import functional

from mezzo import oplists
from mezzo.errors import PolicyError
from mezzo.oplists import FAMILIES, Precision, assign, resolve

PLACES: dict[str, ModuleType | type] = {
    "torch": torch,
    "F": functional,
    "Tensor": torch.Tensor,
    "_nn": torch._C._nn,
    "_VF": torch._C._VariableFunctions,
    "linalg": torch.linalg,
    "special": torch.special,
}

# Operations that CUDA's autocast registers and that the lists hold under no such name.
NOT_LISTED = {
    "linalg_matrix_norm": "exposed as torch.linalg.matrix_norm",
    "linalg_multi_dot": "exposed as torch.linalg.multi_dot",
    "linalg_vecdot": "exposed as torch.linalg.vecdot",
    "linalg_vector_norm": "exposed as torch.linalg.vector_norm",
    "_scaled_dot_product_flash_attention": "the kernel under F.scaled_dot_product_attention",
    "_thnn_fused_gru_cell": "the kernel under torch.gru_cell; no Python code calls it",
    "_thnn_fused_lstm_cell": "the kernel under torch.lstm_cell; no Python code calls it",
}

# Operations that the lists lower, widen or keep in FP32 and that CUDA's autocast does not register.
BEYOND_CUDA = {
    # other names of what is registered
    "__matmul__": "matmul",
    "__pow__": "pow",
    "arccos arcsin arctan2": "acos asin atan2",
    "matrix_norm vector_norm multi_dot vecdot": "linalg_*",
    "nll_loss_nd cross_entropy_loss": "nll_loss and log_softmax are inside",
    "pairwise_distance": "norm is inside",
    # whole layers, by the name that Python calls rather than by the cuDNN kernel
    "lstm gru rnn_tanh rnn_relu": "_cudnn_rnn",
}


def registered() -> set[str]:
    """Return what torch itself registers; a build with cuDNN has its kernel of recurrent layers, too, which is listed by other names."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    return {name.removeprefix("aten::").split(".")[0] for name in names if name.startswith("aten::")} - {"_cudnn_rnn"}


def last_names(*precisions: Precision) -> set[str]:
    chosen = [f for f in FAMILIES if not precisions or f.precision in precisions]
    return {op.split(".")[-1] for family in chosen for op in family.ops}


def test_every_operation_of_cuda_autocast_is_listed() -> None:
    assert len(registered()) > 100
    assert registered() - last_names("lower", "fp32", "widest") == set(NOT_LISTED)


def test_exceptions_that_only_change_name_are_listed_by_the_other_name() -> None:
    renamed = {name: why.split(".")[-1] for name, why in NOT_LISTED.items() if "exposed" in why}
    assert set(renamed.values()) <= last_names()
    assert len(renamed) == 4


def test_nothing_is_listed_that_cuda_autocast_leaves_alone() -> None:
    beyond = {name for names in BEYOND_CUDA for name in names.split()}
    assert last_names("lower", "fp32", "widest") - registered() == beyond


def test_followed_operations_are_left_alone_by_cuda_autocast() -> None:
    assert last_names("follow") & registered() == set()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_every_operation_exists_in_torch(family: oplists.Family) -> None:
    for op in family.ops:
        place, name = op.split(".")
        assert callable(getattr(PLACES[place], name, None)), op


# Compiled functions that share the name of a listed operation and are another operation.
NAMESAKES = {"linalg.cross": "aten::linalg_cross, which CUDA's autocast does not register"}


def test_every_face_of_an_operation_is_listed() -> None:
    """An operation that is cast as a function must be cast as a method too: ``x.exp()`` as ``torch.exp(x)``.

    A Python function of the same name ends in a listed operation and needs no row.
    """
    listed = {op for family in FAMILIES for op in family.ops}
    known = {id(getattr(PLACES[op.split(".")[0]], op.split(".")[1])) for op in listed}
    faces = {f"{place}.{name}" for name in last_names("lower", "fp32", "widest") for place in PLACES}
    missing = []
    for face in sorted(faces - listed):
        place, name = face.split(".")
        found = getattr(PLACES[place], name, None)
        if found is not None and place != "_VF" and not isinstance(found, FunctionType) and id(found) not in known:
            missing.append(face)
    assert missing == list(NAMESAKES)


def test_every_operation_stands_once_and_has_a_reason() -> None:
    counts = Counter(op for family in FAMILIES for op in family.ops)
    assert [op for op, count in counts.items() if count > 1] == []
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    assert all(family.reason for family in FAMILIES)


def test_one_operation_name_never_stands_in_two_families() -> None:
    homes: dict[str, set[str]] = {}
    for family in FAMILIES:
        for op in family.ops:
            homes.setdefault(op.split(".")[-1], set()).add(family.name)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}
    # a family named like an operation holds that operation
    assert {f.name for f in FAMILIES if homes.get(f.name, {f.name}) != {f.name}} == set()


# "Autocast Op Reference" of torch's documentation (torch.amp), CUDA part.
# The reflected operators are Python functions around a listed operation, which is what is cast.
REFLECTED = {"__rpow__": "pow", "__rdiv__": "reciprocal", "__rtruediv__": "reciprocal"}
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
    listed = REFLECTED.get(name, name)
    assert {p for op, p in chosen.items() if op.split(".")[-1] == listed} == {precision}


def test_binary_cross_entropy_runs_where_cuda_autocast_refuses() -> None:
    assert assign((), (), ())["_nn.binary_cross_entropy"] == "fp32"


RESOLVED = [
    ("softplus", ("F.softplus",)),
    ("gelu", ("F.gelu",)),
    ("cumsum", ("torch.cumsum", "Tensor.cumsum")),
    ("log1p", ("torch.log1p", "Tensor.log1p", "special.log1p")),
    ("linear", ("F.linear",)),
    ("log_softmax", ("torch.log_softmax", "Tensor.log_softmax", "special.log_softmax")),
    ("nll_loss", ("_nn.nll_loss",)),
    ("bmm", ("torch.bmm", "Tensor.bmm")),
    ("__matmul__", ("Tensor.__matmul__",)),
    (
        "softmax",  # the family, of which the operation is a part
        (
            *("torch.softmax", "Tensor.softmax", "torch.log_softmax", "Tensor.log_softmax"),
            *("special.softmax", "special.log_softmax"),
        ),
    ),
]


@pytest.mark.parametrize(("name", "ops"), RESOLVED, ids=[name for name, _ in RESOLVED])
def test_resolve(name: str, ops: tuple[str, ...]) -> None:
    assert resolve(name) == ops


def test_every_family_and_operation_resolves() -> None:
    for family in FAMILIES:
        assert resolve(family.name) == family.ops
        for op in family.ops:
            assert op in resolve(op.split(".")[-1])


FAMILY_NAMES = ", ".join(f.name for f in FAMILIES)
UNKNOWN = [
    ("sofmax", "did you mean softmax or log_softmax? Allowed: "),
    ("conv2", "did you mean conv2d or conv or conv3d? Allowed: "),
    ("crossentropy", "did you mean cross_entropy_loss or binary_cross_entropy or cross? Allowed: "),
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
    ({"lower": ("layer_norm",)}, {"torch.layer_norm": "lower", "torch.native_layer_norm": "lower"}),
    ({"fp32": ("bmm",)}, {"torch.bmm": "fp32", "Tensor.bmm": "fp32"}),
    ({"fp32": ("gelu",)}, {"F.gelu": "fp32"}),
    ({"widest": ("add",)}, dict.fromkeys(resolve("add"), "widest")),
    (
        {"lower": ("exp",), "fp32": ("relu",), "widest": ("mm",)},
        {
            **dict.fromkeys(resolve("exp"), "lower"),
            **dict.fromkeys(resolve("relu"), "fp32"),
            "torch.mm": "widest",
            "Tensor.mm": "widest",
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
    (("softmax",), ("softmax",), (), "torch.softmax", "lower", "fp32", "softmax"),
    (("log_softmax",), ("softmax",), (), "torch.log_softmax", "lower", "fp32", "softmax"),
    ((), ("exp",), ("expm1",), "torch.expm1", "fp32", "widest", "expm1"),
    (("mm",), (), ("matmul",), "torch.mm", "lower", "widest", "matmul"),
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
    assert caught.value.message == f"operation {op} stands in the lists {first!r} and {second!r}"
    assert caught.value.hint == f"leave {name!r} in one of the lists lower, fp32, widest"
