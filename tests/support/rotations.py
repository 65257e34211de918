"""What the tests of rotary fusions share: rotations in every spelling, and their reference by complex numbers."""

from __future__ import annotations

import numpy as np
from tvm import relax

op = relax.op


def turned(x, angles, convention):
    """Turn pairs of lanes as complex numbers times ``exp(i angle)``; angles (..., pairs) broadcast to x."""
    x, pairs = x.astype("float64"), angles.shape[-1]
    first = np.arange(pairs) if convention == "half-split" else 2 * np.arange(pairs)
    second = first + (pairs if convention == "half-split" else 1)
    z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles.astype("float64"))
    out = x.copy()
    out[..., first], out[..., second] = z.real, z.imag
    return out


def lanes(e, x, begin, end, step=1):
    """Emit ``x[..., begin:end:step]``."""
    return e(op.strided_slice(x, [len(x.ty.shape) - 1], [begin], [end], [step]))


def tables(e, angles, convention, half):
    """Emit cos and sin of angles (..., pairs): a value per pair, or per lane."""
    if not half and convention == "half-split":
        angles = e(op.concat([angles, angles], -1))
    elif not half:
        angles = e(op.repeat(angles, 2, axis=len(angles.ty.shape) - 1))
    return e(op.cos(angles)), e(op.sin(angles))


def _per_lane(e, x, cos, sin, convention):
    width = int(x.ty.shape[-1])
    if convention == "half-split":
        crossed = e(op.concat([e(op.negative(lanes(e, x, width // 2, width))), lanes(e, x, 0, width // 2)], -1))
    else:
        rank = len(x.ty.shape)
        pairs = [e(op.negative(lanes(e, x, 1, width, 2))), lanes(e, x, 0, width, 2)]
        stacked = e(op.concat([e(op.expand_dims(t, rank)) for t in pairs], -1))
        crossed = e(op.reshape(stacked, x.ty.shape))
    return e(op.add(e(op.multiply(x, cos)), e(op.multiply(crossed, sin))))


def _per_pair(e, x, cos, sin, convention):
    width = int(x.ty.shape[-1])
    if convention == "half-split":
        a, b = lanes(e, x, 0, width // 2), lanes(e, x, width // 2, width)
    else:
        a, b = lanes(e, x, 0, width, 2), lanes(e, x, 1, width, 2)
    first = e(op.subtract(e(op.multiply(a, cos)), e(op.multiply(b, sin))))
    second = e(op.add(e(op.multiply(b, cos)), e(op.multiply(a, sin))))
    if convention == "half-split":
        return e(op.concat([first, second], -1))
    return e(op.reshape(e(op.stack([first, second], -1)), x.ty.shape))


def turn(e, x, cos, sin, convention="half-split", half=False, dim=None):
    """Emit the rotation of the first ``dim`` lanes (all of them when missing) by tables that broadcast to x."""
    width = int(x.ty.shape[-1])
    dim = width if dim is None else dim
    part = x if dim == width else lanes(e, x, 0, dim)
    out = (_per_pair if half else _per_lane)(e, part, cos, sin, convention)
    return out if dim == width else e(op.concat([out, lanes(e, x, dim, width)], -1))
