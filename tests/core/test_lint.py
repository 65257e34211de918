"""The linter on modules made by hand: each kind of finding, and none where nothing is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import TensorType
from tvm.relax import op as R

from crossloom.lint import Finding, lint
from crossloom.model import Entry, Model
from crossloom.targets import get_target


def module(
    body: object,
    *inputs: tuple[tuple[object, ...], str],
    weights: Sequence[tuple[tuple[object, ...], str]] = (),
    name: str = "main",
    into: relax.BlockBuilder | None = None,
) -> tvm.ir.IRModule:
    """Make a module of one function from a Python function over its parameters."""
    bb = into or relax.BlockBuilder()
    params = [relax.Var(f"x{i}", TensorType(s, d)) for i, (s, d) in enumerate((*inputs, *weights))]
    with bb.function(name, params, attrs={"num_input": len(inputs)}):
        bb.emit_func_output(bb.emit(body(*params)))  # type: ignore[operator]
    return bb.get()


def codes(findings: list[Finding], *, info: bool = False) -> list[str]:
    return [f.code for f in findings if info or f.severity != "info"]


def test_static_convolution_is_fine_on_rk3588() -> None:
    mod = module(R.nn.conv2d, ((1, 3, 32, 32), "float32"), weights=[((8, 3, 3, 3), "float32")])
    findings = lint(mod, get_target("rk3588"))
    assert codes(findings) == []
    assert [f.code for f in findings] == ["converted"] and "float16" in findings[0].what


def test_dynamic_dimensions_are_named() -> None:
    n = tvm.tirx.Var("n", "int64")
    mod = module(R.nn.relu, ((1, n, 64), "float32"))
    findings = lint(mod, get_target("rk3588"))
    first = next(f for f in findings if f.where == "x0")
    assert first.code == "dynamic-shape" and first.severity == "warning" and first.function == "main"
    assert "'x0'" in first.what and "1 (n)" in first.what and first.source and first.remedy
    assert lint(mod, get_target("host")) == []
    on_chip = lint(mod, get_target("stm32f746"))
    assert on_chip and all(f.severity == "error" and f.code == "dynamic-shape" for f in on_chip)


def test_dynamic_shapes_do_not_hide_what_else_is_wrong_nor_drown_it() -> None:
    n = tvm.tirx.Var("n", "int64")
    mod = module(lambda x: R.nn.relu(R.exp(R.exp(R.negative(x)))), ((n, 64), "float32"))
    found = [(f.code, f.op, f.count) for f in lint(mod, get_target("rk3588")) if f.severity != "info"]
    assert sorted(found) == [("dynamic-shape", "", 1), ("dynamic-shape", "", 4), ("op", "relax.exp", 2)]


def test_rank_unknown_and_scalars() -> None:
    ranks = module(R.nn.relu, ((4,), "float32"))
    assert codes(lint(ranks, get_target("rk3588"))) == []
    bb = relax.BlockBuilder()
    x = relax.Var("x", TensorType(dtype="float32", ndim=-1))
    with bb.function("main", [x]):
        bb.emit_func_output(bb.emit(R.nn.relu(x)))
    assert set(codes(lint(bb.get(), get_target("rk3588")))) == {"dynamic-shape"}
    scalars = module(R.add, ((), "float32"), ((), "float32"))
    assert [f.where for f in lint(scalars, get_target("rk3588")) if f.code == "rank"] == ["x0", "x1"]
    halved = module(lambda x: R.multiply(x, relax.const(0.5, "float32")), ((4,), "float32"))
    assert codes(lint(halved, get_target("rk3588"))) == []


def test_weights_derived_from_weights_are_weights() -> None:
    mod = module(lambda x, w: R.matmul(x, R.permute_dims(w)), ((4, 8), "int8"), weights=[((16, 8), "int8")])
    assert not any("runtime-weight" in f.why for f in lint(mod, get_target("imx93")))
    mod = module(R.matmul, ((4, 8), "int8"), ((8, 16), "int8"))
    assert any("runtime-weight" in f.why for f in lint(mod, get_target("imx93")))


def test_rank_and_extent_on_the_ane() -> None:
    six = module(R.nn.relu, ((1, 2, 1, 2, 1, 2), "float16"))
    assert codes(lint(six, get_target("apple-m4"))) == ["rank"]
    long = module(R.nn.relu, ((1, 8, 1, 20000), "float16"))
    found = lint(long, get_target("apple-m1"))
    assert codes(found) == ["extent"] and "aneforge" in found[0].source
    assert codes(lint(long, get_target("apple-m4"))) == []


def test_types() -> None:
    half = module(R.add, ((4, 4), "float16"), ((4, 4), "float16"))
    assert lint(half, get_target("rk3588")) == []
    assert [(f.code, f.severity) for f in lint(half, get_target("esp32s3"))] == [("dtype", "error")]
    wide = module(R.add, ((4, 4), "int64"), ((4, 4), "int64"))
    assert codes(lint(wide, get_target("rk3588"))) == ["dtype"]
    assert codes(lint(wide, get_target("apple-m4"))) == ["dtype"]
    assert lint(wide, get_target("host")) == []


def test_what_truly_fails_on_a_cpu() -> None:
    same = module(R.equal, ((4,), "bool"), ((4,), "bool"))
    (finding,) = lint(same, get_target("host"))
    assert finding.severity == "error" and finding.code == "dtype" and "bool" in finding.what
    assert lint(module(R.equal, ((4,), "float32"), ((4,), "float32")), get_target("host")) == []
    assert codes(lint(module(lambda x: R.cumsum(x, 0, "int32"), ((4,), "bool")), get_target("host"))) == ["dtype"]


def test_indices_known_at_build_time_are_fine() -> None:
    def take(table: relax.Var, ids: relax.Var) -> relax.Expr:
        return R.take(table, ids, axis=0)

    runtime = module(lambda ids, table: take(table, ids), ((5,), "int64"), weights=[((100, 8), "float32")])
    (finding,) = [f for f in lint(runtime, get_target("rk3588")) if f.severity != "info"]
    assert finding.op == "relax.take" and "runtime-indices" in finding.why and "fallback" in finding.why
    fixed = module(take, ((100, 8), "float32"), weights=[((5,), "int64")])
    assert codes(lint(fixed, get_target("rk3588"))) == []


@pytest.mark.parametrize(("step", "expected"), [(1, []), (2, ["op"])])
def test_stepped_slices(step: int, expected: list[str]) -> None:
    mod = module(lambda x: R.strided_slice(x, [1], [0], [8], [step]), ((1, 8, 4), "float32"))
    assert codes(lint(mod, get_target("rk3588"))) == expected


def test_casts_and_operators_without_a_lowering() -> None:
    mod = module(lambda x: R.astype(x, "int32"), ((4, 4), "float32"))
    assert any("wrong-values" in f.why for f in lint(mod, get_target("rk3588")))
    mod = module(R.minimum, ((4, 4), "float32"), ((4, 4), "float32"))
    (finding,) = [f for f in lint(mod, get_target("rk3588")) if f.severity == "warning"]
    assert finding.op == "relax.minimum" and "device-fails" in finding.why


def test_disputed_and_unknown_are_said() -> None:
    mod = module(R.nn.gelu, ((4, 4), "float16"))
    findings = lint(mod, get_target("apple-m4"))
    assert codes(findings, info=True) == ["disputed"]
    assert "aneforge" in findings[0].source and "Orion" in findings[0].source
    mod = module(lambda x: R.variance(x, [1]), ((4, 4), "float16"))
    (finding,) = lint(mod, get_target("apple-m4"))
    assert finding.code == "op-unknown" and finding.severity == "info"


def test_repeats_are_counted_functions_kept_apart_and_order_fixed() -> None:
    def chain(x: relax.Var) -> relax.Expr:
        return R.exp(R.exp(R.exp(x)))

    def build() -> tvm.ir.IRModule:
        bb = relax.BlockBuilder()
        for name in ("vision", "decode"):
            module(chain, ((2, 2), "float32"), name=name, into=bb)
        return bb.get()

    findings = lint(build(), get_target("rk3588"))
    assert [(f.function, f.count) for f in findings if f.op == "relax.exp"] == [("decode", 3), ("vision", 3)]
    assert list(map(str, lint(build(), get_target("rk3588")))) == list(map(str, findings))
    assert "3 times" in str(findings[0])


def test_memory_of_a_microcontroller() -> None:
    mod = module(R.matmul, ((1, 64), "float32"), weights=[((64, 8), "float32")])
    entry = Entry("main", (), (), ("w",))
    chip = get_target("stm32f746")
    fits = Model(mod, {"w": np.zeros((64, 8), np.float32)}, {"main": entry})
    assert lint(fits, chip) == []
    heavy = Model(mod, {"w": np.zeros(1024 * 1024 // 4 + 1, np.float32)}, {"main": entry})
    (finding,) = lint(heavy, chip)
    assert finding.code == "flash" and "1048576" in finding.why and finding.severity == "error"
    # 200 KB in and 200 KB out at once: more than the 320 KB there are.
    wide = module(R.exp, ((50, 1024), "float32"))
    (finding,) = lint(wide, chip)
    assert finding.code == "ram" and "409600" in finding.what
