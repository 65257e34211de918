"""Drive TVM's ONNX frontend node by node, with added converters and errors that name the node."""

from __future__ import annotations

import contextlib
import io
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import tvm
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend as frontend

from crossloom.errors import CrossloomError, UnsupportedModel
from crossloom.importers import onnx_shaped
from crossloom.importers.blocks import close_blocks
from crossloom.importers.onnx_affine import AFFINE
from crossloom.importers.onnx_attention import ATTENTION
from crossloom.importers.onnx_bounds import BOUNDING, Bounds, with_sizes
from crossloom.importers.onnx_branches import DOMAIN, SELECT
from crossloom.importers.onnx_check import LOOPS, describe, reads
from crossloom.importers.onnx_contrib import NORMS, Call, Converter
from crossloom.importers.onnx_elementwise import BROADCASTS, ELEMENTWISE, check_broadcast
from crossloom.importers.onnx_evaluators import evaluate
from crossloom.importers.onnx_gather import GATHERS
from crossloom.importers.onnx_pool import POOLS
from crossloom.importers.onnx_reduce import REDUCTIONS
from crossloom.importers.onnx_resize import RESIZES
from crossloom.importers.onnx_scatter import SCATTERS
from crossloom.importers.onnx_symbolic import ShapeMath, Value

CONVERTERS: dict[tuple[str, str], Converter] = {
    **NORMS,
    **AFFINE,
    **ATTENTION,
    **GATHERS,
    **RESIZES,
    **POOLS,
    **REDUCTIONS,
    **ELEMENTWISE,
    **SCATTERS,
}
_FROM_TVM_MICROSOFT = ("FastGelu", "BiasGelu", "Gelu", "Attention", "EmbedLayerNormalization")
#: TVM's converter table holds com.microsoft names too; these are not the standard's operator of that name.
_NOT_STANDARD = ("FastGelu", "BiasGelu", "Attention", "EmbedLayerNormalization", "SkipLayerNormalization")


def supported(domain: str, op_type: str) -> bool:
    """Tell whether a node of that domain and type has a converter."""
    domain = "" if domain == "ai.onnx" else domain
    if (domain, op_type) in CONVERTERS or (domain, op_type) == ("com.microsoft", "MatMulNBits"):
        return True
    if domain == "com.microsoft":
        return op_type in _FROM_TVM_MICROSOFT
    return (
        domain == ""
        and op_type not in _NOT_STANDARD
        and op_type not in LOOPS
        and (op_type in ("If", "Constant") or op_type in frontend._get_convert_map())
    )


