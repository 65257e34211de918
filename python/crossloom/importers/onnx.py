"""ONNX -> Model, through TVM's frontend and with what it lacks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tvm
from tvm import relax

from crossloom.errors import UnsupportedModel
from crossloom.importers import onnx_check, onnx_convert
from crossloom.importers.gather import bound_gathers
from crossloom.importers.onnx_bounds import narrowed
from crossloom.importers.onnx_branches import flatten_branches
from crossloom.importers.onnx_load import WEIGHT_TYPES, WIDENED, has_nan, load, read_tensor
from crossloom.importers.onnx_quantized import fold_dequantize, fold_matmul_nbits
from crossloom.importers.onnx_scatter import masked_scatters
from crossloom.importers.onnx_shapes import input_types
from crossloom.importers.onnx_tables import tables
from crossloom.importers.signature import dimension
from crossloom.importers.unused import drop_unused
from crossloom.model import Entry, Model, TensorSpec

_INLINE_ELEMENTS = 4096


def from_onnx(
    source: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    entry: str = "main",
    input_shapes: Mapping[str, Sequence[int | str]] | None = None,
    modality: str = "",
    upper_bounds: Mapping[str, int] | None = None,
) -> Model:
    """Import an ONNX model.

    Parameters
    ----------
    source : str, path, bytes or onnx.ModelProto
        External data are read only for a path, and only from the model's own folder.
    entry : str
        Name of the Relax function.
    input_shapes : mapping of str to sequence of int or str, optional
        Shapes by input; fixes or names dynamic axes.
    modality : str
    upper_bounds : mapping of str to int, optional
        Largest value of symbolic dimensions (elements).

    Returns
    -------
    Model
        Initializers become weights, except integers and scalars, which are inlined.  An initializer that is
        also a graph input stays an input; its default is ``model.params[<input name>]``, a key that no
        entry lists among its weights.  Symbolic dimensions that the graph's constants fix are fixed; those they
        bound from below are in ``lower_bounds``.

    Raises
    ------
    UnsupportedModel
        The model is broken or uses something without a converter; the message names it.
    UsageError
        The file is missing or `input_shapes` does not fit.
    """
    model, folder = load(source)
    try:
        return _import(model, folder, entry, input_shapes, modality, upper_bounds or {})
    except UnicodeDecodeError as err:
        raise UnsupportedModel(
            f"a name in the model is not UTF-8 text: {err.object[:40]!r}", "the file is damaged; export it again"
        ) from err


def _import(
    model: onnx.ModelProto,
    folder: Path | None,
    entry: str,
    input_shapes: Mapping[str, Sequence[int | str]] | None,
    modality: str,
    upper_bounds: Mapping[str, int],
) -> Model:
    graph = model.graph
    if model.functions:
        try:
            model = onnx.inliner.inline_local_functions(model)
        except Exception as err:
            raise UnsupportedModel(f"local functions cannot be inlined: {err}", "inline them") from err
        graph = model.graph
    opset = onnx_check.opset_of(model)
    onnx_check.move_runtime_operators(graph)
    onnx_check.check_values(graph)
    onnx_check.check_operators(graph, onnx_convert.supported)
    onnx_check.check_attributes(graph)
    shapes = input_types(graph, input_shapes)
    if input_shapes:
        del graph.value_info[:]
        for value in graph.output:
            value.type.tensor_type.ClearField("shape")
    onnx_check.check_graph(model)
    guarded = flatten_branches(graph)
    constants, weights, defaults, nodes = _split(graph, folder, opset)
    converted = onnx.GraphProto(name=graph.name)
    converted.node.extend(nodes)
    converted.input.extend(graph.input)
    converted.output.extend(graph.output)
    mod, fixed, lower = onnx_convert.convert(converted, opset, shapes, constants, weights, guarded)
    upper = narrowed(upper_bounds, fixed, lower)
    return _finish(mod, graph, weights, defaults, entry, modality, upper, lower)


def _split(
    graph: onnx.GraphProto, folder: Path | None, opset: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray], list[onnx.NodeProto]]:
    """Read the initializers and fold the nodes that only spell out a weight (Cast, DequantizeLinear)."""
    inputs = {value.name for value in graph.input}
    tensors: dict[str, np.ndarray] = {}
    defaults: dict[str, np.ndarray] = {}
    for tensor in graph.initializer:
        array = read_tensor(tensor, folder)
        (defaults if tensor.name in inputs else tensors)[tensor.name] = array
    nodes = []
    for node in graph.node:
        folded = _fold(node, tensors, opset, folder)
        if folded is None:
            nodes.append(node)
            continue
        if has_nan(folded):
            raise UnsupportedModel(f"tensor '{node.output[0]}': holds NaN", "the weights are damaged")
        if node.op_type == "MatMulNBits":
            name = node.input[1] if node.input[1] + ".dequantized" not in tensors else node.output[0]
            tensors[name + ".dequantized"] = folded
            nodes += _linear(node, name + ".dequantized")
        else:
            tensors[node.output[0]] = folded
    nodes = masked_scatters(nodes, [o.name for o in graph.output], tensors)
    for node in nodes:
        _clamp_slice(node, tensors)
    _mark_four_bit(graph, nodes)
    used = {n for node in nodes for n in onnx_check.reads(node)} | {o.name for o in graph.output}
    constants: dict[str, np.ndarray] = {}
    weights: dict[str, np.ndarray] = {}
    known = tables(nodes, tensors)
    for name, array in tensors.items():
        if name not in used:
            continue
        small_int = (array.dtype.kind in "iu" and array.dtype.itemsize >= 4) or array.dtype.kind == "b"
        inline = array.ndim == 0 or array.size == 1 or name in known
        inline = inline or (small_int and array.size <= _INLINE_ELEMENTS)
        (constants if inline else weights)[name] = array
    return constants, weights, defaults, nodes


def _mark_four_bit(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    """Write the type of a 4-bit zero point into its QuantizeLinear: the values themselves are widened."""
    kinds = {t.name: t.data_type for t in graph.initializer if t.data_type in WIDENED}
    for node in graph.node:
        value = next((a.t for a in node.attribute if a.name == "value"), None)
        if node.op_type == "Constant" and value is not None and value.data_type in WIDENED:
            kinds[node.output[0]] = value.data_type
        elif node.op_type == "Identity" and node.input[0] in kinds:
            kinds[node.output[0]] = kinds[node.input[0]]
    for node in onnx_check.walk_nodes(nodes):
        marked = len(node.input) > 2 and node.input[2] in kinds
        if node.op_type == "QuantizeLinear" and marked and all(a.name != "output_dtype" for a in node.attribute):
            node.attribute.append(onnx.helper.make_attribute("output_dtype", kinds[node.input[2]]))


def _clamp_slice(node: onnx.NodeProto, tensors: dict[str, np.ndarray]) -> None:
    """Bring "to the end" (INT64_MAX) into 32 bits: TVM reads it as -1 and drops the last element."""
    if node.op_type != "Slice":
        return
    # Before opset 10 the bounds were attributes, which TVM does not read.
    given = {a.name: list(a.ints) for a in node.attribute if a.name in ("starts", "ends", "axes")}
    if len(node.input) == 1 and "starts" in given and "ends" in given:
        given.setdefault("axes", list(range(len(given["starts"]))))
        for key in ("starts", "ends", "axes"):
            node.input.append(f"{node.output[0]}.{key}")
            tensors[node.input[-1]] = np.array(given[key], "int64")
        del node.attribute[:]
    limit = 2**31 - 1
    for index in (1, 2):
        name = node.input[index] if index < len(node.input) else ""
        if name in tensors and np.any(np.abs(tensors[name].astype("float64")) > limit):
            node.input[index] = name + ".clamped"
            tensors[name + ".clamped"] = np.clip(tensors[name], -limit, limit)


def _linear(node: onnx.NodeProto, weight: str) -> list[onnx.NodeProto]:
    """Spell MatMulNBits, its weight (N, K) now float, as Transpose, MatMul and Add."""
    y = node.output[0]
    make = onnx.helper.make_node
    bias = node.input[5] if len(node.input) > 5 else ""
    product = y + ".product" if bias else y
    label = {"name": node.name or y}
    out = [make("Transpose", [weight], [y + ".transposed"], perm=[1, 0], **label)]
    out.append(make("MatMul", [node.input[0], y + ".transposed"], [product], **label))
    if bias:
        out.append(make("Add", [product, bias], [y], **label))
    return out


def _fold(node: onnx.NodeProto, tensors: dict[str, np.ndarray], opset: int, folder: Path | None) -> np.ndarray | None:
    where = onnx_check.describe(node)
    attrs = {a.name: a for a in node.attribute}
    if node.domain == "com.microsoft" and node.op_type == "MatMulNBits":
        for index in range(1, len(node.input)):
            if node.input[index] and node.input[index] not in tensors and index != 5:
                raise UnsupportedModel(
                    f"{where}: operand '{node.input[index]}' is not constant", "store it as an initializer"
                )
        plain = {a.name: a.i for a in node.attribute}
        return fold_matmul_nbits(where, plain, [tensors.get(n) if n else None for n in node.input])
    if node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "Constant":
        if "value" in attrs:
            value = onnx.TensorProto()
            value.CopyFrom(attrs["value"].t)
            value.name = node.output[0]
            return read_tensor(value, folder)
        for name, dtype in (("value_int", "int64"), ("value_ints", "int64"), ("value_float", "float32")):
            if name in attrs:
                return np.asarray(onnx.helper.get_attribute_value(attrs[name]), dtype)
        if "value_floats" in attrs:
            return np.asarray(attrs["value_floats"].floats, "float32")
        raise UnsupportedModel(f"{where}: its kind of value is not supported", "store a tensor")
    if not node.input or any(n and n not in tensors for n in node.input):
        return None
    if node.op_type == "Identity":
        return tensors[node.input[0]]
    if node.op_type == "DequantizeLinear":
        plain = {a.name: a.i for a in node.attribute}
        return fold_dequantize(where, opset, plain, [tensors[n] if n else None for n in node.input])
    if node.op_type == "Cast" and "to" in attrs and attrs["to"].i in WEIGHT_TYPES:
        source = tensors[node.input[0]]
        if (attrs["to"].i not in WIDENED and source.dtype.kind != "f") or attrs["to"].i in (1, 10, 11, 16):
            return source.astype(WEIGHT_TYPES[attrs["to"].i])
    return None


def _dims(ty: Any, name: str) -> tuple[int | str, ...]:
    if ty.shape is None or not hasattr(ty.shape, "values"):
        return tuple(f"{name}_d{i}" for i in range(max(ty.ndim, 0)))
    return tuple(dimension(d) for d in ty.shape.values)


def _with_entry(mod: tvm.IRModule, entry: str, fn: relax.Function) -> tvm.IRModule:
    """Put the entry in the place of `main`, keeping the kernels that some of TVM's converters emit."""
    kept = {gv: f for gv, f in mod.functions_items() if gv.name_hint != "main"}
    if any(gv.name_hint == entry for gv in kept):
        raise UnsupportedModel(f"entry '{entry}' is the name of a kernel", "name the entry differently")
    out = tvm.IRModule(kept)
    out[entry] = fn
    return out


