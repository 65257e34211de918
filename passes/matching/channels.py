"""Maps of each channel by itself: ``values * scale + shift`` with one scale and one shift a channel.

Inference batch norms are such maps, and so are products and sums with weights of one value a channel (what exporters
leave of a batch norm, frozen batch norms, image normalization); a chain of them is one map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from tvm import relax, tirx

from crossloom.rewrite import Graph

from .arithmetic import Arithmetic, Value, known, of_weights
from .spelling import dims, dtype, only_rounds, same_dims, sizes

BATCH_NORM = "relax.nn.batch_norm"
#: Operators of a map's last step; an item is the first result of a batch norm.
STEPS = frozenset({"relax.add", "relax.subtract", "relax.multiply", "relax.divide", "relax.astype", "TupleGetItem"})
#: Steps of one map at most, so that a long chain of them takes linear time.
MOST_STEPS = 16


@dataclass(frozen=True)
class Step:
    """One operator of a chain.

    Attributes
    ----------
    kind : str
        ``norm``, ``cast``, ``add``, ``subtract``, ``subtract_from``, ``multiply`` or ``divide``.
    inner : relax.Expr
        What it is applied to.
    operands : tuple of relax.Expr
        Weights: gamma, beta, mean and variance of a norm, one otherwise.
    axis : int or None
        Axis of the channels; None for a single number.
    inside : tuple of relax.Var
        Its bindings.
    """

    kind: str
    inner: relax.Expr
    operands: tuple[relax.Expr, ...]
    axis: int | None
    inside: tuple[relax.Var, ...]


@dataclass(frozen=True)
class ChannelMap:
    """A chain of steps, the first one first.

    Attributes
    ----------
    source : relax.Expr
        What is mapped.
    axis : int or None
        Axis of the channels; None where all operands are single numbers.
    steps : tuple of Step
    """

    source: relax.Expr
    axis: int | None
    steps: tuple[Step, ...]

    @property
    def normed(self) -> bool:
        """Whether there is a batch norm in it."""
        return any(step.kind == "norm" for step in self.steps)

    @property
    def scaled(self) -> bool:
        """Whether there is a batch norm, a product or a quotient in it."""
        return any(step.kind in ("norm", "multiply", "divide") for step in self.steps)

    @property
    def inside(self) -> frozenset[relax.Var]:
        """All its bindings."""
        return frozenset(var for step in self.steps for var in step.inside)

    @property
    def captures(self) -> dict[str, relax.Expr]:
        """The weights by name."""
        found = (operand for step in self.steps for operand in step.operands)
        return {f"weight{number}": operand for number, operand in enumerate(found)}


def channel_map(graph: Graph, root: relax.Var) -> ChannelMap | None:
    """Return the longest map that ends at a binding; None where the binding is no step, or a later one goes on."""
    steps: list[Step] = []
    axis: int | None = None
    at: relax.Expr = root
    while len(steps) < MOST_STEPS and (step := _step(graph, at)) is not None:
        if None not in (axis, step.axis) and axis != step.axis:
            break
        axis = step.axis if axis is None else axis
        steps.append(step)
        at = step.inner
    if not steps or _goes_on(graph, root, axis, dtype(at)):
        return None
    return ChannelMap(at, axis, tuple(reversed(steps)))


def _goes_on(graph: Graph, root: relax.Var, axis: int | None, kind: str) -> bool:
    """Return whether the only reader of a map is one more step: a cast only where it restores the source's type."""
    readers = dict.fromkeys(graph.users.get(root, ()))
    if len(readers) != 1 or root in graph.escapes:
        return False
    (reader,) = readers
    step = _step(graph, reader)
    if step is None or not step.inner.same_as(root) or graph.scope[reader] != graph.scope[root]:
        return False
    if step.kind == "cast" and (dtype(root) == kind or dtype(reader) != kind):
        return False
    return None in (axis, step.axis) or axis == step.axis


def _step(graph: Graph, at: relax.Expr) -> Step | None:
    if not isinstance(at, relax.Var) or at not in graph.value or at in graph.casts:
        return None
    value = graph.value[at]
    if isinstance(value, relax.TupleGetItem):
        return _norm(graph, at, value)
    name = graph.op(value).removeprefix("relax.") if isinstance(value, relax.Call) else ""
    if name == "astype":
        return Step("cast", value.args[0], (), None, (at,)) if only_rounds(value) else None
    if f"relax.{name}" not in STEPS:
        return None
    for inner, weight, kind in _orders(value, name):
        axis = channel_axis(graph, weight, dims(at) or [])
        if axis is not None and same_dims(dims(inner) or [], dims(at) or [tirx.IntImm("int64", -1)]):
            return Step(kind, inner, (weight,), None if axis < 0 else axis, (at,))
    return None


