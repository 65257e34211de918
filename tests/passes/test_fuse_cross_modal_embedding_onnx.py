"""Sequences as ONNX exporters write them: placeholders by NonZero and ScatterND, classes by OneHot."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from crossloom.importers.onnx import from_onnx
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fuse_cross_modal_embedding import FuseCrossModalEmbedding
from crossloom.testing import run_module
from crossloom.verdict import Ledger
from sequences import composites

N = helper.make_node
WIDTH, TOKEN = 6, 9


def check(nodes, inputs, constants, lengths):
    """Import, fuse, compare with ONNX Runtime, and return the verdicts' rules and what is called."""
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    kind = lambda value: TensorProto.INT64 if value.dtype == "int64" else TensorProto.FLOAT
    shape = lambda name, value: [lengths.get((name, at), size) for at, size in enumerate(value.shape)]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, kind(v), shape(name, v)) for name, v in inputs.items()],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    session = runtime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (want,) = session.run(None, inputs)
    model = from_onnx(proto)
    with Ledger() as ledger:
        out = FuseCrossModalEmbedding()(CanonicalizeTransformer()(model.mod))
    values = [inputs[spec.name] for spec in model.entries["main"].inputs] + model.entry_params("main")
    np.testing.assert_allclose(run_module(out, "main", values)[0], want, rtol=1e-5, atol=1e-5)
    rules = [v.rewrite for v in ledger.fired if v.pass_name == "fuse-cross-modal-embedding"]
    assert not [v for v in ledger if not v.fired]
    return rules, composites(out)


def floats(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


@pytest.mark.parametrize("elements", [False, True])
def test_features_where_placeholder_tokens_stand(elements):
    nodes = [
        N("Gather", ["table", "ids"], ["text"]),
        N("MatMul", ["image", "w"], ["features"]),
        N("Equal", ["ids", "token"], ["mask"]),
        N("Unsqueeze", ["mask", "minus_one"], ["column"]),
        N("Shape", ["text"], ["sizes"]),
        N("Expand", ["column", "sizes"], ["wide"]),
        N("NonZero", ["wide" if elements else "mask"], ["listed"]),
        N("Transpose", ["listed"], ["index"], perm=[1, 0]),
        N("Reshape", ["features", "minus_one"], ["flat"]),
        N("Shape", ["index"], ["places"]),
        N("Gather", ["places", "zero"], ["count"]),
        N("Slice", ["flat", "zero", "count", "zero"], ["cut"]),
        N("ScatterND", ["text", "index", "cut" if elements else "features"], ["y"]),
    ]
    nodes = nodes if elements else [node for node in nodes if node.output[0] not in ("column", "wide", "sizes", "flat")]
    nodes = nodes if elements else [n for n in nodes if n.output[0] not in ("places", "count", "cut")]
    constants = {"table": floats(10, WIDTH), "w": floats(5, WIDTH), "token": np.array(TOKEN)}
    constants |= {"minus_one": np.array([-1]), "zero": np.array([0])}
    inputs = {"ids": np.array([[1, TOKEN, TOKEN, 3, TOKEN, 0]]), "image": floats(3, 5, seed=1)}
    rules, called = check(nodes, inputs, constants, {("ids", 1): "S"})
    assert rules == ["scattered-sequence"] and called == {"fused_sequence": 1}


@pytest.mark.parametrize("values", [(0, 1), (1, 2)])
def test_classes_beside_features(values):
    nodes = [
        N("OneHot", ["ids", "depth", "values"], ["classes"], axis=-1),
        N("Concat", ["image", "classes"], ["both"], axis=-1),
        N("MatMul", ["both", "w"], ["features"]),
        N("Concat", ["features", "audio"], ["y"], axis=1),
    ]
    constants = {"depth": np.array(4), "values": np.array(values, "float32"), "w": floats(9, WIDTH)}
    inputs = {"ids": np.array([[1, 3, -1, 0]]), "image": floats(1, 4, 5), "audio": floats(1, 2, WIDTH)}
    rules, called = check(nodes, inputs, constants, {("ids", 1): "S", ("image", 1): "S"})
    assert rules == (["one-hot", "sequence"] if values == (0, 1) else ["sequence"]) and called == {"fused_sequence": 1}
