"""Drive TVM's ONNX frontend node by node, with added converters and errors that name the node."""

from __future__ import annotations

import contextlib
import io
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend as frontend

from crossloom.errors import CrossloomError, UnsupportedModel
from crossloom.importers.onnx_check import describe
from crossloom.importers.onnx_contrib import CONVERTERS, Call

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
    """

    def __init__(
        self, shapes: dict[str, Any], constants: dict[str, np.ndarray], weights: dict[str, np.ndarray]
    ) -> None:
        super().__init__(shapes, {}, keep_params_in_input=True, sanitize=False)
        self.constants, self.weights = constants, dict(weights)

    def _parse_graph_initializers(self, graph: onnx.GraphProto) -> None:
        for name, array in self.constants.items():
            self._nodes[name] = relax.const(array)
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
                self._one(node, where)
            except CrossloomError:
                raise
            except Exception as err:
                text = str(err).strip().splitlines() or [type(err).__name__]
                raise UnsupportedModel(
                    f"{where}: cannot be converted: {text[-1][:400]}", "rewrite this node, or report it"
                ) from err
        for value in graph.output:
            expr = self._nodes[value.name]
            if isinstance(expr.ty, relax.ShapeType):
                self._nodes[value.name] = self.bb.emit(relax.op.shape_to_tensor(expr))

    def _one(self, node: onnx.NodeProto, where: str) -> None:
        domain = "" if node.domain == "ai.onnx" else node.domain
        converter = CONVERTERS.get((domain, node.op_type))
        if converter is not None:
            arrays = [self.constants.get(n, self.weights.get(n)) if n else None for n in node.input]
            inputs = [self._nodes[n] if n else None for n in node.input]
            call = Call(where, self.bb, inputs, self._parse_attr(node.attribute), arrays, list(node.output))
            for name, expr in zip(node.output, converter(call)):
                if name and expr is not None:
                    self._nodes[name] = expr
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
                self._nodes[name] = relax.const(self.weights[name])
            with contextlib.redirect_stdout(io.StringIO()):
                super()._construct_nodes(shim)


def convert(
    graph: onnx.GraphProto,
    opset: int,
    shapes: dict[str, Any],
    constants: dict[str, np.ndarray],
    weights: dict[str, np.ndarray],
) -> Any:
    """Return the Relax function of a checked graph; parameters are its inputs, then all of `weights`."""
    importer = Importer(shapes, constants, weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importer.from_onnx(graph, opset)["main"]
        except CrossloomError:
            raise
        except Exception as err:
            text = str(err).strip().splitlines() or [type(err).__name__]
            raise UnsupportedModel(
                f"graph '{graph.name}': cannot be converted: {text[-1][:400]}", "simplify or report the model"
            ) from err
