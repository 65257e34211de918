"""Count the kernels of a compiled module by region, and the bytes between them; keep verdicts with their regions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm import ir, relax, s_tir, tirx
from tvm.sym.analyzer import Analyzer
from tvm_ffi import structural_walk

from crossloom.flow import CPU, Step, steps
from crossloom.importers.implied_sizes import bind_implied_sizes
from crossloom.importers.unify import substitute
from crossloom.model import Model
from crossloom.passes.annotate_semantic_regions import AnnotateSemanticRegions
from crossloom.rewrite import Graph, children
from crossloom.semantics import Region, assign, regions_of, weights_of
from crossloom.verdict import Ledger, Verdict

from .fusion_reads import shares_read

#: Symbolic dimensions count as this many elements, or as their upper bound where that is smaller.
LENGTH = 64
_CALLS = ("relax.call_tir", "relax.call_tir_inplace", "relax.call_dps_packed", "relax.call_pure_packed")
_ALIASES = ("relax.reshape", "relax.memory.view", "relax.memory.ensure_zero_offset")
#: Scheduling changes no number counted here, and takes most of the time.
_LEFT_OUT = ("schedule-cpu",)
_ANNOTATE = "annotate-semantic-regions"


def unfused() -> list[str]:
    """Return the passes that fusion adds to the pipeline."""
    return [name for name in CPU if name.partition("{")[0].startswith(("fuse-", "lower-fused-", "fold-"))]


@dataclass(frozen=True)
class Kernel:
    """One call: its function, the region it belongs to (-1: none), and the bytes of activations it moves.

    ``inner_bytes`` are of buffers of its own (scores of attention, normed rows); registers and tiles are none.
    """

    name: str
    region: int
    read_bytes: int
    written_bytes: int
    inner_bytes: int = 0


@dataclass
class Entry:
    """An entry's kernels.

    Attributes
    ----------
    regions : list of Region
    kernels : list of Kernel
    between_bytes : int
        Of values that one kernel makes and another reads, and of kernels' own buffers, each once.
    outside_bytes : int
        Of the inputs that are read and of the results: no fusion can do without moving these once.
    """

    regions: list[Region]
    kernels: list[Kernel]
    between_bytes: int = 0
    outside_bytes: int = 0

    @property
    def traffic_bytes(self) -> int:
        """Activations read and written, weights aside; a kernel's own buffers are written once and read once."""
        return sum(k.read_bytes + k.written_bytes + 2 * k.inner_bytes for k in self.kernels)

    def by_region(self) -> dict[str, list[str]]:
        """Return the kernels of each region by its name; those of no region under ``""``."""
        out: dict[str, list[str]] = {region.name: [] for region in self.regions}
        for kernel in self.kernels:
            out.setdefault(self.regions[kernel.region].name if kernel.region >= 0 else "", []).append(kernel.name)
        return out


@dataclass
class Count:
    """A model's entries, and every verdict with the entry's region at whose binding it was given (None: nowhere)."""

    entries: dict[str, Entry]
    verdicts: list[tuple[Verdict, str | None]] = field(default_factory=list)


def count(model: Model, target: Any, disabled: Iterable[str] = (), text: str | None = None) -> Count:
    """Run the pipeline, weights unfolded and kernels unscheduled, and count what is left.

    Parameters
    ----------
    model : Model
    target : crossloom.targets.Target
    disabled : iterable of str
        Passes to leave out.
    text : str or None
        Textual pipeline instead of the target's own.
    """
    mod = bind_implied_sizes(model).mod
    out = Count({})
    chosen = steps(target, text, [*disabled, *_LEFT_OUT])
    with target.tvm_target():
        for step in chosen:
            places = _places(mod)
            with Ledger() as ledger:
                mod = step.run(mod)
                if step.text.name == "canonicalize-transformer" and not any(s.text.name == _ANNOTATE for s in chosen):
                    mod = AnnotateSemanticRegions()(mod)
            out.verdicts += [(v, places.get(v.function, {}).get(v.site)) for v in ledger]
        # What turns into another name of the same memory is no kernel.
        mod = relax.transform.RewriteDataflowReshape()(mod)
    for name, entry in model.entries.items():
        out.entries[name] = _entry(mod, mod[name], name, entry.upper_bounds)
    return out


