"""Forged files with a right checksum: refused as snapshots, with the session as it was and the snapshot before loaded."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import mezzo
from mezzo import Session, SnapshotError
from snapshot_runs import with_checksum

ABSURD = st.sampled_from(
    [-1, 0, 1, 3, 2**31, 2**47, 2**63, 1.5, "x", None, [], {}, [2**47, 2**47, 0], {"$": "same", "value": 0}]
)


def built() -> Session:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return Session(model, mezzo.AdamW(model.parameters(), lr=0.1), policy="fp16", accumulate=2)


def trained(folder: Path) -> list[Path]:
    """Return two snapshots of a short run, the second inside a window and inside a pass over its data."""
    session, paths = built(), []
    for batch in session.batches(torch.utils.data.DataLoader(torch.randn(8, 3), batch_size=1, shuffle=True)):
        with session.autocast():
            loss = session.models[0](batch).square().mean()
        session.step(loss)
        saving = session.save(folder)
        assert saving is not None
        paths.append(saving.wait())
        if len(paths) == 3:
            break
    return paths[-2:]


def parts_of(path: Path) -> tuple[dict[str, Any], Any, bytes]:
    """Return a file's header, the state in it and the bytes of its tensors."""
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    return header, json.loads(header["__metadata__"]["state"]), whole[8 + length :]


def sealed(header: dict[str, Any], tree: Any, data: bytes) -> bytes:
    """Return a file with a right checksum."""
    header["__metadata__"]["state"] = json.dumps(tree)
    return with_checksum(header, data)


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Return every place in a JSON value: the container and the key."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []
    return [place for key in keys for place in [(tree, key), *places(tree[key])]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, bytes]:
    first, second = trained(tmp_path_factory.mktemp("run"))
    return first, second, second.read_bytes()


def bits(session: Session) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in session.models[0].parameters()]


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_forged_file_is_refused_or_loads_whole(run: tuple[Path, Path, bytes], data: st.DataObject) -> None:
    _, second, whole = run
    second.write_bytes(whole)
    header, tree, tensors = parts_of(second)
    both = [header, tree] if data.draw(st.booleans()) else [tree]
    choices = [place for part in both for place in places(part) if place[1] != "__metadata__"]
    for _ in range(data.draw(st.integers(1, 2))):
        container_, key = choices[data.draw(st.integers(0, len(choices) - 1))]
        container_[key] = data.draw(ABSURD)
    second.write_bytes(sealed(header, tree, tensors))
    session = built()
    before = bits(session)

    try:
        session.load(second)
    except SnapshotError:
        assert bits(session) == before
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it names the refused one
            loaded = session.load(second.parent)
        assert loaded is not None
        assert loaded.path != second


def forge(run: tuple[Path, Path, bytes], change: Any) -> Path:
    _, second, whole = run
    second.write_bytes(whole)
    header, tree, tensors = parts_of(second)
    change(header, tree)
    second.write_bytes(sealed(header, tree, tensors))
    return second


def empty_but_huge(header: dict[str, Any], tree: Any) -> None:
    header["absurd"] = {"dtype": "F32", "shape": [2**47, 2**47, 0], "data_offsets": [0, 0]}
    header.update({name: header.pop(name) for name in [*header] if name not in ("absurd", "__metadata__")})


def began(tree: Any, name: str) -> list[Any]:
    return tree["position"]["began"][name]["value"]  # type: ignore[no-any-return]


FORGERIES = {
    "shape of 2**94 elements and none": (empty_but_huge, "tensor 'absurd' has no possible shape"),
    "Python's generator of the open pass": (lambda h, t: began(t, "python").__setitem__(1, {"$": "tuple", "value": [1, 2]}), "fit"),
    "NumPy's generator behind its words": (lambda h, t: began(t, "numpy").__setitem__(2, 10**6), "NumPy's generator is at word 1000000"),
    "NumPy's generator now": (lambda h, t: t["random"]["numpy"]["value"].__setitem__(2, -1), "NumPy's generator is at word -1"),
    "torch's generator of the open pass": (lambda h, t: t["position"]["began"].__setitem__("torch", 5), "fit"),
    "no batches": (lambda h, t: t["position"].__setitem__("batch", -3), "no pair of counts"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_are_refused_at_load(name: str, run: tuple[Path, Path, bytes]) -> None:
    change, words = FORGERIES[name]
    session = built()
    random = np.random.get_state()

    with pytest.raises(SnapshotError, match=words):
        session.load(forge(run, change))

    assert np.array_equal(np.random.get_state()[1], random[1])  # type: ignore[arg-type]
