"""Translate layer_norm as PyTorch defines it: weight and bias may each be missing.

TVM 0.27 looks up a missing one by name and fails.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax
from tvm.relax import op

NAMES = ("input", "normalized_shape", "weight", "bias", "eps")


def convert_layer_norm(node: Any, importer: Any) -> relax.Var:
    """Translate one node; a ``custom_convert_map`` entry of TVM's PyTorch importer.

    A missing weight becomes ones, a missing bias zeros, of the input's dtype.
    """
    given: dict[str, Any] = dict(zip(NAMES, node.args))
    given.update(node.kwargs)
    x = importer.env[given["input"]]
    shape = [int(size) for size in given["normalized_shape"]]
    weight, bias = (
        importer.env[given[name]]
        if given.get(name) is not None
        else relax.const(np.full(shape, value), str(x.ty.dtype))
        for name, value in (("weight", 1.0), ("bias", 0.0))
    )
    axes, epsilon = list(range(-len(shape), 0)), given.get("eps", 1e-5)
    return importer.block_builder.emit(op.nn.layer_norm(x, weight, bias, axes=axes, epsilon=float(epsilon)))
