"""Indices out of range never leave their tensor, whatever imported them; compiling prints nothing."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import tvm
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from tvm import relax, tirx

from crossloom.errors import UnsupportedModel
from crossloom.importers.compose import compose
from crossloom.importers.gather import bound_gathers
from crossloom.importers.onnx import from_onnx
from crossloom.model import Entry, Model, TensorSpec
from crossloom.testing import run_module

TABLE = np.arange(12, dtype="float32").reshape(4, 3)
IDS = np.array([0, 3, 4, -1, -4, -5, 2**31, -(2**40), 2**62], "int64")
#: Negative ids count from the end down to -4; what is further out reads the nearest row.
ROWS = [0, 3, 3, 3, 0, 0, 3, 0, 3]


@pytest.fixture
def silent(capfd):
    """Nothing may be printed on stderr; what earlier tests left for the collector to warn of goes first."""
    gc.collect()
    capfd.readouterr()
    yield
    assert capfd.readouterr().err == ""


def run(model, *inputs):
    return run_module(model.mod, "main", [*inputs, *model.entry_params("main")])


def onnx_model(nodes, inputs, outputs, init=(), opset=17):
    vi = lambda t: h.make_tensor_value_info(*t)
    graph = h.make_graph(nodes, "g", [vi(t) for t in inputs], [vi(t) for t in outputs], list(init))
    return h.make_model(graph, opset_imports=[h.make_opsetid("", opset)], ir_version=8)


def embedding(width=T.INT64, rows=4, **attrs):
    node = h.make_node("Gather", ["w", "ids"], ["y"], **attrs)
    init = [nh.from_array(TABLE, "w")] if isinstance(rows, int) else []
    inputs = [("ids", width, ["n"])] + ([] if init else [("w", T.FLOAT, [rows, 3])])
    return onnx_model([node], inputs, [("y", T.FLOAT, None)], init)


def test_onnx_gather_of_a_weight(silent):
    model = from_onnx(embedding())
    np.testing.assert_array_equal(run(model, IDS)[0], TABLE[ROWS])


def test_onnx_gather_with_a_symbolic_axis_and_narrow_ids(silent):
    model = from_onnx(embedding(T.INT32, rows="v"))
    ids = np.array([0, -1, -4, -5, 4, 2**31 - 1, -(2**31)], "int32")
    np.testing.assert_array_equal(run(model, ids, TABLE)[0], TABLE[[0, 3, 0, 0, 3, 3, 0]])


def test_onnx_gather_along_the_last_axis_with_constant_indices():
    node = h.make_node("Gather", ["x", "i"], ["y"], axis=-1)
    init = [nh.from_array(np.array([[-1, 0], [2, -3]]), "i")]
    model = from_onnx(onnx_model([node], [("x", T.FLOAT, ["n", 3])], [("y", T.FLOAT, None)], init))
    np.testing.assert_array_equal(run(model, TABLE)[0], np.take(TABLE, [[2, 0], [2, 0]], -1))
    names = [b.value.op.name for b in model.mod["main"].body.blocks[0].bindings if isinstance(b.value, relax.Call)]
    assert names == ["relax.take"], "nothing is computed at run time about constant indices"


@pytest.mark.parametrize("rows", [4, "v"])
def test_onnx_gather_elements_and_nd(rows, silent):
    nodes = [h.make_node("GatherElements", ["x", "i"], ["a"], axis=0), h.make_node("GatherND", ["x", "j"], ["b"])]
    inputs = [("x", T.FLOAT, [rows, 3]), ("i", T.INT64, [2, 3]), ("j", T.INT64, [4, 2])]
    model = from_onnx(onnx_model(nodes, inputs, [("a", T.FLOAT, None), ("b", T.FLOAT, None)]))
    i = np.array([[0, -1, 99], [-99, 3, -4]])
    j = np.array([[0, 0], [-1, -1], [99, 99], [-99, -99]])
    a, b = run(model, TABLE, i, j)
    np.testing.assert_array_equal(a, np.take_along_axis(TABLE, np.array([[0, 3, 3], [0, 3, 0]]), 0))
    np.testing.assert_array_equal(b, TABLE[[0, 3, 3, 0], [0, 2, 2, 0]])


@pytest.mark.parametrize("kind", [T.FLOAT, T.INT64])
def test_gathers_from_an_axis_that_is_empty_at_run_time_read_nothing(kind, silent):
    """What they return is defined, the same wherever they look; a read outside would find what lies there."""
    nodes = [
        h.make_node("Gather", ["x", "k"], ["a"]),
        h.make_node("GatherElements", ["x", "i"], ["b"], axis=0),
        h.make_node("GatherND", ["x", "j"], ["c"]),
        h.make_node("Gather", ["x", "zero"], ["d"]),
    ]
    inputs = [("x", kind, ["v", 3]), ("k", T.INT64, [3]), ("i", T.INT64, [2, 3]), ("j", T.INT64, [4, 1])]
    init = [nh.from_array(np.array([0]), "zero")]
    model = from_onnx(onnx_model(nodes, inputs, [(n, kind, None) for n in "abcd"], init))
    table = TABLE.astype("float32" if kind == T.FLOAT else "int64")
    ids = [np.array([0, -1, 9]), np.array([[0, -1, 99], [-99, 3, -4]]), np.array([[0], [-1], [99], [-99]])]
    none = np.nan if kind == T.FLOAT else 0
    # The first rows of a larger tensor: what a read behind them would find is known, and not what is returned.
    full = tvm.runtime.tensor(table)
    empty = full._create_view((0, 3))
    vm = relax.VirtualMachine(tvm.compile(model.mod, target=tvm.target.Target({"kind": "llvm"})), tvm.cpu())
    given = [tvm.runtime.tensor(array) for array in ids]
    a, b, c, d = (out.numpy() for out in vm["main"](empty, *given))
    np.testing.assert_array_equal(a, np.full((3, 3), none))
    np.testing.assert_array_equal(b, np.zeros((2, 3)))
    np.testing.assert_array_equal(c, np.zeros((4, 3)))
    np.testing.assert_array_equal(d, np.full((1, 3), none))
    a, b, c, d = (out.numpy() for out in vm["main"](full, *given))
    np.testing.assert_array_equal(a, table[[0, 3, 3]])
    np.testing.assert_array_equal(b, np.take_along_axis(table, np.array([[0, 3, 3], [0, 3, 0]]), 0))
    np.testing.assert_array_equal(c, table[[0, 3, 3, 0]])
    np.testing.assert_array_equal(d, table[:1])


def test_onnx_scatters_write_inside():
    nodes = [h.make_node("ScatterElements", ["x", "i", "u"], ["a"]), h.make_node("ScatterND", ["x", "j", "v"], ["b"])]
    inputs = [("x", T.FLOAT, [4, 3]), ("i", T.INT64, [1, 3]), ("u", T.FLOAT, [1, 3])]
    inputs += [("j", T.INT64, [2, 1]), ("v", T.FLOAT, [2, 3])]
    model = from_onnx(onnx_model(nodes, inputs, [("a", T.FLOAT, None), ("b", T.FLOAT, None)], opset=18))
    v = np.array([[-4, -5, -6], [-7, -8, -9]], "float32")
    a, b = run(model, TABLE, np.array([[1, -1, 10**9]]), v[:1], np.array([[10**9], [-(10**9)]]), v)
    wanted = TABLE.copy()
    wanted[[1, 3, 3], [0, 1, 2]] = v[0]
    np.testing.assert_array_equal(a, wanted)
    wanted = TABLE.copy()
    wanted[3], wanted[0] = v
    np.testing.assert_array_equal(b, wanted)


def test_gather_from_nothing_is_refused_unless_nothing_is_asked():
    make = lambda n: onnx_model(
        [h.make_node("Gather", ["x", "i"], ["y"], "rows")],
        [("x", T.FLOAT, [0, 3]), ("i", T.INT64, [n])],
        [("y", T.FLOAT, [n, 3])],
    )
    with pytest.raises(UnsupportedModel, match=r"rows.*size 0"):
        from_onnx(make(2))
    assert run(from_onnx(make(0)), np.zeros((0, 3), "float32"), np.zeros(0, "int64"))[0].shape == (0, 3)


def lookup() -> Model:
    """A part written by hand, with TVM's unchecked gather."""
    bb = relax.BlockBuilder()
    ids = relax.Var("ids", relax.TensorType((tirx.Var("n", "int64"),), "int64"))
    w = relax.Var("w", relax.TensorType((4, 3), "float32"))
    with bb.function("main", [ids, w], attrs={"num_input": 1}):
        with bb.dataflow():
            out = bb.emit_output(relax.op.take(w, ids, 0))
        bb.emit_func_output(out)
    entry = Entry("main", (TensorSpec("ids", ("n",), "int64"),), (TensorSpec("y", ("n", 3), "float32"),), ("w",))
    return Model(bb.get(), {"w": TABLE}, {"main": entry})