def _orders(call: relax.Call, name: str) -> Iterator[tuple[relax.Expr, relax.Expr, str]]:
    yield call.args[0], call.args[1], name
    if name != "divide":
        yield call.args[1], call.args[0], "subtract_from" if name == "subtract" else name


def channel_axis(graph: Graph, weight: relax.Expr, wide: list[tirx.Expr]) -> int | None:
    """Return the axis along which a weight differs, -1 for a single number, None where it is no such weight."""
    shape, static = dims(weight), sizes(weight)
    if shape is None or static is None or len(shape) > len(wide) or "float" not in dtype(weight):
        return None
    places = [place for place, size in enumerate(static) if size != 1]
    if len(places) > 1 or not of_weights(graph, weight):
        return None
    if not places:
        return -1
    axis = places[0] + len(wide) - len(shape)
    return axis if same_dims(shape[places[0] : places[0] + 1], wide[axis : axis + 1]) else None


def _norm(graph: Graph, at: relax.Var, item: relax.TupleGetItem) -> Step | None:
    call = graph.call(item.tuple_value, BATCH_NORM)
    if call is None or item.index != 0 or bool(call.attrs.training) or not isinstance(item.tuple_value, relax.Var):
        return None
    if not all(of_weights(graph, weight) for weight in call.args[1:]):
        return None
    norm = item.tuple_value
    unread = [user for user in graph.users[norm] if user not in graph.users and user not in graph.escapes]
    axis = int(call.attrs.axis) % len(dims(call.args[0]) or [None])
    return Step("norm", call.args[0], tuple(call.args[1:]), axis, (at, norm, *(u for u in unread if u is not at)))


def scale_and_shift(
    graph: Graph, channels: ChannelMap, operand: Callable[[str], Value], do: Arithmetic
) -> tuple[Value, Value]:
    """Return what a map multiplies each channel by, and what it adds then: as many values as channels, or one.

    Parameters
    ----------
    graph : Graph
    channels : ChannelMap
    operand : callable (str) -> numpy.ndarray or relax.Expr
        Values of the map's ``captures``.
    do : Arithmetic
    """
    flat = iter([_flat(operand(name), do) for name in channels.captures])
    scale: Value = np.ones(())
    shift: Value = np.zeros(())
    for step in channels.steps:
        if step.kind == "cast":
            continue
        factor, term = _factor_and_term(graph, step, [next(flat) for _ in step.operands], do)
        scale, shift = do.times(factor, scale), do.plus(do.times(factor, shift), term)
    return scale, shift


def _flat(value: Value, do: Arithmetic) -> Value:
    count = value.size if isinstance(value, np.ndarray) else int(np.prod([int(d) for d in value.ty.shape]))
    return do.reshape(value, [count])


def _factor_and_term(graph: Graph, step: Step, weights: list[Value], do: Arithmetic) -> tuple[Value, Value]:
    one, zero = np.ones(()), np.zeros(())
    if step.kind == "norm":
        attrs = graph.resolve(step.inside[1]).attrs
        gamma, beta, mean, variance = weights
        deviation = do("sqrt", do("add", variance, np.asarray(float(attrs.epsilon))))
        factor = do("divide", gamma if bool(attrs.scale) else one, deviation)
        return factor, do("subtract", beta if bool(attrs.center) else zero, do("multiply", mean, factor))
    (weight,) = weights
    if step.kind == "multiply":
        return weight, zero
    if step.kind == "divide":
        return do("divide", one, weight), zero
    if step.kind == "subtract":
        return one, do("negative", weight)
    return (np.asarray(-1.0) if step.kind == "subtract_from" else one), weight


def known_map(graph: Graph, channels: ChannelMap) -> tuple[np.ndarray, np.ndarray] | None:
    """Return scale and shift where all weights of a map are known."""
    values = {name: known(graph, weight) for name, weight in channels.captures.items()}
    if any(value is None for value in values.values()):
        return None
    # Nothing is emitted: all operands are numbers.
    scale, shift = scale_and_shift(graph, channels, lambda name: values[name], Arithmetic(lambda e: e, "float64"))
    return np.asarray(scale), np.asarray(shift)
