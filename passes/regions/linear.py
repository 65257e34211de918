"""Read a ``crossloom.fused_linear`` region: norm, linear layers, and what is done to their columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from tvm import relax, tirx

from crossloom.rewrite import Graph, Match, composite_attrs, composite_name, region_of, unknown_size
from crossloom.schedules.fused_linear import Dim, Norm, Output, Rotary, Spec, Turn
from crossloom.verdict import Verdict, accept, refuse

from ..matching.spelling import dims, dtype, same_dims, scalar
from .views import Axis, View, apply_view, columns_of, elements, number, turns_into

#: The composite's name.
LINEAR_REGION = "crossloom.fused_linear"
#: Operators that are an activation of the kernel.
ACTIVATIONS = {"relax.nn.relu": "relu", "relax.sigmoid": "sigmoid", "relax.tanh": "tanh", "relax.nn.silu": "silu"}
#: Operators that only move values.
MOVES = frozenset(
    f"relax.{op}" for op in ("reshape", "permute_dims", "squeeze", "expand_dims", "strided_slice", "take")
)
_FLOATS = frozenset({"float16", "float32", "float64"})


class NoKernel(Exception):
    """The region holds something the kernel cannot do; the text says what."""


@dataclass(frozen=True)
class Region:
    """What a region computes, and which of its parameters the kernel takes for what.

    Attributes
    ----------
    spec : Spec
    x : relax.Var
    norm : tuple of relax.Var
        Weight and bias, those that are there.
    turn : tuple of relax.Expr
        cos and sin of a rotation of x.
    weights : tuple of (relax.Expr, layout)
    biases : tuple of (relax.Expr or None, number of columns)
    extras : tuple of relax.Expr
        Norm operands, tables and residuals of the outputs in the kernel's order.
    """

    spec: Spec
    x: relax.Expr
    norm: tuple[relax.Expr, ...]
    turn: tuple[relax.Expr, ...]
    weights: tuple[tuple[relax.Expr, str], ...]
    biases: tuple[tuple[relax.Expr | None, int], ...]
    extras: tuple[relax.Expr, ...]


@dataclass(frozen=True)
class _Table:
    """cos or sin, and which axis of what is turned each of its own follows but for the last; None for none."""

    operand: relax.Expr
    follows: tuple[Axis | None, ...]


@dataclass(frozen=True)
class _Turned:
    """A rotation, and the axes of what it turns."""

    convention: str
    dim: int
    half: bool
    cos: _Table
    sin: _Table
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class _Normed:
    """A norm of lanes, and the axes of what it norms."""

    norm: Norm
    operands: tuple[relax.Expr, ...]
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class _Rows:
    """x, normed and turned or not, as a view of its last axis."""

    x: relax.Expr
    view: View
    norm: Norm | None = None
    operands: tuple[relax.Expr, ...] = ()
    turn: _Turned | None = None

    def is_same(self, other: _Rows) -> bool:
        """Return whether both are the same value."""
        alike = self.x.same_as(other.x) and self.norm == other.norm and self.turn is other.turn
        return alike and all(a.same_as(b) for a, b in zip(self.operands, other.operands))


@dataclass(frozen=True)
class _Columns:
    """A result in the making; ``step`` is the last step taken, in the kernel's order."""

    view: View
    dtype: str
    step: int = 0
    gate: int | None = None
    activation: str = ""
    scale: float = 1.0
    norm: _Normed | None = None
    turn: _Turned | None = None
    residual: tuple[relax.Expr, tuple[Axis | None, ...]] | None = None


#: Steps in the kernel's order.
_ACTIVATED, _SCALED, _NORMED, _ROTATED, _ADDED = 1, 2, 3, 4, 5

_Value: TypeAlias = "_Rows | _Columns | tuple[_Columns, ...]"


