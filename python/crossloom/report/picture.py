"""Pictures without a picture library: PNG bytes, and half blocks for a terminal."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UsageError

if TYPE_CHECKING:
    from rich.text import Text

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def to_rgb(image: np.ndarray) -> np.ndarray:
    """Return a drawing as ``(height, width, 3)`` uint8.

    Parameters
    ----------
    image : numpy.ndarray
        ``(height, width, 3)`` uint8, or ``(3, height, width)`` or ``(1, 3, height, width)`` floats of [0, 1]
        (values outside are clipped), as models take them.

    Raises
    ------
    UsageError
        For any other shape or dtype, and for an empty picture or NaN.
    """
    if image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3 and image.size:
        return image
    planes = image[0] if image.ndim == 4 and image.shape[0] == 1 else image
    if planes.ndim != 3 or planes.shape[0] != 3 or not planes.size or planes.dtype.kind != "f":
        raise UsageError(
            f"no picture: {image.dtype} of shape {image.shape}",
            "give (height, width, 3) uint8, or (3, height, width) floats in [0, 1]",
        )
    if np.isnan(planes).any():
        raise UsageError("no picture: it holds NaN", "give floats in [0, 1]")
    scaled = np.clip(planes.astype(np.float64), 0.0, 1.0) * 255.0
    return np.rint(scaled).astype(np.uint8).transpose(1, 2, 0)


def encode_png(image: np.ndarray) -> bytes:
    """Encode a picture as PNG: 8-bit RGB, no filter, one IDAT chunk (W3C PNG, sections 5 and 11).

    Parameters
    ----------
    image : numpy.ndarray
        As for :func:`to_rgb`.
    """
    rgb = to_rgb(image)
    height, width, _ = rgb.shape
    # Each line starts with the number of its filter; 0 is none.
    lines = np.concatenate([np.zeros((height, 1), np.uint8), rgb.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def half_blocks(image: np.ndarray) -> Text:
    """Return a picture as lines of upper half blocks, two pixels a character (the lower one is its background).

    Parameters
    ----------
    image : numpy.ndarray
        As for :func:`to_rgb`; an odd last line stands over the terminal's own background.
    """
    from rich.text import Text

    rgb = to_rgb(image)
    text = Text()
    for top in range(0, len(rgb), 2):
        for column in range(rgb.shape[1]):
            upper = "rgb({},{},{})".format(*rgb[top, column])
            lower = " on rgb({},{},{})".format(*rgb[top + 1, column]) if top + 1 < len(rgb) else ""
            text.append("▀", style=upper + lower)
        text.append("\n")
    return text
