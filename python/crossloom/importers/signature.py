"""Read the signature of a Relax entry function; check it against its `Entry`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import tvm
from tvm import relax, tirx
from tvm.sym.analyzer import Analyzer

from ..errors import UnsupportedModel
from ..model import Entry, Model, TensorSpec


def dimension_text(dim: tvm.ir.Expr) -> str:
    """Spell a dimension without TVM's marks: ``T + 1``, not ``T_1 + T.int64(1)``; ``max(0, T)``, not ``T.max``.

    TVM's printer renames a variable ``T``, since its scripts call their own prefix that.
    """
    if isinstance(dim, tirx.Var):
        return dim.name
    text = re.sub(r"T\.int64\((-?\d+)\)", r"\1", str(dim))
    text = re.sub(r"\bT\.(min|max)\(", r"\1(", text)
    return re.sub(r"\bT_1\b", "T", text)


def dimension(dim: tvm.ir.Expr) -> int | str:
    """Return one dimension as `TensorSpec` spells it: an integer, or its expression such as ``"P + 1"``."""
    simple = Analyzer().simplify(dim)
    if isinstance(simple, tirx.IntImm):
        return int(simple.value)
    return dimension_text(simple)


def tensor_spec(name: str, ty: tvm.ir.Type) -> TensorSpec:
    """Return the spec of a value of type `ty`.

    Raises
    ------
    UnsupportedModel
        When `ty` is no tensor, or its rank, shape or dtype is unknown.
    """
    if not isinstance(ty, relax.TensorType):
        raise UnsupportedModel(f"{name!r} is a {type(ty).__name__}, not a tensor", "return and take tensors only")
    shape = ty.shape
    if shape is None or not hasattr(shape, "values"):
        raise UnsupportedModel(f"the shape of {name!r} is not known", "give its shape when exporting the model")
    return TensorSpec(name, tuple(dimension(dim) for dim in shape), str(ty.dtype))


def output_types(function: relax.Function) -> list[tvm.ir.Type]:
    """Return the types of the outputs: one, or the leaves of the returned tuple, depth first."""
    return _leaves(function.ret_ty)


def _leaves(ty: tvm.ir.Type) -> list[tvm.ir.Type]:
    if not isinstance(ty, relax.TupleType):
        return [ty]
    return [leaf for field in ty.fields for leaf in _leaves(field)]


def entry_of(
    function: relax.Function,
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    weights: Sequence[str] = (),
    modality: str = "",
    upper_bounds: Mapping[str, int] | None = None,
    lower_bounds: Mapping[str, int] | None = None,
) -> Entry:
    """Describe `function` as an `Entry`, its shapes read from its type.

    Parameters
    ----------
    function : relax.Function
        Takes `inputs`, then `weights`.
    name : str
    inputs, outputs : sequence of str
        Names, in order.
    weights : sequence of str
        Keys into ``Model.params``.
    modality : str
    upper_bounds : mapping of str to int, optional
    lower_bounds : mapping of str to int, optional
        Largest and smallest value of symbolic dimensions; names the function does not use are left out.
    """
    symbols = set(symbolic_names(function))
    known = lambda bounds: {key: int(value) for key, value in (bounds or {}).items() if key in symbols}
    return Entry(
        name=name,
        inputs=tuple(tensor_spec(key, param.ty) for key, param in zip(inputs, function.params)),
        outputs=tuple(tensor_spec(key, ty) for key, ty in zip(outputs, output_types(function))),
        weights=tuple(weights),
        modality=modality,
        upper_bounds=known(upper_bounds),
        lower_bounds=known(lower_bounds),
    )


def symbolic_names(function: relax.Function) -> list[str]:
    """Names of the symbolic dimensions that the parameters of `function` define."""
    return [var.name for var in relax.analysis.defined_symbolic_vars(function)]


def entry_attributes(entry: Entry) -> dict[str, object]:
    """Return the attributes every entry function carries."""
    attributes: dict[str, object] = {"global_symbol": entry.name, "num_input": len(entry.inputs)}
    if entry.modality:
        attributes["crossloom.modality"] = entry.modality
    if entry.upper_bounds:
        attributes["tir_var_upper_bound"] = dict(entry.upper_bounds)
    if entry.lower_bounds:
        attributes["tir_var_lower_bound"] = dict(entry.lower_bounds)
    return attributes


def check_entry(model: Model, name: str, where: str = "") -> relax.Function:
    """Return the function of one entry after checking it against `Model.entries` and `Model.params`.

    Parameters
    ----------
    model : Model
    name : str
        Entry to check.
    where : str
        What to call the model in a message.

    Raises
    ------
    UnsupportedModel
        When the function is missing, takes another number of parameters, or a weight is missing or of another
        shape or dtype than the function takes.
    """
    entry = model.entries[name]
    where = where or model.name
    functions = {gv.name_hint: function for gv, function in model.mod.functions_items()}
    function = functions.get(name)
    if not isinstance(function, relax.Function):
        raise UnsupportedModel(f"{where!r} has no Relax function {name!r} for its entry of that name")
    wanted = len(entry.inputs) + len(entry.weights)
    if len(function.params) != wanted:
        raise UnsupportedModel(
            f"function {name!r} of {where!r} takes {len(function.params)} parameters, its entry lists {wanted}",
            "list every input and every weight of the function, in order",
        )
    if len(output_types(function)) != len(entry.outputs):
        raise UnsupportedModel(
            f"function {name!r} of {where!r} returns {len(output_types(function))} values, "
            f"its entry lists {len(entry.outputs)}"
        )
    for key, param in zip(entry.weights, function.params[len(entry.inputs) :]):
        if key not in model.params:
            raise UnsupportedModel(f"{where!r} has no weight {key!r}, which its entry {name!r} takes")
        spec, array = tensor_spec(key, param.ty), model.params[key]
        if spec.shape != tuple(array.shape) or spec.dtype != str(array.dtype):
            raise UnsupportedModel(
                f"weight {key!r} of {where!r} is {array.dtype}{tuple(array.shape)}, "
                f"entry {name!r} takes {spec.dtype}{spec.shape}"
            )
    return function