class Reader:
    """Reads bindings one by one; one that the kernel cannot do raises :class:`NoKernel` and is not taken in.

    Parameters
    ----------
    graph : Graph
        Of a region's function, or of one that a region may be formed in.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values: dict[relax.Var, _Value] = {}
        self.rows: _Rows | None = None
        self.weights: list[tuple[relax.Expr, str]] = []
        self.biases: list[tuple[relax.Expr | None, int]] = []
        self.width = 0

    # What an operand is ------------------------------------------------------------------------------------------

    def columns(self, expr: relax.Expr) -> _Columns | None:
        """Return what a value is of the linear layers' results; None where it is none."""
        found = self.values.get(expr) if isinstance(expr, relax.Var) else None
        return found if isinstance(found, _Columns) else None

    def _is_outside(self, expr: relax.Expr) -> bool:
        return not isinstance(expr, relax.Var) or expr not in self.values

    def _rows(self, expr: relax.Expr, var: relax.Var) -> _Rows:
        """Return what a value is of x: x itself where it is made outside."""
        found = self.values.get(expr) if isinstance(expr, relax.Var) else None
        if isinstance(found, _Rows):
            return found
        if found is not None:
            raise NoKernel(f"{var.name}: a linear layer of another one's result")
        shape = [number(d) for d in dims(expr) or ()]
        if not shape or not isinstance(shape[-1], int):
            raise NoKernel(f"{var.name}: rows of symbolic or no length")
        return _Rows(expr, columns_of(shape, shape[-1]))

    # Steps -------------------------------------------------------------------------------------------------------

    def _norm(self, kind: str, parts: dict[str, relax.Expr], attrs: dict[str, object], var: relax.Var) -> _Value:
        x, inner = parts["x"], self.columns(parts["x"])
        if not self._is_outside(x) and inner is None:
            raise NoKernel(f"{var.name}: a norm of a value made in the region")
        if [int(a) % len(dims(x) or ()) for a in attrs["axes"]] != [len(dims(x) or ()) - 1]:  # type: ignore[attr-defined]
            raise NoKernel(f"{var.name}: a norm over more than the last axis")
        operands = tuple(parts[name] for name in ("weight", "bias") if name in parts)
        kinds = {dtype(o) for o in operands}
        if any(len(dims(o) or ()) != 1 or not self._is_outside(o) for o in operands) or len(kinds) > 1:
            raise NoKernel(f"{var.name}: a norm's weight of other than the last axis")
        epsilon = float(attrs["epsilon"])  # type: ignore[arg-type]
        norm = Norm(kind, epsilon, "weight" in parts, "bias" in parts, *kinds)
        if inner is None:
            if kinds - {dtype(x)}:
                raise NoKernel(f"{var.name}: a norm's weight of another type")
            return replace(self._rows(x, var), norm=replace(norm, dtype=""), operands=operands)
        if inner.gate is not None or kinds - _FLOATS:
            raise NoKernel(f"{var.name}: a norm of a gated value, or a weight of no float type")
        self._advance(inner, _NORMED, var)
        return replace(inner, step=_NORMED, norm=_Normed(norm, operands, inner.view.axes), dtype=dtype(var))

    def _linear(self, parts: dict[str, relax.Expr], layout: str, var: relax.Var) -> _Columns:
        x = parts["x"]
        rows = self._rows(x, var)
        if self.rows is not None and not rows.is_same(self.rows):
            raise NoKernel(f"{var.name}: linear layers of different values")
        shape = [number(d) for d in dims(x) or ()]
        if not same_dims(dims(x) or (), dims(rows.x) or ()) or rows.view.axes != columns_of(shape, shape[-1]).axes:
            raise NoKernel(f"{var.name}: rows in another order than they are stored in")
        wide = dims(parts["weight"]) or []
        count = number(wide[0 if layout == "out_in" else 1])
        if not isinstance(count, int) or not isinstance(number(wide[1 if layout == "out_in" else 0]), int):
            raise NoKernel(f"{var.name}: a weight of symbolic size")
        kinds = {dtype(e) for e in (rows.x, *parts.values(), var)}
        if len(kinds) != 1:
            raise NoKernel(f"{var.name}: operands of types {', '.join(sorted(kinds))}")
        self.rows = rows
        view = columns_of(shape, count)
        self.weights.append((parts["weight"], layout))
        self.biases.append((parts.get("bias"), count))
        self.width += count
        return _Columns(replace(view, first=self.width - count), dtype(var))

    def _advance(self, value: _Columns, step: int, var: relax.Var) -> None:
        if value.step >= step:
            raise NoKernel(f"{var.name}: steps in another order than the kernel's")

    def _activated(self, value: _Columns, kind: str, var: relax.Var) -> _Columns:
        self._advance(value, _ACTIVATED, var)
        return replace(value, step=_ACTIVATED, activation=kind)

    def _product(self, call: relax.Call, var: relax.Var) -> _Columns:
        sides = [self.columns(arg) for arg in call.args]
        for mine, other in ((sides[0], call.args[1]), (sides[1], call.args[0])):
            if mine is not None and (factor := scalar(self.graph, other)) is not None:
                self._advance(mine, _SCALED, var)
                return replace(mine, step=_SCALED, scale=factor)
        for gate, value in (sides, sides[::-1]):
            if gate is not None and value is not None and gate.activation and value.step == 0:
                if gate.step == _ACTIVATED and gate.gate is None and gate.view.axes == value.view.axes:
                    return replace(gate, view=value.view, gate=gate.view.first)
        raise NoKernel(f"{var.name}: a product of other than an activated and a plain linear layer")

    def _rotary(self, parts: dict[str, relax.Expr], attrs: dict[str, object], var: relax.Var) -> _Value:
        x, value = parts["x"], self.columns(parts["x"])
        if value is not None and value.gate is not None:
            raise NoKernel(f"{var.name}: a rotation of a gated value")
        dim = int(attrs["rotary_dim"])  # type: ignore[call-overload]
        if len({dtype(parts[name]) for name in ("cos", "sin")} & _FLOATS) != 1:
            raise NoKernel(f"{var.name}: tables of two types, or of no float type")
        axes = self._rows(x, var).view.axes if value is None else value.view.axes
        last = dim if attrs["table"] == "full" else dim // 2
        cos, sin = (self._table(parts[name], axes, last, var) for name in ("cos", "sin"))
        turn = _Turned(str(attrs["convention"]), dim, attrs["table"] == "half", cos, sin, axes)
        if value is None:
            rows = self._rows(x, var)
            if rows.turn is not None:
                raise NoKernel(f"{var.name}: a second rotation of the same rows")
            return replace(rows, turn=turn)
        self._advance(value, _ROTATED, var)
        return replace(value, step=_ROTATED, turn=turn, dtype=dtype(var))

    def _table(self, table: relax.Expr, axes: tuple[Axis, ...], last: int, var: relax.Var) -> _Table:
        """Return a table of rotations, which axes of size 1 may have been put into here."""
        seen = [number(d) for d in dims(table) or ()]
        if not seen or seen[-1] != last:
            raise NoKernel(f"{var.name}: a table of {seen[-1:]} values, not {last}")
        if len(seen) > len(axes):
            raise NoKernel(f"{var.name}: a table of more axes than what it turns")
        under = (*axes[len(axes) - len(seen) : -1],)
        if self._is_outside(table):
            plain = (None if isinstance(extent, int) and extent == 1 else at for extent, at in zip(seen, under))
            return _Table(table, tuple(plain))
        made = self.values[table]  # type: ignore[index]
        if not isinstance(made, _Rows) or made.norm is not None or made.turn is not None:
            raise NoKernel(f"{var.name}: a table made in the region")
        lane, own = made.view.axes[-1], [number(d) for d in dims(made.x) or ()]
        if lane.row is not None or (lane.stride, lane.extent, own[-1]) != (1, last, last):
            raise NoKernel(f"{var.name}: a table cut or mixed in the region")
        at = {axis.row: axis_under for axis, axis_under in zip(made.view.axes, under) if axis.row is not None}
        if any(axis.row is None and not axis.is_unit for axis in made.view.axes[:-1]):
            raise NoKernel(f"{var.name}: a table mixed in the region")
        return _Table(made.x, tuple(at.get(i) for i in range(len(own) - 1)))

    def _sum(self, call: relax.Call, var: relax.Var) -> _Columns:
        for inner, other in ((call.args[0], call.args[1]), (call.args[1], call.args[0])):
            value = self.columns(inner)
            if value is None or not self._is_outside(other):
                continue
            self._advance(value, _ADDED, var)
            if self.rows is None or dtype(other) != dtype(self.rows.x) or len(dims(other) or ()) > len(value.view.axes):
                raise NoKernel(f"{var.name}: a sum with a wider value, or of another type")
            if [number(d) for d in dims(var) or ()] != [number(d) for d in dims(inner) or ()]:
                raise NoKernel(f"{var.name}: a sum with a wider value")
            return replace(value, step=_ADDED, residual=(other, _follows(other, value.view.axes)))
        raise NoKernel(f"{var.name}: a sum of two values made in the region")

    def _moved(self, call: relax.Call, op: str, var: relax.Var) -> _Value:
        value: _Rows | _Columns = self.columns(call.args[0]) or self._rows(call.args[0], var)
        view = apply_view(value.view, call, op, dims(var) or [])
        if view is None:
            raise NoKernel(f"{var.name}: a view that mixes rows with columns")
        if isinstance(value, _Columns) and value.step > _SCALED and not turns_into(value.view, view):
            raise NoKernel(f"{var.name}: a view behind a norm, a rotation or a sum")
        return replace(value, view=view)

    def _cast(self, call: relax.Call, var: relax.Var) -> _Value:
        """Sums are of the widest type in any case; what is returned must be of x's own."""
        if dtype(var) not in _FLOATS:
            raise NoKernel(f"{var.name}: a cast to {dtype(var)}")
        value = self.columns(call.args[0])
        if value is None:
            return self._rows(call.args[0], var)
        return replace(value, dtype=dtype(var))

    def _region(self, callee: relax.Function, call: relax.Call, var: relax.Var) -> _Value:
        """Take in the results of a region that has been formed before."""
        inner = Reader(Graph(var.name, callee, self.graph.mod))
        inner.read()
        outer = dict(zip(callee.params, call.args))
        if inner.rows is None or self.rows is not None:
            raise NoKernel(f"{var.name}: a region beside other linear layers")
        # The same axes again, their sizes told in terms of this function.
        x = outer.get(inner.rows.x, inner.rows.x)
        given = self._rows(x, var)
        if given.x is not x and inner.rows.norm is not None:
            raise NoKernel(f"{var.name}: a norm behind a rotation")
        shape = [number(d) for d in dims(x) or ()]
        renewed: dict[int, Axis] = {}

        def axis(old: Axis) -> Axis:
            if old.row is None:
                return old
            return renewed.setdefault(id(old), replace(old, extent=shape[old.row]))

        def axes(old: Sequence[Axis]) -> tuple[Axis, ...]:
            return tuple(axis(a) for a in old)

        def outward(expr: relax.Expr) -> relax.Expr:
            return outer.get(expr, expr) if isinstance(expr, relax.Var) else expr

        def table(old: _Table) -> _Table:
            return _Table(outward(old.operand), tuple(a and axis(a) for a in old.follows))

        def lifted(old: _Columns) -> _Columns:
            norm, turn, residual = old.norm, old.turn, old.residual
            norm = norm and replace(norm, operands=tuple(map(outward, norm.operands)), axes=axes(norm.axes))
            turn = turn and replace(turn, cos=table(turn.cos), sin=table(turn.sin), axes=axes(turn.axes))
            added = residual and (outward(residual[0]), tuple(a and axis(a) for a in residual[1]))
            view = replace(old.view, axes=axes(old.view.axes))
            return replace(old, view=view, norm=norm, turn=turn, residual=added)

        self.rows = replace(given, norm=inner.rows.norm, operands=tuple(map(outward, inner.rows.operands)))
        if given.turn is None and inner.rows.turn is not None:
            raise NoKernel(f"{var.name}: a region that turns its rows grows no further")
        self.weights = [(outward(weight), layout) for weight, layout in inner.weights]
        self.biases = [(bias if bias is None else outward(bias), count) for bias, count in inner.biases]
        self.width = inner.width
        results = tuple(lifted(value) for value in inner.results())
        return results if isinstance(var.ty, relax.TupleType) else results[0]

    def _composite(self, var: relax.Var, callee: relax.Function, call: relax.Call) -> _Value:
        name, attrs = composite_name(callee), composite_attrs(callee)
        parts = dict(zip((p.name for p in callee.params), call.args))
        if name in ("crossloom.rms_norm", "crossloom.layer_norm"):
            return self._norm(name.removeprefix("crossloom.").removesuffix("_norm"), parts, attrs, var)
        if name == "crossloom.linear":
            return self._linear(parts, str(attrs["weight_layout"]), var)
        if name == "crossloom.rotary":
            return self._rotary(parts, attrs, var)
        if name == LINEAR_REGION:
            return self._region(callee, call, var)
        value = self.columns(call.args[0])
        if name == "crossloom.activation" and value is not None:
            return self._activated(value, str(attrs["kind"]), var)
        raise NoKernel(f"{var.name}: {name} is not a step of the kernel")

    def _split(self, call: relax.Call, var: relax.Var) -> _Columns | tuple[_Columns, ...]:
        value = self.columns(call.args[0])
        if value is None:
            raise NoKernel(f"{var.name}: a split of a value that no linear layer made")
        if not isinstance(var.ty, relax.TupleType):
            return value  # A split in one part makes no tuple.
        axis = int(call.attrs.axis) % len(value.view.axes)
        parts, begin = [], 0
        for ty in var.ty.fields:
            extent = number(list(ty.shape)[axis])
            view = value.view.cut(axis, begin, begin + extent) if isinstance(extent, int) else None
            if view is None or value.step > _SCALED:
                raise NoKernel(f"{var.name}: a split along rows")
            parts.append(replace(value, view=view))
            begin += extent
        return tuple(parts)

    def read(self) -> None:
        """Read every binding of the function."""
        for var in self.graph.order:
            if not isinstance(self.graph.value[var], relax.Tuple):  # the results
                self.step(var)

    def step(self, var: relax.Var) -> None:
        """Read one binding."""
        graph, value, op = self.graph, self.graph.value[var], self.graph.op(var)
        if isinstance(value, relax.TupleGetItem):
            parts = self.values.get(value.tuple_value)
            if not isinstance(parts, tuple):
                raise NoKernel(f"{var.name}: a field of a tuple that is not a split")
            self.values[var] = parts[value.index]
        elif not isinstance(value, relax.Call):
            alias = self.values.get(value) if isinstance(value, relax.Var) else None
            if alias is None:
                raise NoKernel(f"{var.name}: another name of an operand")
            self.values[var] = alias
        elif (callee := graph.callee(var)) is not None:
            self.values[var] = self._composite(var, callee, value)
        elif op == "relax.multiply":
            self.values[var] = self._product(value, var)
        elif op == "relax.add":
            self.values[var] = self._sum(value, var)
        elif op in ACTIVATIONS and (inner := self.columns(value.args[0])) is not None:
            self.values[var] = self._activated(inner, ACTIVATIONS[op], var)
        elif op in MOVES:
            self.values[var] = self._moved(value, op, var)
        elif op == "relax.astype":
            self.values[var] = self._cast(value, var)
        elif op == "relax.split":
            self.values[var] = self._split(value, var)
        else:
            raise NoKernel(f"{var.name}: {op or 'a value'} is not a step of the kernel")

    def is_result(self, var: relax.Var) -> bool:
        """Return whether a kernel can return a value that has been read."""
        value = self.columns(var)
        if value is None or self.rows is None or value.dtype != dtype(self.rows.x):
            return False
        try:
            _output(value)
        except NoKernel:
            return False
        return True

    def share(self, var: relax.Var) -> int:
        """Return how many columns a value holds that has been read."""
        value = self.values[var]
        parts = value if isinstance(value, tuple) else (value,)
        return sum(elements(part.view.axes) for part in parts)

    def results(self) -> list[_Columns]:
        """Return what the region returns."""
        body = self.graph.func.body.body
        whole = self.graph.resolve(body)
        fields = list(whole.fields) if isinstance(whole, relax.Tuple) else [body]
        out = []
        for expr in fields:
            found = self.columns(expr)
            if found is None:
                raise NoKernel(f"{getattr(expr, 'name', '')}: a result that no linear layer made")
            out.append(found)
        return out


