"""Compiling a model pass by pass: what comes back, and whose fault an error says it is."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from crossloom import registry
from crossloom.driver import compile_model
from crossloom.errors import UnsupportedModel, UsageError
from crossloom.model import Entry, Model, TensorSpec
from crossloom.numerics import EXACT
from crossloom.registry import PassInfo


def model(body=lambda x: relax.op.nn.relu(x), dtype="float32") -> Model:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((tirx.Var("T", "int64"), 4), dtype))
    with builder.function("decode", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            out = builder.emit_output(body(x))
        builder.emit_func_output(out)
    spec = TensorSpec("x", ("T", 4), dtype)
    return Model(builder.get(), {}, {"decode": Entry("decode", (spec,), (), (spec,))}, {}, "toy")


@pytest.fixture
def registered(monkeypatch):
    """Registers a pass for one test."""

    def add(name, run):
        factory = lambda: tvm.transform.module_pass(run, opt_level=0, name=name)
        monkeypatch.setitem(registry._passes, name, PassInfo(name, factory, "fuse", EXACT, doc="a test's"))

    registry.passes()
    return add


def test_every_pass_is_timed_and_told_in_order():
    told = []
    compiled = compile_model(model(), "host", on_pass=told.append)
    assert list(compiled.seconds) == told and told[-1] == "build" and "fold-weights" in told
    vm = relax.VirtualMachine(compiled.executable, tvm.cpu())
    got = vm["decode"](tvm.runtime.tensor(np.array([[-1, 0, 1, 2]], "float32"))).numpy()
    np.testing.assert_array_equal(got, [[0, 0, 1, 2]])


def test_without_a_build_there_is_the_module_and_the_ledger_only():
    compiled = compile_model(model(), "rk3588", build=False)
    assert compiled.executable is None and "build" not in compiled.seconds
    assert any(isinstance(func, tirx.PrimFunc) for func in compiled.model.mod.functions.values())


def test_a_pass_of_tvm_that_wants_arguments_is_a_usage_error():
    with pytest.raises(UsageError, match=r"relax\.BindParams cannot be made from text"):
        compile_model(model(), "host", text="relax.BindParams,legalize-ops")


def test_what_tvm_raises_becomes_an_error_that_names_the_pass(registered):
    def run(mod, ctx):
        raise ValueError("first line\nlast line")

    registered("stumbles", run)
    with pytest.raises(UnsupportedModel, match=r"pass stumbles failed on toy: ValueError: last line"):
        compile_model(model(), "host", text="stumbles,legalize-ops")


def test_our_own_errors_pass_as_they_are(registered):
    def run(mod, ctx):
        raise UnsupportedModel("tensor 'x' is odd", "make it even")

    registered("refuses", run)
    with pytest.raises(UnsupportedModel) as caught:
        compile_model(model(), "host", text="refuses")
    assert (caught.value.message, caught.value.remedy) == ("tensor 'x' is odd", "make it even")


def test_an_operator_that_cannot_be_built_is_an_unsupported_model():
    with pytest.raises(UnsupportedModel, match="toy"):
        compile_model(model(lambda x: relax.op.cumsum(x, axis=0), "bool"), "host")


def test_an_unknown_key_of_the_pass_configuration_is_a_usage_error():
    with pytest.raises(UsageError, match="pass configuration"):
        compile_model(model(), "host", pass_config={"no.such.key": 1})
