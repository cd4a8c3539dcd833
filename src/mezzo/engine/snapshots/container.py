"""One file with tensors and a JSON value, in the layout of safetensors, with a checksum over every byte.

::

    8 bytes     length of the header, little-endian
    header      JSON: each tensor's format, shape and position; in ``__metadata__`` version, checksum and the JSON value
    tensors     their bytes, one after the other

The checksum is the CRC-32 of the whole file, with zeros for the checksum's own eight digits. It detects every flipped bit, every burst of
up to 32 bits, and all but one in 2**32 of other kinds of damage. It is not a signature: a forged file can pass it, but still runs no
code.

A file is written whole or not at all: to a temporary file in the same folder, fsync, rename, fsync of the folder.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from mezzo.errors import HOW_TO_UPDATE, SnapshotError
from mezzo.version import VERSION as MEZZO_VERSION

FILE_VERSION = 3
KIND = "mezzo snapshot"
MAX_HEADER_BYTES = 100 * 2**20
_OF_PICKLES = (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
PIECE_BYTES = 16 * 2**20
"""Bytes that are checked and written at a time, so that other threads can run in between."""
_NO_CHECKSUM = "00000000"
_HINT = "load an older snapshot: session.load(folder) loads the newest that is whole"


class Contents(NamedTuple):
    """The contents of a file."""

    tree: Any
    tensors: dict[str, Tensor]
    written_by: str = ""
    """The versions of Mezzo and torch, as the file says."""


def _tag(dtype: torch.dtype) -> str:
    """Return safetensors' name of a format: F32, BF16, I64, F8_E4M3."""
    name = str(dtype).removeprefix("torch.").removesuffix("fn")
    for long, short in (("complex", "C"), ("bfloat", "BF"), ("float", "F"), ("uint", "U"), ("int", "I")):
        if name.startswith(long):
            return short + name.removeprefix(long).upper()
    return name.upper()


_DTYPES = {_tag(d): d for d in vars(torch).values() if isinstance(d, torch.dtype) and not str(d).startswith("torch.q")}


