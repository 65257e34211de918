"""Unify two shapes: what symbolic dimensions must be for one tensor to be passed as the other."""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.sym.analyzer import Analyzer
from tvm.sym.pattern import detect_linear_equation

from .signature import dimension_text

Substitution = dict[tirx.Var, tvm.ir.Expr]


class ShapeConflict(Exception):
    """Two dimensions that can never be equal.

    Parameters
    ----------
    axis : int
        Where, or -1 when the ranks differ.
    left, right : str
        The two dimensions (or ranks).
    """

    def __init__(self, axis: int, left: str, right: str) -> None:
        super().__init__(f"axis {axis}: {left} against {right}")
        self.axis, self.left, self.right = axis, left, right


def substitute(dim: tvm.ir.Expr, bound: Substitution) -> tvm.ir.Expr:
    """Replace variables in a dimension; dimensions are trees of two-armed integer arithmetic."""
    if tvm.ir.is_prim_var(dim):
        return next((value for var, value in bound.items() if var.same_as(dim)), dim)
    if hasattr(dim, "a") and hasattr(dim, "b"):
        return type(dim)(substitute(dim.a, bound), substitute(dim.b, bound))
    return dim


def resolve(dim: tvm.ir.Expr, bound: Substitution) -> tvm.ir.Expr:
    """Apply `bound` to `dim` and simplify; bindings never refer to variables bound themselves."""
    return Analyzer().simplify(substitute(dim, bound) if bound else dim)


def _variables(dim: tvm.ir.Expr) -> list[tirx.Var]:
    if tvm.ir.is_prim_var(dim):
        return [dim]
    if not (hasattr(dim, "a") and hasattr(dim, "b")):
        return []
    first = _variables(dim.a)
    return first + [var for var in _variables(dim.b) if not any(var.same_as(other) for other in first)]


def uses(dim: tvm.ir.Expr, var: tirx.Var) -> bool:
    """Whether `var` occurs in `dim`."""
    return any(var.same_as(other) for other in _variables(dim))


def _solve(difference: tvm.ir.Expr) -> tuple[tirx.Var, tvm.ir.Expr] | None:
    """Return ``(var, value)`` with ``difference == 0`` solved for one variable.

    It has coefficient 1 or -1, or is the only one and a whole number solves it.
    """
    variables = _variables(difference)
    coefficients = detect_linear_equation(difference, variables)
    if len(coefficients) != len(variables) + 1:
        return None
    for var, factor in zip(variables, coefficients):
        if not isinstance(factor, tirx.IntImm) or abs(int(factor.value)) != 1:
            continue
        rest = substitute(difference, {var: tirx.IntImm("int64", 0)})
        value = -rest if int(factor.value) == 1 else rest
        return var, Analyzer().simplify(value)
    if len(variables) == 1 and all(isinstance(number, tirx.IntImm) for number in coefficients):
        factor, rest = (int(number.value) for number in coefficients)
        if factor and rest % factor == 0:
            return variables[0], tirx.IntImm("int64", -rest // factor)
    return None


def unify(left: list[tvm.ir.Expr], right: list[tvm.ir.Expr], bound: Substitution) -> None:
    """Extend `bound` so that both shapes become equal.

    Parameters
    ----------
    left, right : list of Expr
        Dimensions (elements), in any number of symbolic variables.
    bound : dict of Var to Expr
        Extended in place; a variable of `right` is preferred to one of `left`.

    Raises
    ------
    ShapeConflict
        When ranks differ, two dimensions differ by a constant, or equality cannot be established by giving
        one variable a value.
    """
    if len(left) != len(right):
        raise ShapeConflict(-1, f"rank {len(left)}", f"rank {len(right)}")
    for axis, (first, second) in enumerate(zip(left, right)):
        first, second = resolve(first, bound), resolve(second, bound)
        pair: tuple[tirx.Var, tvm.ir.Expr] | None
        difference = Analyzer().simplify(second - first)
        if isinstance(difference, tirx.IntImm):
            if int(difference.value) == 0:
                continue
            raise ShapeConflict(axis, dimension_text(first), dimension_text(second))
        if tvm.ir.is_prim_var(second) and not uses(first, second):
            pair = (second, first)
        elif tvm.ir.is_prim_var(first) and not uses(second, first):
            pair = (first, second)
        else:
            pair = _solve(difference)
        if pair is None:
            raise ShapeConflict(axis, dimension_text(first), dimension_text(second))
        var, value = pair
        if isinstance(value, tirx.IntImm) and int(value.value) < 0:
            raise ShapeConflict(axis, dimension_text(first), dimension_text(second))
        for other in list(bound):
            bound[other] = resolve(bound[other], {var: value})
        bound[var] = value
