"""Read GGUF files (versions 2 and 3): metadata and tensors, every length checked against the file.

Layout: magic, version, counts, key-value pairs, tensor infos, padding, tensor data.  Written from the
format's specification (ggml, docs/gguf.md).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UnsupportedModel, UsageError
from .gguf_quant import TYPES, dequantize

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 4


@dataclass(frozen=True)
class GGUFTensor:
    """One stored tensor.

    Attributes
    ----------
    name : str
    shape : tuple of int
        numpy's order, slowest dimension first (the file stores the reverse).
    qtype : str
        ``"F32"``, ``"F16"``, ``"BF16"``, ``"Q8_0"``, ``"Q4_0"`` or ``"Q4_1"``.
    data : numpy.ndarray
        The stored bytes, uint8.
    """

    name: str
    shape: tuple[int, ...]
    qtype: str
    data: np.ndarray

    def dequantize(self) -> np.ndarray:
        """Return the values, float32."""
        return dequantize(self.data, self.qtype).reshape(self.shape)


@dataclass(frozen=True)
class GGUFFile:
    """Metadata and tensors of a file, by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class _Cursor:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def bad(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{str(self.path)!r}: {what}", "download or convert the file again")

    def need(self, count: int, what: str) -> None:
        if count > len(self.data) - self.at:
            raise self.bad(f"truncated in {what}: {count} bytes wanted at {self.at} of {len(self.data)}")

    def scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self.need(size, what)
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value

    def string(self, what: str) -> str:
        count = self.scalar("Q", what)
        self.need(count, what)
        raw = self.data[self.at : self.at + count]
        self.at += count
        return raw.decode("utf-8", "replace")

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY or depth >= _MAX_NESTING:
            raise self.bad(f"{what} has unknown value type {kind}")
        inner, count = self.scalar("I", what), self.scalar("Q", what)
        if inner in _SCALARS:
            size = struct.calcsize("<" + _SCALARS[inner])
            self.need(count * size, what)
            values = struct.unpack_from(f"<{count}{_SCALARS[inner]}", self.data, self.at)
            self.at += count * size
            return list(values)
        self.need(count * 8, what)  # a string or an array takes at least eight bytes
        return [self.value(inner, what, depth + 1) for _ in range(count)]


def read_gguf(path: str | Path) -> GGUFFile:
    """Read a GGUF file; tensor data stays mapped, not copied.

    Raises
    ------
    UsageError
        The file cannot be opened.
    UnsupportedModel
        Bad magic or version, truncation, an unknown tensor type, sizes that disagree; names what.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise UnsupportedModel(f"{str(path)!r}: truncated, {size} bytes are no GGUF file", "download it again")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror}") from error
    cursor = _Cursor(path, data)
    if data[:4] != b"GGUF":
        raise cursor.bad(f"bad magic {bytes(data[:4])!r}, not a GGUF file")
    cursor.at = 4
    version = cursor.scalar("I", "the version")
    if version not in (2, 3):
        raise cursor.bad(f"GGUF version {version} is not read, only 2 and 3 (little endian)")
    tensor_count, pair_count = (
        cursor.scalar("Q", "the tensor count"),
        cursor.scalar("Q", "the metadata count"),
    )
    metadata: dict[str, Any] = {}
    for index in range(pair_count):
        key = cursor.string(f"metadata key {index}")
        if key in metadata:
            raise cursor.bad(f"metadata key {key!r} occurs twice")
        metadata[key] = cursor.value(cursor.scalar("I", f"metadata {key!r}"), f"metadata {key!r}")
    infos = [_tensor_info(cursor, index) for index in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise cursor.bad(f"general.alignment is {alignment!r}, not a multiple of 8")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, qtype, offset in infos:
        if name in tensors:
            raise cursor.bad(f"tensor {name!r} occurs twice")
        block, block_bytes = TYPES[qtype][1:]
        elements = 1
        for dim in shape:
            elements *= dim
        count = elements // block * block_bytes
        if offset % alignment:
            raise cursor.bad(f"tensor {name!r} starts at {offset}, not a multiple of {alignment}")
        cursor.at = start + offset
        cursor.need(count, f"tensor {name!r}")
        view = np.frombuffer(data, np.uint8, count, start + offset) if count else np.zeros(0, np.uint8)
        tensors[name] = GGUFTensor(name, shape, qtype, view)
    return GGUFFile(path, metadata, tensors)


def _tensor_info(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], str, int]:
    name = cursor.string(f"the name of tensor {index}")
    what = f"tensor {name!r}"
    rank = cursor.scalar("I", what)
    if not 1 <= rank <= 4:
        raise cursor.bad(f"{what} has rank {rank}, not 1 to 4")
    stored = [cursor.scalar("Q", what) for _ in range(rank)]
    kind, offset = cursor.scalar("I", what), cursor.scalar("Q", what)
    qtype = next((key for key, (number, _, _) in TYPES.items() if number == kind), None)
    if qtype is None:
        raise UnsupportedModel(
            f"{str(cursor.path)!r}: {what} has type {kind}, which is not read",
            f"convert it to one of {', '.join(TYPES)}",
        )
    if stored[0] % TYPES[qtype][1]:
        raise cursor.bad(f"{what}: rows of {stored[0]} are no multiple of {qtype}'s block of {TYPES[qtype][1]}")
    return name, tuple(reversed(stored)), qtype, offset