def _follows(operand: relax.Expr, axes: Sequence[Axis]) -> tuple[Axis | None, ...]:
    """Return which axis each dimension of a broadcast operand follows, None where it is 1."""
    shape = [number(d) for d in dims(operand) or ()]
    return tuple(
        None if isinstance(extent, int) and extent == 1 else axis
        for extent, axis in zip(shape, axes[len(axes) - len(shape) :], strict=True)
    )


def _output(value: _Columns) -> tuple[Output, list[relax.Expr]]:
    """Return an output of the kernel, and its tables and residual."""
    axes = value.view.axes
    lane = axes[-1] if axes else None
    if lane is None or lane.row is not None or not isinstance(lane.extent, int) or (lane.stride != 1):
        if lane is None or not lane.is_unit:
            raise NoKernel("a result whose last axis is not made of neighbouring columns")
    heads = [a for a in axes[:-1] if a.row is None and not a.is_unit]

    def dim(axis: Axis | None) -> Dim:
        if axis is None or axis.is_unit:
            return ("unit", 0)
        if axis.row is not None:
            return ("row", axis.row)
        return ("head", next(i for i, head in enumerate(heads) if head is axis))

    def follow(found: Sequence[Axis | None]) -> tuple[Dim, ...]:
        # The last dimension is lanes, unless it is 1.
        if not found:
            return ()
        return (*(dim(a) for a in found[:-1]), ("unit", 0) if found[-1] is None else ("lane", 0))

    extras: list[relax.Expr] = []
    norm = rotary = None
    if value.norm is not None:
        if value.norm.axes[-1] is not lane:
            raise NoKernel("a norm along another axis than the last one")
        norm = value.norm.norm
        extras += value.norm.operands
    if value.turn is not None:
        if value.turn.axes[-1] is not lane:
            raise NoKernel("a rotation along another axis than the last one")
        rotary = _rotation(value.turn, dim)
        extras += [value.turn.cos.operand, value.turn.sin.operand]
    residual = None
    if value.residual is not None:
        extras.append(value.residual[0])
        residual = follow(value.residual[1])
    return (
        Output(
            (*(dim(a) for a in axes[:-1]), ("lane", 0)),
            tuple(int(a.extent) for a in heads),
            int(lane.extent),
            value.view.first,
            tuple(a.stride for a in heads),
            value.gate,
            value.activation,
            value.scale,
            norm,
            rotary,
            residual,
        ),
        extras,
    )


