"""Values of single elements as products of a number and named factors, equal exactly where they are spelled equal.

Two equal products hold the same value; two different ones may or may not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from .moves import Index, Place


@dataclass(frozen=True)
class Product:
    """``number`` times the factors (a factor twice is its square).

    Attributes
    ----------
    number : float
    factors : tuple of int
        Sorted names given by :class:`Factors`.
    """

    number: float
    factors: tuple[int, ...] = ()


@dataclass(frozen=True)
class Factor:
    """What a name stands for.

    Attributes
    ----------
    kind : str
        ``leaf`` (element of a value that is not looked into), ``column`` (of a constant, along free places),
        ``place`` (a place itself, as a number) or the name of an operator.
    args : tuple
        Products, for operators.
    varies : bool
        Whether it differs from token to token or from call to call: it has a free place or reads an input.
    """

    kind: str
    args: tuple[Hashable, ...]
    varies: bool


class Factors:
    """Names factors; remembers the arrays of constant columns."""

    def __init__(self) -> None:
        self.of: list[Factor] = []
        self.names: dict[Factor, int] = {}
        self.columns: dict[int, tuple[np.ndarray, Index]] = {}

    def name(self, kind: str, args: tuple[Hashable, ...], varies: bool) -> int:
        """Return the factor's name, the same for equal factors."""
        factor = Factor(kind, args, varies)
        if factor not in self.names:
            self.names[factor] = len(self.of)
            self.of.append(factor)
        return self.names[factor]

    def product(self, kind: str, args: tuple[Hashable, ...], varies: bool) -> Product:
        """Return the factor as a product."""
        return Product(1.0, (self.name(kind, args, varies),))

    def apply(self, kind: str, *args: Product) -> Product:
        """Return an operator of products as a factor."""
        return self.product(kind, args, any(self.varies(a) for a in args))

    def varies(self, product: Product) -> bool:
        """Return whether a factor of the product varies."""
        return any(self.of[f].varies for f in product.factors)

    def moves(self, place: Place) -> bool:
        """Return whether a place varies."""
        if isinstance(place, int):
            return False
        if place[0] == "value":
            return self.varies(place[1])
        if place[0] == "ravel":
            return any(self.moves(p) for p in place[1])
        return place[0] == "axis" or self.moves(place[1])

    def leaf(self, value: Hashable, index: Index, given: bool) -> Product:
        """Return an element of a value that is not looked into; ``given``: it is no weight."""
        return self.product("leaf", (value, index), given or any(self.moves(p) for p in index))

    def place(self, place: Place) -> Product:
        """Return a place as a number."""
        if isinstance(place, int):
            return Product(float(place))
        return place[1] if place[0] == "value" else self.product("place", (place,), self.moves(place))

    def constant(self, array: np.ndarray, index: Index) -> Product:
        """Return an element of a constant; equal columns are equal whichever constant they come from."""
        column = array[tuple(p if isinstance(p, int) else slice(None) for p in index)]
        if column.size and (column == column.flat[0]).all():
            return Product(float(column.flat[0]))
        free = tuple(p for p in index if not isinstance(p, int))
        digest = hashlib.sha256(np.ascontiguousarray(column).tobytes()).digest()
        name = self.name("column", (digest, str(column.dtype), column.shape, free), any(self.moves(p) for p in free))
        self.columns[name] = column, free
        return Product(1.0, (name,))

    def times(self, a: Product, b: Product) -> Product:
        """Return the product of two; a zero takes the factors with it."""
        number = a.number * b.number
        return Product(number, tuple(sorted((*a.factors, *b.factors))) if number else ())

    def inverse(self, a: Product) -> Product | None:
        """Return one over a product, None for one over zero."""
        if a.number == 0:
            return None
        out = Product(1.0 / a.number)
        for name in a.factors:
            factor = self.of[name]
            over = factor.args[0] if factor.kind == "inverse" else None
            out = self.times(out, over if isinstance(over, Product) else self.apply("inverse", Product(1.0, (name,))))
        return out

    def plus(self, a: Product, b: Product) -> Product:
        """Return the sum of two; multiples of the same factors are added up."""
        if a.factors == b.factors:
            number = a.number + b.number
            return Product(number, a.factors if number else ())
        if not a.number or not b.number:
            return b if not a.number else a
        return self.apply("add", *sorted((a, b), key=lambda p: (p.factors, p.number)))


def numbers(products: Sequence[Product]) -> list[float] | None:
    """Return the values where all products are numbers."""
    return None if any(p.factors for p in products) else [p.number for p in products]