def _places(mod: ir.IRModule) -> dict[str, dict[str, str]]:
    """Return the region's name of every binding, by function and variable."""
    out: dict[str, dict[str, str]] = {}
    for gvar, func in mod.functions_items():
        if isinstance(func, relax.Function) and (regions := regions_of(func)):
            placed = assign(Graph(gvar.name_hint, func, mod))
            out[gvar.name_hint] = {v.name: regions[n].name for v, n in placed.items() if n >= 0}
    return out


def _entry(mod: ir.IRModule, func: relax.Function, name: str, bounds: Mapping[str, int]) -> Entry:
    graph = Graph(name, func, mod)
    placed = assign(graph)
    sizes = _Sizes(bounds)
    of_weights: set[relax.Var] = set(weights_of(graph))
    alias: dict[relax.Var, relax.Var] = {}
    part_of: dict[relax.Var, relax.Var] = {}
    made: dict[relax.Var, int] = {}
    read: set[relax.Var] = set()
    out = Entry(regions_of(func), [])
    for var in graph.order:
        value = graph.value[var]
        operands = [alias.get(leaf, leaf) for leaf in children(value) if isinstance(leaf, relax.Var)]
        operands = [leaf for leaf in operands if isinstance(leaf.ty, relax.TensorType | relax.TupleType)]
        if operands and all(leaf in of_weights for leaf in operands):
            of_weights.add(var)
            continue
        if isinstance(value, relax.TupleGetItem | relax.Tuple) or not isinstance(value, relax.Call):
            if isinstance(value, relax.TupleGetItem) and operands:
                part_of[var] = operands[0]
            elif not isinstance(value, relax.Tuple) and operands:
                alias[var] = operands[0]
            continue
        op = graph.op(var)
        if op in _ALIASES or var in graph.casts:
            alias[var] = operands[0] if operands else var
            continue
        if op not in _CALLS and not op.startswith("relax."):
            raise ValueError(f"{name}: {var.name} calls {value.op}, which is no kernel")
        given = list(dict.fromkeys(leaf for leaf in operands if leaf not in of_weights))
        written = sizes.bytes(var.ty)
        kernel, known = _called(mod, value, var, sizes) if op in _CALLS else (None, {})
        inner = 0 if kernel is None else _inner_bytes(kernel, known, sizes)
        share = dict.fromkeys(given, 1.0)
        if kernel is not None:
            share = dict.fromkeys(given, 0.0)
            for part, leaf in zip(shares_read(kernel, known), _arguments(value)):
                at = alias.get(leaf, leaf)
                if at in share:
                    share[at] = max(share[at], part)
        read_bytes = round(sum(sizes.bytes(v.ty) * share[v] for v in given))
        out.kernels.append(_kernel(value, op, placed[var], read_bytes, written, inner))
        made[var] = written
        read.update(part_of.get(leaf, leaf) for leaf in given)
    inputs = [param for param in func.params if param not in graph.weights and param in read]
    out.outside_bytes = sum(sizes.bytes(param.ty) for param in inputs) + sizes.bytes(func.ret_ty)
    out.between_bytes = sum(size for var, size in made.items() if var in read)
    out.between_bytes += sum(kernel.inner_bytes for kernel in out.kernels)
    return out


def _arguments(call: relax.Call) -> list[relax.Expr]:
    return list(getattr(call.args[1], "fields", (call.args[1],)))


def _called(
    mod: ir.IRModule, call: relax.Call, var: relax.Var, sizes: _Sizes
) -> tuple[tirx.PrimFunc | None, dict[tirx.Var, int]]:
    """Return the kernel that is called and its symbolic sizes; None for one that is not of the module."""
    func = mod[call.args[0]] if isinstance(call.args[0], ir.GlobalVar) else None
    if not isinstance(func, tirx.PrimFunc):
        return None, {}
    results = list(var.ty.fields) if isinstance(var.ty, relax.TupleType) else [var.ty]
    known: dict[tirx.Var, int] = {}
    for param, ty in zip(func.params, [*(operand.ty for operand in _arguments(call)), *results]):
        for extent, size in zip(getattr(param.ty, "shape", ()), sizes.shape(ty)):
            if isinstance(extent, tirx.Var):
                known[extent] = size
    return func, known


