"""Reading a region of linear layers, or what may become one, binding by binding."""

from __future__ import annotations

from dataclasses import replace

from tvm import relax, tirx

from crossloom.rewrite import Graph, composite_attrs, composite_name
from crossloom.schedules.fused_linear import Norm

from ..matching.spelling import dims, dtype, extents, number, results_of, same_dims, scalar
from .columns import (
    ACTIVATED,
    ADDED,
    FLOATS,
    NORMED,
    ROTATED,
    SCALED,
    Columns,
    Lift,
    NoKernel,
    Normed,
    Rows,
    Table,
    Turned,
    Value,
    follows,
    output_of,
)
from .once import read_once
from .views import Axis, apply_view, columns_of, elements, turns_into

#: The composite's name.
LINEAR_REGION = "crossloom.fused_linear"
#: Operators that are an activation of the kernel.
ACTIVATIONS = {"relax.nn.relu": "relu", "relax.sigmoid": "sigmoid", "relax.tanh": "tanh", "relax.nn.silu": "silu"}
#: Operators that only move values.
MOVES = frozenset(
    f"relax.{op}" for op in ("reshape", "permute_dims", "squeeze", "expand_dims", "strided_slice", "take")
)


class Reader:
    """Reads bindings one by one; one that the kernel cannot do raises :class:`NoKernel` and is not taken in.

    Parameters
    ----------
    graph : Graph
        Of a region's function, or of one that a region may be formed in.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values: dict[relax.Var, Value] = {}
        self.rows: Rows | None = None
        self.weights: list[tuple[relax.Expr, str]] = []
        self.biases: list[tuple[relax.Expr | None, int]] = []
        self.width = 0

    # What an operand is ------------------------------------------------------------------------------------------

    def columns(self, expr: relax.Expr) -> Columns | None:
        """Return what a value is of the linear layers' results; None where it is none."""
        found = self.values.get(expr) if isinstance(expr, relax.Var) else None
        return found if isinstance(found, Columns) else None

    def _is_outside(self, expr: relax.Expr) -> bool:
        return not isinstance(expr, relax.Var) or expr not in self.values

    def _rows(self, expr: relax.Expr, var: relax.Var) -> Rows:
        """Return what a value is of x: x itself where it is made outside."""
        found = self.values.get(expr) if isinstance(expr, relax.Var) else None
        if isinstance(found, Rows):
            return found
        if found is not None:
            raise NoKernel(f"{var.name}: a linear layer of another one's result")
        shape = extents(expr)
        if not shape or not isinstance(shape[-1], int):
            raise NoKernel(f"{var.name}: rows of symbolic or no length")
        return Rows(expr, columns_of(shape, shape[-1]))

    # Steps -------------------------------------------------------------------------------------------------------

    def _norm(self, kind: str, parts: dict[str, relax.Expr], attrs: dict[str, object], var: relax.Var) -> Value:
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
        if inner.gate is not None or kinds - FLOATS:
            raise NoKernel(f"{var.name}: a norm of a gated value, or a weight of no float type")
        self._advance(inner, NORMED, var)
        return replace(inner, step=NORMED, norm=Normed(norm, operands, inner.view.axes), dtype=dtype(var))

    def _linear(self, parts: dict[str, relax.Expr], layout: str, var: relax.Var) -> Columns:
        x = parts["x"]
        rows = self._rows(x, var)
        if self.rows is not None and not rows.is_same(self.rows):
            raise NoKernel(f"{var.name}: linear layers of different values")
        shape = extents(x)
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
        return Columns(replace(view, first=self.width - count), dtype(var))

    def _advance(self, value: Columns, step: int, var: relax.Var) -> None:
        if value.step >= step:
            raise NoKernel(f"{var.name}: steps in another order than the kernel's")

    def _activated(self, value: Columns, kind: str, var: relax.Var) -> Columns:
        self._advance(value, ACTIVATED, var)
        return replace(value, step=ACTIVATED, activation=kind)

    def _product(self, call: relax.Call, var: relax.Var) -> Columns:
        sides = [self.columns(arg) for arg in call.args]
        for mine, other in ((sides[0], call.args[1]), (sides[1], call.args[0])):
            if mine is not None and (factor := scalar(self.graph, other)) is not None:
                if len(dims(other) or ()) > len(mine.view.axes):
                    raise NoKernel(f"{var.name}: a product with a number of more axes")
                self._advance(mine, SCALED, var)
                return replace(mine, step=SCALED, scale=factor)
        for gate, value in (sides, sides[::-1]):
            if gate is not None and value is not None and gate.activation and value.step == 0:
                if gate.step == ACTIVATED and gate.gate is None and gate.view.axes == value.view.axes:
                    return replace(gate, view=value.view, gate=gate.view.first)
        raise NoKernel(f"{var.name}: a product of other than an activated and a plain linear layer")

    def _rotary(self, parts: dict[str, relax.Expr], attrs: dict[str, object], var: relax.Var) -> Value:
        x, value = parts["x"], self.columns(parts["x"])
        if value is not None and value.gate is not None:
            raise NoKernel(f"{var.name}: a rotation of a gated value")
        dim = int(attrs["rotary_dim"])  # type: ignore[call-overload]
        if len({dtype(parts[name]) for name in ("cos", "sin")} & FLOATS) != 1:
            raise NoKernel(f"{var.name}: tables of two types, or of no float type")
        axes = self._rows(x, var).view.axes if value is None else value.view.axes
        last = dim if attrs["table"] == "full" else dim // 2
        cos, sin = (self._table(parts[name], axes, last, var) for name in ("cos", "sin"))
        turn = Turned(str(attrs["convention"]), dim, attrs["table"] == "half", cos, sin, axes)
        if value is None:
            rows = self._rows(x, var)
            if rows.turn is not None:
                raise NoKernel(f"{var.name}: a second rotation of the same rows")
            return replace(rows, turn=turn)
        self._advance(value, ROTATED, var)
        return replace(value, step=ROTATED, turn=turn, dtype=dtype(var))

    def _table(self, table: relax.Expr, axes: tuple[Axis, ...], last: int, var: relax.Var) -> Table:
        """Return a table of rotations, which axes of size 1 may have been put into here."""
        seen = extents(table)
        if not seen or seen[-1] != last:
            raise NoKernel(f"{var.name}: a table of {seen[-1:]} values, not {last}")
        if len(seen) > len(axes):
            raise NoKernel(f"{var.name}: a table of more axes than what it turns")
        under = (*axes[len(axes) - len(seen) : -1],)
        if self._is_outside(table):
            plain = (None if isinstance(extent, int) and extent == 1 else at for extent, at in zip(seen, under))
            return Table(table, tuple(plain))
        made = self.values[table]
        if not isinstance(made, Rows) or made.norm is not None or made.turn is not None:
            raise NoKernel(f"{var.name}: a table made in the region")
        lane, own = made.view.axes[-1], extents(made.x)
        if lane.row is not None or (lane.stride, lane.extent, own[-1]) != (1, last, last):
            raise NoKernel(f"{var.name}: a table cut or mixed in the region")
        at = {axis.row: axis_under for axis, axis_under in zip(made.view.axes, under) if axis.row is not None}
        if any(axis.row is None and not axis.is_unit for axis in made.view.axes[:-1]):
            raise NoKernel(f"{var.name}: a table mixed in the region")
        return Table(made.x, tuple(at.get(i) for i in range(len(own) - 1)))

    def _sum(self, call: relax.Call, var: relax.Var) -> Columns:
        for inner, other in ((call.args[0], call.args[1]), (call.args[1], call.args[0])):
            value = self.columns(inner)
            if value is None or not self._is_outside(other):
                continue
            self._advance(value, ADDED, var)
            if self.rows is None or dtype(other) != dtype(self.rows.x) or len(dims(other) or ()) > len(value.view.axes):
                raise NoKernel(f"{var.name}: a sum with a wider value, or of another type")
            if not same_dims(dims(var) or (), dims(inner) or (None,)):
                raise NoKernel(f"{var.name}: a sum with a wider value")
            return replace(value, step=ADDED, residual=(other, follows(other, value.view.axes)))
        raise NoKernel(f"{var.name}: a sum of two values made in the region")

    def _moved(self, call: relax.Call, op: str, var: relax.Var) -> Value:
        value: Rows | Columns = self.columns(call.args[0]) or self._rows(call.args[0], var)
        view = apply_view(value.view, call, op, dims(var) or [])
        if view is None:
            raise NoKernel(f"{var.name}: a view that mixes rows with columns")
        if isinstance(value, Columns) and value.step > SCALED and not turns_into(value.view, view):
            raise NoKernel(f"{var.name}: a view behind a norm, a rotation or a sum")
        return replace(value, view=view)

    def _cast(self, call: relax.Call, var: relax.Var) -> Value:
        """Sums are of the widest type in any case; what is returned must be of x's own."""
        if dtype(var) not in FLOATS:
            raise NoKernel(f"{var.name}: a cast to {dtype(var)}")
        value = self.columns(call.args[0])
        if value is None:
            return self._rows(call.args[0], var)
        return replace(value, dtype=dtype(var))

    def _region(self, callee: relax.Function, call: relax.Call, var: relax.Var) -> Value:
        """Take in the results of a region that has been formed before."""
        inner = _read_once(self.graph, callee)
        outer = dict(zip(callee.params, call.args))
        if inner.rows is None or self.rows is not None:
            raise NoKernel(f"{var.name}: a region beside other linear layers")
        x = outer.get(inner.rows.x, inner.rows.x)
        given = self._rows(x, var)
        if inner.rows.norm is not None and (given.turn is not None or given.norm is not None):
            raise NoKernel(f"{var.name}: a norm behind a rotation or another norm")
        if given.turn is None and inner.rows.turn is not None:
            raise NoKernel(f"{var.name}: a region that turns its rows grows no further")
        lift = Lift(outer, extents(x))
        self.rows = given
        if inner.rows.norm is not None:
            self.rows = replace(given, norm=inner.rows.norm, operands=tuple(map(lift.operand, inner.rows.operands)))
        self.weights = [(lift.operand(weight), layout) for weight, layout in inner.weights]
        self.biases = [(bias if bias is None else lift.operand(bias), count) for bias, count in inner.biases]
        self.width = inner.width
        results = tuple(map(lift.columns, inner.results()))
        if any(found.residual is not None and not self._is_outside(found.residual[0]) for found in results):
            raise NoKernel(f"{var.name}: a sum of two values made in the region")
        return results if isinstance(var.ty, relax.TupleType) else results[0]

    def _composite(self, var: relax.Var, callee: relax.Function, call: relax.Call) -> Value:
        name, attrs = composite_name(callee), composite_attrs(callee)
        parts = self.graph.operands(var)
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

    def _split(self, call: relax.Call, var: relax.Var) -> Columns | tuple[Columns, ...]:
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
            if view is None or value.step > SCALED:
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

    def sizes_of_rows(self, rows: Rows) -> list[int | tirx.Expr]:
        """Return the shape of x where a kernel can take it."""
        shape = extents(rows.x)
        if not shape or not isinstance(shape[-1], int) or shape[-1] == 0:
            raise NoKernel("rows of symbolic or no length")
        # Where a region is only thought of yet, a composed size is a variable of it to be.
        if composite_name(self.graph.func) and any(not isinstance(d, (int, tirx.Var)) for d in shape):
            raise NoKernel("rows of a composed size")
        if dtype(rows.x) not in FLOATS:
            raise NoKernel(f"values of type {dtype(rows.x)}")
        return shape

    def is_result(self, var: relax.Var) -> bool:
        """Return whether a kernel can return a value that has been read."""
        value = self.columns(var)
        if value is None or self.rows is None or value.dtype != dtype(self.rows.x):
            return False
        try:
            output_of(value)
        except NoKernel:
            return False
        return True

    def share(self, var: relax.Var) -> int:
        """Return how many columns a value holds that has been read."""
        value = self.values[var]
        parts = value if isinstance(value, tuple) else (value,)
        return sum(elements(part.view.axes) for part in parts)

    def results(self) -> list[Columns]:
        """Return what the region returns."""
        out = []
        for expr in results_of(self.graph):
            found = self.columns(expr)
            if found is None:
                raise NoKernel(f"{getattr(expr, 'name', '')}: a result that no linear layer made")
            out.append(found)
        return out


@read_once
def _read_once(graph: Graph) -> Reader:
    reader = Reader(graph)
    reader.read()
    return reader
