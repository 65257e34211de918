"""Flatten `If`: the nodes of both branches join the graph, and a select node stands for the decision.

Every operator we import is free of side effects, so both branches may run and the unwanted result be dropped;
the graph stays one block that passes see as a whole.  When the condition turns out to be known while
importing (exporters write ``If(rank == 3)`` around a Squeeze), the other branch is never used, and need
not even be convertible.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from crossloom.errors import UnsupportedModel
from crossloom.importers.onnx_check import describe

#: A node of this domain and type reads (condition, then, else) and writes what is chosen.
DOMAIN, SELECT = "crossloom", "Select"


def flatten_branches(graph: onnx.GraphProto) -> set[str]:
    """Replace every `If` of a checked graph, in place.

    Parameters
    ----------
    graph : onnx.GraphProto
        Initializers of branches are moved into it.

    Returns
    -------
    set of str
        Names made inside branches and by their choice: a node that makes one may fail to convert as long as
        nobody wants it.
    """
    guarded: set[str] = set()
    if not any(node.op_type == "If" for node in graph.node):
        return guarded
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        nodes += _flatten(node, {}, graph, guarded)
    del graph.node[:]
    graph.node.extend(nodes)
    return guarded


def _flatten(
    node: onnx.NodeProto, names: Mapping[str, str], graph: onnx.GraphProto, guarded: set[str]
) -> list[onnx.NodeProto]:
    """Return what stands for one node, its operands renamed by `names`."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for index, name in enumerate(copy.input):
        copy.input[index] = names.get(name, name)
    for index, name in enumerate(copy.output):
        copy.output[index] = names.get(name, name)
    if node.op_type != "If" or node.domain not in ("", "ai.onnx"):
        return [copy]
    # Outputs may be left out, the first as well; what is left is made by no other node and tells two Ifs apart.
    made_here = [name for name in copy.output if name]
    if not made_here:
        return []
    branches = {attribute.name: attribute.g for attribute in node.attribute}
    out: list[onnx.NodeProto] = []
    results: list[list[str]] = []
    for key in ("then_branch", "else_branch"):
        if key not in branches:
            raise UnsupportedModel(f"{describe(node)}: has no {key}", "export the model again")
        inner = branches[key]
        prefix = f"{made_here[0]}.{key.removesuffix('_branch')}."
        local = dict(names)
        made = [t.name for t in inner.initializer] + [name for n in inner.node for name in n.output if name]
        local.update({name: prefix + name for name in made})
        for tensor in inner.initializer:
            moved = graph.initializer.add()
            moved.CopyFrom(tensor)
            moved.name = local[tensor.name]
        guarded.update(local[name] for name in made)
        for inside in inner.node:
            out += _flatten(inside, local, graph, guarded)
        results.append([local.get(value.name, value.name) for value in inner.output])
    if not len(copy.output) == len(results[0]) == len(results[1]):
        raise UnsupportedModel(
            f"{describe(node)}: its branches return {len(results[0])} and {len(results[1])} values", "return the same"
        )
    guarded.update(made_here)
    for index, name in enumerate(copy.output):
        if not name:
            continue
        given = [copy.input[0], results[0][index], results[1][index]]
        out.append(onnx.helper.make_node(SELECT, given, [name], node.name or name, domain=DOMAIN))
    return out