def test_compose_makes_hand_written_parts_safe(silent):
    model = compose({"e": lookup()}, {"main": ["e"]})
    np.testing.assert_array_equal(run(model, IDS)[0], TABLE[[0, 3, 3, 0, 0, 0, 3, 0, 3]])


def test_bounding_twice_changes_nothing():
    n = tirx.Var("n", "int64")
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((n, 3), "float32"))
    i = relax.Var("i", relax.TensorType((5,), "int32"))
    j = relax.Var("j", relax.TensorType((4, 3), "int64"))
    with bb.function("main", [x, i, j]):
        with bb.dataflow():
            parts = [relax.op.take(x, i, 0), relax.op.gather_elements(x, j, 0), relax.op.index_tensor(x, [i, i])]
            out = bb.emit_output(relax.Tuple([bb.emit(part) for part in parts]))
        bb.emit_func_output(out)
    tidy = relax.transform.CanonicalizeBindings()
    once = tidy(bound_gathers(bb.get(), from_end=True))
    tvm.ir.assert_structural_equal(once, tidy(bound_gathers(once, from_end=False)))


@pytest.mark.torch
def test_torch_embedding_and_indexing(capfd):
    import torch

    from crossloom.importers.torch import from_torch

    class Rows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding.from_pretrained(torch.from_numpy(TABLE))

        def forward(self, ids):
            return self.table(ids), self.table.weight[ids]

    model = from_torch(Rows(), (torch.zeros(9, dtype=torch.int64),))
    capfd.readouterr()  # what torch.export itself says
    looked_up, indexed = run(model, IDS)
    np.testing.assert_array_equal(looked_up, TABLE[[0, 3, 3, 0, 0, 0, 3, 0, 3]])
    np.testing.assert_array_equal(indexed, TABLE[ROWS])
    assert "Fast mode" not in capfd.readouterr().err
