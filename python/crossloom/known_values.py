"""Fold-time arithmetic: what graph operators give on values that are known, by numpy."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import tvm
from tvm import relax, tirx

from .rewrite import Graph
from .verdict import record, refuse

#: TVM exports no name for the class of constants.
_CONSTANT = type(relax.const(0.0))


def _dtype(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def _static(ty: relax.Type) -> tuple[int, ...] | None:
    if not isinstance(ty, relax.TensorType) or ty.shape is None:
        return None
    dims = list(ty.shape)
    return tuple(int(d) for d in dims) if all(isinstance(d, tirx.IntImm) for d in dims) else None


def _permute(call: relax.Call, x: np.ndarray, *rest: np.ndarray) -> np.ndarray:
    axes = call.attrs.axes
    return np.transpose(x, None if axes is None else [int(a) for a in axes])


def _take(call: relax.Call, x: np.ndarray, indices: np.ndarray) -> np.ndarray | None:
    axis = None if call.attrs.axis is None else int(call.attrs.axis)
    extent = x.size if axis is None else x.shape[axis]
    # What an index outside gives depends on the operator's mode: that stays in the graph.
    inside = indices.size == 0 or (indices.min() >= 0 and indices.max() < extent)
    return np.take(x, indices, axis=axis) if inside else None


def _concat(call: relax.Call, *parts: np.ndarray) -> np.ndarray:
    axis = call.attrs.axis
    return np.concatenate(parts, axis=None if axis is None else int(axis))


def _astype(call: relax.Call, x: np.ndarray) -> np.ndarray | None:
    to = str(call.ty.dtype)
    if "float" not in str(x.dtype) or "int" not in to:
        return x
    bounds = np.iinfo(to)
    whole = np.trunc(x.astype("float64"))
    # What a number outside gives depends on the machine, and so does what is no number: that stays in the graph.
    inside = np.all((whole >= float(bounds.min)) & (whole < float(bounds.max) + 1))
    return x if inside else None


def _divide(call: relax.Call, x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    with np.errstate(all="ignore"):
        # Quotients of integers are rounded by the operator's own rule.
        return x / y if "float" in str(x.dtype) else None


def _of_floats(compute: Callable[[np.ndarray], np.ndarray]) -> Callable[..., np.ndarray | None]:
    def run(call: relax.Call, x: np.ndarray) -> np.ndarray | None:
        with np.errstate(all="ignore"):
            return compute(x) if "float" in str(x.dtype) else None

    return run


def _sum(call: relax.Call, x: np.ndarray) -> np.ndarray | None:
    axes = None if call.attrs.axis is None else tuple(int(a) for a in call.attrs.axis)
    return np.sum(x.astype("float64"), axis=axes) if "float" in str(x.dtype) else None


def _matmul(call: relax.Call, x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    # A product that is larger than its factors (low-rank weights) is not worth storing.
    floats = "float" in str(x.dtype) and "float" in str(y.dtype)
    if not floats or not {x.ndim, y.ndim} <= {1, 2}:
        return None
    rows, columns = x.shape[0] if x.ndim == 2 else 1, y.shape[1] if y.ndim == 2 else 1
    if rows * columns > x.size + y.size:
        return None
    return np.matmul(x.astype("float64"), y.astype("float64"))


def _by_tvm(call: relax.Call, *operands: np.ndarray) -> np.ndarray:
    """Run the operator itself: numpy has none that agrees with it."""
    params = [relax.Var(f"x{i}", arg.ty) for i, arg in enumerate(call.args[: len(operands)])]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        made = relax.Call(call.op, [*params, *call.args[len(params) :]], call.attrs, call.ty_args)
        builder.emit_func_output(builder.emit(made))
    run = relax.VirtualMachine(tvm.compile(builder.get(), "llvm"), tvm.cpu())["main"]
    return run(*(tvm.runtime.tensor(np.ascontiguousarray(x)) for x in operands)).numpy()


#: Operators whose other operands may be constants of the graph.
_WITH_CONSTANTS = frozenset(
    {"relax.add", "relax.subtract", "relax.multiply", "relax.divide", "relax.take", "relax.concat", "relax.matmul"}
)
#: Operator -> numpy on the operands' values; the result is reshaped and cast to the call's own type.
_COMPUTE: dict[str, Callable[..., np.ndarray | None]] = {
    "relax.permute_dims": _permute,
    "relax.reshape": lambda call, x, *rest: x,
    "relax.expand_dims": lambda call, x, *rest: x,
    "relax.squeeze": lambda call, x, *rest: x,
    "relax.astype": _astype,
    "relax.add": lambda call, x, y: x + y,
    "relax.subtract": lambda call, x, y: x - y,
    "relax.multiply": lambda call, x, y: x * y,
    "relax.divide": _divide,
    "relax.negative": lambda call, x: -x,
    "relax.sqrt": _of_floats(np.sqrt),
    "relax.rsqrt": _of_floats(lambda x: 1 / np.sqrt(x)),
    "relax.sum": _sum,
    "relax.take": _take,
    "relax.matmul": _matmul,
    "relax.concat": _concat,
    # Positions of a vision tower, brought to the size of its picture.
    "relax.image.resize2d": _by_tvm,
}


@dataclass(frozen=True)
class Known:
    """What is known of a function's bindings.

    Attributes
    ----------
    folded : set of relax.Var
        Bindings that depend on known values alone.
    values : dict of relax.Var to np.ndarray
        Of those that something else reads, or that are results.
    """

    folded: set[relax.Var]
    values: dict[relax.Var, np.ndarray]


def evaluate(
    graph: Graph, values: Mapping[relax.Var, np.ndarray], pass_name: str = "", constants: bool = False
) -> Known:
    """Compute the bindings that depend on known values alone.

    Parameters
    ----------
    graph : Graph
    values : mapping of relax.Var to np.ndarray
        Of parameters.
    pass_name : str
        Under which a binding of symbolic shape is refused.
    constants : bool
        Whether bindings of constants alone are among them.

    Notes
    -----
    Exact: numpy computes in the values' own dtype; sums are made in float64 and rounded once.  What only folded
    bindings read is let go of behind the last of them: a layer's weights are copied step by step, not all layers'.
    """
    folded: set[relax.Var] = set()
    found: dict[relax.Var, np.ndarray] = {}
    waiting: dict[relax.Var, int] = {}
    known_here = ChainMap(found, dict(values))
    for var in graph.order:
        value = _value(graph, var, known_here, pass_name, constants)
        if value is not None:
            folded.add(var)
            found[var] = value
            waiting[var] = len(set(graph.users.get(var, ()))) + (var in graph.escapes)
        read = {leaf for leaf in graph.leaves[var] if isinstance(leaf, relax.Var)}
        for leaf in (*(read & found.keys()), *([var] if value is not None else [])):
            # One that a binding reads which is not folded waits for good, and so does a result.
            waiting[leaf] -= leaf is not var and value is not None
            if not waiting[leaf]:
                del found[leaf]
    return Known(folded, found)


def _value(
    graph: Graph, var: relax.Var, values: Mapping[relax.Var, np.ndarray], pass_name: str, constants: bool
) -> np.ndarray | None:
    """Return the value of a binding, None where it is not known."""
    compute, call = _COMPUTE.get(graph.op(var)), graph.value[var]
    if compute is None or not isinstance(call, relax.Call):
        return None
    operands: list[np.ndarray] = []
    known = constants
    for arg in (f for a in call.args for f in (a.fields if isinstance(a, relax.Tuple) else (a,))):
        while isinstance(arg, relax.Var) and isinstance(graph.value.get(arg), (relax.Var, _CONSTANT)):
            arg = graph.value[arg]  # another name of it
        if isinstance(arg, relax.Var) and arg in values:
            operands.append(values[arg])
            known = True
        elif isinstance(arg, _CONSTANT) and (constants or graph.op(var) in _WITH_CONSTANTS):
            operands.append(arg.value.numpy())
        elif not isinstance(arg, relax.ShapeExpr):
            return None
    if not known or not operands:
        return None
    shape = _static(var.ty)
    if shape is None:
        record(refuse("symbolic-shape", var.name).at("fold-weights", graph.name, var.name, pass_name))
        return None
    value = compute(call, *operands)
    return None if value is None else value.astype(_dtype(str(var.ty.dtype)), copy=False).reshape(shape)
