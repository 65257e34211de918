"""Tensors of rank 0 stay of rank 0: inputs, weights, and values folded from weights."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

from crossloom.driver import compile_model
from crossloom.fold_weights import fold_weights
from crossloom.model import Entry, Model, TensorSpec
from crossloom.targets import get_target
from crossloom.testing import run_module, verify_pipeline
from crossloom.testing.stages import compile_stages


def model() -> Model:
    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorType((), "float32")) for name in "xw")
    with builder.function("decode", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            doubled = builder.emit(relax.op.add(w, w))
            out = builder.emit_output(relax.op.multiply(x, doubled))
        builder.emit_func_output(out)
    spec = TensorSpec("x", (), "float32")
    entry = Entry("decode", (spec,), (TensorSpec("y", (), "float32"),), ("w",))
    return Model(builder.get(), {"w": np.array(3, "float32")}, {"decode": entry})


def test_run():
    assert run_module(model().mod, "decode", [np.array(2, "float32"), np.array(5, "float32")])[0] == 20


def test_fold():
    (value,) = fold_weights(model()).params.values()
    assert value.shape == () and value == 6


def test_compile():
    compiled = compile_model(model(), "host")
    vm = relax.VirtualMachine(compiled.executable, tvm.cpu())
    weights = [tvm.runtime.tensor(w) for w in compiled.model.entry_params("decode")]
    assert vm["decode"](tvm.runtime.tensor(np.array(2, "float32")), *weights).numpy() == 12


def test_verify():
    records = verify_pipeline(model(), compile_stages(get_target("host")))
    assert records and not any(record.problem for record in records)
