"""Batch norms of imported ONNX files and PyTorch modules, folded."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from crossloom.fold_weights import fold_weights
from crossloom.importers.onnx import from_onnx
from crossloom.model import Model
from crossloom.passes.canonicalize_transformer import CanonicalizeTransformer
from crossloom.passes.fold_batch_norm import FoldBatchNorm
from crossloom.passes.inline_composites import InlineComposites
from crossloom.rewrite import Graph
from crossloom.testing import run_module
from crossloom.verdict import Ledger


def folded(model: Model, values, want, left, tol=2e-5):
    """Fold, compute the weights, compare, and return the codes; ``left`` are the operators at run time."""
    mod = CanonicalizeTransformer()(model.mod)
    with Ledger() as ledger:
        mod = FoldBatchNorm()(mod)
    mod = InlineComposites()(mod)
    built = fold_weights(Model(mod, model.params, model.entries, model.packed))
    graph = Graph("main", built.mod["main"], built.mod)
    calls = [graph.op(value) for var in graph.order if isinstance(value := graph.value[var], relax.Call)]
    assert [name.rsplit(".", 1)[-1] for name in calls] == left
    (got,) = run_module(built.mod, "main", [*values, *built.entry_params("main")])
    np.testing.assert_allclose(got, want, rtol=tol, atol=tol * np.abs(want).max())
    return [v.code for v in ledger]


@pytest.mark.parametrize("wide", [False, True])
def test_an_onnx_file(wide):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype("float32")
    weights = {"w": draw(4, 3, 3, 3), "u": draw(4, 2, 2, 2), "c": draw(2), "s": draw(1, 2, 1, 1), "t": draw(1, 2, 1, 1)}
    weights |= {"gamma": draw(4), "beta": draw(4), "mean": draw(4), "variance": np.abs(draw(4))}
    norm = ["gamma", "beta", "mean", "variance"]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["a", *norm], ["b"], epsilon=1e-3),
        helper.make_node("Relu", ["b"], ["d"]),
        helper.make_node("ConvTranspose", ["d", "u", "c"], ["e"], strides=[2, 2]),
        helper.make_node("Mul", ["e", "s"], ["f"]),
        helper.make_node("Add", ["t", "f"], ["y"]),
    ]
    info = lambda name, shape: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
    graph = helper.make_graph(
        nodes,
        "g",
        [info("x", (1, 3, "H" if wide else 5, 4))],
        [info("y", None)],
        [numpy_helper.from_array(v, n) for n, v in weights.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    x = draw(1, 3, 5, 4)
    session = runtime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (want,) = session.run(None, {"x": x})
    codes = folded(from_onnx(proto), [x], want, ["conv2d", "add", "relu", "conv2d_transpose", "add"])
    assert codes == ["fired", "fired"]


@pytest.mark.torch
def test_a_pytorch_module():
    import torch
    from torch import nn

    from crossloom.importers.torch import from_torch

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3, groups=1, bias=False), nn.ConvTranspose2d(4, 6, 2, 2, groups=2)
            self.norms = nn.ModuleList(
                [nn.BatchNorm2d(4, eps=1e-3), nn.BatchNorm2d(6, affine=False), nn.BatchNorm1d(5)]
            )
            self.last, self.alone = nn.Linear(6, 5), nn.BatchNorm1d(5)
            for norm in (*self.norms, self.alone):
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.5, 2)

        def forward(self, x):
            y = self.norms[1](self.second(self.norms[0](self.first(x))))
            y = self.norms[2](self.last(y.flatten(2).transpose(1, 2)).transpose(1, 2))
            return self.alone(torch.relu(y))

    torch.manual_seed(0)
    module, x = Net().eval(), torch.randn(1, 3, 6, 6)
    with torch.no_grad():
        want = module(x).numpy()
    left = ["conv2d", "add", "conv2d_transpose", "add", "reshape", "permute_dims"]
    left += ["matmul", "add", "permute_dims", "relu", "multiply", "add"]
    assert folded(from_torch(module, (x,)), [x.numpy()], want, left) == ["fired"] * 4
