"""Walk a module's operator calls: their tensors, attributes, and the facts that table rows ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tvm
from tvm import relax

#: Facts about a call that rows may ask for (``when.features``), beyond shapes, types and attributes.
FEATURES = {
    "dynamic": "some dimension of an argument or of the result is not known",
    "stepped": "a slice with a step other than one",
    "scalar-input": "a 0-dimensional input of the function",
    "runtime-indices": "indices that are not constant",
    "runtime-exponent": "a power whose exponent is a computed tensor",
    "runtime-weight": "a convolution or matmul whose second argument is computed, not a weight",
    "float-to-int": "a cast from a floating to an integer type",
    "large-kernel": "pooling over more than 13 elements along an axis",
}

#: Operators whose second argument holds indices.
INDEXED = {
    "relax.take",
    "relax.gather_elements",
    "relax.gather_nd",
    "relax.scatter_elements",
    "relax.scatter_nd",
}
#: Operators whose second argument is a weight where the toolchains want one.
WEIGHTED = {"relax.matmul", "relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d"}

#: A string is a dimension that is not known.
Shape = Sequence[int | str]


def tensor(expr: Any) -> tuple[tuple[int | str, ...], str] | None:
    """Return (shape, dtype) of a tensor expression; an unknown rank gives the symbolic ``("?",)``."""
    ty = expr.ty if isinstance(expr, relax.Expr) else expr
    if not isinstance(ty, relax.TensorType):
        return None
    shape = ty.shape
    dims = ("?",) if not isinstance(shape, relax.ShapeExpr) else tuple(map(dim, shape.values))
    return dims, str(ty.dtype)


def dim(value: Any) -> int | str:
    """Return a dimension as a number, or the text of one that is not known."""
    return int(value) if isinstance(value, (int, tvm.tirx.IntImm)) else str(value)


def tensors(expr: Any) -> Iterator[tuple[tuple[int | str, ...], str]]:
    """Yield (shape, dtype) of each tensor of an argument or result, those of a tuple one by one."""
    if isinstance(expr, relax.Tuple):
        for part in expr.fields:
            yield from tensors(part)
        return
    found = tensor(expr)
    if found is not None:
        yield found
    elif isinstance(expr, relax.Expr) and isinstance(expr.ty, relax.TupleType):
        for part in expr.ty.fields:
            inner = tensor(part)
            if inner is not None:
                yield inner


def calls(function: relax.Function) -> Iterator[tuple[str, relax.Call, set[Any]]]:
    """Yield (binding, call, what is constant) for each operator call, also in nested functions."""
    count = function.attrs.get("num_input") if function.attrs is not None else None
    fixed: set[Any] = set(function.params[int(count) :]) if count is not None else set()

    def walk(expr: Any, name: str) -> Iterator[tuple[str, relax.Call, set[Any]]]:
        if isinstance(expr, relax.SeqExpr):
            for block in expr.blocks:
                for binding in block.bindings:
                    inner = binding.value
                    yield from walk(inner, binding.var.name)
                    # What weights and constants alone give is folded before any tool chain sees it.
                    parts = inner.args if isinstance(inner, relax.Call) else [inner]
                    if isinstance(inner, (relax.Call, relax.Var)) and all(constant(p, fixed) for p in parts):
                        fixed.add(binding.var)
            yield from walk(expr.body, name)
        elif isinstance(expr, relax.Call):
            if isinstance(expr.op, tvm.ir.Op):
                yield name, expr, fixed
            for arg in expr.args:
                if isinstance(arg, relax.Call):
                    yield from walk(arg, name)
        elif isinstance(expr, relax.If):
            yield from walk(expr.true_branch, name)
            yield from walk(expr.false_branch, name)
        elif isinstance(expr, relax.Function):
            yield from walk(expr.body, name)

    yield from walk(function.body, "return")


def constant(expr: Any, fixed: set[Any]) -> bool:
    """Say whether an argument is known when the model is built; ``fixed`` holds the variables that are."""
    if isinstance(expr, relax.Var):
        return expr in fixed
    if isinstance(expr, relax.Tuple):
        return all(constant(part, fixed) for part in expr.fields)
    return not isinstance(expr, (relax.Call, relax.TupleGetItem))


def features_of(call: relax.Call, fixed: set[Any], result_dtype: str) -> tuple[str, ...]:
    """Return which of :data:`FEATURES` hold for a call, beyond its shapes."""
    op, args, found = call.op.name, call.args, []
    if op == "relax.strided_slice" and len(args) > 4 and isinstance(args[4], relax.Tuple):
        steps = [
            getattr(getattr(step, "value", step), "value", getattr(step, "value", step)) for step in args[4].fields
        ]
        found += ["stepped"] * any(str(step) != "1" for step in steps)
    if op in INDEXED and len(args) > 1 and not constant(args[1], fixed):
        found.append("runtime-indices")
    if op == "relax.power" and not constant(args[1], fixed):
        found.append("runtime-exponent")
    if op in WEIGHTED and not constant(args[1], fixed):
        found.append("runtime-weight")
    if op == "relax.astype":
        source = tensor(args[0])
        if source is not None and "float" in source[1] and "int" in result_dtype:
            found.append("float-to-int")
    pool = getattr(call.attrs, "pool_size", None) if call.attrs is not None else None
    if pool is not None and any(isinstance(d := dim(p), int) and d > 13 for p in pool):
        found.append("large-kernel")
    return tuple(found)


def attrs_of(call: relax.Call) -> Mapping[str, str]:
    """Return the attributes that rows may ask for, as text."""
    if call.attrs is None:
        return {}
    names = ("method", "k", "axis", "layout", "data_layout", "mode")
    return {name: str(value) for name in names if (value := getattr(call.attrs, name, None)) is not None}


def functions(mod: tvm.ir.IRModule) -> list[tuple[str, relax.Function]]:
    """Return the Relax functions of a module by name, sorted."""
    found = [(gv.name_hint, fn) for gv, fn in mod.functions.items() if isinstance(fn, relax.Function)]
    return sorted(found, key=lambda pair: pair[0])