class Importer(frontend.ONNXGraphImporter):
    """TVM's importer with weights as parameters, inputs by given shapes, and added operators.

    Parameters
    ----------
    shapes : dict of str to list
        Shape of every input.
    constants : dict of str to numpy.ndarray
        Tensors inlined into the function.
    weights : dict of str to numpy.ndarray
        Tensors that become parameters after the inputs.
    guarded : set of str
        Names made inside branches, whose nodes may fail until somebody wants them.
    """

    def __init__(
        self,
        shapes: dict[str, Any],
        constants: dict[str, np.ndarray],
        weights: dict[str, np.ndarray],
        guarded: set[str],
    ) -> None:
        super().__init__(shapes, {}, keep_params_in_input=True, sanitize=False)
        self.constants, self.weights = constants, dict(weights)
        self.guarded = guarded
        self.failed: dict[str, UnsupportedModel] = {}
        self.math = ShapeMath()
        self.bounds = Bounds(self.math)
        self.values: dict[str, Value] = {}

    def _parse_graph_initializers(self, graph: onnx.GraphProto) -> None:
        for name, array in self.constants.items():
            # Without a dtype relax.const narrows int64 and float64 arrays to 32 bits.
            self._nodes[name] = relax.const(array, array.dtype.name)
            value = Value.of(array)
            if value is not None:
                self.values[name] = value
        for name, array in self.weights.items():
            var = self._new_var(name, shape=array.shape, dtype=array.dtype.name)
            self._nodes[name] = var
            self._params[name] = (var, array)

    def _check_for_unsupported_ops(self, graph: onnx.GraphProto) -> None:
        """Done on the whole graph, nested ones included, before."""

    def _construct_nodes(self, graph: onnx.GraphProto) -> None:
        for node in graph.node:
            where = describe(node)
            try:
                self._want(node)
                self._one(node, where)
            except Exception as err:
                error = err if isinstance(err, CrossloomError) else _unconvertible(where, err)
                if not isinstance(error, UnsupportedModel) or not self.guarded.intersection(node.output):
                    raise error from err
                self.failed.update(dict.fromkeys(node.output, error))
        self._want(onnx.NodeProto(input=[value.name for value in graph.output]))
        for value in graph.output:
            self._materialise([value.name])
            expr = self._nodes[value.name]
            if isinstance(expr.ty, relax.ShapeType):
                self._nodes[value.name] = self.bb.emit(relax.op.shape_to_tensor(expr))

    def _want(self, node: onnx.NodeProto) -> None:
        """Raise what kept an operand from being made; a select node asks for itself."""
        failed = None if node.op_type == SELECT else next((n for n in node.input if n in self.failed), None)
        if failed is not None:
            raise self.failed[failed]

    def _select(self, node: onnx.NodeProto, where: str) -> None:
        """Take one branch's result where the condition is known, else choose element by element."""
        condition, (output,) = node.input[0], node.output
        self._want(onnx.NodeProto(input=[condition]))
        known = self.values.get(condition)
        if known is not None and known.constant:
            name = node.input[1 if known.list()[0] else 2]
            self._want(onnx.NodeProto(input=[name]))
            if name in self.values:
                self.values[output] = self.values[name]
            else:
                self._nodes[output] = self._nodes[name]
            return
        self._want(onnx.NodeProto(input=list(node.input)))
        self._materialise(list(node.input))
        flag, first, second = (self._nodes[name] for name in node.input)
        self._nodes[output] = onnx_shaped.select(self.math, where, self.bb, flag, first, second)

    def _one(self, node: onnx.NodeProto, where: str) -> None:
        domain = "" if node.domain == "ai.onnx" else node.domain
        if (domain, node.op_type) == (DOMAIN, SELECT):
            self._select(node, where)
            return
        if domain == "" and self._shape_arithmetic(node, where):
            return
        self._materialise(reads(node))
        if domain == "" and node.op_type in BROADCASTS:
            check_broadcast(self.math, where, [self._nodes[n] if n else None for n in node.input])
        arrays = [self.constants.get(n, self.weights.get(n)) if n else None for n in node.input]
        # What a branch asks counts only when it is taken.
        if domain == "" and node.op_type in BOUNDING and not self.guarded.intersection(node.output):
            second = self.values.get(node.input[1], arrays[1]) if len(node.input) > 1 else None
            self.bounds.note(node, where, self._nodes[node.input[0]], second, self._parse_attr(node.attribute))
        converter = CONVERTERS.get((domain, node.op_type))
        if converter is not None:
            inputs = [self._nodes[n] if n else None for n in node.input]
            known = [self.values.get(n) if n else None for n in node.input]
            attrs = self._parse_attr(node.attribute)
            call = Call(where, self.bb, inputs, attrs, arrays, list(node.output), known, self.opset)
            for name, expr in zip(node.output, converter(call)):
                if name and expr is not None:
                    self._nodes[name] = expr
                    if isinstance(expr, tvm.ir.GenericConst):
                        self.constants[name] = expr.value.numpy()
                elif name:
                    raise UnsupportedModel(f"{where}: output '{name}' is not supported", "do not use it")
            return
        shim = SimpleNamespace(node=[node])
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                super()._construct_nodes(shim)
        except Exception:
            # Some of TVM's converters need a value where we gave a parameter: offer the values once.
            names = [n for n in node.input if n in self.weights]
            if not names:
                raise
            for name in names:
                self._nodes[name] = relax.const(self.weights[name], self.weights[name].dtype.name)
            with contextlib.redirect_stdout(io.StringIO()):
                super()._construct_nodes(shim)

    def _materialise(self, names: list[str]) -> None:
        """Turn values into tensors where they are read as such."""
        for name in names:
            if name in self.values and name not in self._nodes:
                self._nodes[name] = self.values[name].tensor(self.bb)

    def _shape_arithmetic(self, node: onnx.NodeProto, where: str) -> bool:
        """Evaluate a node on known values, or convert one whose shape operand is a known value."""
        op_type, m = node.op_type, self.math
        given = [self.values.get(n) for n in node.input]
        if not node.input or not node.output:
            return False
        data = None if given[0] is not None else self._nodes.get(node.input[0])
        if data is not None and not hasattr(data.ty, "shape"):
            return False
        symbolic = any(v is not None and not v.constant for v in given)
        attrs = self._parse_attr(node.attribute) if not any(a.HasField("g") for a in node.attribute) else {}
        value: Value | None = None
        if op_type == "Shape" and given[0] is not None:
            value = Value.of(np.array(given[0].items.shape[attrs.get("start", 0) : attrs.get("end")], "int64"))
        elif op_type == "Shape" and data is not None:
            value = onnx_shaped.shape_value(data, attrs)
        elif op_type == "Cast" and given[0] is None and node.input[0] in self.constants:
            kind = {6: "int32", 7: "int64"}.get(attrs["to"])
            value = Value.of(self.constants[node.input[0]].astype(kind)) if kind else None
        elif op_type == "ConstantOfShape" and given[0] is not None and given[0].constant:
            value = onnx_shaped.filled_value(given[0], attrs)
        elif op_type == "Size" and data is not None:
            value = onnx_shaped.size_value(m, data)
        elif all(v is not None or not n for v, n in zip(given, node.input)):
            value = evaluate(m, op_type, given, attrs)
        if value is not None:
            self.values[node.output[0]] = value
            return True
        expr: Any = None
        if op_type in ("Reshape", "Expand") and len(given) > 1 and given[1] is not None:
            self._materialise([node.input[0]])
            data = self._nodes[node.input[0]]
            if op_type == "Reshape":
                expr = onnx_shaped.reshape(m, where, self.bb, data, given[1], attrs)
            else:
                expr = onnx_shaped.expand(m, where, self.bb, data, given[1])
        elif op_type == "ConstantOfShape" and given[0] is not None:
            expr = onnx_shaped.constant_of_shape(self.bb, given[0], attrs)
        elif op_type == "Range" and symbolic and all(v is not None for v in given):
            expr = onnx_shaped.arange(m, where, self.bb, [v for v in given if v is not None])
        elif op_type == "Slice" and data is not None and (symbolic or onnx_shaped.forward_over_symbols(data, given)):
            if all(v is not None or not n for v, n in zip(given[1:], node.input[1:])):
                expr = onnx_shaped.strided_slice(m, where, self.bb, data, given[1:])
        if expr is None:
            return False
        self._nodes[node.output[0]] = expr
        return True