def _inner_bytes(func: tirx.PrimFunc, known: Mapping[tirx.Var, int], sizes: _Sizes) -> int:
    """Return the bytes of the buffers that a kernel makes for itself."""
    buffers = [*_between_reductions(func), *_own(func)]
    shapes = [[sizes.number(extent, known) for extent in buffer.shape] for buffer in buffers]
    return sum(int(np.prod(n, dtype=np.int64)) * item_bytes(str(b.dtype)) for n, b in zip(shapes, buffers))


def _own(func: tirx.PrimFunc) -> list[Any]:
    """Return the buffers that a kernel of ours makes, registers and what a tile keeps aside."""
    out: list[Any] = []

    def of_statement(node: Any) -> None:
        if node.buffer.scope() in ("", "global"):
            out.append(node.buffer)

    structural_walk(func.body, (tirx.AllocBuffer, of_statement))
    return out


def _between_reductions(func: tirx.PrimFunc) -> list[Any]:
    """Return the buffers in which sums wait for other sums (scores of attention): no schedule can do without them.

    What is between a sum and the elementwise lines behind it is inlined, or kept in a tile, and counts nothing.
    """
    blocks: list[Any] = []

    def of_block(block: Any) -> None:
        if list(block.writes):
            blocks.append(block)

    structural_walk(func.body, (s_tir.SBlock, of_block))
    writer = {region.source: block for block in blocks for region in block.writes}
    params = {region.source for block in blocks for region in block.reads if region.source not in writer}
    out: dict[Any, None] = {}
    for block in (one for one in blocks if _reduces(one)):
        todo = [region.source for region in block.reads]
        seen = set(todo)
        for buffer in todo:
            made = writer.get(buffer)
            if made is None or buffer in params or made.same_as(block):
                continue
            if _reduces(made):
                out[buffer] = None
                continue
            more = [region.source for region in made.reads if region.source not in seen]
            seen.update(more)
            todo += more
    return list(out)


def _reduces(block: Any) -> bool:
    return block.init is not None


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element."""
    return 1 if dtype == "bool" else 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _kernel(call: relax.Call, op: str, region: int, read: int, written: int, inner: int) -> Kernel:
    called = call.args[0] if op in _CALLS else None
    name = getattr(called, "name_hint", None) or getattr(called, "global_symbol", None) or op
    return Kernel(str(name), region, read, written, inner)


class _Sizes:
    """Bytes of values whose symbolic dimensions are given a size."""

    def __init__(self, bounds: Mapping[str, int]) -> None:
        self.bounds = bounds

    def bytes(self, ty: relax.Type) -> int:
        """Return the bytes of a tensor, or of all in a tuple; 0 for anything else."""
        if isinstance(ty, relax.TupleType):
            return sum(self.bytes(part) for part in ty.fields)
        shape = self.shape(ty)
        return int(np.prod(shape, dtype=np.int64)) * item_bytes(str(ty.dtype)) if self._known(ty) else 0

    @staticmethod
    def _known(ty: relax.Type) -> bool:
        return isinstance(ty, relax.TensorType) and ty.shape is not None and hasattr(ty.shape, "values")

    def shape(self, ty: relax.Type) -> list[int]:
        """Return the sizes of a tensor, none where they are unknown."""
        return [self.number(extent) for extent in ty.shape] if self._known(ty) else []

    def number(self, extent: Any, known: Mapping[tirx.Var, int] | None = None) -> int:
        """Return a size, with the variables given or else those of the entry."""
        if isinstance(extent, int | tirx.IntImm):
            return int(extent)
        values: dict[tirx.Var, ir.Expr] = {}
        for var in tirx.analysis.undefined_vars(extent):
            given = known.get(var) if known is not None else None
            size = min(LENGTH, self.bounds.get(var.name, LENGTH)) if given is None else given
            values[var] = tirx.const(size, var.ty.dtype)
        return max(0, int(Analyzer().simplify(substitute(extent, values))))


__all__ = ["LENGTH", "Count", "Entry", "Kernel", "Step", "count", "unfused"]
