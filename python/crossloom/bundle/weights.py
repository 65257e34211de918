"""Weights on disk: a safetensors file whose tensors are mapped, not read.

The layout is the published one (8 bytes of header length, a JSON header, the data without gaps).  Written here
rather than through the library so that every numpy and ml_dtypes type, 64-byte alignment and memory mapping work.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from crossloom.bundle.manifest import damaged
from crossloom.errors import UnsupportedModel

_ALIGNMENT_BYTES = 64
_MAX_HEADER_BYTES = 100_000_000

_CODES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_CODE_OF = {dtype: code for code, dtype in _CODES.items()}


def write_weights(path: Path, weights: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Write `weights` to `path`, equal ones (type, shape, bytes) once.

    Returns
    -------
    stored : dict of str to str
        Name of a weight -> name of the tensor in the file.

    Raises
    ------
    UnsupportedModel
        A weight has a type the format lacks.
    """
    stored: dict[str, str] = {}
    kept: dict[str, np.ndarray] = {}
    by_content: dict[tuple[str, tuple[int, ...], bytes], str] = {}
    for name, weight in weights.items():
        if weight.dtype not in _CODE_OF:
            raise UnsupportedModel(
                f"weight `{name}` has type {weight.dtype}, which a bundle cannot hold",
                "store 4-bit data packed as uint8",
            )
        array = np.asarray(weight, order="C")
        content = (str(array.dtype), array.shape, hashlib.sha256(_buffer(array)).digest())
        stored[name] = by_content.setdefault(content, name)
        if stored[name] == name:
            kept[name] = array
    # Wide types first: then every tensor is aligned to its own type without gaps.
    order = sorted(kept, key=lambda name: -kept[name].dtype.itemsize)
    header: dict[str, object] = {}
    offset = 0
    for name in order:
        array = kept[name]
        header[name] = {
            "dtype": _CODE_OF[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            file.write(_buffer(kept[name]))
    return stored


class Mapped(NamedTuple):
    """One tensor of a weights file.

    Attributes
    ----------
    array : numpy.ndarray
        Mapped, read-only.
    offset_bytes : int
        Where its data begins in the file.
    """

    array: np.ndarray
    offset_bytes: int


def map_weights(path: Path, where: str) -> dict[str, Mapped]:
    """Map the tensors of a safetensors file, read-only.

    Raises
    ------
    UsageError
        The header does not describe the file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise damaged(where, f"{path.name} is cut short")
        try:
            header = json.loads(file.read(length))
            items = [(n, i["dtype"], i["shape"], i["data_offsets"]) for n, i in header.items() if n[:2] != "__"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
            raise damaged(where, f"header of {path.name} ({err})") from err
    start = 8 + length
    data = np.memmap(path, np.uint8, "r", offset=0) if size > start else np.zeros(size, np.uint8)
    tensors: dict[str, Mapped] = {}
    for name, code, shape, offsets in items:
        if not (isinstance(code, str) and code in _CODES and _counts(shape) and _counts(offsets, 2)):
            raise damaged(where, f"tensor `{name}` of {path.name}")
        dtype = _CODES[code]
        begin, end = offsets
        if end > size - start or end - begin != math.prod(shape) * dtype.itemsize:
            raise damaged(where, f"tensor `{name}` of {path.name} lies outside the file")
        array = data[start + begin : start + end].view(dtype).reshape(shape)
        tensors[name] = Mapped(array, start + begin)
    return tensors


def _counts(value: object, length: int | None = None) -> bool:
    return (
        isinstance(value, list)
        and length in (None, len(value))
        and all(type(item) is int and item >= 0 for item in value)
    )


def _buffer(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
