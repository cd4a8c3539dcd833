"""The tree of errors, its exit codes and the drawing of it."""

import copy
import inspect
import pickle
import re

import pytest

from mezzo import errors
from mezzo.errors import MezzoError, nearest
from paths import ROOT


def subclasses(cls: type[MezzoError]) -> list[type[MezzoError]]:
    children = [c for c in cls.__subclasses__() if c.__module__ == errors.__name__]
    return children + [below for child in children for below in subclasses(child)]


CLASSES = [MezzoError, *subclasses(MezzoError)]


def test_exit_codes_are_distinct_and_mean_failure() -> None:
    own = [cls for cls in CLASSES if "exit_code" in vars(cls)]  # the others have that of the error they are a kind of
    codes = [cls.exit_code for cls in own]

    assert len(set(codes)) == len(own)
    assert all(0 < code < 126 for code in codes)  # 126 and above have meanings in a shell


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn: dict[str, tuple[int, str | None]] = {}
    parents: list[tuple[int, str]] = []
    for indent, name, code in re.findall(r"^( +)(\w+) +exit (\d+)", errors.__doc__ or "", re.M):
        parents = [(depth, above) for depth, above in parents if depth < len(indent)]
        drawn[name] = (int(code), parents[-1][1] if parents else None)
        parents.append((len(indent), name))

    real = {
        cls.__name__: (
            cls.exit_code,
            next((b.__name__ for b in cls.__bases__ if b in CLASSES), None),
        )
        for cls in CLASSES
    }
    assert drawn == real


def test_every_error_of_the_module_is_a_mezzo_error() -> None:
    found = [
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, BaseException) and cls.__module__ == errors.__name__
    ]
    assert set(found) == set(CLASSES)


def test_the_page_lists_every_exit_code() -> None:
    page = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    listed = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", page, re.M) for code in row.split(",")}
    assert listed >= {0, 129, 130, 143} | {cls.exit_code for cls in CLASSES}


BUILT_IN = [
    ("UsageError", ValueError),
    ("UnsupportedFormatError", ValueError),
    ("SessionError", RuntimeError),
    ("ScaleFloorError", ArithmeticError),
    ("NonFiniteLossError", ArithmeticError),
    ("ScriptError", RuntimeError),
    ("RecordError", ValueError),
    ("SnapshotError", RuntimeError),
    ("GuardError", RuntimeError),
    ("ContractError", ValueError),
    ("PolicyError", ValueError),
    ("NoKernelError", NotImplementedError),
    ("NotSavable", RuntimeError),
]


@pytest.mark.parametrize(("name", "built_in"), BUILT_IN, ids=[name for name, _ in BUILT_IN])
def test_errors_are_also_the_built_in_kind(name: str, built_in: type[Exception]) -> None:
    assert issubclass(getattr(errors, name), built_in)


def test_every_subclass_has_a_row_of_built_in_kinds() -> None:
    assert [cls.__name__ for cls in CLASSES[1:]] == [name for name, _ in BUILT_IN]


@pytest.mark.parametrize("cls", CLASSES)
def test_text_contains_message_and_hint(cls: type[MezzoError]) -> None:
    error = cls("loss scale is 0", hint="use 1")

    assert (error.message, error.hint) == ("loss scale is 0", "use 1")
    assert str(error) == "loss scale is 0\n  hint: use 1"


@pytest.mark.parametrize("cls", CLASSES)
def test_a_hint_is_required(cls: type[MezzoError]) -> None:
    with pytest.raises(TypeError, match="hint"):
        cls("loss scale is 0")  # type: ignore[call-arg]


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_survives_a_process_boundary(cls: type[MezzoError]) -> None:
    error = cls("loss scale is 0", hint="use 1")

    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is cls
        assert str(again) == str(error)


NEAREST = [
    ("zzz", ["fp16", "bf16"], None, "allowed: fp16, bf16"),
    ("fp61", ["fp16", "int8"], None, "did you mean fp16? Allowed: fp16, int8"),
    ("softmx", ["softmax", "softmax", "sum"], None, "did you mean softmax? Allowed: softmax, sum"),
    ("linaer", ["matmul", "linear"], ["matmul"], "did you mean linear? Allowed: matmul"),
    ("zzz", ["matmul", "linear"], ["matmul"], "allowed: matmul"),
]


@pytest.mark.parametrize(("name", "allowed", "listed", "text"), NEAREST)
def test_nearest(name: str, allowed: list[str], listed: list[str] | None, text: str) -> None:
    assert nearest(name, allowed, listed=listed) == text
    assert nearest(name, iter(allowed), listed=listed) == text
