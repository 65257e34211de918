"""Hypothesis strategies of transformer-shaped Relax modules, each with its own numpy reference.

Every strategy also draws what passes forget: float16, ragged and one-element sizes, static lengths or a symbolic one
(run at 0, 1 and some tokens), one entry or two, weights as parameters or constants, duplicated outputs and
nested tuples.  A strategy of your own calls :func:`build`:

>>> import numpy as np
>>> from hypothesis import strategies as st
>>> from tvm import relax
>>> from crossloom.numerics import EXACT
>>> from crossloom.testing import assert_pass_preserves
>>> @st.composite
... def scaled_relu(draw):
...     d, dtype = draw(st.integers(1, 4)), draw(st.sampled_from(["float32", "float16"]))
...     def emit(bb, p):
...         return [relax.op.nn.relu(bb.emit(relax.op.multiply(p[0], p[1])))]
...     def reference(x):
...         return [np.maximum(x[0].astype("float64") * x[1].astype("float64"), 0)]
...     return build(draw, [("n", d), (d,)], emit, reference, dtype)
>>> assert_pass_preserves(relax.transform.LegalizeOps(), scaled_relu(), numerics=EXACT, max_examples=2)
"""

from __future__ import annotations

from hypothesis import strategies as st

from .cases.blocks import decoder_layer
from .cases.build import Case, Input, build
from .cases.mixing import attention
from .cases.norms import layer_norm, residual_norm, rms_norm
from .cases.positions import CONVENTIONS, rotary
from .cases.projections import embedding, gated_mlp, half_precision_sum, linear, mlp, parallel_projections, pooled_sum

__all__ = [
    "CONVENTIONS",
    "Case",
    "Input",
    "attention",
    "build",
    "decoder_layer",
    "embedding",
    "gated_mlp",
    "half_precision_sum",
    "layer_norm",
    "linear",
    "mlp",
    "modules",
    "parallel_projections",
    "pooled_sum",
    "residual_norm",
    "rms_norm",
    "rotary",
]


def modules() -> st.SearchStrategy[Case]:
    """Return any of the module strategies."""
    return st.one_of(
        rms_norm(),
        layer_norm(),
        residual_norm(),
        linear(),
        parallel_projections(),
        half_precision_sum(),
        pooled_sum(),
        embedding(),
        mlp(),
        gated_mlp(),
        *map(rotary, CONVENTIONS),
        attention(),
        decoder_layer(),
    )
