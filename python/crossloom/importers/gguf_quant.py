"""Dequantize GGUF blocks to float32, bit for bit as ggml's reference routines do.

Blocks of 32 values, from ggml's specification: Q8_0 is ``f16 d, i8 q[32]``, value ``d q``; Q4_0 is ``f16 d,
u8 q[16]``, value ``d (q - 8)``; Q4_1 is ``f16 d, f16 m, u8 q[16]``, value ``d q + m``.  The low nibbles of
the sixteen bytes are values 0 to 15 of the block, the high nibbles values 16 to 31.
"""

from __future__ import annotations

import numpy as np

from ..errors import UnsupportedModel

# Name -> (ggml's number, values a block, bytes a block).
TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q8_0": (8, 32, 34),
    "BF16": (30, 1, 2),
}


def dequantize(data: np.ndarray, qtype: str) -> np.ndarray:
    """Return the values of stored bytes.

    Parameters
    ----------
    data : numpy.ndarray
        uint8, whole blocks.
    qtype : str
        A key of ``TYPES``.

    Returns
    -------
    numpy.ndarray
        float32, one-dimensional.
    """
    if qtype not in TYPES:
        raise UnsupportedModel(f"GGUF type {qtype!r} is not read", f"convert to one of {', '.join(TYPES)}")
    data = np.ascontiguousarray(data, np.uint8).reshape(-1)
    if qtype == "F32":
        return data.view("<f4").astype(np.float32)
    if qtype == "F16":
        return data.view("<f2").astype(np.float32)
    if qtype == "BF16":
        return (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    blocks = data.reshape(-1, TYPES[qtype][2])
    scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    if qtype == "Q8_0":
        return (blocks[:, 2:].view(np.int8).astype(np.float32) * scale).reshape(-1)
    packed = blocks[:, -16:]
    values = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
    if qtype == "Q4_0":
        return ((values - np.float32(8)) * scale).reshape(-1)
    minimum = np.ascontiguousarray(blocks[:, 2:4]).view("<f2").astype(np.float32)
    return (values * scale + minimum).reshape(-1)
