"""Read ``shapes3.safetensors``: the one weight file the ONNX graphs share."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

FILE = "shapes3.safetensors"


def path() -> Path:
    """Folder with the weights, the ONNX graphs and ``shapes3.toml``."""
    return Path(__file__).resolve().parent


def weights(file: Path | None = None) -> dict[str, np.ndarray]:
    """Every parameter by name, fp16 as stored, widened to float32."""
    stored = load_file(path() / FILE if file is None else file)
    return {name: array.astype(np.float32) for name, array in stored.items()}


def byte_ranges(file: Path | None = None) -> dict[str, tuple[int, int]]:
    """Offset and length in bytes of each tensor from the start of the file.

    The format is an 8-byte little-endian header length, a JSON header, then
    raw tensor bytes, so an ONNX external-data entry can point straight at them.
    """
    with open(path() / FILE if file is None else file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    out = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        out[name] = (8 + length + begin, end - begin)
    return out
