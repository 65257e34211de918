"""What a schedule rule asks of a block: its axes, what it reads, whether it is a sum of products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import tvm
from tvm.s_tir.schedule import SBlockRV, Schedule

_SPATIAL = 0  # tvm.tirx.IterVar.DataPar
#: Intrinsics that cost tens of instructions a value.
_COSTLY = ("exp", "erf", "tanh", "log", "sin", "cos", "pow", "sqrt", "rsqrt", "sigmoid")


def walk(node: object) -> Iterator[object]:
    """Yield ``node`` and every expression or statement under it, in source order."""
    yield node
    for name in ("value", "source", "condition", "true_value", "false_value", "then_case", "else_case", "body"):
        child = getattr(node, name, None)
        if isinstance(child, (tvm.ir.Expr, tvm.tirx.Stmt)):
            yield from walk(child)
    for name in ("a", "b"):
        child = getattr(node, name, None)
        if isinstance(child, tvm.ir.Expr):
            yield from walk(child)
    for name in ("args", "indices", "seq"):
        for child in getattr(node, name, None) or ():
            yield from walk(child)


def calls_math(node: object) -> bool:
    """Say whether a costly intrinsic is called under ``node``."""
    for part in walk(node):
        if isinstance(part, tvm.ir.Call):
            name = getattr(part.op, "name", "").rsplit(".", 1)[-1]
            if name in _COSTLY:
                return True
    return False


def is_conditional(node: object) -> bool:
    """Say whether an ``if_then_else``, of which only one side may be evaluated, is under ``node``."""
    calls = (part for part in walk(node) if isinstance(part, tvm.ir.Call))
    return any(getattr(call.op, "name", "").endswith(".if_then_else") for call in calls)


@dataclass(frozen=True)
class Axis:
    """One block axis: its variable, extent (expression), kind and the loop expression it is bound to."""

    var: tvm.ir.Var
    extent: tvm.ir.Expr
    spatial: bool
    binding: tvm.ir.Expr

    def bound_to(self, loop_var: tvm.ir.Var) -> bool:
        """Say whether the axis moves with a loop variable."""
        return any(isinstance(p, tvm.ir.Var) and p.same_as(loop_var) for p in walk(self.binding))


@dataclass(frozen=True)
class BlockView:
    """A block as the rules see it.

    Attributes
    ----------
    axes : tuple of Axis
    spatial_only : bool
    leading_spatial : int
        Number of spatial axes before the first reduced one.
    contraction : bool
        ``out += a * b`` with two different operands.
    dtype : str
        Of the value stored.
    output : tuple
        Index expressions of the value stored.
    reads : tuple
        Operands of the product, buffer and index expressions; of other sums and of spatial blocks what they load.
    buffer : Var or None
        The buffer stored to.
    loads : tuple
        Everything loaded from other buffers, buffer and index expressions.
    moves : bool
        Whether the value stored is a load by itself.
    """

    axes: tuple[Axis, ...]
    spatial_only: bool
    leading_spatial: int
    contraction: bool
    dtype: str
    output: tuple[tvm.ir.Expr, ...]
    reads: tuple[tuple[tvm.ir.Var, tuple[tvm.ir.Expr, ...]], ...]
    buffer: tvm.ir.Var | None
    loads: tuple[tuple[tvm.ir.Var, tuple[tvm.ir.Expr, ...]], ...]
    moves: bool

    @property
    def reads_reduced_axis_last(self) -> bool:
        """Whether some operand is contiguous along a reduced axis."""
        reduced = [axis.var for axis in self.axes if not axis.spatial]
        return any(idx and any(_mentions(idx[-1], var) for var in reduced) for _, idx in self.reads)

    @property
    def contiguous_columns(self) -> bool:
        """Whether the operand of a reduction is contiguous along its last spatial axis, not along a reduced one."""
        spatial = [axis.var for axis in self.axes if axis.spatial]
        if self.spatial_only or not spatial or self.reads_reduced_axis_last:
            return False
        return any(idx and isinstance(idx[-1], tvm.ir.Var) and idx[-1].same_as(spatial[-1]) for _, idx in self.loads)

    def leading_indices_of(self, producer: BlockView) -> list[int]:
        """Return, for each time this block reads what ``producer`` writes, how many leading axes index it in order."""
        counts = []
        for buffer, indices in self.loads:
            if self is producer or producer.buffer is None or not buffer.same_as(producer.buffer):
                continue
            same = 0
            for index, axis in zip(indices, self.axes):
                if not (isinstance(index, tvm.ir.Var) and index.same_as(axis.var)):
                    break
                same += 1
            counts.append(same)
        return counts

    @property
    def crossed_axis(self) -> int | None:
        """The axis along which an operand of a spatial block is contiguous, where the result is not."""
        if len(self.axes) < 2 or not self.spatial_only:
            return None
        for _, indices in self.reads:
            for i, axis in enumerate(self.axes[:-1]):
                if indices and _mentions(indices[-1], axis.var) and not _mentions(indices[-1], self.axes[-1].var):
                    if any(_mentions(index, self.axes[-1].var) for index in indices[:-1]):
                        return i
        return None

    def _uses(self, operand: int, spatial_axis: int) -> bool:
        var = [axis for axis in self.axes if axis.spatial][spatial_axis].var
        return any(_mentions(index, var) for index in self.reads[operand][1])

    def operand_of(self, spatial_axis: int) -> int | None:
        """Return the only operand that moves with a spatial axis."""
        users = [i for i in range(len(self.reads)) if self._uses(i, spatial_axis)]
        return users[0] if len(users) == 1 else None

    def operand_dims(self, operand: int) -> int:
        """Return the rank of an operand."""
        return len(self.reads[operand][1])

    def position_in_operand(self, operand: int, spatial_axis: int) -> int | None:
        """Return the dimension of an operand that a spatial axis indexes by itself."""
        var = [axis for axis in self.axes if axis.spatial][spatial_axis].var
        for i, index in enumerate(self.reads[operand][1]):
            if isinstance(index, tvm.ir.Var) and index.same_as(var):
                return i
        return None

    def row_axis(self, column: int) -> int | None:
        """Return the largest spatial axis along which the operand of ``column`` is used again."""
        operand = self.operand_of(column)
        if operand is None:
            return None
        best, best_extent = None, 1
        spatial = [axis for axis in self.axes if axis.spatial]
        for i, axis in enumerate(spatial):
            if i == column or self._uses(operand, i):
                continue
            extent = int(axis.extent) if isinstance(axis.extent, tvm.tirx.IntImm) else 1 << 30
            if extent > best_extent:
                best, best_extent = i, extent
        return best

    @property
    def plain(self) -> bool:
        """Whether every index of every operand is one axis by itself, as in a matrix product."""
        return all(isinstance(index, tvm.ir.Var) for _, indices in self.reads for index in indices)

    @property
    def is_copy(self) -> bool:
        """Whether a spatial block only moves values, index for index."""
        if not self.spatial_only or len(self.loads) != 1 or not self.moves:
            return False
        indices = self.loads[0][1]
        return len(indices) == len(self.output) and all(a.same_as(b) for a, b in zip(indices, self.output))

    def plain_of(self, producer: BlockView) -> bool:
        """Whether this spatial block reads what ``producer`` writes at its own axes, all in order."""
        rank = len(producer.output)
        if not self.spatial_only or rank != len(self.axes):
            return False
        counts = self.leading_indices_of(producer)
        return bool(counts) and all(count == rank for count in counts)


def _mentions(expr: tvm.ir.Expr, var: tvm.ir.Var) -> bool:
    return any(isinstance(part, tvm.ir.Var) and part.same_as(var) for part in walk(expr))


def _product(value: object) -> list[tvm.ir.TensorLoad]:
    """Return the loads of ``out + a * b`` under casts, without the accumulator; empty if it is something else."""
    if not isinstance(value, tvm.ir.prim.expr.Add):
        return []
    term = value.b
    while isinstance(term, tvm.ir.prim.expr.Cast):
        term = term.value
    if not isinstance(term, tvm.ir.prim.expr.Mul):
        return []
    return [part for part in walk(term) if isinstance(part, tvm.ir.TensorLoad)]


def view(sch: Schedule, block: SBlockRV) -> BlockView:
    """Describe a block of a schedule."""
    node = sch.get(block)
    realize = bindings_of(sch, block)
    axes = tuple(
        Axis(iv.var, iv.dom.extent, int(iv.iter_type) == _SPATIAL, binding)
        for iv, binding in zip(node.iter_vars, realize)
    )
    leading = 0
    for axis in axes:
        if not axis.spatial:
            break
        leading += 1
    store = node.body if isinstance(node.body, tvm.tirx.BufferStore) else None
    loads = _product(store.value) if store is not None else []
    every = [
        (load.source, tuple(load.indices))
        for load in (walk(store.value) if store is not None else ())
        if isinstance(load, tvm.ir.TensorLoad) and store is not None and not load.source.same_as(store.buffer)
    ]
    spatial_only = all(axis.spatial for axis in axes)
    reads = [(load.source, tuple(load.indices)) for load in loads] if loads and not spatial_only else every
    contraction = not spatial_only and len(loads) == 2 and not loads[0].source.same_as(loads[1].source)
    return BlockView(
        axes,
        spatial_only,
        leading,
        contraction,
        str(store.buffer.dtype) if store is not None else "float32",
        tuple(store.indices) if store is not None else (),
        tuple(reads),
        store.buffer if store is not None else None,
        tuple(every),
        store is not None and isinstance(store.value, tvm.ir.TensorLoad),
    )


def bindings_of(sch: Schedule, block: SBlockRV) -> list[tvm.ir.Expr]:
    """Return the loop expressions that the axes of a block are bound to."""
    node = sch.get(block)
    loops = list(sch.get_loops(block))
    start = sch.get(loops[0]) if loops else sch.get(sch.get_sblock("root")).body
    for part in walk(start):
        if isinstance(part, tvm.s_tir.SBlockRealize) and part.block.same_as(node):
            return list(part.iter_values)
    return [axis.var for axis in node.iter_vars]
