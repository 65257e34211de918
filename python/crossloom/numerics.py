"""The numerics contract: what a pass may do to the numbers, and how its error is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

#: Allowed normwise error of a reassociation, by dtype of the output (unit: fraction of the largest magnitude).
REASSOCIATION = {"float64": 1e-13, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


@dataclass(frozen=True)
class Numerics:
    """A declared class: ``exact``, ``reassociates`` or ``lowers-precision``.

    Attributes
    ----------
    kind : str
    bounds : mapping of str to float
        Largest allowed normwise relative error by output dtype (see :func:`worst_error`).  Dtypes that are not
        listed (integers, booleans) must agree exactly.

    Examples
    --------
    >>> EXACT.bound("float32"), REASSOCIATES.bound("float16"), lowers_precision(0.01).bound("bfloat16")
    (0.0, 0.002, 0.01)
    >>> print(Numerics("reassociates", {"float32": 1e-5}))
    reassociates (float32 1e-05)
    """

    kind: str
    bounds: Mapping[str, float] = field(default_factory=dict)

    def bound(self, dtype: str) -> float:
        """Return the allowed error for outputs of ``dtype``."""
        return float(self.bounds.get(dtype, 0.0))

    def __str__(self) -> str:
        inner = ", ".join(f"{k} {v:g}" for k, v in self.bounds.items())
        return f"{self.kind} ({inner})" if inner else self.kind


EXACT = Numerics("exact")
REASSOCIATES = Numerics("reassociates", REASSOCIATION)


def lowers_precision(bound: float) -> Numerics:
    """Return the class of passes that trade precision, with its normwise bound for every float dtype."""
    return Numerics("lowers-precision", dict.fromkeys(REASSOCIATION, bound))


def worst_error(before: np.ndarray, after: np.ndarray) -> float:
    """Return ``max|after - before| / max|before|`` over the finite values.

    Parameters
    ----------
    before, after : numpy.ndarray
        Same shape and dtype, any dtype numpy can convert to float64.

    Returns
    -------
    float
        0 for bit-equal arrays (empty ones included); ``inf`` where shapes, dtypes or the places and signs of
        non-finite values differ.  Where ``before`` is all zero the error is absolute.

    Examples
    --------
    >>> worst_error(np.array([1.0, -2.0]), np.array([1.5, -2.0]))
    0.25
    >>> worst_error(np.array([1.0]), np.array([np.nan]))
    inf
    """
    if before.shape != after.shape or before.dtype != after.dtype:
        return float("inf")
    if before.size == 0 or before.tobytes() == after.tobytes():
        return 0.0
    a, b = before.astype("float64"), after.astype("float64")
    odd_a, odd_b = ~np.isfinite(a), ~np.isfinite(b)
    if not np.array_equal(odd_a, odd_b) or not np.array_equal(a[odd_a], b[odd_b], equal_nan=True):
        return float("inf")
    diff = np.abs(np.where(odd_a, 0.0, b) - np.where(odd_a, 0.0, a)).max()
    scale = np.abs(np.where(odd_a, 0.0, a)).max()
    return float(diff / scale) if scale > 0 else float(diff)


@dataclass(frozen=True)
class Violation:
    """An output outside the declared class: its index, its error, the bound it broke, and the call, where known."""

    output: int
    dtype: str
    error: float
    bound: float
    call: str = ""

    def __str__(self) -> str:
        where = f"entry {self.call}, " if self.call else ""
        return f"{where}output {self.output} ({self.dtype}): error {self.error:.3g} > {self.bound:g}"


def check(
    numerics: Numerics, before: Sequence[np.ndarray], after: Sequence[np.ndarray]
) -> tuple[float, list[Violation]]:
    """Hold two lists of outputs against a class.

    Returns
    -------
    tuple
        The worst error, and the violations (empty when the contract holds).

    Examples
    --------
    >>> before, after = [np.array([1.0, -2.0], "float32")], [np.array([1.5, -2.0], "float32")]
    >>> error, (violation,) = check(REASSOCIATES, before, after)
    >>> print(violation)
    output 0 (float32): error 0.25 > 1e-05
    """
    if len(before) != len(after):
        return float("inf"), [Violation(min(len(before), len(after)), "missing", float("inf"), 0.0)]
    worst, broken = 0.0, []
    for i, (x, y) in enumerate(zip(before, after)):
        error, bound = worst_error(x, y), numerics.bound(str(x.dtype))
        worst = max(worst, error)
        if error > bound:
            broken.append(Violation(i, str(x.dtype), error, bound))
    return worst, broken
