"""Read a ``crossloom.fused_linear`` region: norm, linear layers, and what is done to their columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm import relax, tirx

from crossloom.rewrite import Graph, Match, composite_attrs, composite_name, region_of, unknown_size
from crossloom.schedules.fused_linear import Dim, Norm, Output, Rotary, Spec
from crossloom.verdict import Verdict, accept, refuse

from ..matching.spelling import dims, dtype, scalar
from .views import Axis, View, apply_view, columns_of, number

#: The composite's name.
LINEAR_REGION = "crossloom.fused_linear"
#: Operators that are an activation of the kernel.
ACTIVATIONS = {"relax.nn.relu": "relu", "relax.sigmoid": "sigmoid", "relax.tanh": "tanh", "relax.nn.silu": "silu"}
_MOVES = frozenset({"relax.reshape", "relax.permute_dims", "relax.squeeze", "relax.expand_dims", "relax.strided_slice"})


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
    weights : tuple of (relax.Expr, layout)
    biases : tuple of (relax.Expr or None, number of columns)
    extras : tuple of relax.Expr
        Tables and residuals in the kernel's order.
    """

    spec: Spec
    x: relax.Expr
    norm: tuple[relax.Expr, ...]
    weights: tuple[tuple[relax.Expr, str], ...]
    biases: tuple[tuple[relax.Expr | None, int], ...]
    extras: tuple[relax.Expr, ...]


@dataclass(frozen=True)
class _Rows:
    """x, normed or not."""

    x: relax.Expr
    norm: Norm | None = None
    operands: tuple[relax.Expr, ...] = ()


@dataclass(frozen=True)
class _Columns:
    """A result in the making; ``step`` is the last step taken, in the kernel's order."""

    view: View
    step: int = 0
    gate: int | None = None
    activation: str = ""
    scale: float = 1.0
    rotary: tuple[str, int, bool, relax.Expr, relax.Expr, tuple[Axis, ...]] | None = None
    residual: tuple[relax.Expr, tuple[Axis | None, ...]] | None = None


#: Steps in the kernel's order.
_ACTIVATED, _SCALED, _ROTATED, _ADDED = 1, 2, 3, 4


