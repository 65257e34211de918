"""Refuse a broken or unsupported graph before TVM sees it: TVM's errors name neither node nor operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import onnx
from onnx import AttributeProto, TensorProto

from crossloom.errors import UnsupportedModel
from crossloom.importers.onnx_load import MAX_ELEMENTS, WEIGHT_TYPES, checked_dims, type_name

MIN_OPSET, MAX_OPSET = 7, 24
#: ONNX Runtime's optimiser writes these into the default domain, where the standard does not know them.
_ORT_IN_DEFAULT_DOMAIN = ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
#: Control flow that is not compiled.
LOOPS = ("Loop", "Scan", "SequenceMap")
_SMALL_BYTES = 4096
_DEFAULT_DOMAINS = ("", "ai.onnx")
_MAX_NESTING = 16


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of the default operator set, after checking that it is one we read."""
    versions = [o.version for o in model.opset_import if o.domain in _DEFAULT_DOMAINS]
    if not versions:
        versions = [1] if not model.opset_import else [MAX_OPSET]
    if not MIN_OPSET <= versions[0] <= MAX_OPSET or len(set(versions)) > 1:
        raise UnsupportedModel(
            f"the model uses opset {', '.join(map(str, versions))}",
            f"opsets {MIN_OPSET} to {MAX_OPSET} are read; convert it with onnx.version_converter",
        )
    return int(versions[0])