def _unconvertible(where: str, err: Exception) -> UnsupportedModel:
    text = str(err).strip().splitlines() or [type(err).__name__]
    return UnsupportedModel(f"{where}: cannot be converted: {text[-1][:400]}", "rewrite this node, or report it")


def convert(
    graph: onnx.GraphProto,
    opset: int,
    shapes: dict[str, Any],
    constants: dict[str, np.ndarray],
    weights: dict[str, np.ndarray],
    guarded: set[str],
) -> tuple[Any, dict[str, int], dict[str, int]]:
    """Convert a checked graph.

    Returns
    -------
    module : tvm.IRModule
        Of one function `main`, whose parameters are the inputs and all of `weights`.
    fixed : dict of str to int
        Symbols of `shapes` that the graph's constants fix (elements); the function no longer has them.
    lower : dict of str to int
        Least values of those left.
    """
    fixed: dict[str, int] = {}
    while True:
        importer = Importer(with_sizes(shapes, fixed), constants, weights, guarded)
        try:
            mod = _converted(importer, graph, opset)
        except CrossloomError:
            # What failed may do so only because a size was not yet known.
            if not importer.bounds.fixed:
                raise
        if not importer.bounds.fixed:
            return mod, fixed, importer.bounds.lower
        fixed.update(importer.bounds.fixed)


def _converted(importer: Importer, graph: onnx.GraphProto, opset: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importer.from_onnx(graph, opset)
        except CrossloomError:
            close_blocks(importer.bb)
            raise
        except Exception as err:
            close_blocks(importer.bb)
            text = str(err).strip().splitlines() or [type(err).__name__]
            raise UnsupportedModel(
                f"graph '{graph.name}': cannot be converted: {text[-1][:400]}", "simplify or report the model"
            ) from err