class _Reader:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values: dict[relax.Var, _Rows | _Columns | tuple[_Columns, ...]] = {}
        self.rows: _Rows | None = None
        self.weights: list[tuple[relax.Expr, str]] = []
        self.biases: list[tuple[relax.Expr | None, int]] = []
        self.width = 0

    # What an operand is ------------------------------------------------------------------------------------------

    def _columns(self, expr: relax.Expr) -> _Columns | None:
        found = self.values.get(expr) if isinstance(expr, relax.Var) else None
        return found if isinstance(found, _Columns) else None

    def _is_outside(self, expr: relax.Expr) -> bool:
        return not isinstance(expr, relax.Var) or expr not in self.graph.value

    # Steps -------------------------------------------------------------------------------------------------------

    def _norm(self, kind: str, parts: dict[str, relax.Expr], attrs: dict[str, object], var: relax.Var) -> _Rows:
        x = parts["x"]
        if not self._is_outside(x):
            raise NoKernel(f"{var.name}: a norm of a value made in the region")
        if [int(a) for a in attrs["axes"]] != [-1]:  # type: ignore[attr-defined]
            raise NoKernel(f"{var.name}: a norm over more than the last axis")
        operands = [parts[name] for name in ("weight", "bias") if name in parts]
        if any(len(dims(o) or ()) != 1 or dtype(o) != dtype(x) for o in operands):
            raise NoKernel(f"{var.name}: a norm's weight of other than the last axis, or of another type")
        epsilon = float(attrs["epsilon"])  # type: ignore[arg-type]
        return _Rows(x, Norm(kind, epsilon, "weight" in parts, "bias" in parts), tuple(operands))

    def _linear(self, parts: dict[str, relax.Expr], layout: str, var: relax.Var) -> _Columns:
        x = parts["x"]
        found = self.values.get(x) if isinstance(x, relax.Var) else None
        rows = found if isinstance(found, _Rows) else _Rows(x)
        if found is not None and not isinstance(found, _Rows):
            raise NoKernel(f"{var.name}: a linear layer of another one's result")
        if self.rows is not None and rows != self.rows:
            raise NoKernel(f"{var.name}: linear layers of different values")
        self.rows = rows
        shape = dims(parts["weight"]) or []
        count = number(shape[0 if layout == "out_in" else 1])
        if not isinstance(count, int) or not isinstance(number(shape[1 if layout == "out_in" else 0]), int):
            raise NoKernel(f"{var.name}: a weight of symbolic size")
        kinds = {dtype(e) for e in (x, *parts.values(), var)}
        if len(kinds) != 1:
            raise NoKernel(f"{var.name}: operands of types {', '.join(sorted(kinds))}")
        view = columns_of(dims(x) or [], count)
        self.weights.append((parts["weight"], layout))
        self.biases.append((parts.get("bias"), count))
        self.width += count
        return _Columns(replace(view, first=self.width - count))

    def _advance(self, value: _Columns, step: int, var: relax.Var) -> None:
        if value.step >= step:
            raise NoKernel(f"{var.name}: steps in another order than the kernel's")

    def _activated(self, value: _Columns, kind: str, var: relax.Var) -> _Columns:
        self._advance(value, _ACTIVATED, var)
        return replace(value, step=_ACTIVATED, activation=kind)

    def _product(self, call: relax.Call, var: relax.Var) -> _Columns:
        sides = [self._columns(arg) for arg in call.args]
        for mine, other in ((sides[0], call.args[1]), (sides[1], call.args[0])):
            if mine is not None and (factor := scalar(self.graph, other)) is not None:
                self._advance(mine, _SCALED, var)
                return replace(mine, step=_SCALED, scale=factor)
        for gate, value in (sides, sides[::-1]):
            if gate is not None and value is not None and gate.activation and value.step == 0:
                if gate.step == _ACTIVATED and gate.gate is None and gate.view.axes == value.view.axes:
                    return replace(gate, view=value.view, gate=gate.view.first)
        raise NoKernel(f"{var.name}: a product of other than an activated and a plain linear layer")

    def _rotary(self, parts: dict[str, relax.Expr], attrs: dict[str, object], var: relax.Var) -> _Columns:
        value = self._columns(parts["x"])
        if value is None or value.gate is not None:
            raise NoKernel(f"{var.name}: a rotation of a value that no linear layer made")
        self._advance(value, _ROTATED, var)
        axes, dim = value.view.axes, int(attrs["rotary_dim"])  # type: ignore[call-overload]
        for table in (parts["cos"], parts["sin"]):
            last = number((dims(table) or [0])[-1])
            if not self._is_outside(table) or dtype(table) != dtype(var):
                raise NoKernel(f"{var.name}: a table made in the region, or of another type")
            if last != (dim if attrs["table"] == "full" else dim // 2):
                raise NoKernel(f"{var.name}: a table of {last} values for {dim} lanes")
        half = attrs["table"] == "half"
        turn = (str(attrs["convention"]), dim, half, parts["cos"], parts["sin"], axes)
        return replace(value, step=_ROTATED, rotary=turn)

    def _sum(self, call: relax.Call, var: relax.Var) -> _Columns:
        for inner, other in ((call.args[0], call.args[1]), (call.args[1], call.args[0])):
            value = self._columns(inner)
            if value is None or not self._is_outside(other):
                continue
            self._advance(value, _ADDED, var)
            if dtype(other) != dtype(var) or len(dims(other) or ()) > len(value.view.axes):
                raise NoKernel(f"{var.name}: a sum with a wider value, or of another type")
            if [number(d) for d in dims(var) or ()] != [number(d) for d in dims(inner) or ()]:
                raise NoKernel(f"{var.name}: a sum with a wider value")
            return replace(value, step=_ADDED, residual=(other, _follows(other, value.view.axes)))
        raise NoKernel(f"{var.name}: a sum of two values made in the region")

    def _moved(self, call: relax.Call, op: str, var: relax.Var) -> _Columns:
        value = self._columns(call.args[0])
        if value is None:
            raise NoKernel(f"{var.name}: a view of a value that no linear layer made")
        view = apply_view(value.view, call, op, dims(var) or [])
        if view is None:
            raise NoKernel(f"{var.name}: a view that mixes rows with columns")
        if value.step > _SCALED and op != "relax.permute_dims" and view.axes != value.view.axes:
            raise NoKernel(f"{var.name}: a view behind a rotation or a sum")
        return replace(value, view=view)

    def _composite(self, var: relax.Var, callee: relax.Function, call: relax.Call) -> _Rows | _Columns:
        name, attrs = composite_name(callee), composite_attrs(callee)
        parts = dict(zip((p.name for p in callee.params), call.args))
        if name in ("crossloom.rms_norm", "crossloom.layer_norm"):
            return self._norm(name.removeprefix("crossloom.").removesuffix("_norm"), parts, attrs, var)
        if name == "crossloom.linear":
            return self._linear(parts, str(attrs["weight_layout"]), var)
        if name == "crossloom.rotary":
            return self._rotary(parts, attrs, var)
        value = self._columns(call.args[0])
        if name == "crossloom.activation" and value is not None:
            return self._activated(value, str(attrs["kind"]), var)
        raise NoKernel(f"{var.name}: {name} is not a step of the kernel")

    def _split(self, call: relax.Call, var: relax.Var) -> tuple[_Columns, ...]:
        value = self._columns(call.args[0])
        if value is None:
            raise NoKernel(f"{var.name}: a split of a value that no linear layer made")
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
        """Read every binding of the body."""
        graph = self.graph
        steps: dict[str, Callable[[relax.Call, relax.Var], _Columns]] = {
            "relax.multiply": self._product,
            "relax.add": self._sum,
        }
        for var in graph.order:
            value, op = graph.value[var], graph.op(var)
            if isinstance(value, relax.TupleGetItem):
                parts = self.values.get(value.tuple_value)
                if not isinstance(parts, tuple):
                    raise NoKernel(f"{var.name}: a field of a tuple that is not a split")
                self.values[var] = parts[value.index]
            elif isinstance(value, relax.Tuple):
                continue  # the results
            elif not isinstance(value, relax.Call):
                alias = self.values.get(value)
                if alias is None:
                    raise NoKernel(f"{var.name}: another name of an operand")
                self.values[var] = alias
            elif (callee := graph.callee(var)) is not None:
                self.values[var] = self._composite(var, callee, value)
            elif op in steps:
                self.values[var] = steps[op](value, var)
            elif op in ACTIVATIONS and (inner := self._columns(value.args[0])) is not None:
                self.values[var] = self._activated(inner, ACTIVATIONS[op], var)
            elif op in _MOVES:
                self.values[var] = self._moved(value, op, var)
            elif op == "relax.split":
                self.values[var] = self._split(value, var)
            else:
                raise NoKernel(f"{var.name}: {op or 'a value'} is not a step of the kernel")

    def results(self) -> list[_Columns]:
        """Return what the region returns."""
        body = self.graph.func.body.body
        whole = self.graph.resolve(body)
        fields = list(whole.fields) if isinstance(whole, relax.Tuple) else [body]
        out = []
        for expr in fields:
            found = self._columns(expr)
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
    rotary = None
    if value.rotary is not None:
        convention, turned, half, cos, sin, at = value.rotary
        if at[-1] is not lane:
            raise NoKernel("a rotation along another axis than the last one")
        tables = [(*(dim(a) for a in _follows_table(table, at)), ("lane", 0)) for table in (cos, sin)]
        rotary = Rotary(convention, turned, tables[0], tables[1], half)
        extras += [cos, sin]
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
            rotary,
            residual,
        ),
        extras,
    )


def _follows_table(table: relax.Expr, axes: Sequence[Axis]) -> tuple[Axis | None, ...]:
    """Return which axis each dimension of a table follows, but for its last."""
    shape = [number(d) for d in dims(table) or ()]
    return tuple(
        None if isinstance(extent, int) and extent == 1 else axis
        for extent, axis in zip(shape[:-1], axes[len(axes) - len(shape) : -1], strict=True)
    )


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
    reader = _Reader(graph)
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
        output, more = _output(value)
        outputs.append(output)
        extras += more
    biased = any(bias is not None for bias, _ in reader.biases)
    kind = dtype(rows.x)
    if kind not in ("float32", "float16", "float64"):
        raise NoKernel(f"values of type {kind}")
    spec = Spec(tuple(shape[:-1]), shape[-1], kind, tuple(outputs), rows.norm, biased)
    biases = tuple(reader.biases) if biased else ()
    return Region(spec, rows.x, rows.operands, tuple(reader.weights), biases, tuple(extras))


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