def walk(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield every node, those of nested graphs included."""
    return walk_nodes(graph.node)


def walk_nodes(nodes: Iterable[onnx.NodeProto], depth: int = 0) -> Iterator[onnx.NodeProto]:
    """Yield every node given and those of their nested graphs."""
    for node in nodes:
        if depth > _MAX_NESTING:
            raise UnsupportedModel(f"{describe(node)}: nested too deeply", "flatten the control flow")
        yield node
        for attribute in node.attribute:
            for nested in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from walk_nodes(nested.node, depth + 1)


def reads(node: onnx.NodeProto) -> list[str]:
    """Names a node reads, those its nested graphs read included."""
    names = list(node.input)
    for attribute in node.attribute:
        for nested in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            names += [n for inner in nested.node for n in reads(inner)] + [o.name for o in nested.output]
    return names


def describe(node: onnx.NodeProto) -> str:
    """Name a node in messages: operator, domain, and its own or its first output's name."""
    domain = node.domain or "ai.onnx"
    name = node.name or next((o for o in node.output if o), "")
    return f"{domain}.{node.op_type} (node '{name}')"


def check_operators(graph: onnx.GraphProto, supported: Callable[[str, str], bool]) -> None:
    """Raise one :class:`UnsupportedModel` that names every operator without a converter."""
    missing: dict[tuple[str, str], list[str]] = {}
    for node in walk(graph):
        if not supported(node.domain, node.op_type):
            name = node.name or next((o for o in node.output if o), "")
            missing.setdefault((node.domain or "ai.onnx", node.op_type), []).append(name)
    if missing:
        parts = []
        for (domain, op_type), names in sorted(missing.items()):
            where = ", ".join(f"'{n}'" for n in names[:3]) + (", ..." if len(names) > 3 else "")
            parts.append(f"{domain}.{op_type} ({len(names)}x: {where})")
        raise UnsupportedModel(
            f"operators without a converter: {'; '.join(parts)}",
            "loops are not compiled: unroll them, or run the loop around the model, one step a call"
            if all(op_type in LOOPS for _, op_type in missing)
            else "rewrite them with standard operators before exporting",
        )


def check_values(graph: onnx.GraphProto) -> None:
    """Refuse inputs and outputs that are not tensors of a type we run, and sparse initializers."""
    if graph.sparse_initializer:
        name = graph.sparse_initializer[0].values.name
        raise UnsupportedModel(f"tensor '{name}': sparse initializers are not supported", "store it densely")
    if not graph.output:
        raise UnsupportedModel(f"graph '{graph.name}': has no output", "mark what it should return")
    for kind, values in (("input", graph.input), ("output", graph.output)):
        seen: set[str] = set()
        for value in values:
            what = f"{kind} '{value.name}'"
            if not value.name:
                raise UnsupportedModel(f"an {kind} of graph '{graph.name}' has no name", "name it")
            if kind == "input" and value.name in seen:
                raise UnsupportedModel(f"{what}: given twice", "give every input its own name")
            seen.add(value.name)
            if value.type.WhichOneof("value") not in ("tensor_type", None) or (
                kind == "input" and not value.type.HasField("tensor_type")
            ):
                raise UnsupportedModel(f"{what}: is not a tensor", "pass tensors between parts")
            elem = value.type.tensor_type.elem_type
            if kind == "output" and elem == TensorProto.UNDEFINED:
                continue
            if elem not in WEIGHT_TYPES or elem in (TensorProto.INT4, TensorProto.UINT4):
                raise UnsupportedModel(
                    f"{what}: element type {type_name(elem)} is not supported",
                    "cast it inside the model; 4-bit values are supported as weights",
                )
            dims = [d.dim_value for d in value.type.tensor_type.shape.dim if d.HasField("dim_value")]
            checked_dims(dims, what)
    names: set[str] = set()
    for tensor in graph.initializer:
        if not tensor.name:
            raise UnsupportedModel("an initializer has no name", "name it")
        if tensor.name in names:
            raise UnsupportedModel(f"tensor '{tensor.name}': given twice", "give every tensor its own name")
        names.add(tensor.name)


def check_attributes(graph: onnx.GraphProto) -> None:
    """Refuse attributes that make the converter allocate or loop without bound."""
    for node in walk(graph):
        for attribute in node.attribute:
            where = f"{describe(node)}: attribute '{attribute.name}'"
            if attribute.ref_attr_name:
                raise UnsupportedModel(f"{where} refers to a function's attribute", "inline the function")
            if attribute.type in (AttributeProto.SPARSE_TENSOR, AttributeProto.SPARSE_TENSORS):
                raise UnsupportedModel(f"{where} is a sparse tensor", "store it densely")
            if any(abs(i) > MAX_ELEMENTS and abs(i) < 2**63 - 2 for i in attribute.ints):
                raise UnsupportedModel(f"{where}: value out of range", "correct the attribute")


def check_graph(model: onnx.ModelProto) -> None:
    """Run ONNX's checker and strict shape inference.

    Large tensors are replaced by inputs of the same type first: the checker serialises the model, which must
    stay under 2 GB, and it would look for external data in the wrong folder.

    Raises
    ------
    UnsupportedModel
        Undefined or repeated names, cycles, wrong element types, unknown attributes, shapes that contradict.
    """
    made = {v.name for v in (*model.graph.input, *model.graph.initializer)}
    made |= {name for node in model.graph.node for name in node.output}
    for value in model.graph.output:
        if value.name not in made:
            raise UnsupportedModel(f"output '{value.name}': no node makes it", "export the model again")
    skeleton = _skeleton(model)
    try:
        onnx.checker.check_model(skeleton)
        onnx.shape_inference.infer_shapes(skeleton, check_type=True, strict_mode=True, data_prop=True)
    except Exception as err:
        lines = [line.strip() for line in str(err).splitlines() if line.strip()]
        context = [line for line in lines[1:] if "Context" in line or "node" in line.lower()][:1]
        text = " ".join(lines[:1] + context) or type(err).__name__
        raise UnsupportedModel(f"the ONNX graph is invalid: {text[:1000]}", "export the model again") from err


def _skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    out = onnx.ModelProto(ir_version=max(model.ir_version, 4), producer_name=model.producer_name)
    out.opset_import.extend(model.opset_import)
    _import_domains(out, (node.domain for node in walk(model.graph)))
    graph = model.graph
    out.graph.name = graph.name or "graph"
    out.graph.node.extend(graph.node)
    out.graph.input.extend(graph.input)
    # The checker wants every output's shape, which ONNX Runtime and shape inference do without.
    out.graph.output.extend(v for v in graph.output if v.type.tensor_type.HasField("shape"))
    out.graph.value_info.extend(graph.value_info)
    given = {value.name for value in graph.input}
    for tensor in graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL and tensor.ByteSize() <= _SMALL_BYTES:
            out.graph.initializer.append(tensor)
        elif tensor.name not in given:
            out.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return out


def _import_domains(model: onnx.ModelProto, domains: Iterable[str]) -> None:
    have = {o.domain for o in model.opset_import}
    for domain in domains:
        if domain not in have and domain not in _DEFAULT_DOMAINS:
            have.add(domain)
            model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    if not have & set(_DEFAULT_DOMAINS):
        model.opset_import.append(onnx.helper.make_opsetid("", MAX_OPSET))


def move_runtime_operators(graph: onnx.GraphProto) -> None:
    """Put operators that ONNX Runtime keeps in the default domain into ``com.microsoft``, in place."""
    for node in walk(graph):
        if node.domain in _DEFAULT_DOMAINS and node.op_type in _ORT_IN_DEFAULT_DOMAIN:
            node.domain = "com.microsoft"
