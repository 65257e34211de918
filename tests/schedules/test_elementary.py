"""Our exp, erf, tanh and logistic function against float64, over the whole range of float32, scalar and vectorized."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import te

from crossloom.schedules.elementary import vectorizable_math

TARGET = tvm.target.Target({"kind": "llvm"})
SIZE = 1 << 16


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=["float64"])(x)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.where(x < 0, np.exp(-np.abs(x)), 1.0) / (1.0 + np.exp(-np.abs(x)))


#: Function of TVM: reference in float64, largest error (units in the last place).
FUNCTIONS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "exp": (np.exp, 2.0),
    "tanh": (np.tanh, 2.0),
    "erf": (_erf, 3.0),
    "sigmoid": (_sigmoid, 3.0),
}


def kernel(name: str, dtype: str = "float32", size: int | None = SIZE, width: int = 0) -> tvm.tirx.PrimFunc:
    """Return ``y[i] = f(x[i])``, ``width`` lanes at a time (0: one plain loop); a size of None is symbolic."""
    n = tvm.tirx.Var("n", "int64") if size is None else size
    x = te.placeholder((n,), dtype, "x")
    y = te.compute((n,), lambda i: getattr(tvm.tirx, name)(x[i]), "y")
    sch = tvm.s_tir.Schedule(te.create_prim_func([x, y]))
    if width:
        sch.vectorize(sch.split(sch.get_loops(sch.get_sblock("y"))[0], [None, width])[1])
    return sch.mod["main"]


def run(func: tvm.tirx.PrimFunc, x: np.ndarray) -> np.ndarray:
    out = tvm.runtime.tensor(np.zeros_like(x))
    tvm.compile(func.with_attr("global_symbol", "main"), target=TARGET)["main"](tvm.runtime.tensor(x), out)
    return out.numpy()


def values() -> np.ndarray:
    """Return SIZE floats: one in every 2**16 of all bit patterns, the ranges that matter densely, and the odd ones."""
    rng = np.random.default_rng(3)
    patterns = (np.arange(1 << 15, dtype="uint64") << np.uint64(17)) + rng.integers(0, 1 << 17, 1 << 15, dtype="uint64")
    every = patterns.astype("uint32").view("float32")
    dense = np.concatenate(
        [np.linspace(-a, a, 1 << 12, dtype="float32") for a in (0.01, 0.7, 1.0, 1.5, 4.2, 10.0, 105.0)]
    )
    tiny = (np.float32(1e-45) * np.arange(-50, 50)).astype("float32")
    limits = np.nextafter(np.float32([88.72283, -87.33655, -103.97208, 0.625, 0.9375, 4.0, 1.0]), np.float32(np.inf))
    odd = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1.2e-38, -1.2e-38])
    out = np.concatenate([every, dense, tiny, limits, -limits, odd])
    return np.resize(out, SIZE)


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return the error in units of float32's last place at ``want`` (float64); 0 where both are infinite or NaN."""
    rounded = want.astype("float32")
    same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
    # The spacing of the largest finite number stands for infinity's, the smallest subnormal's for 0's.
    largest = np.nextafter(np.finfo("float32").max, np.float32(0))
    unit = np.spacing(np.minimum(np.abs(rounded), largest)).astype("float64")
    return np.where(same, 0.0, np.abs(got.astype("float64") - want) / unit)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@pytest.mark.parametrize("width", [0, 16])
def test_within_a_few_ulp_of_float64_everywhere(name: str, width: int) -> None:
    reference, most = FUNCTIONS[name]
    x = values()
    with np.errstate(all="ignore"):
        want = reference(x.astype("float64"))
        got = run(vectorizable_math(kernel(name, width=width)), x)
        error = ulps(got, want)
    at = int(np.nanargmax(error))
    assert error[at] <= most and not np.isnan(error).any(), (x[at], got[at], want[at], error[at])
    np.testing.assert_array_equal(np.isnan(got), np.isnan(x))
    if name in ("erf", "tanh"):
        zero = x == 0
        np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(x[zero]))


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_the_loop_becomes_vector_code(name: str) -> None:
    """No call of libm is left, and what multiplies is a vector, even where the plain loop's length is not known."""
    for size, width in ((SIZE, 16), (None, 0)):
        func = vectorizable_math(kernel(name, size=size, width=width)).with_attr("global_symbol", "main")
        text = tvm.compile(func, target=TARGET).mod.inspect_source("ll")
        assert "fmul <" in text
        for libm in ("@expf", "@erff", "@tanhf", "@llvm.exp"):
            assert libm not in text, (libm, size, width)


def test_half_precision_goes_by_float32() -> None:
    x = np.linspace(-9, 9, SIZE).astype("float16")
    got = run(vectorizable_math(kernel("exp", "float16", width=16)), x)
    np.testing.assert_array_equal(got, np.exp(x.astype("float64")).astype("float16"))


def test_other_types_and_functions_stay() -> None:
    for func in (kernel("exp", "float64"), kernel("log"), kernel("cos", "float16")):
        assert vectorizable_math(func).same_as(func)
    once = vectorizable_math(kernel("erf"))
    assert "crossloom.erf" in once.script()
    assert vectorizable_math(once).same_as(once)


def test_unrolled_and_nested_calls_keep_their_own_values() -> None:
    """A variable shared by the copies of an unrolled loop would give every copy the first one's value."""
    x = te.placeholder((64, 4), "float32", "x")
    y = te.compute((64, 4), lambda i, j: tvm.tirx.tanh(tvm.tirx.exp(x[i, j]) - tvm.tirx.exp(-x[i, j])), "y")
    sch = tvm.s_tir.Schedule(te.create_prim_func([x, y]))
    sch.unroll(sch.get_loops(sch.get_sblock("y"))[1])
    data = np.random.default_rng(0).standard_normal((64, 4)).astype("float32")
    np.testing.assert_allclose(
        run(vectorizable_math(sch.mod["main"]), data), np.tanh(np.exp(data) - np.exp(-data)), rtol=2e-6, atol=1e-6
    )