def _rotation(turn: _Turned, dim: Callable[[Axis | None], Dim]) -> Rotary:
    """Return a rotation whose tables follow axes, each of which is what ``dim`` says."""
    cos, sin = ((*(dim(a) for a in table.follows), ("lane", 0)) for table in (turn.cos, turn.sin))
    return Rotary(turn.convention, turn.dim, cos, sin, turn.half, dtype(turn.cos.operand))


def _turn(turn: _Turned) -> Turn:
    """Return a rotation of x."""
    lane = turn.axes[-1]
    heads = [a for a in turn.axes[:-1] if a.row is None and not a.is_unit]
    if lane.row is not None or lane.stride != 1 or not isinstance(lane.extent, int):
        raise NoKernel("a rotation along other than neighbouring values of x")

    def dim(axis: Axis | None) -> Dim:
        if axis is None or axis.is_unit:
            return ("unit", 0)
        if axis.row is not None:
            return ("row", axis.row)
        return ("head", next(i for i, head in enumerate(heads) if head is axis))

    extents = tuple(int(a.extent) for a in heads)
    return Turn(_rotation(turn, dim), extents, tuple(a.stride for a in heads), lane.extent)


def read_linear(graph: Graph) -> Region:
    """Read the body of a region.

    Parameters
    ----------
    graph : Graph
        Of the region's function.

    Raises
    ------
    NoKernel
        Where the kernel cannot do what the region holds.
    """
    reader = Reader(graph)
    reader.read()
    rows = reader.rows
    if rows is None:
        raise NoKernel("no linear layer in the region")
    shape = [number(d) for d in dims(rows.x) or ()]
    if not isinstance(shape[-1], int) or shape[-1] == 0:
        raise NoKernel("rows of symbolic or no length")
    if any(not isinstance(d, (int, tirx.Var)) for d in shape):
        raise NoKernel("rows of a composed size")
    outputs, extras = [], []
    for value in reader.results():
        if value.dtype != dtype(rows.x):
            raise NoKernel(f"a result of type {value.dtype} of values of type {dtype(rows.x)}")
        output, more = _output(value)
        outputs.append(output)
        extras += more
    biased = any(bias is not None for bias, _ in reader.biases)
    kind = dtype(rows.x)
    if kind not in _FLOATS:
        raise NoKernel(f"values of type {kind}")
    turn = None if rows.turn is None else _turn(rows.turn)
    spec = Spec(tuple(shape[:-1]), shape[-1], kind, tuple(outputs), rows.norm, biased, turn)
    biases = tuple(reader.biases) if biased else ()
    tables = () if rows.turn is None else (rows.turn.cos.operand, rows.turn.sin.operand)
    return Region(spec, rows.x, rows.operands, tables, tuple(reader.weights), biases, tuple(extras))


def kernel_takes(match: Match, region: str = LINEAR_REGION, read: Callable[[Graph], object] = read_linear) -> Verdict:
    """Refuse a group that no kernel could compute: a ``legal`` for rules that form or grow regions.

    Parameters
    ----------
    match : Match
    region : str
        The composite that the group would become.
    read : callable
        Its reader, which raises :class:`NoKernel`.
    """
    if (size := unknown_size(match)) is not None:
        return refuse("dimension-not-among-operands", str(size), "the region could not know this size")
    func = region_of(match, region)
    try:
        read(Graph(match.graph.name, func, match.graph.mod))
    except NoKernel as problem:
        return refuse("no-kernel", match.root.name, str(problem))
    return accept()
