"""How much of each argument a kernel reads: a layer's slice of keys that all layers share counts as the slice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm import ir, s_tir, tirx
from tvm.sym.analyzer import Analyzer
from tvm_ffi import structural_map, structural_walk


@dataclass
class _Stretch:
    """What is read along one dimension: from ``first`` to ``last``, or one place that is known at run time only."""

    first: float
    last: float
    place: ir.Expr | None = None

    def joined(self, other: _Stretch) -> _Stretch:
        if self.place is not None and other.place is not None and _same(self.place, other.place):
            return self
        if self.place is not None or other.place is not None:
            return _Stretch(0, float("inf"))
        return _Stretch(min(self.first, other.first), max(self.last, other.last))

    def extent(self, size: int) -> int:
        if self.place is not None:
            return min(1, size)
        return int(max(0, min(self.last, size - 1) - max(self.first, 0) + 1))


def _same(a: ir.Expr, b: ir.Expr) -> bool:
    return bool(Analyzer().can_prove_equal(a, b))


def shares_read(func: tirx.PrimFunc, sizes: Mapping[tirx.Var, int]) -> list[float]:
    """Return which part of each argument a kernel reads, 0 for what it only writes.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Loops as its schedule left them, or blocks.
    sizes : mapping of tvm.tirx.Var to int
        Of the symbolic dimensions of its arguments.

    Notes
    -----
    What is read is bounded along each dimension by itself: a diagonal counts as all of a matrix.
    """
    analyzer = Analyzer()
    values: dict[tirx.Var, Any] = {var: tirx.const(size, var.ty.dtype) for var, size in sizes.items()}
    running: set[tirx.Var] = set()
    whole: dict[tirx.Var, tirx.Var] = {}
    loads: dict[tirx.Var, list[_Stretch]] = {}

    def known(expr: Any) -> Any:
        return structural_map(expr, (ir.Var, lambda var: values.get(var, var))) if isinstance(expr, ir.Expr) else expr

    def runs(var: tirx.Var, begin: Any, extent: Any) -> None:
        running.add(var)
        begin, extent = known(begin), known(extent)
        if isinstance(extent, int | tirx.IntImm) and int(extent) > 0 and isinstance(begin, int | tirx.IntImm):
            analyzer.bind(var, ir.Range.from_min_extent(begin, extent))

    def of_loop(loop: tirx.For) -> None:
        runs(loop.loop_var, loop.min, loop.extent)

    def of_block(block: Any) -> None:
        for axis in block.iter_vars:
            runs(axis.var, axis.dom.min, axis.dom.extent)

    def of_name(bound: tirx.Bind) -> None:
        values[bound.var] = known(bound.value)

    def of_alias(declared: tirx.DeclBuffer) -> None:
        data = declared.data
        if isinstance(data, ir.Call) and len(data.args) == 1:
            whole[declared.buffer] = whole.get(data.args[0], data.args[0])

    def of_load(load: ir.TensorLoad) -> None:
        found = [_stretch(known(index), running, analyzer) for index in load.indices]
        before = loads.get(load.source)
        loads[load.source] = found if before is None else [a.joined(b) for a, b in zip(before, found, strict=True)]

    structural_walk(
        func.body,
        [
            (tirx.For, of_loop),
            (s_tir.SBlock, of_block),
            (tirx.Bind, of_name),
            (tirx.DeclBuffer, of_alias),
            (ir.TensorLoad, of_load),
        ],
        order="pre",
    )
    parts: dict[tirx.Var, float] = {}
    params = set(func.params)
    for buffer, stretches in loads.items():
        argument = whole.get(buffer, buffer)
        if argument not in params:
            continue
        shape = [analyzer.simplify(known(extent)) for extent in buffer.ty.shape]
        if not all(isinstance(extent, tirx.IntImm) for extent in shape):
            parts[argument] = 1.0
            continue
        shape = [int(extent) for extent in shape]
        read = math.prod(s.extent(n) for s, n in zip(stretches, shape)) / max(1, math.prod(shape))
        parts[argument] = max(parts.get(argument, 0.0), read)
    return [parts.get(param, 0.0) for param in func.params]


def _stretch(index: Any, running: set[tirx.Var], analyzer: Analyzer) -> _Stretch:
    """Return the stretch of one index."""
    if isinstance(index, tirx.Ramp):
        first = _stretch(index.base, running, analyzer)
        lanes = int(index.lanes)
        return _Stretch(0, float("inf")) if first.place is not None else _Stretch(first.first, first.last + lanes - 1)
    if isinstance(index, int | tirx.IntImm):
        return _Stretch(int(index), int(index))
    if not any(var in running for var in tirx.analysis.undefined_vars(index)):
        return _Stretch(0, 0, index)
    bound = analyzer.const_int_bound(index)
    return _Stretch(int(bound.min_value), int(bound.max_value))
