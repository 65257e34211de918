"""Fusion templates: what each target's table allows, and kernels that hold nothing in memory between load and store."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import tirx

from crossloom.numerics import REASSOCIATES, worst_error
from crossloom.schedules.activations import ACTIVATIONS, BINARY, UNARY
from crossloom.schedules.chain import chain_kernel
from crossloom.schedules.fused_linear import Norm, Output, Rotary, Spec
from crossloom.schedules.machine import Machine
from crossloom.schedules.templates import (
    ElementwiseTemplate,
    LinearTemplate,
    RegionTemplate,
    allowed,
    chain_of,
    target_of,
    template,
)
from crossloom.targets import get_target, list_targets
from crossloom.verdict import Verdict

HOST = get_target("host")
NEON = ["rk3588", "rk3576", "rk3566", "imx93", "apple-m1", "apple-m4"]
NUMPY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "negative": np.negative,
    "abs": np.abs,
    "square": np.square,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "exp": np.exp,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "tanh": np.tanh,
    "gelu": lambda x: x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
}


def run(func, arrays, shape, dtype):
    """Compile a kernel for the host and call it."""
    built = tvm.compile(tvm.ir.IRModule({"k": func.with_attr("global_symbol", "k")}), target=HOST.tvm_target())
    out = tvm.runtime.tensor(np.full(shape, np.nan, dtype))
    built["k"](*map(tvm.runtime.tensor, arrays), out)
    return out.numpy()


def operands(*shapes, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    # Positive and away from 0: roots and quotients are defined.
    return [(rng.random(s) + 0.5).astype(dtype) for s in shapes]


def expected(operators, arrays):
    x, *rest = [a.astype("float64") for a in arrays]
    given = iter(rest)
    for name in operators:
        x = NUMPY[name](x, next(given)) if name in BINARY else NUMPY[name](x)
    return x


def buffers(func):
    """Lines in which a kernel makes a buffer for itself."""
    return [line for line in func.script().splitlines() if "alloc" in line]


# What tables allow ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEON)
def test_neon_keeps_three_operators_in_registers(name):
    target = get_target(name)
    found = template(["load", "multiply", "add", "store"], target, unit="cpu")
    assert isinstance(found, ElementwiseTemplate) and found.operators == ("multiply", "add")
    assert found.limit.most == 3 and found.limit.source and found.machine == Machine(16, 32)
    assert isinstance(template(["multiply", "add", "relu"], target, unit="cpu"), ElementwiseTemplate)
    refused = template(["multiply", "add", "relu", "multiply"], target, unit="cpu")
    assert isinstance(refused, Verdict) and refused.code == "chain-too-long"
    assert "at most 3" in refused.detail and refused.culprit == "4 operators"
    assert found.limit.source in refused.detail


def test_the_host_keeps_as_many_as_there_are():
    found = template(["add"] * 9, HOST)
    assert isinstance(found, ElementwiseTemplate) and found.limit.most == 0 and found.operands == 9


@pytest.mark.parametrize("name", ["apple-m1", "apple-m4", "rk3588", "rk3576", "rk3566"])
def test_a_neural_engine_takes_the_whole_region(name):
    target = get_target(name)
    chain = ["linear", "gelu", "linear", "add", "softmax"]
    found = template(chain, target)
    assert isinstance(found, RegionTemplate) and found.operators == tuple(chain)
    assert found.unit == "npu" and found.codegen == target.npu.codegen and found.limit.source
    assert not hasattr(found, "kernel"), "the unit's own compiler writes it"


@pytest.mark.parametrize(
    ("chain", "target", "unit", "code"),
    [
        ([], "host", None, "empty-chain"),
        (["load", "store"], "host", None, "empty-chain"),
        (["add"], "host", "npu", "no-such-unit"),
        (["add"], "stm32f746", None, "no-limit-known"),
        (["linear"], "esp32s3", None, "no-limit-known"),
        (["add", "softmax"], "host", None, "operator-not-in-table"),
        (["linear", "softmax"], "host", None, "operator-not-in-table"),
        (["add", "store", "add"], "host", None, "order-of-steps"),
        (["linear", "rotary", "gelu"], "host", None, "order-of-steps"),
        (["linear", "add", "add", "add"], "host", None, "order-of-steps"),
        (["linear", "gelu", "relu"], "host", None, "order-of-steps"),
        (["softmax", "linear"], "host", None, "order-of-steps"),
        (["linear", "linear"], "host", None, "operator-not-in-table"),
    ],
)
def test_refusals(chain, target, unit, code):
    found = template(chain, get_target(target), unit)
    assert isinstance(found, Verdict) and not found.fired and found.code == code


def test_a_table_that_lists_operators_excludes_others():
    row = next(r for r in HOST.fusions if r.chain == "elementwise")
    narrow = replace(HOST, fusions=(replace(row, operators=("add",)),))
    assert isinstance(template(["add", "add"], narrow), ElementwiseTemplate)
    assert template(["add", "multiply"], narrow).code == "operator-not-in-table"


def test_every_named_operator_is_one_that_kernels_have():
    known = {*UNARY, *BINARY, "gate", "rms_norm", "layer_norm", "rotary"}
    for target in list_targets().values():
        for row in target.fusions:
            assert set(row.operators) <= known and row.source.strip()
            assert row.unit in target.units


def test_the_table_of_a_tvm_target():
    assert target_of(get_target("rk3588").tvm_target()).name == "rk3588"
    assert target_of(get_target("apple-m4").tvm_target()).name == "apple-m4"
    other = tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a53"})
    assert {r.most for r in target_of(other).fusions if r.chain == "elementwise"} == {0, 3}
    assert target_of(HOST.tvm_target()).name == "host"
    assert target_of(tvm.target.Target("llvm")).name == "host"
    assert target_of(get_target("stm32f746").tvm_target()).name == "stm32f746"


def test_what_passes_ask():
    neon, host = get_target("rk3588").tvm_target(), HOST.tvm_target()
    assert allowed(["multiply", "add", "relu"], neon).fired and allowed(["linear", "bias", "gelu"], neon).fired
    assert allowed(["add"] * 4, neon).code == "chain-too-long" and allowed(["add"] * 4, host).fired
    assert allowed(["linear"], get_target("stm32f746").tvm_target()).code == "no-limit-known"


# Elementwise kernels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", NUMPY)
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_every_operator(operator, dtype):
    shapes = [(3, 37)] * (2 if operator in BINARY else 1)
    found = template([operator], HOST)
    arrays = operands(*shapes, dtype=dtype)
    got = run(found.kernel((3, 37), dtype=dtype), arrays, (3, 37), dtype)
    assert worst_error(expected([operator], arrays).astype(dtype), got) <= REASSOCIATES.bound(dtype)


@pytest.mark.parametrize(
    ("shape", "others"),
    [
        ((), [(), ()]),
        ((1,), [(1,), ()]),
        ((1, 1), [(1,), (1, 1)]),
        ((5,), [(5,), (1,)]),
        ((64,), [(), (64,)]),
        ((1009,), [(1009,), (1009,)]),
        ((3, 7), [(7,), (3, 1)]),
        ((2, 3, 33), [(3, 1), (2, 1, 33)]),
        ((2, 3, 1), [(2, 3, 1), (3, 1)]),
        ((0,), [(0,), ()]),
        ((3, 0), [(1, 0), (3, 0)]),
        ((0, 5), [(5,), (0, 5)]),
        ((257, 300), [(300,), (257, 300)]),
    ],
)
def test_operands_of_every_shape(shape, others):
    found = template(["load", "multiply", "add", "silu", "store"], HOST)
    arrays = operands(shape, *others)
    got = run(found.kernel(shape, others), arrays, shape, "float32")
    assert worst_error(expected(["multiply", "add", "silu"], arrays).astype("float32"), got) <= 1e-5


def test_symbolic_sizes():
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    flat = template(["multiply", "add"], HOST).kernel((n, m))
    rows = template(["multiply", "add"], HOST).kernel((n, m), [(m,), (n, 1)])
    for a, b in ((1, 1), (3, 7), (0, 4), (4, 0), (65, 33)):
        for func, shapes in ((flat, [(a, b)] * 3), (rows, [(a, b), (b,), (a, 1)])):
            arrays = operands(*shapes)
            got = run(func, arrays, (a, b), "float32")
            assert worst_error(expected(["multiply", "add"], arrays).astype("float32"), got) <= 1e-5


@pytest.mark.parametrize("shape", [(64,), (3, 7), (4, 1024)])
@pytest.mark.parametrize("target", ["host", "rk3588"])
def test_nothing_lies_in_memory_between_load_and_store(shape, target):
    func = template(["multiply", "add", "gelu"], get_target(target), "cpu").kernel(shape)
    assert buffers(func) == []
    # The counterpart: a kernel that does hold something is seen.
    spec = Spec((4,), 8, "float32", (Output((("row", 0), ("lane", 0)), (), 8),))
    assert buffers(template(["linear"], HOST).kernel(spec))
    # Every store is of the whole chain.
    stores = [line for line in func.script().splitlines() if "crossloom.erf" in line]
    assert stores and all(line.count("[") == 1 + 6 for line in stores)


def test_a_multiply_add_of_neon_is_one_instruction_on_a_vector():
    func = template(["load", "multiply", "add", "store"], get_target("rk3588"), "cpu").kernel((4096,))
    mod = tvm.ir.IRModule({"k": func.with_attr("global_symbol", "k")})
    code = tvm.compile(mod, target=get_target("rk3588").tvm_target()).mod.inspect_source("asm")
    assert "fmla" in code or "fmadd" in code
    body = [line for line in code.splitlines() if "fmla" in line]
    assert body and all(".4s" in line for line in body)


def test_large_chains_are_shared_by_threads_and_small_ones_are_not():
    found = template(["multiply", "add"], HOST)
    assert "T.parallel" in found.kernel((4096, 4096)).script()
    assert "T.parallel" not in found.kernel((4, 64)).script()


def test_a_chain_that_makes_no_sense():
    with pytest.raises(ValueError, match="take 1 operands"):
        chain_kernel(["add"], (3,), [], "float32", Machine())
    with pytest.raises(ValueError, match="unknown"):
        chain_kernel(["softmax"], (3,), [], "float32", Machine())


# Linear templates ----------------------------------------------------------------------------------------------------


def test_a_linear_chain_is_a_spec():
    found = template(["relax.nn.rms_norm", "linear", "add", "gelu", "multiply", "add"], HOST)
    assert isinstance(found, LinearTemplate)
    assert found.norm == "rms" and found.steps == ("bias", "gelu", "multiply", "residual")
    spec = found.spec((2, 3), 8, 5, (4,), scale=0.5, epsilon=1e-3)
    output = spec.outputs[0]
    assert spec.norm == Norm("rms", 1e-3, weight=True) and spec.bias and spec.depth == 8
    assert (output.activation, output.scale, output.strides, output.residual) == ("gelu", 0.5, (5,), output.dims)
    assert chain_of(spec, output) == ["rms_norm", "linear", "bias", "gelu", "multiply", "residual"]


@pytest.mark.parametrize(
    "chain",
    [
        ["linear"],
        ["layer_norm", "linear", "bias", "quick_gelu"],
        ["linear", "silu", "gate", "residual"],
        ["linear", "bias", "rms_norm", "rotary"],
        ["rms_norm", "linear", "rotary"],
    ],
)
@pytest.mark.parametrize("target", ["host", "rk3588"])
def test_a_spec_of_a_chain_is_that_chain_and_compiles(chain, target):
    found = template(chain, get_target(target), "cpu")
    spec = found.spec((tirx.Var("n", "int64"),), 12, 8, (3,))
    assert chain_of(spec, spec.outputs[0]) == chain
    again = template(chain_of(spec, spec.outputs[0]), get_target(target), "cpu")
    assert again == found
    func = found.kernel(spec)
    tvm.compile(tvm.ir.IRModule({"k": func.with_attr("global_symbol", "k")}), target=get_target(target).tvm_target())


def test_a_rotation_that_does_not_fit():
    with pytest.raises(ValueError, match="no pairs"):
        template(["linear", "rotary"], HOST).spec((3,), 8, 7)
    with pytest.raises(ValueError, match="no rotary"):
        template(["linear"], HOST).spec((3,), 8, 8, rotary=Rotary("half-split", 8, (("lane", 0),), (("lane", 0),)))


def test_activations_of_both_kinds_of_chain_are_the_same():
    assert set(ACTIVATIONS) <= set(UNARY)
    for name in ACTIVATIONS:
        assert isinstance(template(["linear", name], HOST), LinearTemplate)
        assert isinstance(template([name], HOST), ElementwiseTemplate)
