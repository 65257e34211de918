"""Symbolic sizes across a call: a callee's dimensions in terms of its arguments', and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from tvm import ir, relax, tirx
from tvm.sym.analyzer import Analyzer
from tvm_ffi import structural_equal, structural_map

#: Pairs of (dimension on one side, the same on the other).
Known = Sequence[tuple[tirx.Expr, tirx.Expr]]


@lru_cache(maxsize=1 << 14)
def _values(shape: relax.ShapeExpr) -> tuple[tirx.Expr, ...]:
    # Reading an element of TVM's takes microseconds, and the same shapes are asked for over and over.
    return tuple(shape.values)


def dimensions(expr: relax.Expr) -> list[tirx.Expr]:
    """Return the dimensions of a tensor of known shape, none for anything else."""
    ty = expr.ty
    return list(_values(ty.shape)) if isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr) else []


def same_size(a: tirx.Expr | int, b: tirx.Expr | int) -> bool:
    """Return whether two dimensions are proved equal, however they are spelled: ``49 + T`` is ``T + 49``."""
    numbers = [_number(size) for size in (a, b)]
    if None not in numbers:
        return numbers[0] == numbers[1]
    if structural_equal(a, b):
        return True
    # Two variables, or a variable and a number, differ; only sums and products have several spellings.
    simple = all(isinstance(size, (int, tirx.IntImm, tirx.Var)) for size in (a, b))
    return not simple and _number(Analyzer().simplify(a - b)) == 0


def _number(size: tirx.Expr | int) -> int | None:
    return int(size) if isinstance(size, (int, tirx.IntImm)) else None


def is_size(expr: relax.Expr) -> bool:
    """Return whether an operand is a number of the shape language: a bound of a slice, an end of a range."""
    return isinstance(getattr(expr, "ty", None), ir.PrimType)


def sizes_in(leaves: Iterable[relax.Expr]) -> Iterator[tirx.Expr]:
    """Yield the dimensions and numbers among the leaf operands of a binding."""
    for leaf in leaves:
        if isinstance(leaf, relax.ShapeExpr):
            yield from leaf.values
        elif is_size(leaf):
            yield leaf


def translate(dim: tirx.Expr, known: Known) -> tirx.Expr | None:
    """Return a dimension in terms of the other side's, None where ``known`` does not determine it."""
    if isinstance(dim, (int, tirx.IntImm)):
        return dim
    for old, new in known:
        if same_size(old, dim):
            return new
    missing: list[tirx.Var] = []

    def renew(var: tirx.Var) -> tirx.Expr:
        found = next((new for old, new in known if var.same_as(old)), None)
        if found is None:
            missing.append(var)
        return var if found is None else found

    renewed = structural_map(dim, (tirx.Var, renew)) if not isinstance(dim, tirx.Var) else renew(dim)
    return None if missing else renewed


def in_terms_of(values: Mapping[relax.Expr, relax.Expr], known: Known) -> Callable[[relax.Expr], relax.Expr]:
    """Return what tells a leaf operand of one function in terms of another one.

    Parameters
    ----------
    values : mapping of relax.Var to relax.Expr
        Of every variable that is asked for.
    known : sequence of pairs
        That determine every size that is asked for.
    """

    def renew(leaf: relax.Expr) -> relax.Expr:
        if isinstance(leaf, relax.Var) and leaf in values:
            return values[leaf]
        if isinstance(leaf, relax.ShapeExpr):
            return relax.ShapeExpr([translate(d, known) for d in leaf.values])
        if is_size(leaf):
            return translate(leaf, known)
        return values[leaf] if isinstance(leaf, relax.Var) else leaf

    return renew
