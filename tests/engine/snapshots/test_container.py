"""Files of tensors: every byte is checked, safetensors reads them, and nothing in one runs code."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from mezzo import SnapshotError
from mezzo.engine.snapshots import container
from snapshot_runs import built, final_bits, same, train, with_checksum

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b.half": torch.tensor([1.5, float("nan"), float("-inf")], dtype=torch.float16),
    "b.brain": torch.tensor(2.5, dtype=torch.bfloat16),
    "c": torch.tensor([True, False]),
    "empty": torch.empty(0, 3),
    "e5m2": torch.tensor([1.0, 2.0]).to(torch.float8_e5m2),
    "e4m3": torch.tensor([1.0, 448.0]).to(torch.float8_e4m3fn),
    "long": torch.tensor([2**62, -1]),
    "byte": torch.tensor([255, 1, 2], dtype=torch.uint8),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
}
TREE = {"x": [1, 2.5, None, "ü"], "weights": {"$": "tensor", "value": "a"}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "one.safetensors"
    container.write(path, TREE, TENSORS)
    return path


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def test_what_was_written_is_read(file: Path) -> None:
    tree, tensors, _ = container.read(file)

    assert tree == TREE
    assert list(tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes_of(tensors[name]) == bytes_of(tensor)


def test_safetensors_reads_it(file: Path) -> None:
    theirs = safetensors.torch.load_file(file)

    assert theirs.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert theirs[name].dtype is tensor.dtype
        assert bytes_of(theirs[name]) == bytes_of(tensor)


def test_every_flipped_bit_is_found(file: Path) -> None:
    whole = file.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << (at % 8)
        file.write_bytes(damaged)
        with pytest.raises(SnapshotError):
            container.read(file)


def test_every_shortened_or_lengthened_file_is_found(file: Path) -> None:
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(SnapshotError, match="is not a whole snapshot"):
            container.read(file)
    file.write_bytes(whole + b"\0")
    with pytest.raises(SnapshotError, match="truncated or extended"):
        container.read(file)


def sealed(header: dict[str, Any], data: bytes = b"") -> bytes:
    """Return a file with a right checksum, whatever is in it."""
    known = {"kind": container.KIND, "version": str(container.FILE_VERSION), "state": "{}"}
    return with_checksum({**header, "__metadata__": known | header.get("__metadata__", {})}, data)


def row(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


class Evil:
    """Touches a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


torch.save({"model": Evil()}, torch_saved := io.BytesIO())
CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "its header would have 0 bytes, and the file has 0"),
    "text": (b"hello, this is text", "its header would have .* bytes"),
    "pickle": (pickle.dumps(Evil()), "a pickle, as torch.save writes them"),
    "pickle 2": (pickle.dumps(Evil(), 2), "a pickle, as torch.save writes them"),
    "torch.save": (torch_saved.getvalue(), "a pickle, as torch.save writes them"),
    "header beyond the file": ((2**40).to_bytes(8, "little") + b"{}", "its header would have 1099511627776 bytes"),
    "no json": ((4).to_bytes(8, "little") + b"{{{{", "its header is not JSON"),
    "deep json": ((200000).to_bytes(8, "little") + b"[" * 200000, "its header is not JSON"),
    "a list": ((2).to_bytes(8, "little") + b"[]", "its header does not name it as one"),
    "of safetensors": (safetensors.torch.save({"a": torch.ones(2)}), "its header does not name it as one"),
    "newer": (sealed({"__metadata__": {"version": "4"}}), "has version 4; this Mezzo reads up to 3"),
    "no version": (sealed({"__metadata__": {"version": "one"}}), "its version is 'one'"),
    "no checksum": (sealed({}).replace(b'"crc32"', b'"crc3x"'), "it has no checksum"),
    "unknown format": (sealed({"a": row("F99")}, bytes(8)), "tensor 'a' has no valid format"),
    "negative": (sealed({"a": row(shape=[-2])}, bytes(8)), "tensor 'a' has no valid format"),
    "huge": (sealed({"a": row(shape=[2**40, 2**40])}, bytes(8)), "its shape needs"),
    "hole": (sealed({"a": row(offsets=[4, 12])}, bytes(12)), "tensor 'a' has no valid format, shape or place"),
    "overlap": (sealed({"a": row(), "b": row(offsets=[0, 8])}, bytes(8)), "tensor 'b' has no valid"),
    "no row": (sealed({"a": 3}, bytes(8)), "tensor 'a' has no valid"),
    "state is no json": (sealed({"__metadata__": {"state": "{"}}), "its header is not JSON"),
    "state is a number": (sealed({"__metadata__": {"state": 3}}), "its header is not JSON"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_no_snapshot_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data, message = CASES[name]
    path = tmp_path / "bad"
    path.write_bytes(data)

    with pytest.raises(SnapshotError, match=message):
        container.read(path)

    assert not (tmp_path / "evil").exists()


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"cannot read the snapshot .*No such file"):
        container.read(tmp_path / "none")


