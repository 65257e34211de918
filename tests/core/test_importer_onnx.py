"""ONNX import: weights, defaults, quantized weights and errors, run against independent numpy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from tvm import relax

from crossloom.errors import CrossloomError, UnsupportedModel
from crossloom.importers.onnx import from_onnx


def run(model, **inputs):
    entry = model.entries["main"]
    vm = relax.VirtualMachine(tvm.compile(model.mod, target=tvm.target.Target("llvm")), tvm.cpu())
    values = [inputs[i.name] for i in entry.inputs] + model.entry_params("main")
    return vm["main"](*[tvm.runtime.tensor(v) for v in values]).numpy()


def model_of(nodes, inputs, outputs, init=(), opset=17):
    vi = lambda t: h.make_tensor_value_info(*t)
    graph = h.make_graph(nodes, "g", [vi(t) for t in inputs], [vi(t) for t in outputs], list(init))
    sets = [h.make_opsetid("", opset), h.make_opsetid("com.microsoft", 1)]
    return h.make_model(graph, opset_imports=sets, ir_version=8)


def test_default_stays_an_input_and_is_retrievable():
    w = np.arange(6, dtype="float32").reshape(3, 2)
    node = h.make_node("MatMul", ["x", "w"], ["y"])
    tensors = [("x", T.FLOAT, ["n", 3]), ("w", T.FLOAT, [3, 2])]
    model = from_onnx(model_of([node], tensors, [("y", T.FLOAT, ["n", 2])], [nh.from_array(w, "w")]))
    entry = model.entries["main"]
    assert [i.name for i in entry.inputs] == ["x", "w"] and entry.weights == ()
    assert entry.inputs[0].shape == ("n", 3)
    np.testing.assert_array_equal(model.params["w"], w)
    x = np.ones((4, 3), "float32")
    np.testing.assert_allclose(run(model, x=x, w=w + 1), x @ (w + 1))


@pytest.mark.parametrize("bits,zero", [(4, True), (4, False), (8, True), (2, True)])
def test_matmul_nbits_ragged_rows(bits, zero):
    rng = np.random.default_rng(bits)
    k, n, block = 40, 3, 16
    blocks = 3
    q = rng.integers(0, 2**bits, (n, blocks * block))
    z = rng.integers(0, 2**bits, (n, blocks)) if zero else np.full((n, blocks), 2 ** (bits - 1))
    s = rng.uniform(0.1, 0.2, (n, blocks)).astype("float32")

    def pack(rows):
        bytes_ = [sum(int(v) << (bits * i) for i, v in enumerate(r)).to_bytes(64, "little") for r in rows]
        width = -(-rows.shape[1] * bits // 8)
        return np.array([list(b[:width]) for b in bytes_], "uint8")

    init = [nh.from_array(pack(q).reshape(n, blocks, -1), "B"), nh.from_array(s.reshape(-1), "S")]
    names = ["A", "B", "S"]
    if zero:
        init.append(nh.from_array(pack(z).reshape(-1), "Z"))
        names.append("Z")
    node = h.make_node("MatMulNBits", names, ["Y"], domain="com.microsoft", K=k, N=n, bits=bits, block_size=block)
    model = from_onnx(model_of([node], [("A", T.FLOAT, ["m", k])], [("Y", T.FLOAT, ["m", n])], init))
    a = rng.standard_normal((2, k)).astype("float32")
    w = ((q - np.repeat(z, block, 1)) * np.repeat(s, block, 1))[:, :k]
    np.testing.assert_allclose(run(model, A=a), a @ w.T, rtol=1e-4, atol=1e-4)


def test_every_unknown_operator_is_named_at_once():
    nodes = [
        h.make_node("Foo", ["x"], ["t"], "first", domain="my"),
        h.make_node("Bar", ["t"], ["y"], "second", domain="my"),
    ]
    with pytest.raises(UnsupportedModel, match=r"my\.Bar.*second.*my\.Foo.*first"):
        from_onnx(model_of(nodes, [("x", T.FLOAT, [1])], [("y", T.FLOAT, [1])]))


def test_nan_weight_is_named():
    w = nh.from_array(np.array([1, np.nan], "float32"), "bad_weight")
    node = h.make_node("Add", ["x", "bad_weight"], ["y"])
    with pytest.raises(UnsupportedModel, match="bad_weight"):
        from_onnx(model_of([node], [("x", T.FLOAT, [2])], [("y", T.FLOAT, [2])], [w]))


@pytest.mark.parametrize("location", ["/etc/passwd", "../w.bin", "missing.bin"])
def test_external_data_is_confined(tmp_path, location):
    w = T(name="w", data_type=T.FLOAT, dims=[2], data_location=T.EXTERNAL)
    w.external_data.add(key="location", value=location)
    node = h.make_node("Add", ["x", "w"], ["y"])
    model = model_of([node], [("x", T.FLOAT, [2])], [("y", T.FLOAT, [2])], [w])
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UnsupportedModel, match="'w'"):
        from_onnx(tmp_path / "m.onnx")


def test_truncated_bytes_never_crash():
    node = h.make_node("Relu", ["x"], ["y"])
    data = model_of([node], [("x", T.FLOAT, [2])], [("y", T.FLOAT, [2])]).SerializeToString()
    refused = 0
    for end in range(0, len(data), 7):
        try:
            from_onnx(data[:end])
        except CrossloomError:
            refused += 1
    assert refused > 3
