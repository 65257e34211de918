"""What a strategy draws: a module, the lengths to run it at, and a numpy reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from hypothesis import strategies as st
from tvm import relax, tirx

from ..runner import random_inputs

#: By entry: its parameters, or its outputs.
Arrays = dict[str, list[np.ndarray]]
Emit = Callable[[relax.BlockBuilder, list[relax.Expr]], list[relax.Expr]]
Reference = Callable[[list[np.ndarray]], list[np.ndarray]]

#: Ragged on purpose: 1, primes, and one multiple of a vector's width.
DIMS = st.sampled_from([1, 2, 3, 5, 7, 8])
DTYPES = st.sampled_from(["float32", "float16"])

#: Lengths at which a module with a symbolic one is run: none, one, some (elements).  ``m`` is a second length.
LENGTHS: tuple[Mapping[str, int], ...] = ({"n": 0, "m": 2}, {"n": 1, "m": 1}, {"n": 3, "m": 5})


@dataclass(frozen=True)
class Case:
    """A module and how to run it.

    Attributes
    ----------
    mod : tvm.ir.IRModule
    sizes : tuple of mapping of str to int
        Values of the symbolic dimensions to run at (elements; may be 0); one, empty, for a static module.
    dtype : str
        Of the outputs.
    references : mapping of str to callable
        float64 reference by entry, over all parameters.
    """

    mod: tvm.ir.IRModule = field(repr=False)
    sizes: tuple[Mapping[str, int], ...]
    dtype: str
    references: Mapping[str, Reference] = field(repr=False)

    def inputs(self, seed: int = 0, size: int = -1) -> Arrays:
        """Draw all parameters of every entry, at the size of that index."""
        return {name: random_inputs(self.mod, name, seed, self.sizes[size]) for name in self.references}

    def expected(self, inputs: Arrays) -> Arrays:
        """Return the references' outputs, rounded once."""
        return {n: [y.astype(self.dtype) for y in self.references[n](xs)] for n, xs in inputs.items()}


@dataclass(frozen=True)
class Input:
    """A parameter: its shape, where ``"n"`` and ``"m"`` are lengths, and its dtype (the case's when empty)."""

    shape: tuple[int | str, ...]
    dtype: str = ""

    @property
    def is_weight(self) -> bool:
        """Whether it may be a constant: one without a length."""
        return all(isinstance(d, int) for d in self.shape)


def _returned(draw: Any, values: list[relax.Expr]) -> tuple[relax.Expr, list[int]]:
    """Return the function's result in a drawn form, and which value each flat output is."""
    count = len(values)
    form = draw(st.sampled_from(["plain", "duplicate", "nested"]))
    if form == "plain":
        return (values[0] if count == 1 else relax.Tuple(values)), list(range(count))
    if form == "duplicate":
        return relax.Tuple(values * 2), list(range(count)) * 2
    inner = relax.Tuple([relax.Tuple(values), values[0]])
    return relax.Tuple([values[-1], inner]), [count - 1, *range(count), 0]


def _entry(
    draw: Any,
    bb: relax.BlockBuilder,
    name: str,
    inputs: Sequence[Input],
    emit: Emit,
    lengths: Mapping[str, tirx.Var | int],
    dtype: str,
) -> tuple[dict[int, np.ndarray], list[int]]:
    """Emit one function; return the weights that became constants, by position, and the outputs' order."""
    rng = np.random.default_rng(draw(st.integers(0, 7)))
    params: list[relax.Var] = []
    constants: dict[int, np.ndarray] = {}
    operands: list[relax.Expr] = []
    for i, spec in enumerate(inputs):
        kind = spec.dtype or dtype
        if spec.is_weight and draw(st.sampled_from([False, False, True])):
            constants[i] = (rng.standard_normal([int(d) for d in spec.shape]) * 0.5).astype(kind)
            operands.append(relax.const(constants[i], kind))
        else:
            shape = [lengths[d] if isinstance(d, str) else d for d in spec.shape]
            params.append(relax.Var(f"p{i}", relax.TensorType(shape, kind)))
            operands.append(params[-1])
    given = sum(not spec.is_weight for spec in inputs)
    with bb.function(name, params, attrs={"num_input": given}):
        with bb.dataflow():
            values = [bb.emit_output(v) for v in emit(bb, operands)]
        result, order = _returned(draw, values)
        bb.emit_func_output(result)
    return constants, order


def build(
    draw: Any, inputs: Sequence[Input | tuple[int | str, ...]], emit: Emit, reference: Reference, dtype: str
) -> Case:
    """Build a case of one or two entries.

    Drawn besides what the strategy draws: static or dynamic lengths, the number of entries (the second may be the
    static one-token twin of the first, as decode is of prefill), which weights are constants, and the form of the
    result (plain, duplicated outputs, nested tuples).

    Parameters
    ----------
    draw : callable
        Of ``hypothesis.strategies.composite``.
    inputs : sequence of Input or tuple
        Parameters; a tuple is a shape in which ``"n"`` and ``"m"`` are lengths.  Those with a length come first.
    emit : callable (BlockBuilder, operands) -> values
        Emits into a dataflow block.
    reference : callable (arrays) -> arrays
        float64 outputs from all operands, constants among them.
    dtype : str
    """
    specs = [item if isinstance(item, Input) else Input(item) for item in inputs]
    dynamic = draw(st.booleans())
    static = draw(st.sampled_from(LENGTHS[1:]))
    bb = relax.BlockBuilder()
    references: dict[str, Reference] = {}
    for name in ("main", "decode")[: draw(st.integers(1, 2))]:
        lengths: Mapping[str, Any] = static
        if dynamic and not (name == "decode" and draw(st.booleans())):
            lengths = {key: tirx.Var(key, "int64") for key in static}
        constants, order = _entry(draw, bb, name, specs, emit, lengths, dtype)
        references[name] = _with_constants(reference, len(specs), constants, order)
    return Case(bb.get(), LENGTHS if dynamic else ({},), dtype, references)


def _with_constants(
    reference: Reference, count: int, constants: Mapping[int, np.ndarray], order: list[int]
) -> Reference:
    def whole(given: list[np.ndarray]) -> list[np.ndarray]:
        rest = iter(given)
        outputs = reference([constants[i] if i in constants else next(rest) for i in range(count)])
        return [outputs[i] for i in order]

    return whole
