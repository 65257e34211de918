"""Hand a node on to TVM's own converter, after a converter of ours has put its operands and attributes right."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend as frontend

from crossloom.importers.onnx_contrib import Call


class _Operands(list[Any]):
    """Operands as TVM's converters index them: one that is absent at the end reads as None."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) if isinstance(index, slice) or index < len(self) else None


def by_tvm(c: Call, op_type: str, inputs: list[Any] | None = None, attrs: dict[str, Any] | None = None) -> Any:
    """Convert with TVM's converter of `op_type`.

    Parameters
    ----------
    c : Call
    op_type : str
    inputs : list of relax.Expr or None, optional
        In place of the node's operands.
    attrs : dict, optional
        In place of the node's attributes.

    Returns
    -------
    relax.Expr
        A constant where the converter folds, else a bound variable.
    """
    converter = frontend._get_convert_map()[op_type].get_converter(c.opset)
    given = dict(c.attrs if attrs is None else attrs)
    given["tvm_custom"] = {"name": c.where, "num_outputs": len(c.outputs)}
    out = converter(c.bb, _Operands(c.inputs if inputs is None else inputs), given, [{}, {}])
    return out if isinstance(out, tvm.ir.GenericConst | relax.Var) else c.emit(out)