def _finish(
    mod: tvm.IRModule,
    graph: onnx.GraphProto,
    weights: dict[str, np.ndarray],
    defaults: dict[str, np.ndarray],
    entry: str,
    modality: str,
    upper_bounds: Mapping[str, int],
    lower_bounds: Mapping[str, int],
) -> Model:
    """Drop unused weights from the function and describe its inputs and outputs."""
    fn = mod["main"]
    count = len(graph.input)
    used = {v.name for v in relax.analysis.free_vars(fn.body)}
    names = list(weights)
    kept = [(n, v) for n, v in zip(names, fn.params[count:]) if n in used]
    params = list(fn.params[:count]) + [v for _, v in kept]
    fn = relax.Function(params, fn.body, fn.ret_ty, is_pure=bool(fn.is_pure))
    fn = fn.with_attrs({"num_input": count, "global_symbol": entry})
    mod = bound_gathers(_with_entry(mod, entry, fn), from_end=False)
    mod = relax.transform.DeadCodeElimination([entry])(drop_unused(mod))
    ret = mod[entry].ret_ty
    fields = list(ret.fields) if isinstance(ret, relax.TupleType) else [ret]
    spec = lambda name, ty: TensorSpec(name, _dims(ty, name), str(ty.dtype))
    described = Entry(
        name=entry,
        inputs=tuple(spec(v.name, p.ty) for v, p in zip(graph.input, params)),
        outputs=tuple(spec(v.name, ty) for v, ty in zip(graph.output, fields)),
        weights=tuple(n for n, _ in kept),
        modality=modality,
        upper_bounds=dict(upper_bounds),
        lower_bounds=dict(lower_bounds),
    )
    values = {n: weights[n] for n, _ in kept} | defaults
    return Model(mod, values, {entry: described}, {entry: modality} if modality else {}, graph.name or "model")