def write(path: Path, tree: Any, tensors: Mapping[str, Tensor]) -> int:
    """Write a file that only its owner may read, whole or not at all, and return its size in bytes.

    Args:
        path: the file; its folder exists.
        tree: a JSON value.
        tensors: tensors on the CPU, which must not change until the file is written.

    Raises:
        OSError: the disk is full, or the folder is read-only or gone; a file at ``path`` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            size = _fill(file, tree, tensors)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # only then does the new name survive a power failure
    finally:
        os.close(folder)
    return size


def _fill(file: IO[bytes], tree: Any, tensors: Mapping[str, Tensor]) -> int:
    metadata = {"kind": KIND, "version": str(FILE_VERSION), "crc32": _NO_CHECKSUM, "state": json.dumps(tree)}
    metadata["written_by"] = f"mezzo {MEZZO_VERSION}, torch {torch.__version__}"
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _tag(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    front = len(text).to_bytes(8, "little") + text
    crc = zlib.crc32(front)
    file.write(front)
    for tensor in tensors.values():
        for piece in _pieces(_bytes_of(tensor)):
            crc = zlib.crc32(piece, crc)
            file.write(piece)
    file.seek(front.index(f'"crc32":"{_NO_CHECKSUM}"'.encode()) + len('"crc32":"'))
    file.write(f"{crc:08x}".encode())
    return len(front) + end


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))  # a single element may have any stride
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array).cast("B") if flat.numel() else memoryview(b"")


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def read(path: Path) -> Contents:
    """Read a file and check every byte of it.

    Raises:
        SnapshotError: it is missing, damaged, truncated, of a newer version, or not a snapshot.
    """
    try:
        with path.open("rb") as file:
            return _read(file, path)
    except OSError as error:
        raise SnapshotError(f"cannot read the snapshot {str(path)!r}: {error.strerror}", hint=_HINT) from None


def _read(file: BufferedReader, path: Path) -> Contents:
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, "little")
    whole = len(start) == 8 and 2 <= length <= min(size - 8, MAX_HEADER_BYTES)
    # About one in 1,600 header lengths begins with the same bytes, but is followed by the header's brace.
    if start[:2] in _OF_PICKLES and not (whole and file.peek(1)[:1] == b"{"):
        raise _refusal(path, "a pickle, as torch.save writes them; unpickling can run any code, so it was not read")
    if not whole:
        raise _refusal(path, f"its header would have {length} bytes, and the file has {size}")
    text = file.read(length)
    header, metadata = _header(path, text)
    _refuse_newer(path, metadata)
    stored_crc = str(metadata.get("crc32"))
    marked = f'"crc32":"{stored_crc}"'.encode()
    if not re.fullmatch("[0-9a-f]{8}", stored_crc) or marked not in text:
        raise _refusal(path, "it has no checksum")
    crc = zlib.crc32(start + text.replace(marked, f'"crc32":"{_NO_CHECKSUM}"'.encode(), 1))
    layouts = list(_layouts(path, header, size - 8 - length))
    tensors: dict[str, Tensor] = {}
    for name, dtype, shape in layouts:
        try:
            tensors[name] = torch.empty(shape, dtype=dtype)
        except RuntimeError:  # a length of 0 among lengths that are too large together
            raise _refusal(path, f"tensor {name[:80]!r} has no possible shape") from None
        for piece in _pieces(_bytes_of(tensors[name])):
            if file.readinto(piece) != len(piece):
                raise _refusal(path, "it ended while it was read")
            crc = zlib.crc32(piece, crc)
    if f"{crc:08x}" != stored_crc:
        raise _refusal(
            path, f"its checksum is {stored_crc}, but its bytes have {crc:08x}: it was damaged after it was written"
        )
    written_by = str(metadata.get("written_by", "")).encode("unicode_escape").decode()[:80]
    return Contents(_json(path, metadata.get("state")), tensors, written_by)


def _header(path: Path, text: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    header = _json(path, text)
    metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or metadata.get("kind") != KIND:
        raise _refusal(path, "its header does not name it as one")
    return header, metadata


def _json(path: Path, text: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise _refusal(path, f"its header is not JSON: {str(error)[:120]}") from None


def _refuse_newer(path: Path, metadata: Mapping[str, Any]) -> None:
    version = str(metadata.get("version"))
    if version.isascii() and version.isdigit() and len(version) < 9 and int(version) > FILE_VERSION:
        raise SnapshotError(
            f"{str(path)!r} has version {int(version)}; this Mezzo reads up to {FILE_VERSION}",
            hint=HOW_TO_UPDATE,
        )
    if version != str(FILE_VERSION):
        raise _refusal(path, f"its version is {version[:40]!r}")


def _layouts(path: Path, header: Mapping[str, Any], size: int) -> Iterator[tuple[str, torch.dtype, list[int]]]:
    end = 0
    for name, row in header.items():
        entry = row if isinstance(row, dict) else {}
        shape: Any = entry.get("shape")
        offsets: Any = entry.get("data_offsets")
        dtype = _DTYPES.get(str(entry.get("dtype")))
        if (
            dtype is None
            or not _are_counts(shape)
            or not _are_counts(offsets)
            or len(offsets) != 2
            or offsets[0] != end
        ):
            raise _refusal(path, f"tensor {name[:80]!r} has no valid format, shape or place")
        count = 1
        for length in shape:
            count *= length
        end = offsets[1]
        if end - offsets[0] != count * dtype.itemsize:
            raise _refusal(
                path, f"tensor {name[:80]!r} has {end - offsets[0]} bytes, and its shape needs {count * dtype.itemsize}"
            )
        yield name, dtype, shape
    if end != size:
        raise _refusal(
            path, f"it contains {size} bytes of tensors, and its header says {end}: it was truncated or extended"
        )


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and len(value) < 64 and all(type(n) is int and 0 <= n < 2**48 for n in value)


def _refusal(path: Path, why: str) -> SnapshotError:
    return SnapshotError(f"{str(path)!r} is not a whole snapshot: {why}", hint=_HINT)
