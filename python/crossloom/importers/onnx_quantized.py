"""Integer weights with scales: MatMulNBits and DequantizeLinear, read bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from crossloom.errors import UnsupportedModel


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight as the model stores it, unpacked; what a later pass may keep packed.

    Attributes
    ----------
    values : numpy.ndarray of int8, uint8, int16, uint16 or int32
        One value per element.
    scale : numpy.ndarray
        Scalar, one per index along `axis`, or (blocked) of the rank of `values`.
    zero_point : numpy.ndarray or None
        Shape of `scale`; integer or floating point; None is zero.
    axis : int
    block_size : int
        Elements along `axis` that share a scale; 0 when not blocked.
    """

    values: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray | None
    axis: int = 1
    block_size: int = 0

    def dequantize(self) -> np.ndarray:
        """Return ``(values - zero_point) * scale``, computed in float32, in the dtype of `scale`."""
        scale = self._spread(self.scale)
        if self.zero_point is None:
            centred = self.values.astype("float32")
        elif self.zero_point.dtype.kind in "iu":
            centred = (self.values.astype("int64") - self._spread(self.zero_point)).astype("float32")
        else:
            centred = self.values.astype("float32") - self._spread(self.zero_point).astype("float32")
        return (centred * scale.astype("float32")).astype(self.scale.dtype)

    def _spread(self, table: np.ndarray) -> np.ndarray:
        if table.size == 1 and not self.block_size:
            return table.reshape(())
        rank = self.values.ndim
        axis = self.axis % rank if rank else 0
        if self.block_size:
            wide = np.repeat(table, self.block_size, axis=axis)
            return np.take(wide, np.arange(self.values.shape[axis]), axis=axis)
        return table.reshape([-1 if i == axis else 1 for i in range(rank)])


def fold_dequantize(node: str, opset: int, attrs: dict[str, Any], arrays: list[np.ndarray | None]) -> np.ndarray:
    """Evaluate DequantizeLinear on constants: per tensor, per axis or blocked.

    Raises
    ------
    UnsupportedModel
        The scale's shape fits none of the three.
    """
    x, scale = arrays[0], arrays[1]
    zero = arrays[2] if len(arrays) > 2 else None
    if x is None or scale is None:
        raise UnsupportedModel(f"{node}: needs its input and its scale", "export the model again")
    block = int(attrs.get("block_size", 0))
    axis = int(attrs.get("axis", 1))
    if scale.size != 1 or block:
        axis = 0 if x.ndim == 1 and axis == 1 else axis
        fits = -x.ndim <= axis < x.ndim
        if fits and block:
            want = list(x.shape)
            want[axis] = -(-want[axis] // block)
            fits = block > 0 and list(scale.shape) == want
        elif fits:
            fits = scale.size == x.shape[axis]
        if not fits or (zero is not None and zero.size not in (scale.size,)):
            raise UnsupportedModel(
                f"{node}: scale of shape {list(scale.shape)} does not fit data of shape {list(x.shape)} "
                f"(axis {axis}, block_size {block})",
                "correct the scale, the axis or the block size",
            )
    return QuantizedWeight(x, scale, zero, axis, block).dequantize()


def unpack_bits(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unpack bytes along the last axis, lowest bits first: ``(..., n) -> (..., n * 8 // bits)``."""
    shifts = np.arange(0, 8, bits, dtype="uint8")
    parts = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return parts.reshape(*packed.shape[:-1], -1)


def fold_matmul_nbits(node: str, attrs: dict[str, Any], arrays: list[np.ndarray | None]) -> np.ndarray:
    """Return the weight of a com.microsoft MatMulNBits, shape (N, K), in the dtype of its scales.

    Each row holds ``ceil(K / block_size)`` blocks, the last padded; zero points are packed along each row, so
    that a row with an odd number of blocks ends in a padding nibble; without zero points the middle of
    the range is zero.  Source: the operator's documentation in ONNX Runtime's ContribOperators.md.

    Raises
    ------
    UnsupportedModel
        Weights that are not constant, ``g_idx``, an unknown bit width, or sizes that disagree.
    """
    arrays = arrays + [None] * (6 - len(arrays))
    packed, scale, zero, g_idx = arrays[1:5]
    if g_idx is not None:
        raise UnsupportedModel(f"{node}: g_idx is not supported", "quantize without act-order")
    try:
        k, n, block = int(attrs["K"]), int(attrs["N"]), int(attrs["block_size"])
    except KeyError as err:
        raise UnsupportedModel(f"{node}: attribute {err} is missing", "export the model again") from err
    bits = int(attrs.get("bits", 4))
    if bits not in (2, 4, 8) or block <= 0 or block * bits % 8 or k <= 0 or n <= 0:
        raise UnsupportedModel(
            f"{node}: K={k}, N={n}, bits={bits}, block_size={block} is not supported",
            "use 2, 4 or 8 bits and a block size that fills whole bytes",
        )
    if packed is None or scale is None:
        raise UnsupportedModel(f"{node}: needs constant B and scales", "store them as initializers")
    blocks = -(-k // block)
    row_bytes = -(-blocks * bits // 8)
    if packed.dtype != np.uint8 or packed.size != n * blocks * block * bits // 8 or scale.size != n * blocks:
        raise UnsupportedModel(
            f"{node}: B {packed.dtype}{list(packed.shape)} or scales {list(scale.shape)} do not fit "
            f"N={n}, K={k} ({blocks} blocks a row)",
            "pack every row to whole blocks",
        )
    values = unpack_bits(packed.reshape(n, -1), bits)[:, :k]
    if zero is None:
        points = np.full((n, blocks), 1 << (bits - 1), "uint8")
    elif zero.dtype == np.uint8:
        if zero.size != n * row_bytes:
            raise UnsupportedModel(
                f"{node}: zero points {list(zero.shape)} do not fit {n} rows of {row_bytes} bytes",
                "pack the zero points of each row to whole bytes",
            )
        points = unpack_bits(zero.reshape(n, row_bytes), bits)[:, :blocks]
    elif zero.size == n * blocks:
        points = zero.reshape(n, blocks)
    else:
        raise UnsupportedModel(f"{node}: zero points {list(zero.shape)} do not fit", "one per block")
    return QuantizedWeight(values, scale.reshape(n, blocks), points, 1, block).dequantize()
