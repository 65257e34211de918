"""What nothing uses is dropped in time that grows with the function, and only that."""

from __future__ import annotations

import time

import tvm
from tvm import relax, tirx

from crossloom.importers.gather import bound_gathers
from crossloom.importers.unused import drop_unused


def build(*, dead: bool) -> tvm.IRModule:
    """One used chain with a cast and a plain block; with `dead`, unused bindings between."""
    bb = relax.BlockBuilder()
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    x = relax.Var("x", relax.TensorType((n,), "float32"))
    with bb.function("main", [x], attrs={"num_input": 1}, pure=False):
        with bb.dataflow():
            if dead:
                unused = bb.emit(relax.op.abs(x))
                bb.emit(relax.Tuple([bb.emit(relax.op.exp(unused)), unused]))
            bb.match_cast(x, relax.TensorType((m,), "float32"))
            y = bb.emit_output(relax.op.negative(x))
            if dead:
                bb.emit_output(relax.op.sin(x))
        bb.emit(relax.op.assert_op(relax.const(True, "bool"), format="an effect nobody reads"))
        bb.emit_func_output(y)
    with bb.function("other", [z := relax.Var("z", relax.TensorType((2,), "float32"))]):
        with bb.dataflow():
            if dead:
                bb.emit(relax.op.exp(z))
            out = bb.emit_output(relax.op.abs(z))
        bb.emit_func_output(out)
    return bb.finalize()


def test_only_what_nothing_uses_goes_in_every_function():
    found = drop_unused(build(dead=True))
    tvm.ir.assert_structural_equal(found, build(dead=False), map_free_vars=True)
    relax.analysis.well_formed(found)
    assert drop_unused(found) is found


def chain(length: int) -> tvm.IRModule:
    """A chain with an unused gather at each link, all through the same indices."""
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 3), "float32"))
    i = relax.Var("i", relax.TensorType((4, 3), "int64"))
    with bb.function("main", [x, i], attrs={"num_input": 2}):
        with bb.dataflow():
            v = x
            for _ in range(length):
                bb.emit(relax.op.gather_elements(v, i, 0))
                v = bb.emit(relax.op.nn.relu(v))
            out = bb.emit_output(v)
        bb.emit_func_output(out)
    return bb.finalize()


def test_unused_gathers_of_one_index_take_linear_time():
    """Four times the links may take four times as long; where users are searched again it is forty times."""

    def least(length: int) -> float:
        mod, taken = chain(length), []
        for _ in range(2):
            start = time.process_time()
            left = bound_gathers(mod, from_end=False)["main"].body.blocks[0].bindings
            taken.append(time.process_time() - start)
            assert len(left) == length + 1, "each relu, and the output's name"
        return min(taken)

    assert least(1600) < 12 * least(400)
