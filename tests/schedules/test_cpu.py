"""Scheduled kernels compute what numpy computes, over sizes that divide, don't divide, or are symbolic."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import tirx as T

from crossloom.flow import CPU, steps
from crossloom.schedules import cpu

HOST = {"kind": "llvm"}
A76 = {
    "kind": "llvm",
    "mtriple": "aarch64-linux-gnu",
    "mcpu": "cortex-a76",
    "mattr": ["+neon", "+dotprod"],
    "num-cores": 4,
}


def module(build, *shapes, dtype="float32", name="vision"):
    """A module of one function; strings in shapes are symbolic dimensions."""
    dims: dict[str, tvm.tirx.Var] = {}
    fixed = [[dims.setdefault(d, tvm.tirx.Var(d, "int64")) if isinstance(d, str) else d for d in s] for s in shapes]
    bb = relax.BlockBuilder()
    params = [relax.Var(f"x{i}", relax.TensorType(s, dtype)) for i, s in enumerate(fixed)]
    with bb.function(name, params):
        with bb.dataflow():
            out = bb.emit_output(build(*params))
        bb.emit_func_output(out)
    return bb.get()


#: Kernels of their own would take the place of what the schedule rules are held to.
APART = [name for name in CPU if name.startswith(("fuse-", "lower-fused-"))]


def lower(mod, target=HOST):
    target = tvm.target.Target(target)
    with target:
        return tvm.transform.Sequential([step.run for step in steps(target, disabled=APART)])(mod), target


def run(mod, arrays, name="vision"):
    lowered, target = lower(mod)
    vm = relax.VirtualMachine(tvm.compile(lowered, target=target), tvm.cpu())
    return vm[name](*[tvm.runtime.tensor(a) for a in arrays]).numpy()


def arrays(*shapes, dtype="float32"):
    rng = np.random.default_rng(7)
    return [rng.standard_normal(s).astype(dtype) for s in shapes]


@pytest.mark.parametrize("m,k,n", [(1, 64, 128), (1, 1, 1), (17, 31, 97), (64, 64, 64), (127, 33, 48), (30, 5, 7)])
def test_matmul_with_epilogue(m, k, n):
    x, w, b = arrays((m, k), (k, n), (n,))
    mod = module(lambda x, w, b: relax.op.nn.relu(relax.op.add(relax.op.matmul(x, w), b)), (m, k), (k, n), (n,))
    np.testing.assert_allclose(run(mod, [x, w, b]), np.maximum(x @ w + b, 0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("m", [1, 3, 50])
def test_symbolic_rows_and_columns(m):
    x, w = arrays((2, m, 32), (2, 32, m + 2))
    mod = module(relax.op.matmul, (2, "m", 32), (2, 32, "n"))
    np.testing.assert_allclose(run(mod, [x, w]), x @ w, rtol=1e-4, atol=1e-4)
    x, w = arrays((m, 64), (64, 256))
    mod = module(relax.op.matmul, ("m", 64), (64, 256))
    np.testing.assert_allclose(run(mod, [x, w]), x @ w, rtol=1e-4, atol=1e-4)


def test_transposed_weight():
    x, w = arrays((40, 48), (64, 48))
    mod = module(lambda x, w: relax.op.matmul(x, relax.op.permute_dims(w)), (40, 48), (64, 48))
    np.testing.assert_allclose(run(mod, [x, w]), x @ w.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 8])
def test_conv2d(groups):
    x, w = arrays((2, 8, 9, 10), (16, 8 // groups, 3, 3))
    mod = module(lambda x, w: relax.op.nn.conv2d(x, w, padding=1, groups=groups), x.shape, w.shape)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    per_out, per_in = 16 // groups, 8 // groups
    parts = [
        np.einsum(
            "bcyxij,ocij->boyx",
            windows[:, g * per_in : (g + 1) * per_in],
            w[g * per_out : (g + 1) * per_out],
        )
        for g in range(groups)
    ]
    np.testing.assert_allclose(run(mod, [x, w]), np.concatenate(parts, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(64, 512), (3, 7), (1, 1), (5, 4, 33)])
def test_softmax_and_layer_norm(shape):
    (x,) = arrays(shape)
    e = np.exp(x - x.max(-1, keepdims=True))
    mod = module(lambda x: relax.op.nn.softmax(x, -1), shape)
    np.testing.assert_allclose(run(mod, [x]), e / e.sum(-1, keepdims=True), rtol=1e-5, atol=1e-6)
    g, b = arrays((shape[-1],), (shape[-1],))
    mod = module(lambda x, g, b: relax.op.nn.layer_norm(x, g, b, [-1]), shape, g.shape, b.shape)
    want = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * g + b
    np.testing.assert_allclose(run(mod, [x, g, b]), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("axis", [[0], [1], [0, 1], [-1]])
def test_sums(axis):
    (x,) = arrays((33, 5, 48))
    mod = module(lambda x: relax.op.sum(x, axis), x.shape)
    np.testing.assert_allclose(run(mod, [x]), x.sum(tuple(axis)), rtol=1e-4, atol=1e-4)


def test_large_matmul_is_tiled_vectorized_and_parallel():
    lowered, _ = lower(module(relax.op.matmul, (512, 512), (512, 512)))
    text = lowered.script()
    assert "T.parallel" in text and "T.vectorized" in text and "T.unroll" in text


def test_tiny_work_stays_on_one_thread():
    lowered, _ = lower(module(lambda x: relax.op.nn.softmax(relax.op.exp(x), -1), (4, 8)))
    assert "T.parallel" not in lowered.script()


def test_entries_of_any_name_survive():
    mod = module(relax.op.exp, (2, 2), name="prefill")
    mod.update_func(
        tvm.ir.GlobalVar("decode"), relax.utils.copy_with_new_vars(mod["prefill"]).with_attr("global_symbol", "decode")
    )
    lowered, _ = lower(mod)
    names = {gv.name_hint for gv, f in lowered.functions_items() if isinstance(f, relax.Function)}
    assert names == {"prefill", "decode"}


@pytest.mark.aarch64
@pytest.mark.parametrize(
    "build,shapes",
    [
        (relax.op.matmul, [(512, 512), (512, 512)]),
        (lambda x, w: relax.op.matmul(x, relax.op.permute_dims(w)), [(64, 768), (768, 768)]),
        (relax.op.matmul, [(1, 2048), (2048, 2048)]),
        (relax.op.matmul, [("m", 256), (256, 256)]),
        (lambda x: relax.op.nn.softmax(x, -1), [(64, 512)]),
        (lambda x, g, b: relax.op.nn.layer_norm(x, g, b, [-1]), [(64, 768), (768,), (768,)]),
        (relax.op.nn.gelu, [(64, 768)]),
    ],
)
def test_compiles_for_aarch64(build, shapes, tmp_path):
    lowered, target = lower(module(build, *shapes), A76)
    path = tmp_path / "model.so"
    tvm.compile(lowered, target=target).export_library(str(path), cc="aarch64-linux-gnu-g++")
    header = path.read_bytes()[:20]
    assert header[:4] == b"\x7fELF" and header[18:20] == b"\xb7\x00"


def test_rows_bounded_by_min_and_max_are_not_tiled():
    """An ONNX Slice [-1:] has min(2**31-1, T) - max(0, T-1) rows; TVM would allocate 2**31 rows for a tile of them."""
    length = tvm.tirx.Var("T", "int64")
    rows = tvm.tirx.min(tvm.tirx.IntImm("int64", 2**31 - 1), length) - tvm.tirx.max(0, length - 1)
    scheduled = {}
    for name, extent in (("slice", rows), ("plain", length + 1)):
        x = tvm.te.placeholder((extent, 128), "float32", "x")
        w = tvm.te.placeholder((128, 64), "float32", "w")
        func = tvm.te.create_prim_func([x, w, tvm.topi.matmul(x, w)], index_dtype_override="int64")
        scheduled[name] = cpu.schedule(func, tvm.target.Target(HOST)).script()
    assert "// T.int64(4)" in scheduled["plain"]
    assert "// T.int64(4)" not in scheduled["slice"] and "T.vectorized" in scheduled["slice"]


def kernel_text(build, *shapes, target=HOST):
    """The scheduled kernels of a module of one function, printed."""
    lowered, _ = lower(module(build, *shapes), target)
    return lowered.script()


def test_a_ragged_or_symbolic_product_is_padded_to_whole_tiles():
    for shapes in [((17, 31), (31, 97)), (("m", 64), (64, "n"))]:
        text = kernel_text(relax.op.matmul, *shapes)
        assert "_pad" in text and "T.vectorized" in text and "T.unroll" in text
    # So few products are not worth the copies.
    assert "_pad" not in kernel_text(relax.op.matmul, (3, 5), (5, 7))


@pytest.mark.parametrize("shape,axes", [((64, 48), (1, 0)), ((3, 40, 56), (0, 2, 1)), ((33, 21), (1, 0))])
def test_transposes(shape, axes):
    (x,) = arrays(shape)
    mod = module(lambda x: relax.op.permute_dims(x, axes), shape)
    np.testing.assert_array_equal(run(mod, [x]), x.transpose(axes))


def test_a_transpose_reads_whole_registers_of_a_tile():
    assert "T.vectorized" in kernel_text(lambda x: relax.op.permute_dims(x, (1, 0)), (64, 48))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("shape", [(6, 5, 48), (4, 7, 9)])
def test_softmax_over_any_axis(axis, shape):
    """Over a middle axis the maximum is computed once a row, not once for every value of it."""
    (x,) = arrays(shape)
    e = np.exp(x - x.max(axis, keepdims=True))
    mod = module(lambda x: relax.op.nn.softmax(x, axis), shape)
    np.testing.assert_allclose(run(mod, [x]), e / e.sum(axis, keepdims=True), rtol=1e-5, atol=1e-6)


def test_an_epilogue_that_reads_the_product_twice():
    x, w = arrays((20, 24), (24, 36))
    y = x @ w
    mod = module(lambda x, w: relax.op.nn.silu(relax.op.matmul(x, w)), x.shape, w.shape)
    np.testing.assert_allclose(run(mod, [x, w]), y / (1 + np.exp(-y)), rtol=1e-4, atol=1e-5)


def test_for_plain_c_the_functions_stay_libm():
    mod = module(relax.op.exp, (4, 4))
    assert "crossloom.exp" in lower(mod)[0].script()
    assert "crossloom.exp" not in lower(mod, {"kind": "c"})[0].script()


EMPTY = {
    "sum of rows": (lambda x: relax.op.sum(x, -1), [(4, "n")], (4,), 0),
    "sum of columns": (lambda x: relax.op.sum(x, 0), [("n", 4)], (4,), 0),
    "sum of all": (relax.op.sum, [("n", 3)], (), 0),
    "sum of the middle": (lambda x: relax.op.sum(x, 1), [(2, "n", 5)], (2, 5), 0),
    "maximum": (lambda x: relax.op.max(x, -1), [(4, "n")], (4,), np.finfo("float32").min),
    "product": (relax.op.matmul, [(4, "n"), ("n", 4)], (4, 4), 0),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_a_sum_of_nothing_is_its_start_and_not_what_lay_in_memory(kind):
    build, shapes, result, want = EMPTY[kind]
    lowered, target = lower(module(build, *shapes))
    (func,) = [f for f in lowered.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    inputs = [tvm.runtime.tensor(np.zeros([0 if d == "n" else d for d in s], "float32")) for s in shapes]
    out = tvm.runtime.tensor(np.full(result, 7, "float32"))
    tvm.compile(func.with_attr("global_symbol", "kernel"), target=target)["kernel"](*inputs, out)
    np.testing.assert_array_equal(out.numpy(), np.full(result, want, "float32"))


def test_a_sum_along_an_axis_of_size_0_is_0():
    got = run(module(lambda x: relax.op.sum(x, -1), (4, 0)), [np.zeros((4, 0), "float32")])
    np.testing.assert_array_equal(got, np.zeros(4, "float32"))


@T.prim_func(s_tir=True)
def DEAD(x: T.Buffer((16, 64), "float32"), y: T.Buffer((16, 64), "float32")):
    unread = T.alloc_buffer((16, 64), "float32")
    for i, j in T.grid(16, 64):
        with T.sblock("unread"):
            vi, vj = T.axis.remap("SS", [i, j])
            unread[vi, vj] = T.exp(x[vi, vj])
    for i, j in T.grid(16, 64):
        with T.sblock("y"):
            vi, vj = T.axis.remap("SS", [i, j])
            y[vi, vj] = x[vi, vj] + T.float32(1)


def test_a_costly_block_that_nobody_reads_stays_and_the_rest_is_scheduled():
    outcome = cpu.attempt(DEAD, tvm.target.Target(HOST))
    assert outcome.rule == "elementwise" and "T.vectorized" in outcome.func.script()
    (x,) = arrays((16, 64))
    out = tvm.runtime.tensor(np.zeros_like(x))
    kernel = tvm.compile(outcome.func.with_attr("global_symbol", "kernel"), target=tvm.target.Target(HOST))["kernel"]
    kernel(tvm.runtime.tensor(x), out)
    np.testing.assert_array_equal(out.numpy(), x + np.float32(1))


def test_a_fault_of_a_rule_goes_out_and_a_refusal_of_tvm_is_told(monkeypatch):
    def faulty(sch, machine):
        raise ValueError("cannot count")

    def refused(sch, machine):
        sch.compute_inline(sch.get_sblock("y"))  # an output block

    target = tvm.target.Target(HOST)
    monkeypatch.setattr(cpu, "RULES", (refused,))
    outcome = cpu.attempt(DEAD, target)
    assert outcome.rule == "" and outcome.problem.startswith("refused: ") and "output" in outcome.problem
    monkeypatch.setattr(cpu, "RULES", (refused, faulty))
    with pytest.raises(ValueError, match="cannot count"):
        cpu.attempt(DEAD, target)


def test_names_of_blocks_decide_nothing():
    """A row's sum under other names than TVM's own gives the same loops."""

    def kernel(names):
        x = tvm.te.placeholder((8, 256), "float32", "x")
        k = tvm.te.reduce_axis((0, 256), "k")
        total = tvm.te.compute((8,), lambda i: tvm.te.sum(x[i, k], k), names[0])
        y = tvm.te.compute((8, 256), lambda i, j: x[i, j] - total[i], names[1])
        func = tvm.te.create_prim_func([x, y], index_dtype_override="int64")
        return cpu.schedule(func, tvm.target.Target(HOST))

    plain = kernel(("total", "y"))
    assert plain.script().count("T.vectorized") >= 2
    for names in [("total_rf", "y"), ("total", "y_rf"), ("sum_pad", "out_pad")]:
        other = kernel(names).script()
        assert other.count("T.vectorized") == plain.script().count("T.vectorized")
        assert other.count(" in range(") + other.count("T.grid(") == plain.script().count(
            " in range("
        ) + plain.script().count("T.grid(")
