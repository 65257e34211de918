"""Sizes that operators imply are bound in the entry, and so checked when it is called."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from tvm import relax, tirx

from crossloom.bundle import write_bundle
from crossloom.driver import compile_model
from crossloom.errors import UnsupportedModel, UsageError
from crossloom.importers.implied_sizes import bind_implied_sizes
from crossloom.importers.load import load_model
from crossloom.model import Entry, Model, TensorSpec
from crossloom.runtime import open_session


def model(shapes, body, **bounds) -> Model:
    builder, known = relax.BlockBuilder(), {}
    params = []
    for i, shape in enumerate(shapes):
        dims = [known.setdefault(d, tirx.Var(d, "int64")) if isinstance(d, str) else d for d in shape]
        params.append(relax.Var(f"x{i}", relax.TensorType(dims, "float32")))
    with builder.function("decode", params, attrs={"num_input": len(params)}):
        with builder.dataflow():
            out = builder.emit_output(body(*params))
        builder.emit_func_output(out)
    specs = tuple(TensorSpec(f"x{i}", tuple(shape), "float32") for i, shape in enumerate(shapes))
    return Model(builder.get(), {}, {"decode": Entry("decode", specs, (TensorSpec("y", (), "float32"),), **bounds)})


op = relax.op
CASES = {
    "product with a fixed matrix": ([("n", "m"), (5, 3)], op.matmul, [("n", 5), (5, 3)]),
    "product of two": ([("n", "m"), ("k", "j")], op.matmul, [("n", "m"), ("m", "j")]),
    "product of stacks": ([(2, "n", "m"), (2, 7, 3)], op.matmul, [(2, "n", 7), (2, 7, 3)]),
    "view": ([("n", 4)], lambda x: op.reshape(x, (3, 4)), [(3, 4)]),
    "channels": ([("b", "c", 8, 8), (4, 3, 3, 3)], op.nn.conv2d, [("b", 3, 8, 8), (4, 3, 3, 3)]),
    "groups": (
        [("b", "c", 8, 8), (4, 3, 3, 3)],
        lambda x, w: op.nn.conv2d(x, w, groups=2),
        [("b", 6, 8, 8), (4, 3, 3, 3)],
    ),
    "join": ([("n", 4), ("m", 4)], lambda x, y: op.concat([x, y], 1), [("n", 4), ("n", 4)]),
    "norm": ([("n", "m"), (6,)], lambda x, w: op.nn.rms_norm(x, w, axes=[-1]), [("n", 6), (6,)]),
}


@pytest.mark.parametrize("kind", CASES)
def test_bound_in_the_entry_and_once(kind):
    shapes, body, want = CASES[kind]
    found = bind_implied_sizes(model(shapes, body))
    assert [spec.shape for spec in found.entries["decode"].inputs] == want
    assert bind_implied_sizes(found) is found


@pytest.mark.parametrize(
    ("shapes", "body"),
    [
        ([("n", 4)], lambda x: op.reshape(x, (-1, 8))),
        ([("n", 4), ("n", 4)], op.add),
        ([("n", 4), (4, 3)], op.matmul),
        ([("n", 4)], lambda x: op.reshape(x, (-1, 2))),
    ],
)
def test_nothing_implied_nothing_changed(shapes, body):
    given = model(shapes, body)
    assert bind_implied_sizes(given) is given


def test_sizes_that_never_agree_are_named():
    with pytest.raises(UnsupportedModel, match=r"relax\.matmul.*function .decode.*size 5 meets size 4"):
        shapes = [("n", "m"), (5, 3), (4, 3)]
        bind_implied_sizes(model(shapes, lambda x, v, w: op.concat([op.matmul(x, v), op.matmul(x, w)], 1)))


def test_bounds_follow_and_are_held():
    found = bind_implied_sizes(model([("n", "m"), ("k", 3)], op.matmul, upper_bounds={"m": 9, "k": 7}))
    assert dict(found.entries["decode"].upper_bounds) == {"m": 7}
    with pytest.raises(UnsupportedModel, match="makes m 5"):
        bind_implied_sizes(model([("n", "m"), (5, 3)], op.matmul, upper_bounds={"m": 4}))


def test_a_call_with_another_size_is_refused_before_it_reads(tmp_path):
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", 1, ["n", "m"])],
        [helper.make_tensor_value_info("y", 1, ["n", 3])],
        [onnx.numpy_helper.from_array(np.arange(15, dtype="float32").reshape(5, 3), "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "m.onnx")
    compiled = compile_model(load_model(tmp_path / "m.onnx"), "host")
    path = write_bundle(
        tmp_path / "m", executable=compiled.executable, model=compiled.model, target=compiled.target, target_name="host"
    )
    with open_session(path, "host") as session:
        (y,) = session.run("main", {"x": np.ones((2, 5), "float32")})
        np.testing.assert_array_equal(y, np.ones((2, 5)) @ np.arange(15).reshape(5, 3))
        for width in (4, 7):
            with pytest.raises(UsageError, match=r"`x`.*wanted \(n, 5\)"):
                session.run("main", {"x": np.ones((2, width), "float32")})
