"""What ONNX exporters write, imported: recognised as the same composites, with the results of ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from crossloom.importers.onnx import from_onnx
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.rewrite import composite_attrs, composite_name
from crossloom.testing import run_module

N = helper.make_node


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def recognised(nodes, inputs, weights, opset=17):
    """Import, canonicalize and compare with ONNX Runtime; return composites as (name, facts, parameters)."""
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [info(name, TensorProto.FLOAT, value.shape) for name, value in inputs.items()],
        [info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    sets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    proto = helper.make_model(graph, opset_imports=sets, ir_version=10)
    session = runtime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (want,) = session.run(None, inputs)
    model = from_onnx(proto)
    out = CanonicalizeTransformer()(model.mod)
    values = [inputs[i.name] for i in model.entries["main"].inputs] + model.entry_params("main")
    (got,) = run_module(out, "main", values)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    return [
        (composite_name(f).removeprefix("crossloom."), composite_attrs(f), len(f.params))
        for _, f in out.functions_items()
        if composite_name(f)
    ]


def statistics(of):
    return [N("Pow", [of, "two"], ["sq"]), N("ReduceMean", ["sq"], ["ms"], axes=[-1]), N("Add", ["ms", "eps"], ["v"])]


NORM = {"two": np.float32(2), "eps": np.float32(1e-5), "half": np.float32(-0.5), "one": np.float32(1)}
CENTRED = [N("ReduceMean", ["x"], ["m"], axes=[-1]), N("Sub", ["x", "m"], ["d"])]
SPELLINGS = {
    "operator": ([N("LayerNormalization", ["x", "w", "b"], ["y"])], "layer_norm", 3),
    "operator without bias": ([N("LayerNormalization", ["x", "w"], ["y"])], "layer_norm", None),
    "simplified": (
        [N("SimplifiedLayerNormalization", ["x", "w"], ["y"], epsilon=1e-5, axis=-1)],
        "rms_norm",
        2,
    ),
    "decomposed": (
        [
            *CENTRED,
            *statistics("d"),
            N("Sqrt", ["v"], ["s"]),
            N("Div", ["d", "s"], ["q"]),
            N("Mul", ["q", "w"], ["z"]),
            N("Add", ["z", "b"], ["y"]),
        ],
        "layer_norm",
        3,
    ),
    "decomposed without bias": (
        [*CENTRED, *statistics("d"), N("Sqrt", ["v"], ["s"]), N("Div", ["d", "s"], ["q"]), N("Mul", ["w", "q"], ["y"])],
        "layer_norm",
        2,
    ),
    "bare": ([*CENTRED, *statistics("d"), N("Sqrt", ["v"], ["s"]), N("Div", ["d", "s"], ["y"])], "layer_norm", 1),
    "root mean square by Div": (
        [*statistics("x"), N("Sqrt", ["v"], ["s"]), N("Div", ["x", "s"], ["q"]), N("Mul", ["w", "q"], ["y"])],
        "rms_norm",
        2,
    ),
    "by Pow": (
        [*statistics("x"), N("Pow", ["v", "half"], ["r"]), N("Mul", ["x", "r"], ["q"]), N("Mul", ["q", "w"], ["y"])],
        "rms_norm",
        2,
    ),
    "by Reciprocal": (
        [
            *statistics("x"),
            N("Sqrt", ["v"], ["s"]),
            N("Reciprocal", ["s"], ["r"]),
            N("Mul", ["x", "r"], ["q"]),
            N("Mul", ["q", "w"], ["y"]),
        ],
        "rms_norm",
        2,
    ),
    "by one over": (
        [*statistics("x"), N("Sqrt", ["v"], ["s"]), N("Div", ["one", "s"], ["r"]), N("Mul", ["x", "r"], ["y"])],
        "rms_norm",
        1,
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_norms(spelling):
    nodes, kind, operands = SPELLINGS[spelling]
    used = {name for node in nodes for name in node.input}
    weights = {k: v for k, v in {**NORM, "w": normal(8, seed=1), "b": normal(8, seed=2)}.items() if k in used}
    ((name, facts, count),) = recognised(nodes, {"x": normal(2, 3, 8)}, {k: np.asarray(v) for k, v in weights.items()})
    assert name == kind and list(facts["axes"]) == [-1] and facts["epsilon"] == pytest.approx(1e-5)
    # Without a bias the operator is imported with one of zeros.
    assert operands is None or count == operands


@pytest.mark.parametrize("masked", [False, True])
def test_grouped_attention_with_computed_mask(masked):
    masking = [
        N("Range", ["zero", "five", "one"], ["key"]),
        N("Unsqueeze", ["key", "last"], ["query"]),
        N("LessOrEqual", ["key", "query"], ["keep"]),
        N("Where", ["keep", "s", "far"], ["t"]),
    ]
    nodes = [
        N("Unsqueeze", ["k", "axis"], ["k5"]),
        N("Expand", ["k5", "wide"], ["ke"]),
        N("Reshape", ["ke", "heads"], ["kr"]),
        N("Unsqueeze", ["v", "axis"], ["v5"]),
        N("Expand", ["v5", "wide"], ["ve"]),
        N("Reshape", ["ve", "heads"], ["vr"]),
        N("Transpose", ["kr"], ["kt"], perm=[0, 1, 3, 2]),
        N("MatMul", ["q", "kt"], ["s0"]),
        N("Div", ["s0", "root"], ["s"]),
        *(masking if masked else []),
        N("Softmax", ["t" if masked else "s"], ["p"], axis=-1),
        N("MatMul", ["p", "vr"], ["y"]),
    ]
    weights = {
        "axis": np.array([2], "int64"),
        "wide": np.array([1, 2, 2, 5, 4], "int64"),
        "heads": np.array([1, 4, 5, 4], "int64"),
        "root": np.float32(2),
    }
    if masked:
        weights |= {"zero": np.int64(0), "one": np.int64(1), "five": np.int64(5), "last": np.array([1], "int64")}
        weights["far"] = np.finfo("float32").min
    inputs = {"q": normal(1, 4, 5, 4), "k": normal(1, 2, 5, 4, seed=1), "v": normal(1, 2, 5, 4, seed=2)}
    ((name, facts, _),) = recognised(nodes, inputs, {k: np.asarray(v) for k, v in weights.items()})
    assert (name, facts["groups"], facts["scale"]) == ("attention", 2, 0.5)
    assert facts["mask"] == ("causal" if masked else "none")


def test_feed_forward_of_gemm():
    nodes = [
        N("Gemm", ["x", "u", "ub"], ["h"], transB=1),
        N("Sigmoid", ["h"], ["g"]),
        N("Mul", ["h", "g"], ["a"]),
        N("Gemm", ["a", "d", "db"], ["y"], transB=1),
    ]
    weights = {"u": normal(12, 8), "ub": normal(12, seed=1), "d": normal(8, 12, seed=2), "db": normal(8, seed=3)}
    ((name, facts, count),) = recognised(nodes, {"x": normal(3, 8, seed=4)}, weights)
    assert (name, facts["activation"], count) == ("mlp", "silu", 5)