# --- hundreds of damaged files ---------------------------------------------------------------------


ODD = ["null", "-1", "[]", '{"$":"tuple"}', '"x"', "1e999", "[[[[3]]]]"]


def torn(data: bytearray, draw: random.Random) -> bytes:
    return bytes(data[: draw.randrange(len(data))])


def with_zeros(data: bytearray, draw: random.Random) -> bytes:
    """As after a loss of power: the length is right, and a block was never written."""
    start = draw.randrange(len(data)) // 512 * 512
    block = data[start : start + 4096]
    data[start : start + 4096] = bytes(len(block)) if any(block) else b"x" * len(block)
    return bytes(data)


def flipped(data: bytearray, draw: random.Random) -> bytes:
    for _ in range(draw.randrange(1, 4)):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def spliced(data: bytearray, draw: random.Random) -> bytes:
    start, end = sorted((draw.randrange(len(data)), draw.randrange(len(data))))
    return bytes(data[:start] + data[end + 1 :])


def rewritten(data: bytearray, draw: random.Random) -> bytes:
    """A file whose JSON was changed by somebody who also made its checksum right."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8 : 8 + length]))
    state = header["__metadata__"]["state"]
    inside = [m.span() for m in re.finditer(r'"[^"]*"|-?\d[\d.]*|null|\[\]|\{\}', state)]
    for start, end in sorted(draw.sample(inside, 3), reverse=True):
        state = f"{state[:start]}{draw.choice(ODD)}{state[end:]}"
    header["__metadata__"]["state"] = state
    return with_checksum(header, bytes(data[8 + length :]))


DAMAGES: list[Callable[[bytearray, random.Random], bytes]] = [torn, with_zeros, flipped, spliced, rewritten]


@pytest.mark.parametrize("damage", DAMAGES)
def test_of_hundreds_of_damaged_files_none_loads_and_the_previous_one_does(
    damage: Callable[[bytearray, random.Random], bytes], tmp_path: Path
) -> None:
    session, loader = built()
    train(session, loader, calls=4, after=lambda s, made: (s.save(tmp_path) and None) if made > 2 else None)
    session.state.snapshots.saving.wait()  # type: ignore[union-attr]
    good, newest = sorted(tmp_path.glob("*.safetensors"))
    other, _ = built()
    other.load(good)
    wanted = final_bits(other)
    whole, draw, loaded_altered = newest.read_bytes(), random.Random(3), 0
    for _ in range(60):
        newest.write_bytes(damage(bytearray(whole), draw))
        if damage is rewritten:
            loaded_altered += loads_or_is_refused(other, newest)
            continue
        with pytest.warns(UserWarning, match="not loaded, though newer"):
            other.load(tmp_path)
        assert same(final_bits(other), wanted)
    assert loaded_altered < 60


def loads_or_is_refused(session: Any, path: Path) -> bool:
    """Return whether a file with another state but a right checksum loads; if not, the session is as it was."""
    before = [p.detach().clone() for p in session.models[0].parameters()]
    try:
        session.load(path)
    except SnapshotError:
        assert same([p.detach() for p in session.models[0].parameters()], before)
        return False
    return True


# --- writing --------------------------------------------------------------------------------------


def test_the_order_of_a_write_survives_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):
        monkeypatch.setattr(container.os, name, noted(calls, name, getattr(os, name)))

    container.write(tmp_path / "a", {}, TENSORS)

    assert calls == ["fsync file", "replace", "fsync folder"]


def noted(calls: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        is_folder = isinstance(args[0], int) and os.path.isdir(f"/proc/self/fd/{args[0]}")
        calls.append(name if name == "replace" else f"fsync {'folder' if is_folder else 'file'}")
        return function(*args)

    return call


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failed_write_leaves_and_harms_nothing(name: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(container.os, name, fail)
    with pytest.raises(OSError, match="No space left"):
        container.write(file, {}, {"a": torch.ones(3)})

    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("length", [0x0280, 0x0380, 0x0480, 0x0580, 0x4B50])
def test_a_header_whose_length_begins_like_a_pickle_is_read(length: int, tmp_path: Path) -> None:
    path, extra = tmp_path / "one.safetensors", 0
    for _ in range(3):  # the padding that brings the header to this length
        container.write(path, {"text": "x" * extra}, {"w": torch.ones(2)})
        extra += length - int.from_bytes(path.read_bytes()[:8], "little")
    assert int.from_bytes(path.read_bytes()[:8], "little") == length
    assert torch.equal(container.read(path).tensors["w"], torch.ones(2))
