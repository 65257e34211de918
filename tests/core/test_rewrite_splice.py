"""A callee's lines in the caller's terms: operands, sizes, tuples, calls of its own."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, tirx

from canonical import data
from crossloom.rewrite import splice
from crossloom.testing import run_module

op = relax.op


def callee(build, *shapes):
    """A private function of one dataflow block."""
    bb = relax.BlockBuilder()
    params = [relax.Var(f"a{i}", relax.TensorType(s, "float32")) for i, s in enumerate(shapes)]
    with bb.function("callee", params, private=True):
        with bb.dataflow():
            out = bb.emit_output(build(bb.emit, *params))
        bb.emit_func_output(out)
    return bb.get()["callee"]


def spliced(func, *shapes, **kwargs):
    """A module whose entry is the callee's lines over parameters of these shapes."""
    bb = relax.BlockBuilder()
    params = [relax.Var(f"x{i}", relax.TensorType(s, "float32")) for i, s in enumerate(shapes)]
    with bb.function("decode", params):
        with bb.dataflow():
            out = bb.emit_output(splice(bb, func, params, **kwargs))
        bb.emit_func_output(out)
    mod = bb.get()
    assert relax.analysis.check_well_formed(mod)
    return mod


def sizes(func):
    return {var.name for var in relax.analysis.free_symbolic_vars(func)}


def test_symbolic_sizes_become_the_callers():
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    func = callee(lambda e, x, y: e(op.add(e(op.reshape(x, [n * m])), y)), (n, m), (n * m,))
    for shapes in (((2, 3), (6,)), ((tirx.Var("k", "int64"), 3), None)):
        first = shapes[0]
        second = shapes[1] or (first[0] * 3,)
        mod = spliced(func, first, second)
        assert not sizes(mod["decode"])
        x, y = data((2, 3), (6,))
        np.testing.assert_array_equal(run_module(mod, "decode", [x, y])[0], x.reshape(6) + y)


def test_a_composed_size_takes_the_place_of_a_variable():
    n, k = tirx.Var("n", "int64"), tirx.Var("k", "int64")
    func = callee(lambda e, x, y: e(op.add(e(op.full([n], relax.const(2.0), "float32")), x)), (n,), (3,))
    mod = spliced(func, (k * 2,), (k,))
    assert not sizes(mod["decode"])
    x, y = data((4,), (2,))
    np.testing.assert_array_equal(run_module(mod, "decode", [x, y])[0], x + 2)


def test_several_results_are_a_tuple_of_the_callers_values():
    def build(e, x):
        pair = relax.Tuple([e(op.exp(x)), e(op.nn.relu(x))])
        return relax.Tuple([pair, e(op.negative(x))])

    mod = spliced(callee(build, (3,)), (3,))
    (x,) = data((3,))
    for got, want in zip(run_module(mod, "decode", [x]), (np.exp(x), np.maximum(x, 0), -x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_field_of_a_tuple_is_the_value_itself():
    def build(e, x):
        both = e(relax.Tuple([e(op.exp(x)), e(op.nn.relu(x))]))
        return e(op.add(e(relax.TupleGetItem(both, 1)), x))

    mod = spliced(callee(build, (3,)), (3,))
    values = [b.value for block in mod["decode"].body.blocks for b in block.bindings]
    assert not any(isinstance(v, (relax.Tuple, relax.TupleGetItem)) for v in values)
    (x,) = data((3,))
    np.testing.assert_array_equal(run_module(mod, "decode", [x])[0], np.maximum(x, 0) + x)


def test_the_callees_own_calls_can_be_changed():
    seen = []

    def inner(call):
        seen.append(call.op.name)
        return op.nn.relu(call.args[0]) if call.op.name == "relax.exp" else call

    mod = spliced(callee(lambda e, x: e(op.negative(e(op.exp(x)))), (3,)), (3,), inner=inner)
    assert seen == ["relax.exp", "relax.negative"]
    (x,) = data((3,))
    np.testing.assert_array_equal(run_module(mod, "decode", [x])[0], -np.maximum(x, 0))


def test_a_parameter_may_be_the_result_and_constants_stay():
    mod = spliced(callee(lambda e, x, y: relax.Tuple([y, e(op.add(x, relax.const(1.0)))]), (3,), (2,)), (3,), (2,))
    x, y = data((3,), (2,))
    got = run_module(mod, "decode", [x, y])
    np.testing.assert_array_equal(got[0], y)
    np.testing.assert_array_equal(got[1], x + 1)


def test_the_callee_is_left_as_it_is():
    func = callee(lambda e, x: e(op.exp(x)), (tirx.Var("n", "int64"),))
    before = tvm.ir.save_json(func)
    spliced(func, (4,))
    tvm.ir.assert_structural_equal(func, tvm.ir.load_json(before))
