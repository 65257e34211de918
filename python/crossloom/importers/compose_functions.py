"""Bring the functions of composed parts into one module, under names that do not clash."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax
from tvm.relax.expr import _update_type as update_type
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..errors import UnsupportedModel
from ..model import Model
from .compose_weights import free_name


@mutator
class _Renamer(PyExprMutator):
    """Replace references to global functions."""

    def __init__(self, names: Mapping[str, tvm.ir.GlobalVar]) -> None:
        super().__init__()
        self.names = names

    def visit_global_var_(self, op: tvm.ir.GlobalVar) -> tvm.ir.GlobalVar:
        return self.names.get(op.name_hint, op)


def renew(names: Mapping[str, tvm.ir.GlobalVar], function: relax.Function) -> relax.Function:
    """Copy a function: new variables, references to private functions renamed."""
    try:
        copy = relax.utils.copy_with_new_vars(function)
    except Exception as error:  # tvm cannot rebuild a type whose size holds a condition
        name = (function.attrs or {}).get("global_symbol", "a private function")
        text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UnsupportedModel(
            f"function {str(name)!r} cannot be copied into the composed model: {text}",
            "fix the dimensions its slices depend on with specialize()",
        ) from error
    return _Renamer(names).visit_expr(copy) if names else copy


def private_functions(
    parts: Mapping[str, Model], taken: set[str]
) -> tuple[dict[tvm.ir.GlobalVar, object], dict[str, dict[str, tvm.ir.GlobalVar]]]:
    """Collect what the entries call, under names free of clashes.

    Returns
    -------
    functions : dict of GlobalVar to function
    renamed : dict of str to dict of str to GlobalVar
        Part -> old name -> its function.
    """
    functions: dict[tvm.ir.GlobalVar, object] = {}
    renamed: dict[str, dict[str, tvm.ir.GlobalVar]] = {}
    used = set(taken)
    for part, model in parts.items():
        names: dict[str, tvm.ir.GlobalVar] = {}
        for gv, _ in model.mod.functions_items():
            new = free_name(gv.name_hint if gv.name_hint not in used else f"{part}_{gv.name_hint}", used)
            if gv.name_hint in model.entries:
                new = free_name(f"{part}_{gv.name_hint}", used)
            used.add(new)
            names[gv.name_hint] = tvm.ir.GlobalVar(new)
            update_type(names[gv.name_hint], gv.ty)
        for gv, function in model.mod.functions_items():
            target = names[gv.name_hint]
            if isinstance(function, relax.Function):
                function = renew(names, function)
            if function.attrs and "global_symbol" in function.attrs:
                function = (
                    function.without_attr("global_symbol")
                    if gv.name_hint in model.entries
                    else function.with_attr("global_symbol", target.name_hint)
                )
            functions[target] = function
        renamed[part] = names
    return functions, renamed
