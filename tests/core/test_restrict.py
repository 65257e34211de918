"""Kernels keep what is known of their aliases beside the function that computes shapes."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax import transform as t

from crossloom.flow import steps, vm_lowering
from crossloom.restrict import restrict_single_arguments
from crossloom.targets import get_target


def lowered():
    """Return a product of symbolic rows, whose result's shape has to be computed, as the virtual machine runs it."""
    n, builder = tirx.Var("n", "int64"), relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((n, 8), "float32"))
    w = relax.Var("w", relax.TensorType((8, 16), "float32"))
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            both = builder.emit(relax.op.matmul(x, w))
            out = builder.emit_output(relax.op.concat([both, both], 0))
        builder.emit_func_output(out)
    mod = builder.get()
    for step in steps("host"):
        mod = step.run(mod)
    for step in vm_lowering():
        mod = step(mod)
    return mod


def without(mod):
    return [g.name_hint for g, f in mod.functions_items() if isinstance(f, tirx.PrimFunc) and not marked(f)]


def marked(func):
    return func.attrs is not None and "tirx.noalias" in func.attrs


def test_only_functions_of_one_argument_are_marked():
    mod = lowered()
    plain = next(f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc) and len(f.params) > 1)
    mod = tvm.ir.IRModule(
        {**dict(mod.functions_items()), tvm.ir.GlobalVar("other"): plain.without_attr("tirx.noalias")}
    )
    out = restrict_single_arguments()(mod)
    assert without(out) == ["other"]
    assert restrict_single_arguments()(out).same_as(out)


def test_stores_are_told_apart_and_results_stay():
    target = get_target("host").tvm_target()
    mod = t.ToNonDataflow()(lowered())
    mod = tvm.ir.IRModule(
        {g: f.without_attr("tirx.noalias") if "shape_func" in g.name_hint else f for g, f in mod.functions_items()}
    )
    x, w = (np.random.default_rng(0).standard_normal(s).astype("float32") for s in ((3, 8), (8, 16)))
    known = []
    for step in (mod, restrict_single_arguments()(mod)):
        built = relax.build(step, target, relax_pipeline=tvm.transform.Sequential([]))
        known.append("tvm-alias" not in built.mod.imports[0].inspect_source("ll"))
        got = relax.VirtualMachine(built, tvm.cpu())["main"](*map(tvm.runtime.tensor, (x, w))).numpy()
        assert np.abs(got - np.concatenate([x @ w] * 2)).max() < 1e-5
    # With one function that says nothing, all stores are of one kind.
    assert known == [False, True]
