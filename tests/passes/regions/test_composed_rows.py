"""Regions over as many rows as two sizes have together: image features in front of text."""

from __future__ import annotations

import numpy as np
from tvm import relax, tirx

from canonical import function
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fuse_rotary_projection import FuseRotaryProjection
from crossloom.passes.lower_fused_linear import LowerFusedLinear
from crossloom.targets import get_target
from crossloom.testing import run_module
from crossloom.verdict import Ledger

op = relax.op


def test_a_projection_over_features_and_text_is_moved_by_its_kernel():
    text = tirx.Var("T", "int64")

    def lines(emit, features, embedded, w):
        x = emit(op.concat([features, embedded], axis=1))
        heads = emit(op.reshape(emit(op.matmul(x, w)), [1, text + 3, 2, 4]))
        return emit(op.permute_dims(heads, [0, 2, 1, 3]))

    mod = function(lines, [(1, 3, 8), (1, text, 8), (8, 8)], "prefill", num_input=2)
    with Ledger() as ledger:
        mod = FuseRotaryProjection()(CanonicalizeTransformer()(mod))
        mod = LowerFusedLinear(get_target("host").tvm_target())(mod)
    assert {"moved-projection", "lower-fused-linear"} <= {v.rewrite for v in ledger.fired}
    assert not [v for v in ledger.refused if v.pass_name != "canonicalize-transformer"]
    rng = np.random.default_rng(0)
    features, w = (rng.standard_normal(s).astype("float32") for s in ((1, 3, 8), (8, 8)))
    for rows in (1, 5):
        embedded = rng.standard_normal((1, rows, 8)).astype("float32")
        (got,) = run_module(mod, "prefill", [features, embedded, w])
        whole = np.concatenate([features, embedded], axis=1).astype("float64")
        wanted = (whole @ w).reshape(1, rows + 3, 2, 4).transpose(0, 2, 1, 3)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
