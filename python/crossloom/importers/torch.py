"""Import PyTorch programs through torch.export, by TVM's translator and our own attention.

TVM 0.27 reads ``scale=`` and ``enable_gqa=`` of scaled_dot_product_attention wrongly, without an error;
attention is translated here instead, from PyTorch's definition.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ..errors import ToolchainMissing, UnsupportedModel, UsageError
from ..model import Model
from .blocks import close_blocks
from .gather import bound_gathers
from .signature import entry_attributes, entry_of, output_types
from .torch_attention import convert_attention
from .torch_concat import convert_concat
from .torch_norm import convert_layer_norm
from .torch_scatter import convert_masked_scatter
from .torch_slice import slice_converter

# Operators TVM translates as a whole; decomposing them only hides what they are from the passes.
KEPT = ("scaled_dot_product_attention", "silu", "linear", "layer_norm", "gelu")


def from_torch(
    module: Any,
    args: Sequence[Any] | None = None,
    *,
    entry: str = "main",
    dynamic_shapes: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    modality: str = "",
    upper_bounds: Mapping[str, int] | None = None,
) -> Model:
    """Import a module, an exported program, or a ``.pt2`` file.

    Parameters
    ----------
    module : torch.nn.Module, torch.export.ExportedProgram, str or Path
        A path must be a ``.pt2`` written by ``torch.export.save``; pickled checkpoints are refused, because
        reading one runs code.
    args : sequence of torch.Tensor, optional
        Example inputs; needed for a module only.
    entry : str
        Name of the resulting entry.
    dynamic_shapes, kwargs
        As ``torch.export.export`` takes them.
    modality : str
    upper_bounds : mapping of str to int, optional
        Largest sizes of dynamic dimensions (elements), over those of the program.

    Returns
    -------
    Model
        Weights are named as in the state dict; tied weights are kept once.

    Raises
    ------
    ToolchainMissing
        PyTorch is not installed.
    UsageError
        No example inputs, or a file of another kind.
    UnsupportedModel
        torch.export or the translation refuses; names the operator.
    """
    try:
        import torch
        from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter
    except ImportError as error:
        raise ToolchainMissing("PyTorch is not installed", "pip install 'crossloom[torch]'") from error

    program = _program(torch, module, args, dynamic_shapes, kwargs)
    table = torch.export.default_decompositions()
    for name in KEPT:
        table.pop(getattr(torch.ops.aten, name).default, None)
    importer = ExportedProgramImporter()
    try:
        with torch.no_grad():
            program = program.run_decompositions(table)
        _refuse_mutation(torch, program)
        mod = importer.from_exported_program(
            program,
            keep_params_as_input=True,
            unwrap_unit_return_tuple=True,
            no_bind_return_tuple=False,
            custom_convert_map={
                "scaled_dot_product_attention.default": convert_attention,
                "layer_norm.default": convert_layer_norm,
                "cat.default": convert_concat,
                "embedding.default": _convert_embedding,
                "masked_scatter.default": convert_masked_scatter,
                "slice.Tensor": slice_converter(_least_sizes(program)),
            },
        )
    except UnsupportedModel:
        close_blocks(importer.block_builder)
        raise
    except Exception as error:  # the translator raises assertions, ValueError, tvm errors: all mean the same here
        close_blocks(importer.block_builder)
        raise UnsupportedModel(
            f"PyTorch program cannot be translated: {_first_line(error)}",
            "replace the operator named, or export the part to ONNX",
        ) from error
    return _as_model(torch, program, mod, entry, modality, upper_bounds or {})


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _least_sizes(program: Any) -> dict[str, int]:
    """Return the least value of each dynamic dimension, by the name TVM gives its variable."""
    return {str(key): int(limits.lower) for key, limits in program.range_constraints.items() if limits.lower > 0}


def _suggestion(error: Exception) -> str:
    """Return the ranges torch.export proposes for dynamic dimensions, or else the guard it names."""
    lines = [line.strip() for line in str(error).splitlines()]
    if "Suggested fixes:" in lines:
        after = lines[lines.index("Suggested fixes:") + 1 :]
        return "; ".join(itertools.takewhile(bool, after))
    return next((line.removeprefix("- ") for line in lines if line.startswith("- Not all values")), "")


def _program(torch: Any, module: Any, args: Any, dynamic_shapes: Any, kwargs: Any) -> Any:
    if isinstance(module, torch.export.ExportedProgram):
        return module
    if isinstance(module, str | Path):
        path = Path(module)
        if not path.is_file():
            raise UsageError(f"no file {str(path)!r}", "give the path of a .pt2 written by torch.export.save")
        if path.suffix != ".pt2":
            raise UsageError(
                f"{str(path)!r} is not a .pt2 file; a pickled checkpoint runs code when read: not opened",
                "export the module with torch.export.export and torch.export.save",
            )
        try:
            return torch.export.load(path)
        except Exception as error:
            raise UnsupportedModel(f"{str(path)!r} cannot be read: {_first_line(error)}") from error
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"from_torch() takes a module, an exported program or a path, not {type(module).__name__}")
    if args is None:
        raise UsageError("from_torch() needs example inputs for a module", "pass args=(tensor, ...)")
    args, kwargs = _without_aliases(torch, (tuple(args), kwargs), set())
    try:
        with torch.no_grad():
            return torch.export.export(module.eval(), args, kwargs=kwargs, dynamic_shapes=dynamic_shapes)
    except Exception as error:
        raise UnsupportedModel(
            f"torch.export refuses {type(module).__name__}: {_first_line(error)}",
            _suggestion(error) or "export its parts apart and stitch them with compose()",
        ) from error


def _without_aliases(torch: Any, given: Any, seen: set[int]) -> Any:
    """Return example inputs with a copy of each tensor given twice: torch.export takes one object for one input."""
    if isinstance(given, torch.Tensor):
        if id(given) in seen:
            return given.clone()
        seen.add(id(given))
        return given
    if isinstance(given, tuple | list):
        parts = [_without_aliases(torch, part, seen) for part in given]
        return type(given)(*parts) if hasattr(given, "_fields") else type(given)(parts)
    if isinstance(given, dict):
        return {key: _without_aliases(torch, part, seen) for key, part in given.items()}
    return given


def _refuse_mutation(torch: Any, program: Any) -> None:
    """Outputs that update buffers or inputs have no place in a pure function."""
    kinds = torch.export.graph_signature.OutputKind
    for spec in program.graph_signature.output_specs:
        if spec.kind not in (kinds.USER_OUTPUT, kinds.LOSS_OUTPUT):
            raise UnsupportedModel(
                f"the program changes {spec.target!r} in place",
                "return the new value instead, e.g. the KV cache",
            )


def _convert_embedding(node: Any, importer: Any) -> relax.Var:
    """Look rows up; PyTorch refuses ids outside the table, here they read its first or last row."""
    weight, ids = (importer.env[arg] for arg in node.args[:2])
    return importer.block_builder.emit(relax.op.take(weight, ids, 0, mode="clip"))


def _as_model(
    torch: Any, program: Any, mod: tvm.IRModule, entry: str, modality: str, upper_bounds: Mapping[str, int]
) -> Model:
    function = mod["main"]
    kinds = torch.export.graph_signature.InputKind
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    upper, lower = (_bounds(function, f"tir_var_{side}_bound") for side in ("upper", "lower"))
    inputs, weights, params = [], [], {}
    owner: dict[tuple[Any, ...], str] = {}
    first: dict[str, relax.Var] = {}
    kept: list[relax.Var] = []
    tied: list[relax.Binding] = []
    for var in function.params:
        spec = specs[var.name]
        if spec.kind == kinds.USER_INPUT:
            inputs.append(var.name)
            kept.append(var)
            continue
        # Buffers that are not saved, and tensors made in forward(), are constants of the program.
        tensor = program.constants[spec.target] if spec.target in program.constants else program.state_dict[spec.target]
        tensor = tensor.detach()
        identity = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        name = owner.setdefault(identity, spec.target) if tensor.numel() else spec.target
        if name in first:
            tied.append(relax.VarBinding(var, first[name]))
            continue
        first[name] = var
        weights.append(name)
        kept.append(var)
        params[name] = _array(tensor)
    blocks = ([relax.DataflowBlock(tied)] if tied else []) + list(function.body.blocks)
    count = len(output_types(function))
    users = [spec.arg.name for spec in program.graph_signature.output_specs]
    outputs = users if len(users) == count and len(set(users)) == count else [f"output_{i}" for i in range(count)]
    function = relax.Function(
        kept, relax.SeqExpr(blocks, function.body.body), function.ret_ty, is_pure=bool(function.is_pure)
    )
    described = entry_of(
        function,
        entry,
        inputs,
        outputs,
        weights=weights,
        modality=modality,
        upper_bounds={**upper, **upper_bounds},
        lower_bounds={key: value for key, value in lower.items() if value > 0},
    )
    for attribute, value in entry_attributes(described).items():
        function = function.with_attr(attribute, value)
    functions = {gv: other for gv, other in mod.functions_items() if gv.name_hint != "main"}
    result = tvm.IRModule({**functions, tvm.ir.GlobalVar(entry): function})
    result = bound_gathers(relax.transform.Normalize()(result), from_end=True)
    result = relax.transform.CanonicalizeBindings()(result)
    relax.analysis.well_formed(result)
    return Model(result, params, {entry: described}, {entry: modality}, entry)


def _bounds(function: relax.Function, attribute: str) -> dict[str, int]:
    return {str(key): int(value) for key, value in dict((function.attrs or {}).get(attribute, {})).items()}


def _array(tensor: Any) -> np.ndarray:
    """Copy a tensor to numpy; bfloat16, which numpy lacks, by its bits."""
    tensor = tensor.cpu().contiguous()
    if str(tensor.dtype) == "torch.bfloat16":
        import ml_dtypes
        import torch

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
    return tensor.numpy().copy()
