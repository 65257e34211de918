"""exp, erf, tanh and the logistic function in arithmetic that vectorizes, for float32.

TVM hands these to libm, one call a lane, so that one ``exp`` costs as much as a softmax row's other work together.
Here each is an operator of our own (``crossloom.exp``, ...) that stays opaque until TVM lowers intrinsics, after
loops are vectorized and unrolled, and then becomes additions, products, comparisons and bit shifts of whole vectors.

Errors against float64, measured over all of float32's range by ``tests/schedules/test_elementary.py``: at most 2 ulp
for exp and tanh, 3 for erf and the logistic function; infinities, NaN, signed zero and subnormals as in C.

Sources: exp and tanh are Cephes' expf and tanhf (S. L. Moshier, netlib.org/cephes, single precision), exp with the
rounding by a large constant of the IEEE literature (e.g. J.-M. Muller, Elementary Functions, chapter 11) and the
power of two applied in two halves, so that subnormal results are rounded once.  erf is a polynomial below 15/16 and
``1 - exp(-t P(t))`` above, in the manner of W. J. Cody's split; both polynomials are our own weighted minimax fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
import tvm_ffi
from tvm import ir, tirx

#: TVM's operator: ours.
_OURS = {f"tirx.{name}": f"crossloom.{name}" for name in ("exp", "erf", "tanh", "sigmoid")}
_WIDENED = ("float16",)

# Cephes expf.c: exp(r) = 1 + r + r^2 P(r) for |r| <= ln(2) / 2.
_EXP = (5.0000001201e-1, 1.6666665459e-1, 4.1665795894e-2, 8.3334519073e-3, 1.3981999507e-3, 1.9875691500e-4)
_LOG2_E = 1.44269504088896341
# ln(2) in two parts; products of the first with exponents are exact.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Adding 1.5 * 2^23 leaves the nearest integer in the low bits of a float32.
_ROUNDER, _ROUNDER_BITS = 12582912.0, 0x4B400000
# Beyond these exp is 0 or infinite in float32.
_EXP_LOWEST, _EXP_HIGHEST = -104.0, 89.0
# Cephes tanhf.c: tanh(x) = x P(x^2) for |x| < 0.625; as a product, not as x + x^3 Q, so that -0 stays -0.
_TANH = (1.0, -3.33332819422e-1, 1.33314422036e-1, -5.37397155531e-2, 2.06390887954e-2, -5.70498872745e-3)
_TANH_SMALL = 0.625
# erf(x) = x P(x^2) for |x| < 15/16, relative error 5e-10; 1 - exp(-t P(t)), t = |x|, up to 4, relative error 6e-10.
# From 4 on erf is 1 in float32.
_ERF_SMALL = (
    1.1283791666,
    -0.37612633203,
    0.11283686351,
    -0.026858851201,
    0.0051995998272,
    -0.00081258063469,
    8.296609499e-05,
)
_ERF_LARGE = (
    1.1286585206,
    0.63511076019,
    0.10630367497,
    -0.023819377665,
    0.0036694611463,
    -0.00032942282215,
    1.1890573987e-05,
)
_ERF_SPLIT, _ERF_ONE = 0.9375, 4.0


#: Names a value that is used more than once.
_Keep = Callable[[ir.Expr], ir.Expr]


def _const(like: ir.Expr, value: float) -> ir.Expr:
    return tirx.const(value, str(like.ty.dtype))


def _horner(x: ir.Expr, coefficients: Sequence[float]) -> ir.Expr:
    total = _const(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + _const(x, coefficient)
    return total


def _capped(x: ir.Expr, low: float, high: float) -> ir.Expr:
    """Return x within bounds.

    TVM makes ``min(a, b)`` of ``a < b ? a : b``, so a NaN in the second place stays.
    """
    return tirx.Max(_const(x, low), tirx.Min(_const(x, high), x))


def _negated(x: ir.Expr) -> ir.Expr:
    return _const(x, 0.0) - x


def _with_sign_of(x: ir.Expr, value: ir.Expr) -> ir.Expr:
    return tirx.Select(x < _const(x, 0.0), _negated(value), value)


def _integers(like: ir.Expr, value: int) -> ir.Expr:
    lanes = tvm.DataType(str(like.ty.dtype)).lanes
    return tirx.const(value, "int32" if lanes == 1 else f"int32x{lanes}")


def _power_of_two(exponent: ir.Expr, dtype: str) -> ir.Expr:
    return tirx.reinterpret(dtype, (exponent + _integers(exponent, 127)) << _integers(exponent, 23))


def _exp(x: ir.Expr, keep: _Keep) -> ir.Expr:
    dtype, integer = str(x.ty.dtype), str(_integers(x, 0).ty.dtype)
    v = keep(_capped(x, _EXP_LOWEST, _EXP_HIGHEST))
    shifted = keep(v * _const(x, _LOG2_E) + _const(x, _ROUNDER))
    n = keep(shifted - _const(x, _ROUNDER))
    r = keep(v - n * _const(x, _LN2_HIGH) - n * _const(x, _LN2_LOW))
    exponent = keep(tirx.reinterpret(integer, shifted) - _integers(x, _ROUNDER_BITS))
    half = keep(exponent >> _integers(x, 1))
    value = _horner(r, _EXP) * r * r + r + _const(x, 1.0)
    return value * _power_of_two(half, dtype) * _power_of_two(exponent - half, dtype)


def _tanh(x: ir.Expr, keep: _Keep) -> ir.Expr:
    t = keep(tirx.abs(x))
    small = _horner(keep(x * x), _TANH) * x
    large = keep(_const(x, 1.0) - _const(x, 2.0) / (_exp(keep(t + t), keep) + _const(x, 1.0)))
    return tirx.Select(t < _const(x, _TANH_SMALL), small, _with_sign_of(x, large))


def _erf(x: ir.Expr, keep: _Keep) -> ir.Expr:
    t = keep(tirx.abs(x))
    # A NaN fails the comparison and goes the way of the small ones; the large polynomial is held where it ends.
    small = _horner(keep(x * x), _ERF_SMALL) * x
    held = keep(tirx.Min(_const(x, _ERF_ONE), t))
    large = keep(_const(x, 1.0) - _exp(keep(_negated(held * _horner(held, _ERF_LARGE))), keep))
    return tirx.Select(t > _const(x, _ERF_SPLIT), _with_sign_of(x, large), small)


def _sigmoid(x: ir.Expr, keep: _Keep) -> ir.Expr:
    # From the side where the exponential is at most 1, so that nothing overflows and small results keep their digits.
    e = keep(_exp(keep(_negated(tirx.abs(x))), keep))
    return tirx.Select(x < _const(x, 0.0), e, _const(x, 1.0)) / (e + _const(x, 1.0))


def _lowered(formula: Callable[[ir.Expr, _Keep], ir.Expr]) -> Callable[[ir.Call], ir.Expr]:
    """Return TVM's kind of rule: the formula of the argument, its kept values in one flat chain of lets.

    TVM's analyzer substitutes lets into each other, so the time it takes is the product of the numbers of uses along
    the chain: where one use will do (min and max for a comparison and a choice), it makes seconds milliseconds.
    """

    def lower(call: ir.Call) -> ir.Expr:
        kept: list[tuple[tirx.Var, ir.Expr]] = []

        def keep(value: ir.Expr) -> ir.Expr:
            kept.append((tirx.Var("t", value.ty), value))
            return kept[-1][0]

        result = formula(keep(call.args[0]), keep)
        for var, value in reversed(kept):
            result = tirx.Let(var, value, result)
        return result

    return lower


_FORMULAS = {"exp": _exp, "tanh": _tanh, "erf": _erf, "sigmoid": _sigmoid}


def _register() -> None:
    """Tell TVM of our operators, once a process: it refuses a second registration."""
    if "crossloom.exp" in ir.Op.list_op_names():
        return
    pure = ir.Op.get("tirx.exp").get_attr("TCallEffectKind")
    for name, formula in _FORMULAS.items():
        ir.register_op_attr(f"crossloom.{name}", "TVectorizable", True)
        ir.register_op_attr(f"crossloom.{name}", "TCallEffectKind", pure)
        tirx.register_intrin_lowering(f"crossloom.{name}", target="default", f=_lowered(formula))


_register()


def vectorizable_math(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function whose exp, erf, tanh and logistic calls are ours: float32 ones, and float16 ones by way of it.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Calls of other types (float64: libm's are exact to its last place) stay as they are.
    """

    def replaced(call: ir.Call) -> ir.Expr:
        name = _OURS.get(getattr(call.op, "name", ""))
        dtype = str(call.ty.dtype) if isinstance(call.ty, ir.PrimType) else ""
        if name is None or dtype not in ("float32", *_WIDENED):
            return call
        value = call.args[0]
        if dtype == "float32":
            return tirx.call_intrin("float32", name, value)
        return tirx.call_intrin("float32", name, value.astype("float32")).astype(dtype)

    body = tvm_ffi.structural_map(func.body, (ir.Call, replaced))
    return func if body.same_as(func.body) else func.with_body(body)
